"""Slot arithmetic against plain sets of numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.slots import FreeMap, SlotRef, SlotRun, choose_runs, join_runs

bits = st.lists(st.booleans(), max_size=80)


def free_map(given_bits: list[bool]) -> FreeMap:
    free = FreeMap.full(len(given_bits))
    for slot, bit in enumerate(given_bits):
        if not bit:
            free.use(slot)
    return free


def bits_of(free: FreeMap) -> list[bool]:
    return [bit == ord("1") for bit in free.bits]


@given(bits)
def test_a_free_map_survives_packing(given_bits: list[bool]) -> None:
    packed = free_map(given_bits).pack()
    assert len(packed) == -(-len(given_bits) // 8)
    assert bits_of(FreeMap.unpack(packed, len(given_bits))) == given_bits
    assert [packed[at // 8] >> 7 - at % 8 & 1 for at in range(len(given_bits))] == given_bits


@given(bits)
def test_runs_are_the_free_slots_in_order_and_as_long_as_they_can_be(given_bits: list[bool]) -> None:
    free = free_map(given_bits)
    runs = free.runs(7)
    covered = [ref.slot for run in runs for ref in run.refs()]
    assert covered == [at for at, one in enumerate(given_bits) if one]
    assert all(free.slots(start) == [at for at in covered if at >= start] for start in range(len(given_bits) + 1))
    assert all(run.count > 0 and run.segment == 7 for run in runs)
    assert all(a.first + a.count < b.first for a, b in itertools.pairwise(runs))
    assert free.free == sum(given_bits)


@given(bits, st.data())
def test_taking_and_giving_are_each_others_undoing_and_refuse_what_is_not_so(
    given_bits: list[bool], data: st.DataObject
) -> None:
    free = free_map(list(given_bits))
    first = data.draw(st.integers(0, 80))
    count = data.draw(st.integers(1, 10))
    wanted = range(first, first + count)
    if all(at < len(given_bits) and given_bits[at] for at in wanted):
        free.take(SlotRun(0, first, count))
        assert bits_of(free) == [one and at not in wanted for at, one in enumerate(given_bits)]
        for at in wanted:
            free.give(at)
            with pytest.raises(ValueError, match="free already"):
                free.give(at)
    else:
        with pytest.raises(ValueError, match="not free"):
            free.take(SlotRun(0, first, count))
    assert bits_of(free) == given_bits


@st.composite
def disjoint_runs(draw: st.DrawFn) -> list[SlotRun]:
    """Free runs of a few segments."""
    maps = draw(st.lists(bits, max_size=3))
    return [run for segment, one in enumerate(maps) for run in free_map(one).runs(segment)]


@given(disjoint_runs(), st.integers(0, 120))
def test_chosen_runs_are_free_disjoint_and_as_many_slots_as_wanted(runs: list[SlotRun], count: int) -> None:
    chosen = choose_runs(runs, count)
    slots = [ref for run in chosen for ref in run.refs()]
    free = {ref for run in runs for ref in run.refs()}
    assert len(slots) == len(set(slots)) == min(count, len(free))
    assert set(slots) <= free


@given(disjoint_runs(), st.integers(1, 120))
def test_a_sequence_lies_in_as_few_pieces_as_it_can(runs: list[SlotRun], count: int) -> None:
    chosen = choose_runs(runs, count)
    sizes = sorted((run.count for run in runs), reverse=True)
    fewest = next((n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= count), len(sizes))
    assert len(chosen) == fewest
    if len(chosen) == 1:
        fitting = [run.count for run in runs if run.count >= count]
        source = next(run for run in runs if (run.segment, run.first) == (chosen[0].segment, chosen[0].first))
        assert not fitting or source.count == min(fitting), "the smallest run that holds them all"


refs = st.lists(st.builds(SlotRef, st.integers(0, 2), st.integers(0, 12)), max_size=40)


@given(refs, st.integers(1, 9))
def test_joined_runs_give_back_the_slots_in_order(given_refs: list[SlotRef], limit: int) -> None:
    joined = join_runs(given_refs, limit)
    assert [ref for _, run in joined for ref in run.refs()] == given_refs
    assert [begin for begin, _ in joined] == [sum(run.count for _, run in joined[:at]) for at in range(len(joined))]
    assert all(1 <= run.count <= limit for _, run in joined)


@given(refs)
def test_runs_end_only_where_slots_do_not_go_on(given_refs: list[SlotRef]) -> None:
    joined = [run for _, run in join_runs(given_refs, 1000)]
    for a, b in itertools.pairwise(joined):
        assert (b.segment, b.first) != (a.segment, a.first + a.count)
