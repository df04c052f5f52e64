"""The distribution holds exactly what the tree holds, under the names it is imported by."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).resolve().parents[1]
MAPPED = ("adapters", "tiers", "tools")


def project() -> dict[str, Any]:
    return tomllib.loads((TREE / "pyproject.toml").read_text())


def folders() -> dict[str, Path]:
    """Every package of the tree by its import name."""
    found = {"kvstore": TREE / "kvstore"}
    for top in MAPPED:
        for init in (TREE / top).rglob("__init__.py"):
            found[".".join(("kvstore", *init.parent.relative_to(TREE).parts))] = init.parent
    return found


def test_packages_list_equals_the_tree() -> None:
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(folders())


def test_every_folder_with_modules_is_a_package() -> None:
    holding = {module.parent for top in ("kvstore", *MAPPED) for module in (TREE / top).rglob("*.py")}
    assert {folder for folder in holding if not folder.is_relative_to(TREE / "kvstore")} <= set(folders().values())


@pytest.mark.parametrize("name", MAPPED)
def test_checkout_and_wheel_see_the_same_folder(name: str) -> None:
    assert (TREE / "kvstore" / name).is_symlink()
    assert (TREE / "kvstore" / name).resolve() == TREE / name
    assert project()["tool"]["setuptools"]["package-dir"][f"kvstore.{name}"] == name


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_folder_refuses_the_bare_name(name: str) -> None:
    tried = subprocess.run(
        [sys.executable, "-S", "-c", f"import {name}"], cwd=TREE, capture_output=True, text=True, check=False
    )
    assert tried.returncode == 1
    assert f"ImportError: import kvstore.{name}, not {name}" in tried.stderr


def test_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    hidden = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "tests", "__pycache__")
    shutil.copytree(TREE, source, symlinks=True, ignore=hidden)
    build = "import sys, setuptools.build_meta; print(setuptools.build_meta.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-W", "ignore", "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("prefix_kvstore-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    wanted = {
        f"{package.replace('.', '/')}/{file.name}"
        for package, folder in folders().items()
        for pattern in ("*.py", "py.typed")
        for file in folder.glob(pattern)
    }
    documents = {f"kvstore/{file.name}" for file in (TREE / "kvstore").glob("*.md")}
    documents |= {f"kvstore/{file.relative_to(TREE)}" for top in MAPPED for file in (TREE / top).rglob("*.md")}
    served = {f"kvstore/tools/page/{file.name}" for file in (TREE / "tools" / "page").glob("*")}
    served |= {"kvstore/tools/alerts.yml", "kvstore/tools/grafana.json"}
    assert held == wanted | documents | served
    assert len(licences) == 1


@pytest.mark.parametrize("script", ["tools/test", "tools/demo", ".ci/run"])
def test_script_can_be_run_as_it_is(script: str) -> None:
    assert os.access(TREE / script, os.X_OK)
    subprocess.run(["bash", "-n", str(TREE / script)], check=True)


def test_constraints_lie_within_what_the_project_asks_for() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    pins = {}
    for line in (TREE / "tools" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name] = version
    declared = project()["project"]
    lines = [
        *declared["dependencies"],
        *(line for extra in declared["optional-dependencies"].values() for line in extra),
    ]
    asked = [requirements.Requirement(line) for line in lines if not line.startswith("prefix-kvstore")]
    assert {requirement.name for requirement in asked} - {"setuptools"} <= set(pins)
    assert [str(one) for one in asked if one.name in pins and not one.specifier.contains(pins[one.name])] == []
