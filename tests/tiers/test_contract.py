"""What every tier with slots promises, on every medium; after each test its books, files and payloads agree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from stores import (
    BLOCK,
    LAYOUT,
    PART,
    SLOT,
    WIDE,
    TierBench,
    record_of,
    tree_bytes,
)

from kvstore.events import Evicted, Fault
from kvstore.header import slot_bytes
from kvstore.host import boottime_ns, supports_o_direct
from kvstore.identity import as_tokens, chain, salt_digest
from kvstore.policy import cold_batch
from kvstore.records import Usage, block_names
from kvstore.slots import SlotRef
from kvstore.states import State
from kvstore.tiers import integrity, ledger, reservation, segments
from kvstore.tiers.arrays import arrays_bytes
from kvstore.tiers.fault import FaultMedium
from kvstore.tiers.medium import DirectMedium, MappedMedium
from kvstore.tiers.null import NullMedium
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.throttle import ThrottleMedium
from kvstore.tombstone import Tombstone
from kvstore.transaction import Database, get_number, put_number

INDEX = 1 << 20
SLOTS_A_SEGMENT = 8
SEGMENT = SLOTS_A_SEGMENT * SLOT
Maker = Callable[..., TierBench]


def give_room(bench: TierBench, whole_segments: int, spare: int = 0) -> None:
    """Set the budget to exactly so many whole segments, and ``spare`` bytes."""
    room = whole_segments * (SEGMENT + arrays_bytes(SEGMENT)) + spare
    bench.index.write(lambda txn: put_number(txn, segments.BUDGET, get_number(txn, segments.FIXED) + room))


@pytest.fixture(params=["ram", "direct", "buffered", "faults", "throttle", "null"])
def make(request: pytest.FixtureRequest, tmp_path: Path, shm: Path) -> Iterator[Maker]:
    """Makes tiers of one kind; each is checked through and through, and closed, after the test."""
    made: list[TierBench] = []
    kind: str = request.param
    if kind == "direct" and not supports_o_direct(tmp_path):
        pytest.skip(f"{tmp_path} has no O_DIRECT")

    def build(name: str = "tier", *, whole_segments: int = 3, **options: object) -> TierBench:
        directory = (tmp_path if kind in ("direct", "buffered") else shm) / name
        medium = {
            "ram": lambda: MappedMedium(directory),
            "direct": lambda: DirectMedium(directory, direct=True),
            "buffered": lambda: DirectMedium(directory, direct=False),
            "faults": lambda: FaultMedium(DirectMedium(directory, direct=False)),
            "throttle": lambda: ThrottleMedium(DirectMedium(directory, direct=False), 1e9, 1e-6),
            "null": NullMedium,
        }[kind]()
        bench = TierBench(
            RamTier if kind == "ram" else NvmeTier,
            directory,
            medium,
            budget=4 << 20,
            segment_bytes=SEGMENT,
            index_bytes=INDEX,
            keeps_bytes=kind != "null",
            **options,  # type: ignore[arg-type]
        )
        give_room(bench, whole_segments)
        made.append(bench)
        return bench

    yield build
    for bench in made:
        if not bench.index._closed:
            assert bench.problems() == []
            assert tree_bytes(bench.directory) <= bench.tier.budget()
            bench.close()


# -------------------------------------------------------------------- states


def test_a_block_is_absent_then_writing_then_ready(make: Maker) -> None:
    bench = make()
    names = bench.names(1, 3, tail=5)
    assert bench.tier.find(names) == [None] * 4
    placed = bench.reserve(names).placed
    assert [entry and entry.state for entry in bench.tier.find(names)] == [State.WRITING] * 4
    assert bench.tier.publish(bench.fill(placed), now=bench.now()) == placed
    entries = bench.tier.find(names)
    assert [entry and entry.state for entry in entries] == [State.READY] * 4
    assert [entry.tokens for entry in entries if entry] == [BLOCK, BLOCK, BLOCK, 5]
    if bench.keeps_bytes:
        assert all(bench.read(entry) is not None for entry in entries if entry)


def test_what_is_abandoned_is_absent_and_its_slots_are_free_again(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT)
    bench.tier.abandon(bench.reserve(names).placed)
    bench.settle()
    assert bench.tier.find(names) == [None] * len(names)
    assert len(bench.save(bench.names(2, SLOTS_A_SEGMENT)).placed) == SLOTS_A_SEGMENT
    assert not [event for event in bench.told if isinstance(event, Evicted)]


def test_steps_that_the_table_does_not_have_change_nothing(make: Maker) -> None:
    bench = make()
    names = bench.names(1, 2)
    placed = bench.reserve(names).placed
    done = bench.fill(placed)
    victims = [(name.index_key, name.key) for name in names]
    assert bench.tier.remove(victims, "evict") == 0, "WRITING cannot be removed"
    assert bench.tier.publish(done, now=bench.now()) == placed
    assert bench.tier.publish(done, now=bench.now()) == [], "READY cannot be published"
    bench.tier.abandon(placed)
    bench.settle()
    assert bench.present(names) == [True, True], "READY cannot be abandoned"
    assert bench.tier.remove(victims, "evict") == 2
    assert bench.tier.remove(victims, "evict") == 0, "ABSENT cannot be removed"


def test_who_was_taken_for_dead_can_neither_publish_nor_abandon_any_more(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, 1)
    placed = bench.reserve(names).placed
    done = bench.fill(placed)
    assert bench.tier.take_back(bench.tier.owner) == 1
    assert bench.tier.publish(done, now=bench.now()) == []
    bench.tier.owner = b"another process!"
    taken = bench.reserve(names).placed
    assert [one.ref for one in taken] == [one.ref for one in placed]
    assert bench.index.write(lambda txn: reservation.publish(txn, b"the only process", done, ())) == []
    assert bench.index.write(lambda txn: reservation.abandon(txn, b"the only process", placed)) == 0
    assert bench.tier.publish(bench.fill(taken), now=bench.now()) == taken


def test_a_block_purged_while_it_is_written_never_becomes_readable(make: Maker) -> None:
    bench = make()
    doomed, buried, kept = bench.names(1, 1), bench.names(2, 1), bench.names(3, 1)
    placed = [bench.reserve(names).placed[0] for names in (doomed, buried, kept)]
    bench.tier.remove([(doomed[0].index_key, doomed[0].key)], "evict", doom=True)
    stones = [Tombstone(1, keys=frozenset([buried[0].key]))]
    published = bench.tier.publish(bench.fill(placed), stones, now=bench.now())
    assert [placement.name for placement in published] == kept
    assert bench.tier.find(doomed + buried) == [None, None]


def test_a_tombstone_older_than_the_reservation_does_not_count(make: Maker) -> None:
    bench = make()
    names = bench.names(1, 1)
    placed = bench.reserve(names, epoch=7).placed
    assert bench.tier.publish(bench.fill(placed), [Tombstone(7, everything=True)], now=bench.now()) == placed


# -------------------------------------------------------------------- batches


def test_known_writing_and_doubled_blocks_drop_out_of_a_batch(make: Maker) -> None:
    bench = make()
    known, writing, fresh = bench.names(1, 2), bench.names(2, 2), bench.names(3, 2)
    bench.save(known)
    open_ones = bench.reserve(writing).placed
    reserved = bench.reserve([*known, *writing, *fresh, *fresh, *known])
    assert [placement.name for placement in reserved.placed] == fresh
    assert len(reserved.known) == 4
    assert reserved.writing == 4
    assert reserved.left == []
    bench.tier.abandon(reserved.placed + open_ones)


def test_a_batch_larger_than_the_tier_is_placed_from_its_head(make: Maker) -> None:
    bench = make(whole_segments=2)
    names = bench.names(1, 2 * SLOTS_A_SEGMENT + 5)
    reserved = bench.save(names)
    assert [placement.name for placement in reserved.placed] == names[: 2 * SLOTS_A_SEGMENT]
    assert reserved.left == names[2 * SLOTS_A_SEGMENT :]
    assert reserved.evicted == []


def test_a_batch_never_evicts_its_own_blocks(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT + 4)
    bench.save(names[:SLOTS_A_SEGMENT])
    reserved = bench.save(names)
    assert reserved.evicted == [], "blocks of the batch that were there already"
    assert len(reserved.known) == SLOTS_A_SEGMENT
    assert reserved.left == names[SLOTS_A_SEGMENT:]


def test_a_sequence_larger_than_the_tier_does_not_evict_its_own_head(make: Maker) -> None:
    bench = make(whole_segments=1)
    bench.save(bench.names(1, SLOTS_A_SEGMENT))
    names = bench.names(2, 2 * SLOTS_A_SEGMENT)
    space, now = bench.space(), bench.now()
    for first in range(0, len(names), 4):
        reserved = bench.tier.reserve(names[first : first + 4], space, SLOT, 0, 10.0, now=now)
        bench.tier.publish(bench.fill(reserved.placed), now=now)
    assert bench.present(names) == [True] * SLOTS_A_SEGMENT + [False] * SLOTS_A_SEGMENT


def test_what_is_colder_than_everything_in_a_full_tier_is_not_let_in(make: Maker) -> None:
    bench = make(whole_segments=1)
    long_ago = bench.now()
    residents = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(residents)
    names = bench.names(2, 2)
    reserved = bench.tier.reserve(names, bench.space(), SLOT, 0, 10.0, now=long_ago)
    assert (reserved.placed, reserved.left) == ([], names)
    assert all(bench.present(residents))


def test_an_oversized_block_is_refused_alone(make: Maker) -> None:
    bench = make(whole_segments=2)
    residents = bench.names(1, 2 * SLOTS_A_SEGMENT)
    bench.save(residents)
    names = bench.names(2, 1)
    reserved = bench.tier.reserve(names, bench.space(), SEGMENT + 4096, 0, 10.0, now=bench.now())
    assert (reserved.placed, reserved.left, reserved.evicted) == ([], names, [])
    assert all(bench.present(residents))


def test_a_sequence_lies_in_consecutive_slots(make: Maker) -> None:
    bench = make()
    bench.save(bench.names(1, 3))
    refs = [placement.ref for placement in bench.save(bench.names(2, SLOTS_A_SEGMENT - 3)).placed]
    assert refs == [SlotRef(refs[0].segment, refs[0].slot + at) for at in range(len(refs))]


# -------------------------------------------------------------------- eviction


@pytest.mark.parametrize("needed", [1, 3, SLOTS_A_SEGMENT + 2])
def test_no_more_is_evicted_than_is_needed(make: Maker, needed: int) -> None:
    bench = make(whole_segments=2)
    residents = bench.names(1, 2 * SLOTS_A_SEGMENT)
    bench.save(residents)
    reserved = bench.save(bench.names(2, needed))
    assert len(reserved.placed) == len(reserved.evicted) == needed
    assert sum(bench.present(residents)) == 2 * SLOTS_A_SEGMENT - needed
    assert sum(event.blocks for event in bench.told if isinstance(event, Evicted)) == needed


def test_free_slots_are_taken_before_anything_is_evicted(make: Maker) -> None:
    bench = make(whole_segments=1)
    bench.save(bench.names(1, SLOTS_A_SEGMENT - 2))
    reserved = bench.save(bench.names(2, 3))
    assert len(reserved.placed) == 3
    assert len(reserved.evicted) == 1


def test_the_least_recently_used_go_first_and_tails_before_heads(make: Maker) -> None:
    bench = make(whole_segments=1)
    old, young = bench.names(1, 4), bench.names(2, 4)
    bench.save(old)
    bench.save(young)
    bench.save(bench.names(3, 2))
    assert bench.present(old) == [True, True, False, False]
    entries = [entry for entry in bench.tier.find(old[:2]) if entry]
    bench.tier.touch([entry.ref for entry in entries], [0, 1], bench.now())
    bench.tier._cold._pools.clear()
    bench.save(bench.names(4, 3))
    assert bench.present(old) == [True, True, False, False]
    assert bench.present(young) == [True, False, False, False]


def test_a_block_touched_after_it_was_picked_is_not_evicted(make: Maker) -> None:
    bench = make(whole_segments=1)
    old = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(old)
    bench.save(bench.names(2, 1))
    survivors = [entry for entry in bench.tier.find(old[:2]) if entry]
    assert bench.tier._cold._pools[SLOT], "the pool of candidates was picked before the touch"
    bench.tier.touch([entry.ref for entry in survivors], [0, 1], bench.now())
    bench.save(bench.names(3, SLOTS_A_SEGMENT - 3))
    assert bench.present(old) == [True, True] + [False] * (SLOTS_A_SEGMENT - 2)


def test_more_cold_pins_than_are_looked_at_in_one_go_do_not_stop_eviction(make: Maker) -> None:
    bench = make(whole_segments=10)
    pinned, others = bench.names(1, 9 * SLOTS_A_SEGMENT), bench.names(2, SLOTS_A_SEGMENT)
    bench.pinned.update(name.key for name in pinned)
    bench.save(pinned)
    bench.save(others)
    assert cold_batch(10 * SLOTS_A_SEGMENT, 1) < len(pinned)
    assert len(bench.save(bench.names(3, 1)).placed) == 1
    assert len(bench.save(bench.names(4, 5)).placed) == 5
    assert all(bench.present(pinned))
    assert sum(bench.present(others)) == len(others) - 6


def test_a_tier_of_which_all_is_pinned_is_full_and_says_so(make: Maker) -> None:
    bench = make(whole_segments=2)
    pinned = bench.names(1, 2 * SLOTS_A_SEGMENT)
    bench.pinned.update(name.key for name in pinned)
    bench.save(pinned)
    names = bench.names(2, 1)
    reserved = bench.save(names)
    assert (reserved.placed, reserved.left, reserved.evicted) == ([], names, [])
    bench.pinned.clear()
    assert len(bench.save(bench.names(3, 3)).placed) == 3
    assert sum(bench.present(pinned)) == 2 * SLOTS_A_SEGMENT - 3


def test_candidates_that_were_used_since_they_were_picked_do_not_stop_eviction(make: Maker) -> None:
    bench = make(whole_segments=9)
    names = bench.names(1, 9 * SLOTS_A_SEGMENT)
    bench.save(names)
    bench.save(bench.names(2, 1))
    pool = bench.tier._cold._pools[SLOT]
    assert len(pool) > 8
    bench.tier.touch([candidate.ref for candidate in pool], [0] * len(pool), bench.now())
    for seed in range(3, 7):
        assert len(bench.save(bench.names(seed, 1)).placed) == 1


def test_pinned_and_writing_blocks_are_never_victims(make: Maker) -> None:
    bench = make(whole_segments=1)
    pinned, others = bench.names(1, 2), bench.names(2, 3)
    bench.pinned.update(name.key for name in pinned)
    bench.save(pinned)
    writing = bench.reserve(bench.names(3, 3)).placed
    bench.save(others)
    reserved = bench.save(bench.names(4, SLOTS_A_SEGMENT))
    assert len(reserved.placed) == 3
    assert all(bench.present(pinned))
    assert not any(bench.present(others))
    assert bench.tier.publish(bench.fill(writing), now=bench.now()) == writing


def test_leased_blocks_are_no_victims_until_the_lease_ends(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(names)
    entries = [entry for entry in bench.tier.find(names) if entry]
    lease = RamTier.lease(bench.tier, list(zip(names, entries, strict=True))[2:5], 60.0)  # type: ignore[arg-type]
    assert lease[1] == 3
    reserved = bench.save(bench.names(2, SLOTS_A_SEGMENT))
    assert len(reserved.placed) == SLOTS_A_SEGMENT - 3
    assert bench.present(names) == [False, False, True, True, True, False, False, False]
    RamTier.release(bench.tier, [lease[0]])  # type: ignore[arg-type]
    bench.settle()
    assert len(bench.save(bench.names(3, SLOTS_A_SEGMENT)).placed) == SLOTS_A_SEGMENT


def test_a_lease_that_has_run_out_holds_nothing(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(names)
    entries = [entry for entry in bench.tier.find(names) if entry]
    RamTier.lease(bench.tier, list(zip(names, entries, strict=True)), -1.0)  # type: ignore[arg-type]
    assert len(bench.save(bench.names(2, 3)).placed) == 3


def test_a_lease_holds_only_the_blocks_that_are_still_what_they_were(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, 3)
    bench.save(names)
    pairs = list(zip(names, [entry for entry in bench.tier.find(names) if entry], strict=True))
    bench.tier.remove([(names[1].index_key, names[1].key)], "evict")
    assert RamTier.lease(bench.tier, pairs, 60.0)[1] == 1  # type: ignore[arg-type]


def test_a_slot_that_was_reused_is_told_from_the_one_that_was_looked_up(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(names)
    entries = [entry for entry in bench.tier.find(names) if entry]
    assert all(bench.tier.unchanged(entries))
    gone = set(bench.save(bench.names(2, 3)).evicted)
    assert bench.tier.unchanged(entries) == [entry.ref not in gone for entry in entries]


# -------------------------------------------------------------------- removing


def test_removed_blocks_are_gone_and_counted_once(make: Maker) -> None:
    bench = make()
    names = bench.names(1, 4)
    bench.save(names)
    wrong_key = [(names[0].index_key, bytes(32))]
    assert bench.tier.remove(wrong_key, "evict") == 0
    assert bench.tier.remove([(name.index_key, name.key) for name in names[2:]], "evict") == 2
    assert bench.present(names) == [True, True, False, False]
    assert bench.tier.usage()[LAYOUT.root()] == Usage(2, 2 * SLOT)
    assert [event for event in bench.told if isinstance(event, Evicted)] == [Evicted(bench.tier.name, "evict", 2)]


def test_discard_removes_the_block_that_was_read_and_no_later_one(make: Maker) -> None:
    bench = make()
    names = bench.names(1, 1)
    bench.save(names)
    (entry,) = bench.tier.find(names)
    assert entry is not None
    bench.tier.discard(names[0], entry, "corrupt")
    bench.settle()
    assert bench.present(names) == [False]
    bench.save(names)
    bench.tier.discard(names[0], entry, "corrupt")
    bench.settle()
    assert bench.present(names) == [True]
    assert [event for event in bench.told if isinstance(event, Evicted)] == [Evicted(bench.tier.name, "corrupt", 1)]


def test_what_a_dead_owner_left_is_taken_back(make: Maker) -> None:
    bench = make(whole_segments=1)
    published, unpublished = bench.names(1, 2), bench.names(2, 3)
    dead = b"a dead process.."
    mine = bench.tier.owner
    bench.tier.owner = dead
    bench.save(published)
    placed = bench.reserve(unpublished).placed
    bench.fill(placed)
    bench.tier.touch([one.ref for one in placed], [0, 1, 2], bench.now())  # it died before it published
    entries = [entry for entry in bench.tier.find(published) if entry]
    RamTier.lease(bench.tier, list(zip(published, entries, strict=True)), 3600.0)  # type: ignore[arg-type]
    bench.tier.owner = mine
    assert bench.tier.take_back(b"somebody else...") == 0
    assert bench.tier.take_back(dead) == 3
    assert bench.tier.take_back(dead) == 0
    assert [int(bench.tier.arrays.of(one.ref.segment).stamps[one.ref.slot]) for one in placed] == [0, 0, 0]
    assert bench.present(published + unpublished) == [True, True, False, False, False]
    assert len(bench.save(bench.names(3, SLOTS_A_SEGMENT)).placed) == SLOTS_A_SEGMENT, "the lease is gone too"


def test_a_segment_that_a_dead_owner_was_making_is_finished(make: Maker) -> None:
    bench = make(whole_segments=1)
    dead = b"a dead process.."
    growth = bench.index.write(
        lambda txn: segments.plan_growth(txn, dead, SLOT, bench.tier.limits, [], lambda ref, entry: False)
    )
    assert growth is not None
    assert growth.new
    assert bench.save(bench.names(1, 1)).placed == [], "its bytes are claimed"
    assert bench.tier.take_back(dead) == 0
    bench.tier._grower.room_was_made()
    assert len(bench.save(bench.names(2, SLOTS_A_SEGMENT)).placed) == SLOTS_A_SEGMENT


# -------------------------------------------------------------------- quotas


def test_a_salt_at_its_quota_evicts_its_own_blocks(make: Maker) -> None:
    bench = make(whole_segments=2)
    bench.quotas[salt_digest("greedy")] = 4 * SLOT
    others = bench.names(1, 6)
    bench.save(others)
    for seed in range(2, 6):
        assert len(bench.save(bench.names(seed, 3, salt="greedy"), salt="greedy").placed) == 3
        assert bench.tier.usage()[LAYOUT.root("greedy")].size <= 4 * SLOT
    assert all(bench.present(others))
    newest = bench.names(5, 3, salt="greedy")
    assert all(bench.present(newest))


def test_a_batch_larger_than_its_quota_is_placed_as_far_as_the_quota_goes(make: Maker) -> None:
    bench = make(whole_segments=2)
    bench.quotas[salt_digest("greedy")] = 4 * SLOT
    names = bench.names(1, 7, salt="greedy")
    reserved = bench.save(names, salt="greedy")
    assert [placement.name for placement in reserved.placed] == names[:4]
    assert (reserved.left, reserved.over_quota) == (names[4:], 3)


def test_a_quota_holds_for_all_layouts_of_a_salt_together(make: Maker) -> None:
    bench = make(whole_segments=3)
    wide_slot = slot_bytes(WIDE.payload_bytes())
    bench.quotas[salt_digest("two")] = 3 * SLOT + wide_slot
    bench.save(bench.names(1, 3, salt="two"), salt="two")
    reserved = bench.save(bench.names(2, 2, WIDE, salt="two"), WIDE, salt="two")
    assert (len(reserved.placed), reserved.over_quota) == (1, 1)
    assert sum(use.size for use in bench.tier.usage().values()) <= 3 * SLOT + wide_slot


def test_a_quota_of_nothing_lets_nothing_in_and_evicts_nobody(make: Maker) -> None:
    bench = make(whole_segments=1)
    bench.quotas[salt_digest("none")] = 0
    others = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(others)
    reserved = bench.save(bench.names(2, 2, salt="none"), salt="none")
    assert (len(reserved.placed), reserved.over_quota) == (0, 2)
    assert all(bench.present(others))


# -------------------------------------------------------------------- growth


def test_a_tier_grows_as_needed_and_never_past_its_budget(make: Maker) -> None:
    bench = make(whole_segments=3)
    assert bench.tier.segment_list() == []
    for seed in range(1, 8):
        bench.save(bench.names(seed, 5))
        assert tree_bytes(bench.directory) <= bench.tier.allocated() <= bench.tier.budget()
        needed = -(-5 * seed // SLOTS_A_SEGMENT)
        assert min(3, needed) <= len(bench.tier.segment_list()) <= min(3, needed + 1), "one ahead of need at most"


def test_the_last_segment_is_as_small_as_what_is_left(make: Maker) -> None:
    bench = make(whole_segments=1)
    give_room(bench, 1, 3 * SLOT + 8192)
    assert len(bench.save(bench.names(1, SLOTS_A_SEGMENT + 9)).placed) == SLOTS_A_SEGMENT + 3


def test_the_coldest_segment_of_another_size_is_recut(make: Maker) -> None:
    bench = make(whole_segments=2)
    cold, warm = bench.names(1, SLOTS_A_SEGMENT), bench.names(2, SLOTS_A_SEGMENT)
    bench.save(cold)
    bench.save(warm)
    wide = bench.names(3, 4, WIDE)
    assert len(bench.save(wide, WIDE).placed) == 4
    assert not any(bench.present(cold))
    assert all(bench.present(warm))
    assert Evicted(bench.tier.name, "recut", SLOTS_A_SEGMENT) in bench.told
    entries = [entry for entry in bench.tier.find(wide) if entry]
    if bench.keeps_bytes:
        assert all(bench.read(entry, WIDE) is not None for entry in entries)


def test_free_slots_of_one_size_do_not_keep_another_size_out(make: Maker) -> None:
    bench = make(whole_segments=6)
    bench.tier.limits = segments.Limits(SEGMENT, INDEX // 4)
    names = bench.names(1, 6 * SLOTS_A_SEGMENT)
    bench.save(names)
    bench.tier.remove([(name.index_key, name.key) for name in names], "evict")
    for seed in range(2, 6):
        assert len(bench.save(bench.names(seed, 4, WIDE), WIDE).placed) == 4


def test_the_first_layout_leaves_room_for_the_next(make: Maker) -> None:
    bench = make(whole_segments=60)
    bench.tier.limits = segments.Limits(60 * SEGMENT, INDEX)
    first = bench.names(1, 4)
    bench.save(first)
    bench.pinned.add(first[0].key)
    wide = bench.names(2, 4, WIDE)
    assert len(bench.save(wide, WIDE).placed) == 4
    assert all(bench.present(first + wide))


def test_a_reader_of_a_recut_segment_sees_that_it_changed(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(names)
    entries = [entry for entry in bench.tier.find(names) if entry]
    bench.save(bench.names(2, 1, WIDE), WIDE)
    assert bench.tier.unchanged(entries) == [False] * SLOTS_A_SEGMENT


@pytest.mark.parametrize("why", ["pinned", "leased", "writing"])
def test_a_segment_is_not_recut_while_something_in_it_must_stay(make: Maker, why: str) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, 3)
    bench.save(names)
    if why == "pinned":
        bench.pinned.add(names[1].key)
    elif why == "leased":
        (entry,) = bench.tier.find(names[1:2])
        assert entry is not None
        RamTier.lease(bench.tier, [(names[1], entry)], 60.0)  # type: ignore[arg-type]
    else:
        bench.reserve(bench.names(2, 1))
    reserved = bench.save(bench.names(3, 2, WIDE), WIDE)
    assert (len(reserved.placed), len(reserved.left)) == (0, 2)
    assert all(bench.present(names))


def test_two_layouts_share_a_full_tier_and_both_go_on(make: Maker) -> None:
    bench = make(whole_segments=3)
    for seed in range(1, 9):
        layout = WIDE if seed % 2 else LAYOUT
        bench.tier._grower.room_was_made()
        names = bench.names(seed, 4, layout)
        assert len(bench.save(names, layout).placed) == 4
        assert all(bench.present(names))
        assert tree_bytes(bench.directory) <= bench.tier.budget()


def test_segments_are_never_numbered_twice(make: Maker) -> None:
    bench = make(whole_segments=2)
    bench.save(bench.names(1, 2 * SLOTS_A_SEGMENT))
    before = [segment.number for segment in bench.tier.segment_list()]
    integrity.drop_segments(bench.tier, before[1:])
    bench.tier._grower.room_was_made()
    bench.save(bench.names(2, SLOTS_A_SEGMENT))
    after = [segment.number for segment in bench.tier.segment_list()]
    assert after[0] == before[0]
    assert after[1] > before[1], "another process may still have the old file mapped under its number"


def test_a_tier_has_no_more_slots_than_its_index_has_room_for(make: Maker) -> None:
    bench = make(whole_segments=60)
    bench.tier.limits = segments.Limits(SEGMENT, INDEX // 2)
    usable = INDEX // 2 // 5
    for seed in range(1, 11):
        layout = WIDE if seed % 3 == 0 else LAYOUT
        bench.save(bench.names(seed, 40, layout), layout)
        bench.tier._grower.room_was_made()
        with bench.index.read() as txn:
            free = sum(int.from_bytes(raw, "big") for _, raw in txn.scan(Database.FREE))
            assert txn.live_bytes() + free * segments.INDEX_BYTES_A_SLOT <= usable + 4 * 4096
    assert bench.tier.allocated() < bench.tier.budget() - SEGMENT


# -------------------------------------------------------------------- namespaces, nearest, reopening


def test_namespaces_are_counted_apart_and_keep_their_numbers(make: Maker) -> None:
    bench = make()
    one, two = bench.space(), bench.space(salt="x")
    assert one.number != two.number
    assert bench.space() == one
    bench.save(bench.names(1, 2))
    bench.save(bench.names(1, 3, salt="x"), salt="x")
    assert bench.tier.usage() == {one.root: Usage(2, 2 * SLOT), two.root: Usage(3, 3 * SLOT)}
    assert bench.present(bench.names(1, 3)) == [True, True, False]
    assert bench.tier.index.write(lambda txn: txn.count(Database.BLOCKS)) == 5


def test_the_nearest_child_is_found_to_the_token(make: Maker) -> None:
    bench = make()
    stored = bench.chain(1, 2, tail=9)
    bench.save(block_names(stored, PART))
    asked = np.array(stored.tokens)
    asked[2 * BLOCK + 6 :] = 7
    other = chain(stored.root, as_tokens(np.concatenate([asked, asked])), BLOCK)
    near = bench.tier.nearest(other, PART, 2, BLOCK)
    assert near is not None
    assert (near.shared, near.entry.tokens) == (6, 9)
    assert bench.tier.nearest(other, PART, 3, BLOCK) is None


def test_a_tier_opened_again_has_its_blocks_its_order_and_its_budget(make: Maker) -> None:
    bench = make(whole_segments=1)
    old, young = bench.names(1, 4), bench.names(2, 4)
    bench.save(old)
    bench.save(young)
    before = bench.tier.allocated()
    assert bench.problems() == []
    bench.close()
    again = make(whole_segments=1)
    again.clock = bench.clock
    assert again.problems() == []
    assert again.tier.allocated() == before
    assert all(again.present(old + young))
    again.save(again.names(3, 4))
    assert not any(again.present(old))
    assert all(again.present(young))


def test_after_a_restart_of_the_host_new_stamps_follow_the_old_ones(make: Maker) -> None:
    bench = make(whole_segments=1)
    old = bench.names(1, 4)
    bench.save(old)
    integrity.rebuild(bench.tier)
    bench.tier.reload()
    entries = [entry for entry in bench.tier.find(old) if entry]
    assert all(bench.tier.unchanged(entries))
    bench.clock = 0
    young = bench.names(2, 4)
    bench.save(young)
    bench.save(bench.names(3, 4))
    assert not any(bench.present(old))
    assert all(bench.present(young))


def test_a_damaged_generation_is_told_by_the_check(make: Maker) -> None:
    bench = make()
    names = bench.names(1, 1)
    bench.save(names)
    (entry,) = bench.tier.find(names)
    assert entry is not None
    arrays = bench.tier.arrays.of(entry.ref.segment)
    arrays.generations[entry.ref.slot] += np.uint64(1)
    assert [problem for problem in integrity.check(bench.tier, {bench.tier.owner}) if "generation" in problem]
    arrays.generations[entry.ref.slot] -= np.uint64(1)


def test_a_ready_block_that_could_never_be_evicted_is_told_by_the_check(make: Maker) -> None:
    bench = make()
    names = bench.names(1, 1)
    bench.save(names)
    (entry,) = bench.tier.find(names)
    assert entry is not None
    stamps = bench.tier.arrays.of(entry.ref.segment).stamps
    kept, stamps[entry.ref.slot] = int(stamps[entry.ref.slot]), 0
    assert [problem for problem in integrity.check(bench.tier, {bench.tier.owner}) if "stamp" in problem]
    stamps[entry.ref.slot] = kept


def test_a_slot_taken_again_before_its_stamp_was_cleared_keeps_the_new_stamp(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(names)
    victim = (names[3].index_key, names[3].key)
    removed = bench.index.write(lambda txn: ledger.remove(txn, [victim]))
    bench.save(bench.names(2, 1))
    bench.tier._forget(removed)
    assert integrity.check(bench.tier, {bench.tier.owner}) == []


def test_slots_taken_again_while_the_stamps_of_many_are_cleared_keep_the_new_ones(make: Maker) -> None:
    bench = make(whole_segments=1)
    names = bench.names(1, SLOTS_A_SEGMENT)
    bench.save(names)
    removed = bench.index.write(lambda txn: ledger.remove(txn, [(name.index_key, name.key) for name in names]))
    assert len(removed) > 3

    class Stamps:
        """A segment's stamps; others take all the slots when the first of them has been cleared."""

        def __init__(self, array: npt.NDArray[np.uint64]) -> None:
            self.array, self.taken = array, False

        @property
        def data(self) -> Stamps:
            return self

        def __setitem__(self, slot: int, stamp: int) -> None:
            self.array[slot] = stamp
            if not self.taken:
                self.taken = True
                bench.save(bench.names(2, SLOTS_A_SEGMENT))

    arrays = bench.tier.arrays.of(removed[0].ref.segment)
    stamps = Stamps(arrays.stamps)
    bench.tier.arrays._mapped[removed[0].ref.segment] = replace(arrays, stamps=stamps)
    bench.tier._forget(removed)
    assert stamps.taken
    bench.tier.arrays._mapped[removed[0].ref.segment] = arrays
    assert integrity.check(bench.tier, {bench.tier.owner}) == []


