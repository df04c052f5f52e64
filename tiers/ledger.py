"""The books of a tier with slots: what one transaction reads and records about blocks, slots and segments.

Every function takes a transaction and plain values, decides, and writes the outcome; none copies a byte, opens a file
or waits. That is the *plan* and the *commit* of plan → execute → commit; tiers do the executing in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from kvstore.records import (
    BlockName,
    Entry,
    Segment,
    Usage,
    parse_slot_key,
    slot_key,
    unpack_lease,
)
from kvstore.slots import FreeMap, SlotRef, SlotRun
from kvstore.states import State, Step, after
from kvstore.transaction import Database, Transaction

DOOMED = 2**64 - 1
"""Epoch of a block that was purged while it was being written."""


class Placement(NamedTuple):
    """A block that its writer has a slot for: WRITING until it is published or abandoned.

    generation: what the slot's must be once the writer has bumped it. epoch: the purge epoch known when it was
    reserved. record: its value in the index.
    """

    name: BlockName
    ref: SlotRef
    generation: int
    epoch: int
    root: bytes
    record: bytes


class Bitmaps:
    """Free maps of the segments a transaction touches; written back by `flush`."""

    def __init__(self, txn: Transaction) -> None:
        self._txn = txn
        self._touched: dict[int, tuple[Segment, FreeMap]] = {}

    def take(self, run: SlotRun) -> None:
        """Slots become used."""
        self._of(run.segment)[1].take(run)

    def give(self, ref: SlotRef) -> None:
        """A slot becomes free."""
        self._of(ref.segment)[1].give(ref.slot)

    def runs(self, slot_bytes: int) -> list[SlotRun]:
        """Runs of free slots of a size."""
        prefix = slot_bytes.to_bytes(4, "big")
        found: list[SlotRun] = []
        for key, _ in list(self._txn.scan(Database.FREE, prefix)):
            segment = int.from_bytes(key[4:], "big")
            found += self._of(segment)[1].runs(segment)
        return found

    def flush(self) -> None:
        """Write back what changed."""
        for number, (segment, free) in self._touched.items():
            packed = free.pack()
            if packed != segment.bitmap:
                changed = replace(segment, bitmap=packed)
                put_segment(self._txn, changed, free.free)
                self._touched[number] = (changed, free)

    def _of(self, number: int) -> tuple[Segment, FreeMap]:
        if number not in self._touched:
            segment = get_segment(self._txn, number)
            self._touched[number] = (segment, FreeMap.unpack(segment.bitmap, segment.slots))
        return self._touched[number]


def get_segment(txn: Transaction, number: int) -> Segment:
    """A segment's record. Raises DamagedError when there is none."""
    key = number.to_bytes(4, "big")
    return Segment.unpack(key, txn.get(Database.SEGMENTS, key) or b"")


def put_segment(txn: Transaction, segment: Segment, free: int) -> None:
    """Write a segment's record, and whether it has free slots."""
    txn.put(Database.SEGMENTS, segment.number.to_bytes(4, "big"), segment.pack())
    key = segment.slot_bytes.to_bytes(4, "big") + segment.number.to_bytes(4, "big")
    if free and not segment.allocating:
        txn.put(Database.FREE, key, free.to_bytes(4, "big"))
    else:
        txn.delete(Database.FREE, key)


def segments(txn: Transaction) -> list[Segment]:
    """All segments."""
    return [Segment.unpack(key, raw) for key, raw in txn.scan(Database.SEGMENTS)]


def free_slots(txn: Transaction, slot_bytes: int) -> int:
    """Free slots of a size."""
    return sum(int.from_bytes(raw, "big") for _, raw in txn.scan(Database.FREE, slot_bytes.to_bytes(4, "big")))


def own(txn: Transaction, owner: bytes, placement: Placement) -> Entry | None:
    """The placement's entry, if it is still WRITING and the owner's."""
    raw = txn.get(Database.BLOCKS, placement.name.index_key)
    entry = Entry.unpack(raw) if raw is not None else None
    if entry is None or entry.state is not State.WRITING or entry.owner != owner:
        return None
    return entry if entry.ref == placement.ref and entry.generation == placement.generation else None


def owes(txn: Transaction, owner: bytes) -> bool:
    """Whether an owner is writing a block, holds a lease or is making a segment."""
    held = (True for db in (Database.WRITING, Database.LEASES) for _ in txn.scan(db, owner))
    return next(held, False) or any(segment.owner == owner for segment in segments(txn))


