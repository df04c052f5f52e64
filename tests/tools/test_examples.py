"""Every command has an example in its help, and every example runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvstore.tools.cli import app

SLOW = ("demo", "bench resume", "bench commands", "bench page")
SMALLER: dict[str, list[str]] = {
    "demo": ["--tokens", "128"],
    "bench resume": ["--tokens", "128", "--cold-tokens", "64", "--pairs", "5"],
    "bench decode": ["--tokens", "300", "--threads", "1"],
    "bench index": ["--small", "100", "--large", "9000", "--pairs", "5"],
    "bench commands": ["--entries", "1025", "--repeats", "2"],
    "bench tiers": ["--tokens", "256", "--pairs", "5", "--stores", "1"],
    "bench page": ["--tokens", "128", "--pairs", "5", "--seconds", "0.3"],
}
"""Arguments added to examples that would take minutes; the last of an option counts."""
BEFORE: dict[str, str] = {"import": "export"}
"""Commands whose example needs what another one's example makes."""
LEFT: dict[str, list[str]] = {"export": ["greeting.safetensors"], "import": ["greeting.safetensors"]}
"""Files that an example is meant to make."""
KEYS: dict[str, set[str]] = {
    "demo": {"identical", "reused_tokens"},
    "bench resume": {"ram_over_limit", "nvme_over_limit", "decode_over_stock", "save_overhead"},
    "bench decode": {"points", "kv_bytes_a_token"},
    "bench index": {"match", "reserve_publish", "victims"},
    "bench commands": {"entries", "commands", "late", "stats"},
    "bench tiers": {"ram", "nvme"},
    "bench page": {"page_over_none", "page"},
}
ELSEWHERE = {"bench vllm"}
"""Commands whose example runs in another environment, and is tested there; here they say so."""


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


ALL = dict(commands(get_command(app)))


def example(command: Any) -> list[str]:
    found = re.search(r"Example:\s+(kvstore .+)", command.help)
    assert found is not None, "no example"
    return shlex.split(found[1])


@pytest.mark.parametrize("name", ALL)
def test_help_has_an_example_and_json(name: str) -> None:
    assert example(ALL[name])[0] == "kvstore"
    assert " ".join(example(ALL[name])).startswith(f"kvstore {name}")
    assert any("--json" in getattr(option, "opts", ()) for option in ALL[name].params)
    assert all(getattr(option, "help", None) for option in ALL[name].params if option.name != "help"), name


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ALL])
def test_the_example_runs_and_its_json_is_one_object(made: Any, name: str, request: pytest.FixtureRequest) -> None:
    more = SMALLER.get(name, [])
    if name in ELSEWHERE:
        assert "is not installed here" in run_example(made, name, more).stderr
        return
    if any("--model" in getattr(option, "opts", ()) for option in ALL[name].params):
        more = [*more, "--model", str(request.getfixturevalue("tiny_model"))]
    if name in BEFORE:
        run_example(made, BEFORE[name], [])
    done = run_example(made, name, more)
    assert done.returncode == 0, done.stderr
    assert KEYS.get(name, set()) <= set(json.loads(done.stdout))
    left = sorted(path.name for path in made.path.parent.iterdir())
    assert left == sorted(["store", *LEFT.get(name, [])]), "something was left behind"


def run_example(made: Any, name: str, more: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore.tools.cli", *example(ALL[name])[1:], *more, "--json"],
        cwd=made.path.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        check=False,
    )
