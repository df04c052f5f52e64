"""Growth of a tier: which segment is cut for whom, within the budget.

Plan → execute → commit again: `plan_growth` claims a segment in a transaction (one that is not cut, a new one while the
budget lasts, or a cold one of another slot size), the tier makes its file ready, `finish_growth` hands its slots out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.records import NO_OWNER, Entry, Segment
from kvstore.slots import FreeMap, SlotRef
from kvstore.states import Step, after
from kvstore.tiers.arrays import array_slots, arrays_bytes
from kvstore.tiers.ledger import Removal, get_segment, put_segment, segments
from kvstore.tiers.medium import ALIGNMENT
from kvstore.transaction import Database, Transaction, get_number, put_number

ALLOCATED = b"allocated"
BUDGET = b"budget"
ASKED, WHY = b"budget asked", b"budget why"
"""What was asked for when the budget in force was set, and why it is less; empty where it is not."""
NEXT = b"next segment"
"""Numbers are never used twice: another process may still have the files of a dropped segment open under its number."""

FIXED = b"fixed"
"""Bytes of the tier's other files: index, lock file, superblock."""

INDEX_BYTES_A_SLOT = 4608
"""Index space set aside for a free slot: what a block with the longest key takes (m: 4.2 KB at most)."""

FEWEST_SLOTS = 16
"""Where the index has room for fewer, no segment is made: they would get smaller and smaller."""

COPY_ROOM = 4 << 20
"""What one transaction of 256 blocks, scattered over a large index, writes anew."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A claimed segment. new: its files must be made. emptied: how many blocks it lost; slots: how many it had."""

    segment: Segment
    new: bool
    emptied: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """segment_bytes: size of a new segment. index_bytes: size of the index."""

    segment_bytes: int
    index_bytes: int


