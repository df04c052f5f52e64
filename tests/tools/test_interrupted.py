"""Whatever ends a command, the store is sound and nothing is half-done: Ctrl-C at many points, a disk that fills up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.core import Core
from kvstore.errors import NoSpaceError
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.tiers.fault import Effect, FaultMedium, FaultRule, Operation
from kvstore.tools.bundle import Bundle
from kvstore.tools.cli import app
from kvstore.tools.transfer import restore

ROOT = Path(__file__).resolve().parents[2]
DELAYS = [0.0, 0.03, 0.1]


LAYOUT = Layout.uniform(layers=8, heads=4, k_dim=32, block_tokens=16)
"""128 KiB a block."""
SIZES: dict[str, Any] = {"ram": "64MiB", "nvme": "256MiB", "nvme_segment_bytes": 8 << 20}
SEQUENCES, TOKENS = 12, 64


def sequence(number: int) -> np.ndarray[Any, Any]:
    return np.arange(TOKENS, dtype=np.uint32) + 1000 * (number + 1)


def stored(path: Path, salt: str) -> int:
    """Sequences that a store has whole."""
    with kvstore.open(path, **SIZES) as store:
        space = store.namespace(LAYOUT, salt=salt)
        return sum(store.match(space, sequence(number)).tokens == TOKENS for number in range(SEQUENCES))


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A store with the sequences under the salt "first", and one of them under the salt "second"."""
    path = tmp_path / "store"
    with kvstore.open(path, **SIZES) as store:
        for salt, count in (("first", SEQUENCES), ("second", 1)):
            space = store.namespace(LAYOUT, salt=salt, label=salt)
            for number in range(count):
                kv = np.full((8, 2, 4, TOKENS, 32), number, np.uint32)
                store.save(space, sequence(number), HostKV.stacked(LAYOUT, kv))
                assert store.flush(30)
    assert stored(path, "first") == SEQUENCES
    return path


def interrupted(*words: str | Path, after_s: float) -> int:
    """Start a command, interrupt it so long after its first word on standard error; its exit code."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kvstore.tools.cli", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert child.stderr is not None
    first = child.stderr.readline()
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    _, rest = child.communicate(timeout=60)
    assert "Traceback" not in first + rest
    done = child.returncode in (0, -signal.SIGINT)  # the latter once the interpreter is ending, with everything done
    assert done or child.returncode == 130, first + rest
    if not done:
        assert rest.splitlines()[-1] == "interrupted"
    return 0 if done else 130


def export(path: Path, file: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(file), "--namespace", "first", "--path", str(path)])
    assert done.exit_code == 0, done.output


def sound(path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", "--path", str(path)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("after_s", DELAYS)
def test_an_export_is_whole_or_not_there(full: Path, tmp_path: Path, after_s: float) -> None:
    file = tmp_path / "out" / "x.safetensors"
    file.parent.mkdir()
    code = interrupted("export", file, "--namespace", "first", "--path", full, after_s=after_s)
    left = list(file.parent.iterdir())
    assert left == [file] or (left == [] and code == 130)  # a Ctrl-C may come when the file is there already
    if left:
        with Bundle(file) as bundle:
            bundle.verify(lambda done, total: None)
    sound(full)


@pytest.mark.parametrize("after_s", DELAYS)
def test_an_import_can_be_gone_on_with(full: Path, tmp_path: Path, after_s: float) -> None:
    file, away = tmp_path / "x.safetensors", tmp_path / "away"
    assert CliRunner().invoke(app, ["export", str(file), "--namespace", "first", "--path", str(full)]).exit_code == 0
    kvstore.open(away, **SIZES).close()
    interrupted("import", file, "--unsalted", "--path", away, after_s=after_s)
    sound(away)
    done = CliRunner().invoke(app, ["import", str(file), "--unsalted", "--path", str(away)])
    assert done.exit_code == 0, done.output
    assert stored(away, "") == SEQUENCES


@pytest.mark.parametrize("after_s", DELAYS)
def test_a_wipe_can_be_run_again(full: Path, after_s: float) -> None:
    interrupted("evict", "--wipe", "--salt", "first", "--yes", "--path", full, after_s=after_s)
    sound(full)
    done = CliRunner().invoke(app, ["evict", "--wipe", "--yes", "--path", str(full)])
    assert done.exit_code == 0, done.output
    assert (stored(full, "first"), stored(full, "second")) == (0, 1)
    sound(full)


@pytest.mark.parametrize("after_s", DELAYS[:2])
def test_a_verification_changes_nothing(full: Path, after_s: float) -> None:
    interrupted("verify", "--repair", "--path", full, after_s=after_s)
    sound(full)
    assert stored(full, "first") == SEQUENCES


def test_a_disk_that_fills_up_during_an_import_is_told(full: Path, tmp_path: Path) -> None:
    """What is in memory alone is not called imported."""
    file, away = tmp_path / "x.safetensors", tmp_path / "away"
    assert CliRunner().invoke(app, ["export", str(file), "--namespace", "first", "--path", str(full)]).exit_code == 0

    def wrap(medium: Any) -> Any:
        if medium.name != "nvme":
            return medium
        return FaultMedium(medium, [FaultRule(Operation.ALLOCATE, Effect.ENOSPC, first=1)])

    with kvstore.open(away, wrap=wrap, **SIZES) as store, Bundle(file) as bundle:
        with pytest.raises(NoSpaceError, match="found room on nvme"):
            restore(store, bundle, store.namespace(bundle.layout), lambda done, total: None)
        assert store.verify().problems == []
    with kvstore.open(away, **SIZES) as store, Bundle(file) as bundle:
        moved = restore(store, bundle, store.namespace(bundle.layout), lambda done, total: None)
        assert moved.sequences == SEQUENCES
        assert store.verify().problems == []


def test_an_import_takes_to_disk_what_an_interrupted_one_left_in_memory(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper would, in its time: the import must not depend on who is first."""
    file, away = tmp_path / "x.safetensors", tmp_path / "away"
    export(full, file)

    def wrap(medium: Any) -> Any:
        if medium.name != "nvme":
            return medium
        return FaultMedium(medium, [FaultRule(Operation.WRITE, Effect.EIO)])

    monkeypatch.setattr(Core, "_rescan", lambda self: None)
    with kvstore.open(away, wrap=wrap, **SIZES) as store, Bundle(file) as bundle:
        space = store.namespace(bundle.layout)
        for number in range(3):
            kv = np.full((8, 2, 4, TOKENS, 32), number, np.uint32)
            assert store.save(space, sequence(number), HostKV.stacked(LAYOUT, kv)).new_blocks == TOKENS // 16
        store.flush(30)
    with kvstore.open(away, **SIZES) as store, Bundle(file) as bundle:
        space = store.namespace(bundle.layout)
        assert store.match(space, sequence(2)).tokens == TOKENS
        moved = restore(store, bundle, space, lambda done, total: None)
        assert (moved.sequences, moved.blocks, moved.known) == (SEQUENCES, SEQUENCES * TOKENS // 16, 0)
        store.evict(everything=True, tier="ram")
        assert all(store.match(space, sequence(number)).tokens == TOKENS for number in range(SEQUENCES))
        assert store.verify().problems == []
