"""The index space set aside for a slot is enough: a tier full of blocks with the longest keys churns without MAP_FULL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from stores import TierBench

from kvstore.events import Fault
from kvstore.header import slot_bytes
from kvstore.identity import chain
from kvstore.layout import Layout, Part
from kvstore.records import block_names
from kvstore.tiers.null import NullMedium
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.segments import INDEX_BYTES_A_SLOT

LONG = Layout.uniform(layers=1, heads=1, k_dim=1, block_tokens=256, dtype="float8_e5m2")
SLOT = slot_bytes(LONG.payload_bytes())


def test_the_longest_blocks_fill_the_slots_the_index_has_room_for_and_churn(shm: Path) -> None:
    index_bytes = 4 << 20
    slots = index_bytes // INDEX_BYTES_A_SLOT
    bench = TierBench(
        NvmeTier,
        shm / "tier",
        NullMedium(),
        budget=2 * slots * SLOT + index_bytes,
        segment_bytes=256 * SLOT,
        index_bytes=index_bytes,
        keeps_bytes=False,
    )
    random = np.random.default_rng(1)
    space = bench.space(LONG)

    def save(blocks: int) -> int:
        """A sequence of random blocks, some abandoned, some removed again, as a busy store does."""
        tokens = random.integers(0, 2**32 - 2, blocks * 256, np.uint32)
        names = block_names(chain(LONG.root(), tokens, 256), Part())
        reserved = bench.tier.reserve(names, space, SLOT, 0, 10.0, now=bench.now())
        assert not reserved.left
        kept = [placement for placement in reserved.placed if random.random() > 0.05]
        bench.tier.abandon([placement for placement in reserved.placed if placement not in kept])
        bench.tier.publish([(placement, bytes(16)) for placement in kept], now=bench.now())
        victims = [(one.name.index_key, one.name.key) for one in kept if random.random() < 0.05]
        bench.tier.remove(victims, "evict")
        return len(reserved.evicted)

    evicted = sum(save(64) for _ in range(slots // 64))
    assert sum(segment.slots for segment in bench.tier.segment_list()) == slots, "the index limits the tier"
    while evicted < 4 * slots:
        evicted += save(int(random.integers(1, 65)))
    assert not [event for event in bench.told if isinstance(event, Fault)]
    used = bench.index.used_bytes()
    print(f"{used / slots:.0f} bytes of index a slot, {used / index_bytes:.2f} of the index")
    assert used < index_bytes
    assert bench.problems() == []
    bench.close()
