"""Which slots of a tier are cold: picked in bulk from the stamps, outside any transaction.

Candidates are hints; each is checked again inside the transaction that evicts it. Must not know how slots are written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.index import Index
from kvstore.policy import Policy, cold_batch
from kvstore.records import Segment
from kvstore.slots import SlotRef
from kvstore.tiers import ledger
from kvstore.tiers.arrays import ArrayFiles
from kvstore.tiers.reservation import Candidate


class ColdSlots:
    """The candidates for eviction of one tier, in the order of a policy. Safe for any thread."""

    def __init__(self, index: Index, arrays: ArrayFiles, policy: Policy) -> None:
        self._index, self._arrays, self._policy = index, arrays, policy
        self._pools: dict[int, list[Candidate]] = {}
        self._lock = threading.Lock()

    def take(self, slot_bytes: int, needed: int, *, afresh: bool = False) -> list[Candidate]:
        """Twice as many candidates as needed, where there are so many, out of a pool that is filled again when low.

        afresh: not from what was picked before, of which much may have been used since.
        """
        with self._lock:
            pool = self._pools.get(slot_bytes, [])
            if afresh or len(pool) < 2 * needed:
                pool = self.pick(slot_bytes, needed, None)
            self._pools[slot_bytes] = pool[2 * needed :]
            return pool if afresh else pool[: 2 * needed]

    def first_of(self, slot_bytes: int, needed: int, namespaces: Sequence[int]) -> list[Candidate]:
        """Candidates of some namespaces, then all others: what a writer with a quota may evict."""
        mine = self.pick(slot_bytes, needed, namespaces)
        known = set(mine)
        return mine + [candidate for candidate in self.pick(slot_bytes, needed, None) if candidate not in known]

    def pick(self, slot_bytes: int, needed: int, own: Sequence[int] | None) -> list[Candidate]:
        """The coldest slots of a size, of these namespaces only where any are named."""
        cut = [segment for segment in self._segments() if segment.slot_bytes == slot_bytes]
        if not cut:
            return []
        stamps = np.concatenate([self._stamps(segment, own) for segment in cut])
        flags = np.concatenate([self._arrays.of(segment.number).flags[: segment.slots] for segment in cut])
        starts = np.cumsum([0] + [segment.slots for segment in cut])
        order = self._policy(stamps, flags, cold_batch(int(np.count_nonzero(stamps)), needed))
        which = np.searchsorted(starts, order, side="right") - 1
        return [
            Candidate(SlotRef(cut[at].number, int(position - starts[at])), int(stamps[position]))
            for at, position in zip(which.tolist(), order.tolist(), strict=True)
        ]

    def _stamps(self, segment: Segment, own: Sequence[int] | None) -> npt.NDArray[np.uint64]:
        stamps = self._arrays.stamps(segment)
        if own is None:
            return stamps
        return np.where(np.isin(self._arrays.of(segment.number).namespaces[: segment.slots], own), stamps, 0)

    def segments(self, slot_bytes: int) -> list[int]:
        """Segments of other slot sizes that are colder, as a whole, than the coldest slot of this size."""
        coldest = None
        others: list[tuple[int, int]] = []
        for segment in self._segments():
            if segment.allocating or not segment.slots:
                continue
            stamps = self._arrays.stamps(segment)
            if segment.slot_bytes != slot_bytes:
                others.append((int(stamps.max()), segment.number))
            elif stamps.any():
                lowest = int(stamps[stamps > 0].min())
                coldest = lowest if coldest is None else min(coldest, lowest)
        return [number for hottest, number in sorted(others) if coldest is None or hottest < coldest]

    def _segments(self) -> list[Segment]:
        with self._index.read() as txn:
            return ledger.segments(txn)
