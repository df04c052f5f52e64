"""What was explicitly evicted stays gone, also where its evictor died or did not see a tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import shm_directory

import kvstore
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.store import Store

LAYOUT = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
TOKENS = np.arange(64)


@pytest.fixture
def memories() -> Iterator[tuple[Path, Path]]:
    with shm_directory() as one, shm_directory() as other:
        yield one, other


def opened(path: Path, memory: Path) -> Store:
    sizes = {"ram": "8MiB", "nvme": "16MiB", "ram_segment_bytes": "1MiB", "nvme_segment_bytes": "2MiB"}
    return kvstore.open(path, ram_directory=memory, **sizes)


def save(store: Store, tokens: np.ndarray = TOKENS) -> None:
    values = np.ones((2, 2, 2, len(tokens), 16), np.float32)
    store.save(store.namespace(LAYOUT), tokens, HostKV.stacked(LAYOUT, values))
    assert store.flush(30)


def held(store: Store, tokens: np.ndarray = TOKENS) -> int:
    return store.match(store.namespace(LAYOUT), tokens).tokens


def test_a_private_ram_forgets_what_was_evicted_elsewhere(tmp_path: Path, memories: tuple[Path, Path]) -> None:
    mine, others = memories
    with opened(tmp_path / "store", mine) as store:
        save(store)
    with opened(tmp_path / "store", others) as store:
        assert sum(store.evict(everything=True).values()) > 0
    with opened(tmp_path / "store", mine) as store:
        assert held(store) == 0
        assert store.verify().problems == []


@pytest.mark.parametrize("what", ["everything", "root", "keys", "first key", "prefix", "short prefix", "salt"])
def test_an_eviction_whose_process_died_is_finished_at_the_next_open(
    tmp_path: Path, memories: tuple[Path, Path], what: str
) -> None:
    with opened(tmp_path / "store", memories[0]) as store:
        save(store)
        space = store.namespace(LAYOUT)
        keys = tuple(piece.name.key for piece in store.match(space, TOKENS).pieces[next(iter(LAYOUT.parts()))])
        assert held(store) == len(TOKENS)
        begun = TOKENS.astype(">u4").tobytes()
        stones: dict[str, dict[str, Any]] = {
            "everything": {"everything": True},
            "root": {"root": space.root},
            "keys": {"keys": keys},
            "first key": {"keys": keys[:1]},
            "prefix": {"parent": space.root, "tokens": begun[:64]},
            "short prefix": {"parent": space.root, "tokens": begun[:20]},
            "salt": {"salt": space.record.salt},
        }
        store._core.purge.add(**stones[what])
    with opened(tmp_path / "store", memories[0]) as store:
        assert held(store) == 0
        assert sum(tier.blocks for tier in store.stats().tiers) == 0


def test_housekeeping_finishes_it_while_the_store_stays_open(tmp_path: Path, memories: tuple[Path, Path]) -> None:
    with opened(tmp_path / "store", memories[0]) as store:
        save(store)
        store._core.purge.add(everything=True)
        keeper = store._core.keeper
        keeper.finish_evictions()
        keeper.finish_evictions()
        assert held(store) == 0


def test_what_was_saved_after_an_eviction_stays(tmp_path: Path, memories: tuple[Path, Path]) -> None:
    other = TOKENS[::-1].copy()
    with opened(tmp_path / "store", memories[0]) as store:
        save(store, other)
        store._core.purge.add(everything=True)  # another process's, not finished
        save(store)
    with opened(tmp_path / "store", memories[0]) as store:
        assert (held(store), held(store, other)) == (len(TOKENS), 0)
        store.evict(everything=True)
        save(store)
        store._core.keeper.finish_evictions()
        store._core.keeper.finish_evictions()
        assert held(store) == len(TOKENS)
    with opened(tmp_path / "store", memories[0]) as store:
        assert held(store) == len(TOKENS)
