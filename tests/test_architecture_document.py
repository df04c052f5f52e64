"""ARCHITECTURE.md names every module, thread and layer there is, and no function that does not exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from kvstore.tiers.segments import INDEX_BYTES_A_SLOT

TREE = Path(__file__).resolve().parents[1]
TEXT = (TREE / "kvstore" / "ARCHITECTURE.md").read_text()
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
FOLDERS = ("kvstore", "tiers", "adapters", "tools")


def sources() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (TREE / folder).rglob("*.py"))


def drawn() -> dict[str, str]:
    """Modules of the tree in the document, with what is said of each."""
    block = re.search(r"## The tree\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    folders: list[str] = []
    found: dict[str, str] = {}
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, said = line.strip().partition(" ")
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
        else:
            assert "/".join([*folders, name]) not in found
            found["/".join([*folders, name])] = said.strip()
    return found


def defined() -> dict[str, set[str]]:
    """Names that can stand before a dot (modules, classes), with what can stand after it."""
    found: dict[str, set[str]] = {}
    for file in sources():
        tree = ast.parse(file.read_text())
        found.setdefault(file.stem, set()).update(names_in(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(names_in(node.body))
    return found


def names_in(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            if node.name == "__init__":
                found |= {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_the_tree_names_every_module_and_no_other() -> None:
    assert sorted(drawn()) == [str(file.relative_to(TREE)) for file in sources()]


def test_every_module_has_its_line() -> None:
    assert [name for name, said in drawn().items() if len(said) < 10] == []


def test_every_function_told_of_exists() -> None:
    known = defined()
    told = set(re.findall(r"`(\w+)\.(\w+)`", TEXT)) - {("kvstore", "open"), ("kvstore", "tiers")}
    told = {(owner, name) for owner, name in told if name not in ("md", "py", "toml")}
    assert len(told) > 40
    assert sorted(f"{owner}.{name}" for owner, name in told if name not in known.get(owner, set())) == []


def test_what_is_set_aside_in_an_index_is_what_the_code_sets_aside() -> None:
    assert re.findall(r"(\d+) bytes are set aside for a slot", TEXT) == [str(INDEX_BYTES_A_SLOT)]


def test_every_thread_of_the_code_is_in_the_table() -> None:
    code = "\n".join(file.read_text() for file in sources())
    named = set(re.findall(r'name(?:_prefix)?=f?"(kvstore-[^"]+)"', code))
    started = len(re.findall(r"threading\.Thread\(|[^.\w]Thread\(|ThreadPoolExecutor\(", code))
    wanted = {name.replace("{name}", tier) for name in named for tier in ("ram", "nvme")}
    assert wanted <= set(re.findall(r"`(kvstore-[\w-]+)`", TEXT))
    assert started >= len(named) > 5


def test_layers_are_those_that_the_linter_checks() -> None:
    contracts = tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    wanted = [{name.rpartition(".")[2] for name in re.findall(r"[\w.]+", layer)} for layer in layers]
    block = re.search(r"## Who may know what\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    told = [set(re.findall(r"\w+", step)) for step in block[1].split("→")]
    assert len(told) == len(wanted)
    assert [said - asked for said, asked in zip(told, wanted, strict=True)] == [set()] * len(wanted)


def test_rules_are_those_that_the_linter_checks() -> None:
    contracts = tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    told = TEXT.partition("`lint-imports` checks that, with ")[2].partition("\n\n## ")[0]
    count, _, rest = told.partition(" more rules")
    assert NUMBERS.index(count) == len(contracts) - 1 == len(re.findall(r"^- ", rest, re.MULTILINE))


def test_nothing_but_tools_may_open_a_connection() -> None:
    contracts = tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rule,) = (one for one in contracts if one["name"] == "Only tools open connections")
    assert {"http", "httpx", "requests", "socket", "urllib"} <= set(rule["forbidden_modules"])
    assert rule["source_modules"] == ["kvstore"]
    assert rule["ignore_imports"] == ["kvstore.tools.** -> *", "kvstore.adapters.vllm.layout -> huggingface_hub"]
    hub = (TREE / "adapters" / "vllm" / "layout.py").read_text()
    assert hub.count("snapshot_download(") == hub.count("local_files_only=True") == 1


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "FORMAT.md"])
def test_documents_lie_beside_the_code_and_are_shipped(document: str) -> None:
    assert (TREE / "kvstore" / document).is_file()
    data = tomllib.loads((TREE / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "*.md" in data["kvstore"]
