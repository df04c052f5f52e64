"""How a tier gets another segment: claim it, make its files ready outside any lock, hand its slots out.

In the way of a request only when there is no free slot; else ahead of need, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import DamagedError, KVStoreError, NoSpaceError, StorageError
from kvstore.events import Evicted, EvictReason, Fault
from kvstore.records import Entry
from kvstore.slots import SlotRef
from kvstore.tiers import ledger, segments
from kvstore.tiers.reservation import Candidate
from kvstore.tiers.victims import ColdSlots
from kvstore.transaction import Transaction

if TYPE_CHECKING:
    from kvstore.tiers.slotted import SlottedTier

FULL_PAUSE_S = 1.0
"""How long a tier that could not grow goes without trying again."""
PATIENCE_S = 0.05
"""How long who needs room leaves it to the thread that works ahead: an idle machine makes 64 MiB in half of it."""
AHEAD_SHARE = 2
"""One part in this many of the next segment is kept free, ahead of need."""


class Grower:
    """Grows one tier: one segment at a time ahead of need, and one for who needs it.

    Who needs room waits for the thread that works ahead for a moment only: on a busy machine that takes long. Longer
    only where the budget has no other segment.
    """

    def __init__(self, tier: SlottedTier, cold: ColdSlots) -> None:
        self._tier, self._cold = tier, cold
        self._lock = threading.Lock()
        self._under_way = threading.Lock()
        self._full_until: dict[tuple[int, bool], float] = {}

    def may_grow(self, slot_bytes: int, *, recut: bool = True) -> bool:
        """Whether it is worth trying: the last attempt of this kind was no failure, or long enough ago."""
        return time.monotonic() >= self._full_until.get((slot_bytes, recut), 0.0)

    def room_was_made(self) -> None:
        """Something was removed: try again."""
        self._full_until.clear()

    def ahead(self, slot_bytes: int) -> None:
        """Grow in the background, where little is free and nothing is being made. Never recuts."""
        if not self.may_grow(slot_bytes, recut=False) or not self._under_way.acquire(blocking=False):
            return
        turn = [self._under_way]  # whoever takes it out gives it back: once, also after Ctrl-C in here
        try:
            thread = threading.Thread(target=self._quietly, args=(slot_bytes, turn), name="kvstore-grow", daemon=True)
            thread.start()
        except BaseException as error:
            _give_back(turn)
            if not isinstance(error, RuntimeError):
                raise
            # no thread is to be had: who needs room makes it
            self._tier.events.emit_elsewhere(Fault(self._tier.name, "grow", str(error)))

    def grow(self, slot_bytes: int, timeout: float | None) -> bool:
        """Room for slots of a size; False when there is none, and none is tried for a while.

        A colder segment of another slot size may be emptied for it, unless one is being made.
        """
        with self._lock:
            if self._is_room(slot_bytes):
                return True  # made while this one waited for its turn
            made = not self._came(PATIENCE_S) and self._one_more(slot_bytes, timeout, recut=False)
            if not made and self._came(timeout):
                made = self._is_room(slot_bytes) or self._one_more(slot_bytes, timeout, recut=True)
            if not made:
                self._full_until[slot_bytes, True] = time.monotonic() + FULL_PAUSE_S
            return made

    def _came(self, timeout: float | None) -> bool:
        """Wait until nothing is being made ahead of need; False when that took longer than ``timeout`` seconds."""
        if not self._under_way.acquire(timeout=-1 if timeout is None else timeout):
            return False
        self._under_way.release()
        return True

    def _is_room(self, slot_bytes: int) -> bool:
        with self._tier.index.read() as txn:
            return ledger.free_slots(txn, slot_bytes) > 0

    def _one_more(self, slot_bytes: int, timeout: float | None, *, recut: bool) -> bool:
        """One more segment; recut: which a colder one of another slot size may be emptied for."""
        tier = self._tier
        cold = self._cold.segments(slot_bytes) if recut else []

        def plan(txn: Transaction) -> segments.Growth | None:
            spared = tier.spared_in(txn, [])

            def spared_now(ref: SlotRef, entry: Entry) -> bool:
                return spared(Candidate(ref, int(tier.arrays.of(ref.segment).stamps[ref.slot])), entry)

            return segments.plan_growth(txn, tier.owner, slot_bytes, tier.limits, cold, spared_now)

        growth = tier.index.write(plan, timeout, unheard=self._give_up)
        return growth is not None and self.make(growth, slot_bytes, timeout)

    def make(self, growth: segments.Growth, slot_bytes: int, timeout: float | None) -> bool:
        """Make a claimed segment's files ready and hand out its slots; a failure returns its budget.

        The generations go up after the commit that emptied a recut segment, and before its first new byte.
        """
        tier, number, size = self._tier, growth.segment.number, growth.segment.size
        tier.know_segment(number, size)
        try:
            if growth.new:
                tier.arrays.allocate(number, size)
                tier.medium.allocate(number, size)
                tier.medium.prepare(number, size)
            arrays = tier.arrays.of(number)
            np.add(arrays.generations, np.uint64(1), out=arrays.generations)
            arrays.stamps[:] = 0
        except BaseException as error:
            tier.medium.remove(number)
            tier.arrays.remove(number)
            tier.index.submit(lambda txn: segments.cancel_growth(txn, growth, tier.owner))
            if not isinstance(error, NoSpaceError | StorageError | DamagedError):
                raise  # a Ctrl-C: a claim that nobody finishes is lost budget
            tier.events.emit_elsewhere(Fault(tier.name, "grow", error.problem))
            return False
        if growth.emptied:
            tier.events.emit_elsewhere(Evicted(tier.name, EvictReason.RECUT, growth.emptied))
        finished = tier.index.submit(
            lambda txn: segments.finish_growth(txn, growth, tier.owner, slot_bytes, tier.limits)
        )
        try:
            return finished.result(timeout)
        except TimeoutError:  # it is done all the same, later: a claim that nobody finishes is lost budget
            tier.events.emit_elsewhere(Fault(tier.name, "grow", f"the {tier.name} index is locked by another process"))
            return False

    def _give_up(self, growth: segments.Growth | None) -> None:
        """Return a claim whose caller is gone: the budget of what was not made yet, or a segment, uncut."""
        tier = self._tier
        if growth is not None and growth.new:
            tier.index.submit(lambda txn: segments.cancel_growth(txn, growth, tier.owner))
        elif growth is not None:
            tier.index.submit(lambda txn: segments.finish_growth(txn, growth, tier.owner, 0, tier.limits))

    def close(self) -> None:
        """Wait for what is being made."""
        with self._under_way:
            self._full_until.clear()

    def _quietly(self, slot_bytes: int, turn: list[threading.Lock]) -> None:
        tier = self._tier
        try:
            with tier.index.read() as txn:
                spare = ledger.free_slots(txn, slot_bytes)
                room = segments.slot_room(txn, tier.limits)
            coming = tier.limits.segment_bytes  # with too little room growth fails, and is not tried for a while
            if room >= segments.FEWEST_SLOTS:
                coming = min(coming, segments.share_of(room) * slot_bytes)
            if spare * slot_bytes < coming // AHEAD_SHARE:
                made = self._one_more(slot_bytes, None, recut=False)
                self._full_until[slot_bytes, False] = 0.0 if made else time.monotonic() + FULL_PAUSE_S
        except KVStoreError as error:
            tier.events.emit_elsewhere(Fault(tier.name, "grow", error.problem))
        finally:
            _give_back(turn)


def _give_back(turn: list[threading.Lock]) -> None:
    with contextlib.suppress(IndexError):
        turn.pop().release()
