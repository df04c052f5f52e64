"""In a transaction: free slots, and segments that are not cut, taken to be written over, and given back.

What is taken is WRITING under its taker, in a namespace that does not exist (`NOWHERE`): nobody else writes there, and
when the taker dies it is taken back like any unfinished block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstore.layout import Part
from kvstore.records import NO_OWNER, BlockName, Segment, family_key, slot_key
from kvstore.slots import FreeMap, SlotRef, SlotRun
from kvstore.tiers.ledger import Bitmaps, Placement, Usages, get_segment, put_segment
from kvstore.tiers.reservation import Terms, mark_writing
from kvstore.transaction import Transaction

NOWHERE = 0
"""The number of no namespace."""
_MARK = b"\xff" * 8
_DEEPEST = 2**32 - 1


def take_free(
    txn: Transaction,
    owner: bytes,
    known: Segment,
    first: int,
    most: int,
    generations: Callable[[Sequence[SlotRef]], list[int]],
) -> list[Placement]:
    """Take up to ``most`` free slots of a segment, from the slot ``first`` on.

    known: as its taker knows it; cut otherwise by now, its slots lie elsewhere and none is taken.
    """
    segment, record = known.number, get_segment(txn, known.number)
    if record.allocating or not record.slot_bytes or record.slot_bytes != known.slot_bytes:
        return []
    free = FreeMap.unpack(record.bitmap, record.slots).slots(first)
    refs = [SlotRef(segment, slot) for slot in free[:most]]
    if not refs:
        return []
    bitmaps, usage = Bitmaps(txn), Usages(txn)
    for ref in refs:
        bitmaps.take(SlotRun(segment, ref.slot, 1))
    terms = Terms(owner, NOWHERE, b"", record.slot_bytes, 0)
    taken = mark_writing(txn, [_name(ref) for ref in refs], refs, generations(refs), terms)
    usage.add(NOWHERE, len(taken), record.slot_bytes)
    usage.flush()
    bitmaps.flush()
    return taken


def take_uncut(txn: Transaction, owner: bytes, segment: int) -> bool:
    """Take a segment that is not cut; False when somebody else has it, or cut it."""
    record = get_segment(txn, segment)
    if record.allocating or record.slot_bytes:
        return False
    put_segment(txn, replace(record, owner=owner), 0)
    return True


def give_uncut(txn: Transaction, owner: bytes, segment: int) -> None:
    """Give it back."""
    record: Segment = get_segment(txn, segment)
    if record.owner == owner:
        put_segment(txn, replace(record, owner=NO_OWNER), 0)


def _name(ref: SlotRef) -> BlockName:
    """A name that no block has, one a slot."""
    place = slot_key(ref)
    key = _MARK * 3 + place
    return BlockName(family_key(_MARK, _DEEPEST, place, Part()) + key[:8], b"", key, 0, Part())
