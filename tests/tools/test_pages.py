"""The pages are true: links lead somewhere, command lines parse, programs run, every exit code is told."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvstore import errors
from kvstore.settings import Settings
from kvstore.tools import published
from kvstore.tools.cli import app
from kvstore.tools.geometry import geometry

TREE = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path for path in sorted((TREE / "kvstore").glob("*.md"))}
GUIDES = ("TRANSFORMERS", "VLLM", "OPERATING", "SIZING", "SECURITY", "TROUBLESHOOTING")


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        below = commands(command, f"{prefix}{name} ") if hasattr(command, "commands") else {f"{prefix}{name}": command}
        found |= below
    return found


ALL = commands(get_command(app))
COMMAND = re.compile(r"kvstore ((?:bench )?[a-z]+)\b")


def text(name: str) -> str:
    return PAGES[name].read_text()


def lines(name: str) -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", text(name), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("kvstore ")]


def quoted(name: str) -> list[str]:
    """Everything in code marks that begins with the command's name."""
    return [*re.findall(r"`(kvstore [^`]+)`", re.sub(r"```.*?```", "", text(name), flags=re.DOTALL)), *lines(name)]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", text(name)):
        assert (PAGES[name].parent / link).resolve().is_file(), link


@pytest.mark.parametrize("name", GUIDES)
def test_readme_leads_to_every_page(name: str) -> None:
    assert f"(kvstore/{name}.md)" in (TREE / "README.md").read_text()


@pytest.mark.parametrize("name", GUIDES)
def test_every_command_named_exists(name: str) -> None:
    named = {COMMAND.match(line) for line in quoted(name)}
    assert {found[1] for found in named if found} - {"import", *ALL} == set()


@pytest.mark.parametrize("line", [line for name in GUIDES for line in lines(name)])
def test_every_command_line_parses(line: str) -> None:
    words = shlex.split(line)[1:]
    name = " ".join(words[:2]) if words[0] == "bench" else words[0]
    ALL[name].make_context(name, words[len(name.split()) :], resilient_parsing=False)


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_its_place_in_a_guide(name: str) -> None:
    told = [COMMAND.match(line) for page in GUIDES for line in quoted(page)]
    elsewhere = {"demo", "bench index", "bench commands"}  # in the README and in COMMANDS.md
    assert name in elsewhere | {found[1] for found in told if found}


def test_every_exit_code_is_told_and_no_other() -> None:
    kinds = {thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)}
    wanted = {kind.exit_code: kind.__name__ for kind in kinds if kind is not errors.KVStoreError}
    table = re.findall(r"^\| (\d+) \| (\w+) \|", text("TROUBLESHOOTING"), re.MULTILINE)
    assert {int(code): name for code, name in table} == wanted


def test_settings_named_exist() -> None:
    named = set(re.findall(r"`((?:ram|nvme|mover|lock|verify|direct|hbm)_\w+)`", "".join(map(text, GUIDES))))
    assert named
    assert named <= set(Settings.__dataclass_fields__)


def test_sizes_of_well_known_models_are_those_of_plan() -> None:
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    table = re.findall(r"^\| (.+?) \| (\d+) KiB \|(.*?) ?\|(.*?) ?\|$", text("SIZING"), re.MULTILINE)
    assert len(table) == 5
    for name, token, short, long in table:
        for tokens, said in ((8192, short), (131_072, long)):
            if said:
                number, unit = said.split()
                assert float(number) * units[unit] == int(token) * 1024 * tokens, name
    known = {"Llama 3.1 8B": "llama-3.1-8b", "Llama 3.1 70B": "llama-3.1-70b", "Llama 2 7B": "llama-2-7b"}
    said = {name: int(token) * 1024 for name, token, *_ in table}
    for name, key in known.items():
        assert geometry(published.PUBLISHED[key]).token_bytes == said[name]


def test_programs_of_the_transformers_page_run(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    torch = pytest.importorskip("torch")
    from kvstore.tools import model as models

    blocks = re.findall(r"```python\n(.*?)```", text("TRANSFORMERS"), re.DOTALL)
    assert len(blocks) == 4
    model, _ = models.load(tiny_model)
    known: dict[str, Any] = {"model": model, "ids": torch.arange(100)[None]}
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        for block in blocks:
            exec(
                compile(block.replace('"2GiB"', '"64MiB"').replace('"20GiB"', '"128MiB"'), "TRANSFORMERS.md", "exec"),
                known,
            )
    finally:
        os.chdir(before)
    assert "prompt_tokens=100" in capsys.readouterr().out
    assert known["loading"].columns == 99
    store = known["store"]
    assert store.verify().problems == []
    store.close()
