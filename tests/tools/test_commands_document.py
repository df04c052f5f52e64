"""COMMANDS.md has a place for every command and every cause, names no other, and its command lines parse."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
from typer.main import get_command

from kvstore.tools import differ, explaining, suspects
from kvstore.tools.cli import app

TREE = Path(__file__).resolve().parents[2]
TEXT = (TREE / "kvstore" / "COMMANDS.md").read_text()
BLOCKS = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("kvstore ")]


def commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            found |= {f"{name} {below}": one for below, one in command.commands.items()}
        else:
            found[name] = command
    return found


def codes() -> set[str]:
    """The codes of causes in the code: first arguments of Suspect and Cause, and those chosen by a condition."""
    found: set[str] = set()
    for module in (suspects, differ, explaining):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Suspect", "Cause", "_replaced"):
                at = 2 if getattr(node.func, "id", "") == "_replaced" else 0
                found |= {one.value for one in node.args[at : at + 1] if isinstance(one, ast.Constant)}
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                target = node.targets[0]
                if isinstance(target, ast.Tuple) and getattr(target.elts[0], "id", "") == "code":
                    found |= {one.value for one in node.value.elts[:1] if isinstance(one, ast.Constant)}
    return found | set(explaining.CODES.values())


@pytest.mark.parametrize("name", commands())
def test_every_command_has_its_place(name: str) -> None:
    assert f"kvstore {name}" in TEXT


def test_no_command_is_named_that_does_not_exist() -> None:
    named = set(re.findall(r"kvstore ([a-z]+(?: (?:resume|decode|tiers|index|page|vllm))?)\b", TEXT))
    assert named <= set(commands()) | {"bench"}


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_parses(line: str) -> None:
    words = shlex.split(line)
    command = commands()[words[1]]
    command.make_context(words[1], words[2:], resilient_parsing=False)


def test_every_cause_is_told_and_no_other() -> None:
    known = codes()
    assert {"date", "tools-order", "json-spelling", "evicted", "new"} <= known
    table = TEXT.split("| code |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == known | {"salt"}
