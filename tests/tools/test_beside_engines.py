"""Commands beside an engine that is at work: what they evict it misses, and it never waits for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SEEN = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
ENVIRONMENT = {"PYTHONPATH": SEEN, "OMP_NUM_THREADS": "1"}
READING = [
    ["stats"],
    ["ls", "held"],
    ["show", "100,101"],
    ["explain", "100,101,7"],
    ["verify"],
    ["evict", "--all", "--dry-run"],
]


class Engine:
    """The process of `holding`."""

    def __init__(self, path: Path, manner: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "holding", str(path), manner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        assert self.answer() == "open"

    def answer(self) -> Any:
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def load(self) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return self.answer()

    def end(self) -> int:
        self._child.communicate("", timeout=120)
        return self._child.returncode


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def begin(manner: str = "") -> Engine:
        engines.append(Engine(tmp_path / "store", manner))
        return engines[-1]

    yield begin
    for engine in engines:
        assert engine.end() == 0


def run(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.tools.cli", *words, "--path", str(path / "store"), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("words", [["--salt", "held"], ["--all"], ["--namespace", "held", "--prefix", "100,101"]])
def test_what_is_evicted_is_missed_by_the_engine_that_has_it_in_hbm_and_ram(
    start: Start, tmp_path: Path, words: list[str]
) -> None:
    engine = start()
    assert engine.load()["by_tier"] == {"hbm": 80}
    assert json.loads(run(tmp_path, "evict", *words, "--yes").stdout)["blocks"] == {"ram": 5, "nvme": 5}
    assert engine.load()["tokens"] == 0


def test_what_is_wiped_is_missed_and_the_engine_has_confirmed(start: Start, tmp_path: Path) -> None:
    engine = start()
    assert engine.load()["by_tier"] == {"hbm": 80}
    told = json.loads(run(tmp_path, "evict", "--salt", "held", "--wipe", "--yes").stdout)
    assert (told["wiped"]["unconfirmed"], told["wiped"]["left"]) == (0, 0)
    assert engine.load()["tokens"] == 0


def test_no_command_holds_a_lock_that_an_engine_waits_for(start: Start, tmp_path: Path) -> None:
    """The engine's disk is slow, so that a lock held across it would show: a save gives up after half a second."""
    engine = start("slow")
    assert engine.load()["tokens"] == 80
    waited = 0
    for words in READING:
        running = subprocess.Popen(
            [sys.executable, "-m", "kvstore.tools.cli", *words, "--path", str(tmp_path / "store"), "--json"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        while running.poll() is None:
            told = engine.load()
            assert (told["tokens"], told["saved"]) == (80, 2), words
            waited = max(waited, told["waiting"])
        assert running.stderr is not None
        assert running.wait() == 0, running.stderr.read()
        running.stderr.close()
    assert [reason for reason in engine.load()["skipped"] if reason.startswith("ram")] == []
    assert waited > 10, "the disk was never behind: this shows nothing"
