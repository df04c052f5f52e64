"""The index never gets in the way: full of blocks with the longest keys, a tier churns without MAP_FULL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stores import TierBench

from kvstore.events import Fault
from kvstore.header import slot_bytes
from kvstore.identity import chain
from kvstore.layout import Layout, Part
from kvstore.records import block_names
from kvstore.tiers import segments
from kvstore.tiers.null import NullMedium
from kvstore.tiers.nvme import NvmeTier

LONG = Layout.uniform(layers=1, heads=1, k_dim=1, block_tokens=256, dtype="float8_e5m2")
SLOT = slot_bytes(LONG.payload_bytes())


@pytest.mark.parametrize("index_bytes", [1 << 20, 4 << 20, 24 << 20])
@pytest.mark.parametrize("related", [True, False], ids=["sequences", "strangers"])
def test_the_longest_blocks_fill_a_tier_as_far_as_its_index_goes_and_churn(
    shm: Path, index_bytes: int, related: bool
) -> None:
    bench = TierBench(
        NvmeTier,
        shm / "tier",
        NullMedium(),
        budget=1 << 30,
        segment_bytes=128 * SLOT,
        index_bytes=index_bytes,
        keeps_bytes=False,
    )
    random = np.random.default_rng(1)
    space = bench.space(LONG)

    def save(blocks: int) -> int:
        """Random blocks, some abandoned, some removed again, as a busy store does."""
        rows = random.integers(0, 2**32 - 2, (1, blocks * 256) if related else (blocks, 256), np.uint32)
        names = [name for row in rows for name in block_names(chain(LONG.root(), row, 256), Part())]
        reserved = bench.tier.reserve(names, space, SLOT, 0, 10.0, now=bench.now())
        chances = random.random(len(reserved.placed))
        kept = [placement for placement, chance in zip(reserved.placed, chances, strict=True) if chance > 0.1]
        bench.tier.abandon([one for one, chance in zip(reserved.placed, chances, strict=True) if chance <= 0.1])
        bench.tier.publish([(placement, bytes(16)) for placement in kept], now=bench.now())
        bench.tier.remove([(one.name.index_key, one.name.key) for one in kept[::15]], "evict")
        return len(reserved.evicted)

    evicted, batch = 0, min(256, index_bytes >> 14)
    while evicted < 12 * batch:
        evicted += save(batch)
    while evicted < 15 * batch:
        evicted += save(int(random.integers(1, 9)))
    with bench.index.read() as txn:
        live = txn.live_bytes()
    slots = sum(segment.slots for segment in bench.tier.segment_list())
    print(f"{slots} slots: {live / slots:.0f} bytes live, {bench.index.used_bytes() / slots:.0f} with copies")
    assert not [event for event in bench.told if isinstance(event, Fault)], "the index was never full"
    assert bench.tier.allocated() < bench.tier.budget() // 2, "it is the index that limits the tier"
    assert slots * segments.INDEX_BYTES_A_SLOT > index_bytes // 8, "and not by more than it must"
    assert bench.index.used_bytes() <= 0.95 * index_bytes
    assert bench.problems() == []
    bench.close()
