"""The store's memory on tmpfs is freed when its store is gone, and never while anybody may use it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kvstore
from kvstore.events import Event, Notice
from kvstore.memory_home import HOME, orphans, sweep


def open_store(path: Path, memory: Path, observers: tuple = ()) -> kvstore.store.Store:
    return kvstore.open(path, ram="4MiB", nvme=0, ram_directory=memory, ram_segment_bytes="1MiB", observers=observers)


def test_memory_of_a_removed_store_is_freed_by_the_next_open_of_any(tmp_path: Path, memory: Path) -> None:
    open_store(tmp_path / "gone", memory).close()
    (left,) = memory.iterdir()
    shutil.rmtree(tmp_path / "gone")
    told: list[Event] = []
    open_store(tmp_path / "other", memory, (told.append,)).close()
    assert not left.exists()
    assert any(isinstance(event, Notice) and event.subject == "orphan removed" for event in told)


def test_memory_of_a_store_that_exists_is_kept(tmp_path: Path, memory: Path) -> None:
    open_store(tmp_path / "here", memory).close()
    assert sweep(memory) == []


def test_memory_in_use_is_kept_although_its_store_is_gone(tmp_path: Path, memory: Path) -> None:
    with open_store(tmp_path / "used", memory):
        shutil.rmtree(tmp_path / "used" / "owners")
        (tmp_path / "used" / "STORE").unlink()
        assert orphans(memory) == []
    assert len(orphans(memory)) == 1


@pytest.mark.parametrize("card", ["", "{}", '{"store": 1, "id": "zz", "mounts": 0}', '{"store": "/x", "id": ""}'])
def test_a_directory_that_does_not_say_whose_it_is_is_left_alone(memory: Path, card: str) -> None:
    import os

    path = memory / f"kvstore-{os.geteuid()}-{'0' * 32}"
    path.mkdir()
    (path / HOME).write_text(card)
    assert orphans(memory) == []


def test_a_path_of_another_mount_namespace_proves_nothing(tmp_path: Path, memory: Path) -> None:
    open_store(tmp_path / "far", memory).close()
    (home,) = memory.glob(f"*/{HOME}")
    shutil.rmtree(tmp_path / "far")
    text = home.read_text()
    home.write_text(text.replace('"mounts": ', '"mounts": 9'))
    assert orphans(memory) == []
