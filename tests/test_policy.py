"""What every policy promises, and what each of them orders by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy import CLEAN, COLD_SHARE, POLICIES, cold_batch

Slots = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]


@st.composite
def slots(draw: st.DrawFn) -> Slots:
    """Stamps, many of them 0 or equal, and flags."""
    stamp = st.one_of(st.just(0), st.integers(1, 5), st.integers(0, 2**64 - 1))
    pairs = draw(st.lists(st.tuples(stamp, st.integers(0, 3)), max_size=60))
    return np.array([s for s, _ in pairs], np.uint64), np.array([f for _, f in pairs], np.uint32)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(given_slots=slots(), count=st.integers(1, 70))
def test_a_policy_names_the_coldest_blocks_once_each_and_nothing_else(
    name: str, given_slots: Slots, count: int
) -> None:
    stamps, flags = given_slots
    before = stamps.copy(), flags.copy()
    order = POLICIES[name](stamps, flags, count).tolist()
    assert len(order) == len(set(order)) == min(count, int(np.count_nonzero(stamps)))
    assert all(stamps[at] > 0 for at in order)
    chosen = sorted(int(stamps[at]) for at in order)
    assert chosen == sorted(int(stamp) for stamp in stamps if stamp)[: len(order)]
    assert np.array_equal(stamps, before[0])
    assert np.array_equal(flags, before[1])


@given(given_slots=slots(), count=st.integers(1, 70))
def test_lru_goes_by_stamp_alone(given_slots: Slots, count: int) -> None:
    stamps, flags = given_slots
    order = POLICIES["lru"](stamps, flags, count)
    assert np.all(np.diff(stamps[order].astype(object)) >= 0)


@given(given_slots=slots(), count=st.integers(1, 70))
def test_clean_first_lets_blocks_go_that_the_tier_below_has(given_slots: Slots, count: int) -> None:
    stamps, flags = given_slots
    order = POLICIES["lru-clean-first"](stamps, flags, count)
    clean = ((flags[order] & CLEAN) != 0).tolist()
    assert clean == sorted(clean, reverse=True)
    for group in (True, False):
        mine = [int(stamps[at]) for at, one in zip(order, clean, strict=True) if one is group]
        assert mine == sorted(mine)


@given(live=st.integers(0, 10**7), needed=st.integers(1, 10**4))
def test_a_pick_covers_what_is_needed_and_is_shared_by_many_evictions(live: int, needed: int) -> None:
    batch = cold_batch(live, needed)
    assert batch >= 2 * needed
    assert batch >= live // COLD_SHARE