# -------------------------------------------------------------------- many at once


def test_threads_that_write_evict_and_read_at_once_never_see_a_wrong_byte(make: Maker) -> None:
    bench = make(whole_segments=2)
    wrong: list[str] = []
    served = [0]

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(25):
                names = bench.names(int(random.integers(1, 9)), int(random.integers(1, 6)))
                reserved = bench.reserve(names)
                done = bench.fill(reserved.placed)
                if random.random() < 0.2:
                    bench.tier.abandon(reserved.placed)
                else:
                    bench.tier.publish(done, now=boottime_ns())
                for name, entry in zip(names, bench.tier.find(names), strict=True):
                    if entry is None or entry.state is not State.READY or not bench.keeps_bytes:
                        continue
                    payload = bench.read(entry)
                    served[0] += payload is not None
                    if payload is not None and entry.key != name.key:
                        wrong.append("another block")
        except BaseException as error:  # noqa: BLE001  told by the assertion below
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert served[0] > 0 or not bench.keeps_bytes
    assert not [event for event in bench.told if isinstance(event, Fault)]


def test_records_of_namespaces_survive_a_change_of_label(make: Maker) -> None:
    bench = make()
    record = record_of(LAYOUT)
    first = bench.tier.space(record)
    bench.tier._spaces.clear()
    renamed = type(record)(record.root, record.salt, 0, 0, "another name", record.layout)
    assert bench.tier.space(renamed) == first
