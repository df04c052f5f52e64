"""Ranks of one engine save and load their own shards; a load can begin where the engine's own cache ends."""

from __future__ import annotations

import numpy as np
import pytest
from stores import BLOCK, LAYOUT, StoreMaker, kv_of, tokens_of

from kvstore.errors import LayoutError
from kvstore.events import Hit, Miss
from kvstore.kv import HostKV
from kvstore.layout import Layout, Part

HALVES = Layout(LAYOUT.dtype, LAYOUT.groups, LAYOUT.block_tokens, (("test", "shards"),), 2)


def test_a_prefix_counts_only_when_every_rank_has_saved_it(make_store: StoreMaker) -> None:
    store = make_store().store
    space, tokens = store.namespace(HALVES), tokens_of(1, 40)
    halves = [HostKV.stacked(HALVES, kv_of(tokens, HALVES) + rank) for rank in range(2)]
    store.save(space, tokens, {Part(0, 0): halves[0]})
    assert store.match(space, tokens).tokens == 0
    store.save(space, tokens[:20], {Part(0, 1): halves[1]})
    assert store.match(space, tokens).tokens == 20
    for rank in range(2):
        array = np.zeros_like(kv_of(tokens, HALVES))
        loaded = store.load(store.match(space, tokens), {Part(0, rank): HostKV.stacked(HALVES, array)})
        assert loaded.tokens == 20
        assert np.array_equal(array[..., :20, :], (kv_of(tokens, HALVES) + rank)[..., :20, :])


def test_parts_that_the_layout_does_not_have_are_refused(make_store: StoreMaker) -> None:
    store = make_store().store
    space, tokens = store.namespace(HALVES), tokens_of(1, 20)
    buffer = HostKV.stacked(HALVES, kv_of(tokens, HALVES))
    for wrong in ({Part(0, 2): buffer}, {}, buffer):
        with pytest.raises(LayoutError):
            store.save(space, tokens, wrong)


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_what_the_engine_has_is_neither_copied_nor_counted(make_store: StoreMaker, tier: str) -> None:
    bench = make_store()
    tokens = tokens_of(2, 4 * BLOCK + 5)
    bench.save(tokens)
    bench.settle()
    if tier == "nvme":
        bench.drop("ram")
    array = np.zeros_like(kv_of(tokens, LAYOUT))
    match = bench.store.match(bench.space(), tokens, limit=len(tokens) - 1)
    bench.told.clear()
    loaded = bench.store.load(match, HostKV.stacked(LAYOUT, array), first=2 * BLOCK)
    assert loaded.tokens == len(tokens) - 1
    assert loaded.by_tier == {tier: len(tokens) - 1 - 2 * BLOCK}
    assert not array[..., : 2 * BLOCK, :].any()
    assert np.array_equal(array[..., 2 * BLOCK : -1, :], kv_of(tokens, LAYOUT)[..., 2 * BLOCK : -1, :])
    assert sum(event.tokens for event in bench.of(Hit)) == len(tokens) - 1 - 2 * BLOCK
    assert sum(event.tokens for event in bench.of(Miss)) == 1
