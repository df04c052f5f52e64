"""What every slot needs that is too hot for the index: its generation and its stamp, in mapped arrays.

One file beside each segment. A *generation* counts the owners a slot has had: a reader that finds another one after
its copy than it looked up has read a reused slot, and treats it as a miss. A *stamp* says when the slot's block was
last used, 0 when there is none; stamps, namespaces and flags are hints, checked again before anything is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import DamagedError
from kvstore.kv import Bytes
from kvstore.records import Segment
from kvstore.slots import MIN_SLOT_BYTES, SlotRef
from kvstore.tiers.mapping import map_file
from kvstore.tiers.medium import ALIGNMENT, allocate_file

SLOT_RECORD = 24
"""Bytes a slot: generation u64, stamp u64, namespace u32, flags u32, each in an array of its own."""


def array_slots(segment_bytes: int) -> int:
    """How many slots a segment can have at most."""
    return segment_bytes // MIN_SLOT_BYTES


def arrays_bytes(segment_bytes: int) -> int:
    """Size of the arrays' file of a segment."""
    return -(-array_slots(segment_bytes) * SLOT_RECORD // ALIGNMENT) * ALIGNMENT


def arrays_path(directory: Path, segment: int) -> Path:
    """The arrays' file of a segment."""
    return directory / f"{segment:08x}.slots"


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """The mapped arrays of one segment; plain 8-byte loads and stores, which are atomic on the machines we run on.

    For a few slots among many, ``.data`` of an array serves better than numpy's indexing: numpy's code is not in a
    core's cache when a request comes to it, and takes as long for one slot as for thousands.
    """

    generations: npt.NDArray[np.uint64]
    stamps: npt.NDArray[np.uint64]
    namespaces: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint32]

    @classmethod
    def over(cls, memory: Bytes, slots: int) -> SlotArrays:
        """The four arrays in a file's memory."""
        wide, narrow = 8 * slots, 4 * slots
        return cls(
            memory[:wide].view(np.uint64),
            memory[wide : 2 * wide].view(np.uint64),
            memory[2 * wide : 2 * wide + narrow].view(np.uint32),
            memory[2 * wide + narrow : 2 * wide + 2 * narrow].view(np.uint32),
        )


class ArrayFiles:
    """The arrays of all segments of a tier, mapped when first needed. Safe for any thread.

    size_of: bytes of a segment, by its number.
    """

    def __init__(self, directory: Path, name: str, size_of: Callable[[int], int]) -> None:
        self.directory = directory
        self.name = name
        self._size_of = size_of
        self._mapped: dict[int, SlotArrays] = {}

    def allocate(self, segment: int, segment_bytes: int) -> None:
        """Make the file. Raises NoSpaceError."""
        allocate_file(arrays_path(self.directory, segment), arrays_bytes(segment_bytes), self.name)

    def remove(self, segment: int) -> None:
        """Delete the file."""
        self._mapped.pop(segment, None)
        arrays_path(self.directory, segment).unlink(missing_ok=True)

    def of(self, segment: int) -> SlotArrays:
        """The arrays of a segment. Raises DamagedError when its file is missing or truncated."""
        arrays = self._mapped.get(segment)
        if arrays is None:
            size = self._size_of(segment)
            memory = map_file(arrays_path(self.directory, segment), arrays_bytes(size))
            arrays = SlotArrays.over(memory, array_slots(size))
            arrays = self._mapped.setdefault(segment, arrays)
        return arrays

    def stamps(self, segment: Segment) -> npt.NDArray[np.uint64]:
        """A copy of the stamps of a segment's slots, at this moment: other threads and processes write to the arrays.

        Whoever looks at stamps twice, first whether there are any, then which, must look at the same ones.
        """
        return np.array(self.of(segment.number).stamps[: segment.slots])

    def holding(self, segment: int, slots: Sequence[int]) -> SlotArrays:
        """The arrays of a segment, which has these slots. Raises DamagedError when it cannot have them."""
        arrays = self.of(segment)
        if max(slots) >= len(arrays.generations):
            raise DamagedError(f"slot {max(slots)} of segment {segment} cannot exist", "run `kvstore verify --repair`")
        return arrays

    def generations(self, refs: Sequence[SlotRef]) -> list[int]:
        """The generations of slots now. Raises DamagedError for a slot that cannot exist."""
        found = [0] * len(refs)
        for segment, (slots, places) in by_segment(refs).items():
            now = self.holding(segment, slots).generations.data
            for slot, place in zip(slots, places, strict=True):
                found[place] = now[slot]
        return found

    def use(self, refs: Sequence[SlotRef], stamps: Sequence[int], flags: int | None) -> None:
        """Set the stamps of slots, and before them their flags unless None. Raises DamagedError as `generations`."""
        for segment, (slots, places) in by_segment(refs).items():
            arrays = self.holding(segment, slots)
            if flags is not None:
                _fill(arrays.flags.data, slots, flags)
            cells = arrays.stamps.data
            for slot, place in zip(slots, places, strict=True):
                cells[slot] = stamps[place]

    def raise_stamps(self, refs: Sequence[SlotRef], stamps: Sequence[int]) -> None:
        """Make stamps of slots later; not those that are later already, nor where a new owner has not set one yet."""
        for segment, (slots, places) in by_segment(refs).items():
            cells = self.holding(segment, slots).stamps.data
            for slot, place in zip(slots, places, strict=True):
                if 0 < cells[slot] < stamps[place]:
                    cells[slot] = stamps[place]

    def flag(self, refs: Sequence[SlotRef], flags: int) -> None:
        """Set the flags of slots. Raises DamagedError as `generations`."""
        for segment, (slots, _) in by_segment(refs).items():
            _fill(self.holding(segment, slots).flags.data, slots, flags)

    def begin(self, refs: Sequence[SlotRef], generations: Sequence[int], namespace: int) -> None:
        """Slots get new owners: stamps and flags are cleared, and the generations go up last."""
        for segment, (slots, places) in by_segment(refs).items():
            arrays = self.of(segment)
            _fill(arrays.stamps.data, slots, 0)
            _fill(arrays.namespaces.data, slots, namespace)
            _fill(arrays.flags.data, slots, 0)
            cells = arrays.generations.data
            for slot, place in zip(slots, places, strict=True):
                cells[slot] = generations[place]

    def forget(self, refs: Sequence[SlotRef], generations: Sequence[int]) -> None:
        """Clear the stamps of slots that still have these generations. Raises DamagedError as `generations`.

        Slot by slot: of thousands, those looked at first may have new owners before the last are looked at.
        """
        for segment, (slots, places) in by_segment(refs).items():
            arrays = self.holding(segment, slots)
            now, stamps = arrays.generations.data, arrays.stamps.data
            for slot, place in zip(slots, places, strict=True):
                if now[slot] == generations[place]:
                    stamps[slot] = 0

    def close(self) -> None:
        """Forget the mappings."""
        self._mapped.clear()


def by_segment(refs: Sequence[SlotRef]) -> dict[int, tuple[list[int], list[int]]]:
    """Slots grouped by segment: for each, the slots and their positions in ``refs``."""
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for at, (segment, slot) in enumerate(refs):
        slots, places = groups.setdefault(segment, ([], []))
        slots.append(slot)
        places.append(at)
    return groups


def _fill(cells: memoryview, slots: Sequence[int], value: int) -> None:
    for slot in slots:
        cells[slot] = value
