"""Pins take at most half of the smallest tier; which of them hold is a matter of priority, then of age."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import BLOCK, SLOT, StoreBench, StoreMaker, tokens_of

from kvstore.errors import BudgetError
from kvstore.events import Notice
from kvstore.header import slot_bytes
from kvstore.layout import Layout
from kvstore.pins import PINNED_SHARE, _holding
from kvstore.records import NameRecord


def record(number: int, blocks: int, priority: int, created: int, shared: int = 0) -> NameRecord:
    """A pin of blocks of its own, and of some that all pins share."""
    own = [number.to_bytes(16, "big") + at.to_bytes(16, "big") for at in range(blocks)]
    common = [b"shared".ljust(16) + at.to_bytes(16, "big") for at in range(shared)]
    return NameRecord(b"r" * 32, tuple(common + own), b"", True, priority, 0, created, SLOT)


pins = st.lists(st.tuples(st.integers(0, 6), st.integers(-3, 3), st.integers(0, 3), st.integers(0, 2)), max_size=8).map(
    lambda rows: {f"pin {at}": record(at, *row) for at, row in enumerate(rows)}
)


@settings(max_examples=300)
@given(live=pins, room=st.integers(0, 20))
def test_what_holds_fits_and_nothing_that_would_fit_is_left_for_less_important_pins(
    live: dict[str, NameRecord], room: int
) -> None:
    held = _holding(live, PINNED_SHARE * room * SLOT)
    kept = {key for name in held for key in live[name].keys}
    assert len(kept) <= room
    for name in live.keys() - held:
        mine = live[name]
        above = [other for other in held if live[other].priority >= mine.priority]
        keys = {key for other in above for key in live[other].keys}
        assert len(keys | set(mine.keys)) > room
    assert _holding({name: live[name] for name in held}, PINNED_SHARE * room * SLOT) == held


LARGE = Layout.uniform(layers=2, heads=8, k_dim=64, block_tokens=BLOCK)
"""128 KiB a payload: the budget is what bounds it, not the index."""


def most_pinned(bench: StoreBench) -> int:
    """Blocks that pins may keep."""
    return min(tier.budget() for tier in bench.store._core.tiers) // PINNED_SHARE // slot_bytes(LARGE.payload_bytes())


def pin(bench: StoreBench, name: str, blocks: int, priority: int = 0) -> npt.NDArray[np.uint32]:
    tokens = tokens_of(sum(name.encode()), blocks * BLOCK)
    bench.save(tokens, LARGE)
    bench.store.pin(name, bench.space(LARGE), tokens, priority=priority)
    return tokens


def test_a_pin_of_a_higher_priority_takes_the_room_of_a_lower_one_which_comes_back_with_it(
    make_store: StoreMaker,
) -> None:
    bench = make_store(nvme=0, ram="16MiB")
    small = most_pinned(bench) * 2 // 3
    pin(bench, "low", small)
    with pytest.raises(BudgetError, match="higher priority"):
        pin(bench, "equal", small)
    assert bench.store.pinned() == {"low"}
    pin(bench, "high", small, priority=1)
    assert bench.store.pinned() == {"high"}
    assert set(bench.store.names()) == {"low", "high"}
    assert any(isinstance(event, Notice) and "'high'" in event.detail and "low" in event.detail for event in bench.told)
    bench.store.unpin("high")
    assert bench.store.pinned() == {"low"}


def test_only_pins_that_hold_keep_blocks_from_eviction_after_a_restart_too(make_store: StoreMaker) -> None:
    bench = make_store(nvme=0, ram="16MiB")
    most = most_pinned(bench)
    small = most * 2 // 3
    low = pin(bench, "low", small)
    high = pin(bench, "high", small, priority=5)
    bench.close()
    for seed in range(500, 500 + 3 * most):
        bench.save(tokens_of(seed, BLOCK), LARGE)
    assert bench.load(high, LARGE).tokens == len(high)
    assert bench.load(low, LARGE).tokens < len(low)
