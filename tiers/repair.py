"""Books made anew from the blocks themselves: what `kvstore verify --repair` does when a tier's records disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from kvstore.errors import DamagedError
from kvstore.records import Entry, Segment, Usage, slot_key
from kvstore.slots import FreeMap, SlotRef
from kvstore.states import State
from kvstore.tiers import ledger, namespaces, segments
from kvstore.tiers.arrays import arrays_bytes
from kvstore.tiers.integrity import drop_segments, missing_files
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database, Transaction, get_number, put_number


def rebuild_books(tier: SlottedTier, live: Collection[bytes]) -> int:
    """Keep blocks that are whole in themselves, drop the rest, recompute everything else. Returns how many went."""
    damaged = {segment.number for segment in tier.segment_list() if missing_files(tier, segment)}
    gone = drop_segments(tier, damaged) if damaged else 0
    return gone + tier.index.write(lambda txn: _rebuild(tier, txn, live))


def _rebuild(tier: SlottedTier, txn: Transaction, live: Collection[bytes]) -> int:
    cut = {segment.number: segment for segment in ledger.segments(txn)}
    kept: dict[SlotRef, tuple[bytes, Entry]] = {}
    dropped: list[bytes] = []
    for index_key, raw in txn.scan(Database.BLOCKS):
        entry = _usable(tier, cut, raw, live)
        if entry is None or entry.ref in kept:
            dropped.append(index_key)
        else:
            kept[entry.ref] = (index_key, entry)
    for index_key in dropped:
        txn.delete(Database.BLOCKS, index_key)
    for db in (Database.SLOTS, Database.WRITING, Database.FREE, Database.USAGE):
        txn.clear(db)
    usage: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for ref, (index_key, entry) in kept.items():
        stamps = tier.arrays.of(ref.segment).stamps
        if entry.state is State.READY and not stamps[ref.slot]:
            stamps[ref.slot] = 1
        txn.put(Database.SLOTS, slot_key(ref), index_key)
        if entry.state is State.WRITING:
            txn.put(Database.WRITING, entry.owner + slot_key(ref), index_key)
        usage[entry.namespace] += 1
        held[entry.namespace] += cut[ref.segment].slot_bytes
    for number, _ in namespaces.listing(txn):
        txn.put(Database.USAGE, number.to_bytes(4, "big"), Usage(usage[number], held[number]).pack())
    for segment in cut.values():
        free = FreeMap.full(segment.slots)
        for ref in kept:
            if ref.segment == segment.number:
                free.use(ref.slot)
        ledger.put_segment(txn, replace(segment, bitmap=free.pack()), free.free)
    sizes = sum(segment.size + arrays_bytes(segment.size) for segment in cut.values())
    put_number(txn, segments.ALLOCATED, sizes + get_number(txn, segments.FIXED))
    return len(dropped)


def _usable(tier: SlottedTier, cut: dict[int, Segment], raw: bytes, live: Collection[bytes]) -> Entry | None:
    try:
        entry = Entry.unpack(raw)
    except DamagedError:
        return None
    segment = cut.get(entry.ref.segment)
    if segment is None or entry.ref.slot >= segment.slots:
        return None
    if entry.state is State.WRITING:
        return entry if entry.owner in live else None
    return entry if tier.unchanged([entry])[0] else None
