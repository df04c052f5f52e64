"""A store that could not be opened leaves nothing that was not there before, and takes nothing that was."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import superblock
from kvstore.errors import KVStoreError

REFUSED: dict[str, dict[str, Any]] = {
    "no ram": {"ram": 0},
    "ram too small for its index": {"ram": "1MiB"},
    "nvme too small for its index": {"ram": "8MiB", "nvme": "1MiB"},
    "nvme larger than the disk": {"ram": "8MiB", "nvme": "4000PiB"},
}


def everything(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


@pytest.mark.parametrize("why", REFUSED)
def test_nothing_stays(tmp_path: Path, memory: Path, why: str) -> None:
    shared = everything(memory)
    with pytest.raises(KVStoreError):
        kvstore.open(tmp_path / "one" / "two", ram_directory=memory, **{"nvme": 0, **REFUSED[why]})
    assert (everything(tmp_path), everything(memory)) == ([], shared)


@pytest.mark.parametrize("why", REFUSED)
def test_what_was_there_stays(tmp_path: Path, memory: Path, why: str) -> None:
    path = tmp_path / "store"
    path.mkdir()
    (path / "kvstore.toml").write_text("lease_s = 5.0\n")
    with pytest.raises(KVStoreError):
        kvstore.open(path, ram_directory=memory, **{"nvme": 0, **REFUSED[why]})
    assert everything(path) == ["kvstore.toml"]
    for name in ("owners", "nvme", "mine"):
        (path / name).mkdir()
        (path / name / "file").touch()
    before = everything(path)
    with pytest.raises(KVStoreError):
        kvstore.open(path, ram_directory=memory, **{"nvme": 0, **REFUSED[why]})
    assert everything(path) == before


def test_a_store_that_was_there_is_not_touched(tmp_path: Path, memory: Path) -> None:
    kvstore.open(tmp_path / "store", ram_directory=memory, ram="8MiB", nvme=0).close()
    before = everything(tmp_path)
    with pytest.raises(KVStoreError):
        kvstore.open(tmp_path / "store", ram_directory=memory, ram="8MiB", nvme="4000PiB")
    assert everything(tmp_path) == before


def test_who_waits_to_open_it_meanwhile_makes_it_anew(tmp_path: Path, memory: Path) -> None:
    path = tmp_path / "store"
    superblock.prepare_directory(path)
    got = threading.Event()

    def second() -> None:
        with superblock.opening(path):
            got.set()

    with superblock.opening(path):
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not got.wait(0.1)
        (path / superblock.LOCK).unlink()  # as one that withdraws does
    waiting.join(10)
    assert got.is_set()
    assert (path / superblock.LOCK).exists()
