"""A path for a store and a directory on tmpfs for its `ram` part, both gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from known_kv import open_small, shm

from kvstore.store import Store


@pytest.fixture
def memory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir=shm()))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def reopen(tmp_path: Path, memory: Path) -> Iterator[Callable[..., Store]]:
    """Opens the test's store; whatever is still open at the end is closed."""
    opened: list[Store] = []

    def make(**over: Any) -> Store:
        store = open_small(tmp_path / "kv", memory, **over)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()
