"""Slot arithmetic: where slots lie in a segment, and which free ones to take so that runs stay together.

Copies of consecutive slots run at memory speed, scattered ones at half of it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MIN_SLOT_BYTES = 8192
"""A header and one page of payload; it bounds how many slots a segment can have."""


class SlotRef(NamedTuple):
    """One slot of a tier."""

    segment: int
    slot: int


class SlotRun(NamedTuple):
    """``count`` consecutive slots of a segment."""

    segment: int
    first: int
    count: int  # type: ignore[assignment]  # a field of ours, not tuple.count

    def refs(self) -> list[SlotRef]:
        """The slots, in order."""
        return [SlotRef(self.segment, self.first + i) for i in range(self.count)]


_FREE = re.compile(rb"\x01+")


class FreeMap:
    """Which slots of one segment are free: one bit a slot, set where free."""

    def __init__(self, bits: npt.NDArray[np.bool_]) -> None:
        self.bits = bits

    @classmethod
    def full(cls, slots: int) -> FreeMap:
        """All ``slots`` slots free."""
        return cls(np.ones(slots, np.bool_))

    @classmethod
    def unpack(cls, raw: bytes, slots: int) -> FreeMap:
        """From its stored bytes."""
        return cls(np.unpackbits(np.frombuffer(raw, np.uint8), count=slots).astype(np.bool_))

    def pack(self) -> bytes:
        """Its stored bytes: bit i, from the high end, is slot i."""
        return np.packbits(self.bits).tobytes()

    @property
    def free(self) -> int:
        """How many slots are free."""
        return int(np.count_nonzero(self.bits))

    def take(self, run: SlotRun) -> None:
        """Mark slots as used. Raises ValueError when one is not free."""
        window = self.bits[run.first : run.first + run.count]
        if len(window) != run.count or not window.all():
            raise ValueError(f"{run} is not free")
        window[:] = False

    def give(self, slot: int) -> None:
        """Mark a slot as free. Raises ValueError when it is."""
        if self.bits[slot]:
            raise ValueError(f"slot {slot} is free already")
        self.bits[slot] = True

    def runs(self, segment: int) -> list[SlotRun]:
        """The runs of free slots, in order."""
        found = _FREE.finditer(self.bits.tobytes())
        return [SlotRun(segment, run.start(), run.end() - run.start()) for run in found]


def choose_runs(runs: Iterable[SlotRun], count: int) -> list[SlotRun]:
    """``count`` slots out of free runs, or fewer when there are not so many.

    The smallest run that holds them all, else the largest runs first, so that a sequence lies in few pieces.
    """
    by_size = sorted(runs, key=lambda run: (run.count, -run.segment, -run.first))
    for run in by_size:
        if run.count >= count:
            return [SlotRun(run.segment, run.first, count)] if count else []
    chosen: list[SlotRun] = []
    for run in reversed(by_size):
        if not count:
            break
        part = min(run.count, count)
        chosen.append(SlotRun(run.segment, run.first, part))
        count -= part
    return chosen


def join_runs(refs: Sequence[SlotRef], limit: int) -> list[tuple[int, SlotRun]]:
    """Consecutive slots, in the order given, as runs of up to ``limit``; each with the position it begins at."""
    joined: list[tuple[int, SlotRun]] = []
    begin = 0
    for at in range(1, len(refs) + 1):
        whole = at - begin == limit
        if at == len(refs) or whole or refs[at] != SlotRef(refs[at - 1].segment, refs[at - 1].slot + 1):
            joined.append((begin, SlotRun(refs[begin].segment, refs[begin].slot, at - begin)))
            begin = at
    return joined