def take_back(txn: Transaction, owner: bytes) -> tuple[list[Entry], list[Segment]]:
    """Free everything a dead owner was writing; returns the entries, and the segments it was allocating."""
    removal = Removal(txn)
    gone: list[Entry] = []
    for key, index_key in list(txn.scan(Database.WRITING, owner)):
        ref = parse_slot_key(key[len(owner) :])
        raw = txn.get(Database.BLOCKS, index_key)
        entry = Entry.unpack(raw) if raw is not None else None
        if entry is not None and entry.ref == ref and entry.owner == owner:
            removal.drop(index_key, entry)
            gone.append(entry)
        txn.delete(Database.WRITING, key)
    removal.flush()
    for key, _ in list(txn.scan(Database.LEASES, owner)):
        txn.delete(Database.LEASES, key)
    return gone, [segment for segment in segments(txn) if segment.owner == owner]


def remove(
    txn: Transaction, victims: Iterable[tuple[bytes, bytes]], generation: int | None = None, *, doom: bool = False
) -> list[Entry]:
    """Remove READY blocks, named by (index key, key); returns their entries.

    generation: only if the entry has it. doom: a block that is being written is marked, so that its owner's `publish`
    drops it.
    """
    removal = Removal(txn)
    gone: list[Entry] = []
    for index_key, key in victims:
        raw = txn.get(Database.BLOCKS, index_key)
        entry = Entry.unpack(raw) if raw is not None else None
        if entry is None or entry.key != key or (generation is not None and entry.generation != generation):
            continue
        if after(entry.state, Step.REMOVE) is not None:
            removal.drop(index_key, entry)
            gone.append(entry)
        elif doom:
            txn.put(Database.BLOCKS, index_key, entry._replace(epoch=DOOMED).pack())
    removal.flush()
    return gone


class Removal:
    """Entries dropped in one transaction; `flush` writes bitmaps and usage back."""

    def __init__(self, txn: Transaction) -> None:
        self._txn = txn
        self._bitmaps = Bitmaps(txn)
        self._usage = Usages(txn)
        self._sizes: dict[int, int] = {}

    def drop(self, index_key: bytes, entry: Entry, *, free: bool = True) -> None:
        """Drop one entry; free: its slot becomes free (else it is reused or recut at once)."""
        txn, number = self._txn, entry.ref.segment
        if number not in self._sizes:
            self._sizes[number] = get_segment(txn, number).slot_bytes
        txn.delete(Database.BLOCKS, index_key)
        txn.delete(Database.SLOTS, slot_key(entry.ref))
        if entry.state is State.WRITING:
            txn.delete(Database.WRITING, entry.owner + slot_key(entry.ref))
        if free:
            self._bitmaps.give(entry.ref)
        self._usage.add(entry.namespace, -1, self._sizes[number])

    def flush(self) -> None:
        """Write bitmaps and usage back."""
        self._bitmaps.flush()
        self._usage.flush()


class Usages:
    """Usage records a transaction changes."""

    def __init__(self, txn: Transaction) -> None:
        self._txn = txn
        self._changed: dict[int, Usage] = {}

    def of(self, namespace: int) -> Usage:
        if namespace not in self._changed:
            self._changed[namespace] = Usage.unpack(self._txn.get(Database.USAGE, namespace.to_bytes(4, "big")))
        return self._changed[namespace]

    def add(self, namespace: int, blocks: int, slot_bytes: int) -> None:
        if blocks:
            usage = self.of(namespace)
            self._changed[namespace] = Usage(usage.blocks + blocks, usage.size + blocks * slot_bytes)

    def flush(self) -> None:
        for namespace, usage in self._changed.items():
            self._txn.put(Database.USAGE, namespace.to_bytes(4, "big"), usage.pack())


def leased_slots(txn: Transaction, now: int) -> Mapping[int, set[int]]:
    """Slots under an unexpired lease, by segment; now: CLOCK_BOOTTIME in ns."""
    held: dict[int, set[int]] = {}
    for _, raw in txn.scan(Database.LEASES):
        deadline, runs = unpack_lease(raw)
        if deadline > now:
            for run in runs:
                held.setdefault(run.segment, set()).update(range(run.first, run.first + run.count))
    return held
