"""Wiping: what was evicted leaves no readable byte, in any file of any tier.

Zeros go over every free slot and every part of a segment that no slot covers, then the indexes are written anew. It
works beside engines: slots are taken like a writer's while they are written over, and every process clears what its
index keeps in memory. It does not reach copies that an engine, a device or an export has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvstore import scrubbing
from kvstore.events import EvictReason
from kvstore.kv import Bytes
from kvstore.records import Entry, Segment, parse_slot_key
from kvstore.scrubbing import WipeLog
from kvstore.slots import SlotRef
from kvstore.states import State
from kvstore.tiers import ledger, wiping
from kvstore.tiers.medium import aligned_buffer
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database

STEP_BYTES = 32 << 20
"""Bytes of slots taken at once."""
OWNER_BYTES = 16
STRAGGLERS_S = 10.0
CONFIRM_S = 15.0

Step = Callable[[str, int, int], None]
"""Told what is being wiped, how much of it is done, and of how much."""


@dataclass(slots=True)
class Wiped:
    """What a wipe did. slots: bytes of slots that were written over, by tier. unconfirmed: processes that have the
    store open and did not say that they cleared their memory. left: slots that were still being written, and segments
    that were still being cut, or so full of pinned blocks that what lies behind their slots could not be reached."""

    slots: dict[str, int] = field(default_factory=dict)
    unconfirmed: int = 0
    left: int = 0


class Wiper:
    """Wipes the tiers of a store, the fastest first. others: owners that live, besides this process."""

    def __init__(self, tiers: Sequence[SlottedTier], log: WipeLog, others: Callable[[], Collection[bytes]]) -> None:
        self._tiers, self._log, self._others = tuple(tiers), log, others
        self._zeros: Bytes = aligned_buffer(8 << 20)

    def run(self, step: Step) -> Wiped:
        """Wipe everything that is not stored. Raises StorageError, BusyError, NoSpaceError: then run it again."""
        done = Wiped()
        epoch = self._log.begin()
        for tier in (*self._tiers, self._tiers[0]):  # the last once more: loads bring up what they had begun to read
            size = self._slots(tier, done, step)
            done.slots[tier.name] = done.slots.get(tier.name, 0) + size
        for tier in self._tiers:
            scrubbing.forget(tier.index)
        done.unconfirmed = self._wait_for_others(epoch)
        for tier in self._tiers:
            step(f"{tier.name} index", 0, 1)
            since = scrubbing.rewrite(tier.index)
            scrubbing.overwrite_free(tier.index, since, lambda at, total: step(f"{tier.name} index", at, total))  # noqa: B023
        return done

    def _slots(self, tier: SlottedTier, done: Wiped, step: Step) -> int:
        """Every free slot and every uncovered byte of a tier; returns bytes of slots."""
        tier.index.write(lambda txn: None)  # behind all that was given back
        listed = tier.segment_list()
        cuts = {segment.number: segment.slot_bytes for segment in listed}
        busy = _being_written(tier)
        size = 0
        for at, segment in enumerate(listed):
            step(tier.name, at, len(listed))
            size += self._as_cut(tier, segment.number, done)
        until = time.monotonic() + STRAGGLERS_S
        while busy:
            busy -= {ref for ref in busy if self._ended(tier, ref, cuts.get(ref.segment, 0), done)}
            if busy and time.monotonic() > until:
                done.left += len(busy)
                break
            time.sleep(0.02 if busy else 0)
        step(tier.name, len(listed), len(listed))
        return size

    def _as_cut(self, tier: SlottedTier, number: int, done: Wiped) -> int:
        """A segment, and again when it was cut otherwise meanwhile: new slots have the bytes of the old ones."""
        size, until = 0, time.monotonic() + STRAGGLERS_S
        while True:
            segment = _now(tier, number)
            size += self._segment(tier, segment, done) if segment.slot_bytes else self._uncut(tier, segment)
            after = _now(tier, number)
            if not after.allocating and after.slot_bytes == segment.slot_bytes:
                return size
            if time.monotonic() > until:
                done.left += 1
                return size
            time.sleep(0.02 if after.allocating else 0)

    def _segment(self, tier: SlottedTier, segment: Segment, done: Wiped) -> int:
        most, first, size = max(1, STEP_BYTES // segment.slot_bytes), 0, 0
        covered = False
        while True:
            taken = tier.take_free(segment, first, most)
            if not taken:
                break
            try:
                for placement in taken:
                    self._zero(tier, segment.number, placement.ref.slot * segment.slot_bytes, segment.slot_bytes)
                if not covered:  # with a slot taken the segment stays cut as it is
                    self._remainder(tier, segment)
                    covered = True
                tier.medium.sync([segment.number])
            finally:
                tier.abandon(taken)
            first = taken[-1].ref.slot + 1
            size += len(taken) * segment.slot_bytes
        full = not covered and _now(tier, segment.number).slot_bytes == segment.slot_bytes
        if full and self._uncovered(tier, segment):
            self._make_room(tier, segment, done)
        return size

    def _remainder(self, tier: SlottedTier, segment: Segment) -> None:
        start = segment.slots * segment.slot_bytes
        self._zero(tier, segment.number, start, segment.size - start)

    def _uncovered(self, tier: SlottedTier, segment: Segment) -> bool:
        """Whether a full segment has bytes behind its last slot, from when it was cut otherwise."""
        start = segment.slots * segment.slot_bytes
        buffer = aligned_buffer(len(self._zeros))
        for at in range(start, segment.size, len(buffer)):
            view = buffer[: min(len(buffer), segment.size - at)]
            tier.medium.read(segment.number, at, [view])
            if view.any():
                return True
        return False

    def _make_room(self, tier: SlottedTier, segment: Segment, done: Wiped) -> None:
        """Give up one block of a full segment, so that a slot of it can be taken."""
        with tier.index.read() as txn:
            pins = tier.pins()
            for _, index_key in txn.scan(Database.SLOTS, segment.number.to_bytes(4, "big")):
                raw = txn.get(Database.BLOCKS, index_key)
                entry = Entry.unpack(raw) if raw is not None else None
                if entry is not None and entry.state is State.READY and entry.key not in pins:
                    victim = [(index_key, entry.key)]
                    break
            else:
                done.left += 1
                return
        if tier.remove(victim, EvictReason.WIPE):
            self._segment(tier, segment, done)

    def _uncut(self, tier: SlottedTier, segment: Segment) -> int:
        number, owner = segment.number, tier.owner
        if not tier.index.write(lambda txn: wiping.take_uncut(txn, owner, number)):
            return 0
        try:
            self._zero(tier, number, 0, segment.size)
            tier.medium.sync([number])
        finally:
            tier.index.write(lambda txn: wiping.give_uncut(txn, owner, number))
        return segment.size

    def _ended(self, tier: SlottedTier, ref: SlotRef, slot_bytes: int, done: Wiped) -> bool:
        """Whether a slot of a size that was being written is published, or free and now wiped."""
        if ref in _being_written(tier):
            return False
        segment = _now(tier, ref.segment)
        if segment.slot_bytes != slot_bytes:
            self._as_cut(tier, ref.segment, done)
            return True
        taken = tier.take_free(segment, ref.slot, 1)
        try:
            for placement in taken:
                self._zero(tier, ref.segment, placement.ref.slot * slot_bytes, slot_bytes)
            tier.medium.sync([ref.segment] if taken else [])
        finally:
            tier.abandon(taken)
        return bool(taken) or _now(tier, ref.segment).slot_bytes == slot_bytes

    def _zero(self, tier: SlottedTier, segment: int, start: int, size: int) -> None:
        stop = start + size
        for at in range(start, stop, len(self._zeros)):
            tier.medium.write(segment, at, [self._zeros[: min(len(self._zeros), stop - at)]])

    def _wait_for_others(self, epoch: int) -> int:
        """Wait until every process that lives has cleared its memory; returns how many did not."""
        until = time.monotonic() + CONFIRM_S
        while True:
            waiting = set(self._others()) - self._log.confirmed(epoch)
            if not waiting or time.monotonic() > until:
                return len(waiting)
            time.sleep(0.05)


def _now(tier: SlottedTier, number: int) -> Segment:
    """A segment as it is cut at this moment."""
    with tier.index.read() as txn:
        return ledger.get_segment(txn, number)


def _being_written(tier: SlottedTier) -> set[SlotRef]:
    """Slots that anybody is writing, this process's own mover and saves among them."""
    with tier.index.read() as txn:
        return {parse_slot_key(key[OWNER_BYTES:]) for key, _ in txn.scan(Database.WRITING)}
