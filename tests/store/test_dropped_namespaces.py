"""Namespaces dropped while they are empty: what is saved into one again is found by all that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from children import Child
from known_kv import SPEAKERS, load, save

from kvstore.store import Store

SPEAKER = SPEAKERS[1]
ONE, TWO, THREE = ([seed, *range(100, 147)] for seed in range(3))


@pytest.fixture
def store(reopen: Callable[..., Store]) -> Store:
    """A store that knew a namespace before it was dropped."""
    store = reopen()
    save(store, SPEAKER, ONE)
    assert store.flush(60)
    store.evict(everything=True)
    assert [record.salt for record in store.drop_empty()] != []
    return store


@pytest.mark.parametrize("again", ["here", "elsewhere first"])
def test_what_is_saved_after_a_drop_is_counted_and_evicted(
    store: Store, tmp_path: Path, memory: Path, again: str
) -> None:
    """Another process may have registered it anew, under another number than the one this process remembers."""
    with Child(tmp_path / "kv", memory) as child:
        if again == "elsewhere first":
            child.do("save", speaker=1, tokens=TWO)
            assert child.do("flush")
        save(store, SPEAKER, THREE)
        assert store.flush(60)
        blocks = 3 if again == "here" else 6
        (use,) = store.namespaces()
        assert {tier: usage.blocks for tier, usage in use.by_tier.items()} == {"ram": blocks, "nvme": blocks}
        assert child.do("load", speaker=1, tokens=THREE)[:2] == [48, 0]
        assert store.evict(salt=SPEAKER.salt) == {"ram": blocks, "nvme": blocks}
        assert load(store, SPEAKER, THREE)[0].tokens == 0
        assert store.verify().problems == []


def test_a_quota_holds_for_what_is_saved_under_a_number_that_is_gone(
    store: Store, tmp_path: Path, memory: Path
) -> None:
    with Child(tmp_path / "kv", memory) as child:
        child.do("save", speaker=1, tokens=TWO)
        store.set_quota(SPEAKER.salt, ram=4 * 12288)
        save(store, SPEAKER, THREE)
        (quota,) = store.quotas()
        assert quota.used == 4 * 12288
        assert store.namespaces()[0].by_tier["ram"].size == quota.used