def slot_room(txn: Transaction, limits: Limits) -> int:
    """How many more slots the index has room for, beyond those that are free already.

    LMDB copies what it changes, and reuses what is freed two transactions later, or when the last reader of that
    time is done: in a small index everything can be there three times (m: 2.96) and more, in a large one only a few
    transactions' copies come on top (m: 1.6 times at 24 MiB).
    """
    usable = max(limits.index_bytes // 5, limits.index_bytes * 2 // 5 - COPY_ROOM)
    free = sum(int.from_bytes(raw, "big") for _, raw in txn.scan(Database.FREE))
    return max(0, (usable - txn.live_bytes()) // INDEX_BYTES_A_SLOT - free)


def share_of(room: int) -> int:
    """How many slots one segment may take of the index's room.

    Half of it: slots of one size set room aside while they are free, and the next layout needs slots of its own. In a
    store whose index is small the first would take all, and the second could only empty what the first has stored.
    """
    return max(min(room, FEWEST_SLOTS), room // 2)


def plan_growth(
    txn: Transaction,
    owner: bytes,
    slot_bytes: int,
    limits: Limits,
    cold: Sequence[int],
    spared: Callable[[SlotRef, Entry], bool],
) -> Growth | None:
    """Claim a segment for slots of a size, or None when there is none to be had.

    cold: segments of another slot size that may be emptied and recut, the coldest first.
    """
    existing = segments(txn)
    room = slot_room(txn, limits)
    for segment in existing:
        if not segment.slot_bytes and not segment.allocating and room > 0 and segment.size >= slot_bytes:
            return Growth(_claim(txn, segment, owner), new=False)
    wanted = new_segment_bytes(txn, limits.segment_bytes)
    size = min(wanted, share_of(room) * slot_bytes) // ALIGNMENT * ALIGNMENT
    if size >= slot_bytes and (size == wanted or room >= FEWEST_SLOTS):
        number = max(get_number(txn, NEXT), existing[-1].number + 1 if existing else 0)
        put_number(txn, NEXT, number + 1)
        segment = Segment(number, size, 0, 0, owner)
        put_segment(txn, segment, 0)
        put_number(txn, ALLOCATED, get_number(txn, ALLOCATED) + size + arrays_bytes(size))
        return Growth(segment, new=True)
    for number in cold:
        segment = get_segment(txn, number)
        if segment.slot_bytes == slot_bytes or segment.allocating or slot_bytes > segment.size:
            continue
        emptied = _empty(txn, segment, spared)
        if emptied is not None:
            return Growth(_claim(txn, segment, owner), new=False, emptied=emptied, slots=segment.slots)
    return None


def finish_growth(txn: Transaction, growth: Growth, owner: bytes, slot_bytes: int, limits: Limits) -> bool:
    """Hand out a claimed segment's slots, as many as it had or the index has room for; slot_bytes 0 leaves it uncut.

    False when there were none, or the claim was taken back.
    """
    segment = get_segment(txn, growth.segment.number)
    if segment.owner != owner:
        return False
    most = max(slot_room(txn, limits), growth.slots)
    slots = min(segment.size // slot_bytes, array_slots(segment.size), most) if slot_bytes else 0
    free = FreeMap.full(slots)
    cut = Segment(segment.number, segment.size, slot_bytes if slots else 0, slots, NO_OWNER, free.pack())
    put_segment(txn, cut, slots)
    return slots > 0


def adopt(txn: Transaction, number: int, dead: bytes, owner: bytes) -> Segment | None:
    """Take over a segment that a dead owner was allocating; None when somebody else did."""
    segment = get_segment(txn, number)
    if segment.owner != dead:
        return None
    adopted = replace(segment, owner=owner)
    put_segment(txn, adopted, 0)
    return adopted


def cancel_growth(txn: Transaction, growth: Growth, owner: bytes) -> None:
    """Return the budget of a new segment whose file could not be made."""
    segment = get_segment(txn, growth.segment.number)
    if segment.owner == owner:
        drop_segment(txn, segment)


def drop_segment(txn: Transaction, segment: Segment) -> None:
    """Forget an empty segment and return its budget."""
    txn.delete(Database.SEGMENTS, segment.number.to_bytes(4, "big"))
    txn.delete(Database.FREE, segment.slot_bytes.to_bytes(4, "big") + segment.number.to_bytes(4, "big"))
    put_number(txn, ALLOCATED, get_number(txn, ALLOCATED) - segment.size - arrays_bytes(segment.size))


def new_segment_bytes(txn: Transaction, wanted: int) -> int:
    """The largest size up to ``wanted`` whose segment and arrays fit what is left of the budget."""
    left = get_number(txn, BUDGET) - get_number(txn, ALLOCATED)
    size = min(wanted, left) // ALIGNMENT * ALIGNMENT
    while size > 0 and size + arrays_bytes(size) > left:
        size -= ALIGNMENT
    return max(size, 0)


def _claim(txn: Transaction, segment: Segment, owner: bytes) -> Segment:
    txn.delete(Database.FREE, segment.slot_bytes.to_bytes(4, "big") + segment.number.to_bytes(4, "big"))
    claimed = replace(segment, slot_bytes=0, slots=0, owner=owner, bitmap=b"")
    put_segment(txn, claimed, 0)
    return claimed


def _empty(txn: Transaction, segment: Segment, spared: Callable[[SlotRef, Entry], bool]) -> int | None:
    """Remove every block of a segment, or none: None when one is being written, leased or pinned."""
    found: list[tuple[bytes, Entry]] = []
    for _, index_key in txn.scan(Database.SLOTS, segment.number.to_bytes(4, "big")):
        raw = txn.get(Database.BLOCKS, index_key)
        if raw is None:
            continue
        entry = Entry.unpack(raw)
        if after(entry.state, Step.REMOVE) is None or spared(entry.ref, entry):
            return None
        found.append((index_key, entry))
    removal = Removal(txn)
    for index_key, entry in found:
        removal.drop(index_key, entry, free=False)
    removal.flush()
    return len(found)
