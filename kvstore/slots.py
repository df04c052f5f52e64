"""Slot arithmetic: where slots lie in a segment, and which free ones to take so that runs stay together.

Copies of consecutive slots run at memory speed, scattered ones at half of it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


_ZERO, _ONE = b"01"
_FREE = re.compile(b"1+")


class FreeMap:
    """Which slots of one segment are free. bits: one character a slot, ``1`` where it is free, else ``0``.

    Of builtins only: for the few slots of most segments, numpy's code would cost more than the work.
    """

    def __init__(self, bits: bytearray) -> None:
        self.bits = bits

    @classmethod
    def full(cls, slots: int) -> FreeMap:
        """All ``slots`` slots free."""
        return cls(bytearray(b"1" * slots))

    @classmethod
    def unpack(cls, raw: bytes, slots: int) -> FreeMap:
        """From its stored bytes, as many as ``slots`` take."""
        number = int.from_bytes(raw, "big") >> (-slots % 8)
        return cls(bytearray(format((1 << slots) | number, "b")[1:], "ascii"))

    def pack(self) -> bytes:
        """Its stored bytes: bit i, from the high end, is slot i."""
        slots = len(self.bits)
        return (int(self.bits or b"0", 2) << (-slots % 8)).to_bytes(-(-slots // 8), "big")

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self.bits.count(b"1")

    def take(self, run: SlotRun) -> None:
        """Mark slots as used. Raises ValueError when one is not free."""
        stop = run.first + run.count
        if self.bits[run.first : stop] != b"1" * run.count:
            raise ValueError(f"{run} is not free")
        self.bits[run.first : stop] = b"0" * run.count

    def give(self, slot: int) -> None:
        """Mark a slot as free. Raises ValueError when it is."""
        if self.bits[slot] == _ONE:
            raise ValueError(f"slot {slot} is free already")
        self.bits[slot] = _ONE

    def use(self, slot: int) -> None:
        """Mark a slot as used, whatever it was."""
        self.bits[slot] = _ZERO

    def slots(self, start: int = 0) -> list[int]:
        """The free slots from ``start`` on, in order."""
        return [slot for run in _FREE.finditer(self.bits, start) for slot in range(run.start(), run.end())]

    def runs(self, segment: int) -> list[SlotRun]:
        """The runs of free slots, in order."""
        return [SlotRun(segment, run.start(), run.end() - run.start()) for run in _FREE.finditer(self.bits)]


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
