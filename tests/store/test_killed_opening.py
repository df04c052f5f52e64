"""A process killed while it opens or closes a store, after every change it makes to a file: the next one opens.

The steps are not listed: the process dies after the first call of the system's, from whatever module, that changed
something under the store's directory or its memory on tmpfs; then after the second, and so on until it comes through.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import KILLED, Nursery
from known_kv import SPEAKERS, load, open_small, save

TOKENS = list(range(180))
FEWEST = 4
"""Changes of files that an opening and a closing make at least."""


def nothing(_path: Path, _memory: Path) -> None:
    pass


def used(path: Path, memory: Path) -> None:
    with open_small(path, memory) as store:
        save(store, SPEAKERS[0], TOKENS)
        assert store.flush(60)


def restarted(path: Path, memory: Path) -> None:
    used(path, memory)
    for directory in memory.iterdir():
        shutil.rmtree(directory)


def replaced(path: Path, memory: Path) -> None:
    """Its memory holds what another store left there."""
    used(path, memory)
    (home,) = memory.iterdir()
    other = memory.parent / f"{memory.name}-other"
    other.mkdir()
    try:
        used(path.parent / "other", other)
        (strange,) = other.iterdir()
        shutil.rmtree(home)
        shutil.copytree(strange, home)
    finally:
        shutil.rmtree(other)


def orphaned(path: Path, memory: Path) -> None:
    """Another store's memory stayed, its store is gone."""
    used(path.parent / "gone", memory)
    shutil.rmtree(path.parent / "gone")


BEFORE: dict[str, tuple[Callable[[Path, Path], None], dict[str, Any]]] = {
    "a new store": (nothing, {}),
    "a new store without nvme": (nothing, {"nvme": "0"}),
    "a store that was used": (used, {}),
    "a store after a restart of the machine": (restarted, {}),
    "a store with larger budgets": (used, {"ram": "256MiB", "nvme": "256MiB"}),
    "a store with smaller budgets": (used, {"ram": "1536KiB", "nvme": "2MiB"}),
    "a store whose memory is another's": (replaced, {}),
    "a new store beside an orphan": (orphaned, {}),
}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.mark.parametrize("case", BEFORE)
def test_a_death_at_any_change_of_a_file_hinders_nobody(
    case: str, tmp_path: Path, memory: Path, nursery: Nursery
) -> None:
    prepare, settings = BEFORE[case]
    path, kept, kept_memory = tmp_path / "kv", tmp_path / "kept", tmp_path / "kept-memory"
    prepare(path, memory)
    path.mkdir(exist_ok=True)
    shutil.copytree(path, kept)
    shutil.copytree(memory, kept_memory)
    deaths = 0
    names: set[str] | None = None
    while True:
        ended = nursery.death_in_opening(path, memory, deaths + 1, **settings)
        assert ended in (KILLED, 0)
        with open_small(path, memory, **settings) as store:
            assert store.stats().processes == 1
            assert store.verify().problems == []
            assert load(store, SPEAKERS[0], TOKENS)[1] == 0
            now = files(path, memory)
        assert names is None or now == names, "an earlier death left more, or less"
        names = now
        if not ended:
            break
        deaths += 1
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        for directory in memory.iterdir():
            shutil.rmtree(directory)
        shutil.copytree(kept_memory, memory, dirs_exist_ok=True)
    assert deaths >= FEWEST


def files(path: Path, memory: Path) -> set[str]:
    """The names of an open store's files, less segments, which a store makes when it comes to it; owners by length."""
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.parent.name != "owners"}
    found |= {f"owner {len(file.name)}" for file in (path / "owners").iterdir()}
    found |= {f"memory {'/'.join(file.relative_to(memory).parts[1:])}" for file in memory.rglob("*")}
    return {name for name in found if not name.endswith((".seg", ".slots"))}
