"""What was used in `ram` is made known to `nvme`: its copies get the stamps, and those that are gone are found out.

A hit in `ram` touches `ram` alone, so that it costs no look into `nvme`. Without this, what is used most would be the
coldest there. Only what was used since the last time is looked at; any process may do it, and all may. Must not know
who evicts, or why.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.policy import CLEAN
from kvstore.records import Entry, Segment, slot_key
from kvstore.slots import SlotRef
from kvstore.states import State
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.transaction import Database

BATCH = 1024
"""Blocks looked up in one transaction of each index."""


class Recency:
    """Carries uses from `ram` to `nvme`. Safe for any thread."""

    def __init__(self, ram: RamTier, nvme: NvmeTier) -> None:
        self._ram, self._nvme = ram, nvme
        self._carried: dict[int, npt.NDArray[np.uint64]] = {}
        """By segment: the stamp that each slot had when it was last looked at, 0 where it was not CLEAN."""
        self._lock = threading.Lock()

    def carry(self, *, afresh: bool = False) -> None:
        """Note in `nvme` what was used in `ram` since this was last done, and clear CLEAN where `nvme` has it no more.

        afresh: all that is CLEAN, used or not, since copies went for another reason than age. Raises DamagedError.
        """
        with self._lock:
            if afresh:
                self._carried.clear()
            self._carried = {segment.number: self._segment(segment) for segment in self._ram.cut_segments()}

    def _segment(self, segment: Segment) -> npt.NDArray[np.uint64]:
        """Carry one segment's uses; returns the stamps that have been carried."""
        stamps = self._ram.arrays.stamps(segment)
        flags = self._ram.arrays.of(segment.number).flags[: segment.slots]
        clean = np.where(flags & CLEAN, stamps, 0)
        before = self._carried.get(segment.number)
        used = clean > 0 if before is None or len(before) != len(clean) else (clean > 0) & (clean != before)
        slots = np.flatnonzero(used).tolist()
        for first in range(0, len(slots), BATCH):
            refs = [SlotRef(segment.number, slot) for slot in slots[first : first + BATCH]]
            self._carry(refs, [int(stamps[ref.slot]) for ref in refs])
        return clean

    def _carry(self, refs: Sequence[SlotRef], stamps: Sequence[int]) -> None:
        with self._ram.index.read() as txn:
            named = txn.get_many(Database.SLOTS, [slot_key(ref) for ref in refs])
            index_keys = [index_key for index_key in named if index_key is not None]
            blocks = dict(zip(index_keys, txn.get_many(Database.BLOCKS, index_keys), strict=True))
        with self._nvme.index.read() as txn:  # begun after the flags were read: a copy is there before its flag
            copies = dict(zip(index_keys, txn.get_many(Database.BLOCKS, index_keys), strict=True))
        later = self._nvme.stamp_base - self._ram.stamp_base
        found: list[SlotRef] = []
        latest: list[int] = []
        lost: list[SlotRef] = []
        for ref, stamp, index_key in zip(refs, stamps, named, strict=True):
            block = _ready(blocks.get(index_key)) if index_key is not None else None
            if index_key is None or block is None or block.ref != ref:
                continue
            copy = _ready(copies[index_key])
            if copy is not None and copy.key == block.key:
                found.append(copy.ref)
                latest.append(stamp + later)
            else:
                lost.append(ref)
        self._nvme.arrays.raise_stamps(found, latest)
        self._ram.flag(lost, 0)


def _ready(raw: bytes | None) -> Entry | None:
    entry = Entry.unpack(raw) if raw is not None else None
    return entry if entry is not None and entry.state is State.READY else None
