"""Every example of every help text runs as it is printed, on a store with the demo's conversations of two models."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import kvstore
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
SALTS = ("first", "second")
LONG = {
    "demo",
    "bench resume",
    "bench decode",
    "bench index",
    "bench commands",
    "bench tiers",
    "bench page",
    "bench vllm",
}
"""Run by `test_examples` with smaller numbers: as they are printed they take minutes."""
MODEL = {"warm": "--model"}
"""The model that is used where none is named has to be fetched first."""
BEFORE = {"import": "export"}


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        below = commands(command, f"{prefix}{name} ") if hasattr(command, "commands") else {f"{prefix}{name}": command}
        found |= below
    return found


ALL = commands(get_command(app))


def example(name: str) -> str:
    found = re.search(r"Example:\s+(kvstore .+)", ALL[name].help)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def talked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store: two models' conversations under two salts, each with an answer, and what the examples name."""
    torch = pytest.importorskip("torch")
    from kvstore.adapters.transformers import attach
    from kvstore.tools import model as models
    from kvstore.tools.demo_text import conversation

    path = tmp_path_factory.mktemp("talked") / "store"
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        kvstore.open(path, ram="64MiB", nvme="128MiB", ram_directory=shared) as store,
    ):
        for name in ("one model", "another model"):
            model, tokenizer = models.load(tiny_model)
            if name == "another model":
                with torch.no_grad():
                    model.get_input_embeddings().weight.add_(0.01)
            talk = conversation(tokenizer, 300, 64)
            row = torch.tensor([list(talk.prompt)])
            for salt in SALTS:
                with attach(model, store, salt=salt, label=f"{name}, {salt}", warm_tokens=0) as kv:
                    model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=16, pad_token_id=0)
                    assert kv.flush(30)
        for salt in SALTS:
            space = store.namespace(LAYOUT, salt=salt, label=salt)
            ids = [40, *range(100, 139)]
            store.save(space, ids, HostKV.stacked(LAYOUT, np.zeros((2, 2, 2, 40, 16), np.uint32)))
            if salt == "first":
                store.pin("greeting", space, ids)
            else:
                store.evict(prefix=store.match(space, ids))
                store.save(space, ids[1:], HostKV.stacked(LAYOUT, np.zeros((2, 2, 2, 39, 16), np.uint32)))
        assert store.flush(30)
        assert len(store.namespaces()) == 6
    return path


@pytest.mark.parametrize("name", [name for name in ALL if name not in LONG])
def test_the_example_runs_as_it_is_printed(talked: Path, tiny_model: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(talked, tmp_path / "store")
    if name == "serve":
        pytest.importorskip("uvicorn")
    if name in BEFORE:
        run(tmp_path, example(BEFORE[name]))
    more = f" {MODEL[name]} {tiny_model}" if name in MODEL else ""
    told = run(tmp_path, example(name) + more)
    assert told.stdout.strip()
    assert "Traceback" not in told.stderr


def test_the_first_ten_minutes_go_as_they_are_printed(tiny_model: Path, tmp_path: Path) -> None:
    text = (ROOT / "kvstore" / "COMMANDS.md").read_text()
    walk = re.search(r"<!-- walk -->\n```\n(.*?)```", text, re.DOTALL)
    assert walk is not None
    printed = "~/.cache/kvstore/models/SmolLM2-135M-Instruct"
    lines = walk[1].replace(printed, str(tiny_model)).replace("kvstore warm", f"kvstore warm --model {tiny_model}")
    assert str(tiny_model) in lines.splitlines()[1]
    told = run(tmp_path, f"set -e; export KVSTORE_RAM=64MiB KVSTORE_NVME=128MiB\n{lines}").stdout
    assert "tokens match in" in told  # explain, of the store
    assert "of 85 characters agree" in told  # and of two files
    assert "Imported 85 tokens" in told
    assert told.count("85 of 85 are stored") == 2
    assert "all is well" in told


def run(place: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line as a shell runs it, with ``kvstore`` for this interpreter's."""
    shim = place / "bin" / "kvstore"
    if not shim.exists():
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore.tools.cli "$@"\n')
        shim.chmod(0o700)
    seen = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(["bash", "-c", line], cwd=place, env=seen, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done
