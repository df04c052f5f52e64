"""The books of a tier with slots: what one transaction reads and records about blocks, slots and segments.

Every function takes a transaction and plain values, decides, and writes the outcome; none copies a byte, opens a file
or waits. That is the *plan* and the *commit* of plan → execute → commit; tiers do the executing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvstore.index import Database, Transaction
from kvstore.records import (
    BlockName,
    Entry,
    Segment,
    Tombstone,
    Usage,
    parse_slot_key,
    slot_key,
    unpack_lease,
)
from kvstore.slots import FreeMap, SlotRef, SlotRun, choose_runs
from kvstore.states import State, Step, after
from kvstore.tiers.lookup import find

DOOMED = 2**64 - 1
"""Epoch of a block that was purged while it was being written."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A slot whose block may be evicted, and the stamp it had when it was picked."""

    ref: SlotRef
    stamp: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A block that its writer has a slot for: WRITING until it is published or abandoned.

    generation: what the slot's must be once the writer has bumped it. epoch: the purge epoch known when it was
    reserved.
    """

    name: BlockName
    ref: SlotRef
    generation: int
    epoch: int
    root: bytes


@dataclass(slots=True)
class Reserved:
    """What `reserve` did with each wanted block.

    left: blocks there was no slot for, in order; over_quota: how many of them for a quota's sake. writing: blocks that
    somebody is writing. evicted: slots whose blocks had to go.
    """

    placed: list[Placement] = field(default_factory=list)
    known: list[Entry] = field(default_factory=list)
    left: list[BlockName] = field(default_factory=list)
    writing: int = 0
    over_quota: int = 0
    evicted: list[SlotRef] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Terms:
    """Under which terms a writer reserves.

    namespace: the tier's number of it. siblings: numbers of the namespaces under the same salt. quota: bytes of slots
    they may hold together, None without.
    """

    owner: bytes
    namespace: int
    root: bytes
    slot_bytes: int
    epoch: int
    siblings: tuple[int, ...] = ()
    quota: int | None = None


Spared: TypeAlias = Callable[[Candidate, Entry], bool]
"""Whether a victim must not be taken: leased, pinned, or used since it was picked."""


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
                put_segment(self._txn, replace(segment, bitmap=packed), free.free)
                self._touched[number] = (replace(segment, bitmap=packed), free)

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


def reserve(
    txn: Transaction,
    wants: Sequence[BlockName],
    terms: Terms,
    candidates: Sequence[Candidate],
    spared: Spared,
    generation: Callable[[SlotRef], int],
) -> Reserved:
    """Take a slot for every wanted block that is not there yet: a free one, else a victim's.

    Blocks that find no slot are left; heads come before tails, so what is placed is a prefix. A victim
    is taken only if it is READY and ``spared`` does not hold for it. generation: a slot's at this moment.
    """
    result = Reserved()
    fresh: list[BlockName] = []
    seen: set[bytes] = set()
    for name, entry in zip(wants, find(txn, wants), strict=True):
        if entry is not None and entry.state is State.READY:
            result.known.append(entry)
        elif entry is not None or name.index_key in seen or txn.get(Database.BLOCKS, name.index_key) is not None:
            result.writing += 1
        else:
            fresh.append(name)
            seen.add(name.index_key)
    if not fresh:
        return result
    usage, bitmaps = _Usages(txn), Bitmaps(txn)
    room = _quota_room(usage, terms)
    within = len(fresh) if room is None else min(max(room, 0), len(fresh))
    refs = [ref for run in choose_runs(bitmaps.runs(terms.slot_bytes), within) for ref in _taken(bitmaps, run)]
    keep = {entry.ref for entry in result.known}
    pick = _Pick(txn, usage, terms.slot_bytes, keep, spared)
    result.evicted = pick(within - len(refs), candidates, None)
    if within < len(fresh):
        result.evicted += pick(len(fresh) - within, candidates, set(terms.siblings))
    refs += sorted(result.evicted)
    for name, ref in zip(fresh, refs, strict=False):
        placement = Placement(name, ref, generation(ref) + 1, terms.epoch, terms.root)
        _mark_writing(txn, placement, terms)
        result.placed.append(placement)
    usage.add(terms.namespace, len(result.placed), terms.slot_bytes)
    usage.flush()
    bitmaps.flush()
    result.left = fresh[len(result.placed) :]
    result.over_quota = min(len(result.left), len(fresh) - within)
    return result


def publish(
    txn: Transaction, owner: bytes, done: Sequence[tuple[Placement, bytes]], tombstones: Sequence[Tombstone]
) -> list[Placement]:
    """Make written blocks READY; done: with the checksum of each payload. Returns those that became readable.

    A block that was purged since it was reserved, or taken back, is dropped instead.
    """
    published: list[Placement] = []
    dropped: list[Placement] = []
    for placement, checksum in done:
        entry = _own(txn, owner, placement)
        if entry is None:
            continue
        if entry.epoch == DOOMED or any(
            stone.epoch > placement.epoch and stone.names(placement.root, placement.name.key) for stone in tombstones
        ):
            dropped.append(placement)
            continue
        assert after(entry.state, Step.PUBLISH) is State.READY
        txn.put(Database.BLOCKS, placement.name.index_key, entry.ready(checksum).pack())
        txn.delete(Database.WRITING, owner + slot_key(placement.ref))
        published.append(placement)
    abandon(txn, owner, dropped)
    return published


def abandon(txn: Transaction, owner: bytes, placements: Iterable[Placement]) -> int:
    """Give slots back that were reserved and not published."""
    removal = Removal(txn)
    count = 0
    for placement in placements:
        entry = _own(txn, owner, placement)
        if entry is not None:
            removal.drop(placement.name.index_key, entry)
            count += 1
    removal.flush()
    return count


def take_back(txn: Transaction, owner: bytes) -> tuple[list[SlotRef], list[Segment]]:
    """Free everything a dead owner was writing; returns the slots, and the segments it was allocating."""
    removal = Removal(txn)
    refs: list[SlotRef] = []
    for key, index_key in list(txn.scan(Database.WRITING, owner)):
        ref = parse_slot_key(key[len(owner) :])
        raw = txn.get(Database.BLOCKS, index_key)
        entry = Entry.unpack(raw) if raw is not None else None
        if entry is not None and entry.ref == ref and entry.owner == owner:
            removal.drop(index_key, entry)
            refs.append(ref)
        txn.delete(Database.WRITING, key)
    removal.flush()
    for key, _ in list(txn.scan(Database.LEASES, owner)):
        txn.delete(Database.LEASES, key)
    return refs, [segment for segment in segments(txn) if segment.owner == owner]


def remove(
    txn: Transaction, victims: Iterable[tuple[bytes, bytes]], generation: int | None = None, *, doom: bool = False
) -> list[SlotRef]:
    """Remove READY blocks, named by (index key, key); returns their slots.

    generation: only if the entry has it. doom: a block that is being written is marked, so that its owner's `publish`
    drops it.
    """
    removal = Removal(txn)
    refs: list[SlotRef] = []
    for index_key, key in victims:
        raw = txn.get(Database.BLOCKS, index_key)
        entry = Entry.unpack(raw) if raw is not None else None
        if entry is None or entry.key != key or (generation is not None and entry.generation != generation):
            continue
        if after(entry.state, Step.REMOVE) is not None:
            removal.drop(index_key, entry)
            refs.append(entry.ref)
        elif doom:
            txn.put(Database.BLOCKS, index_key, replace(entry, epoch=DOOMED).pack())
    removal.flush()
    return refs


class Removal:
    """Entries dropped in one transaction; `flush` writes bitmaps and usage back."""

    def __init__(self, txn: Transaction) -> None:
        self._txn = txn
        self._bitmaps = Bitmaps(txn)
        self._usage = _Usages(txn)
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


class _Usages:
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


def _quota_room(usage: _Usages, terms: Terms) -> int | None:
    """Slots the salt may still take, None without a quota."""
    if terms.quota is None:
        return None
    held = sum(usage.of(number).size for number in terms.siblings)
    return (terms.quota - held) // terms.slot_bytes


def _taken(bitmaps: Bitmaps, run: SlotRun) -> list[SlotRef]:
    bitmaps.take(run)
    return run.refs()


class _Pick:
    """Evicts candidates inside a reservation; their slots stay marked as used, for whoever asked."""

    def __init__(
        self, txn: Transaction, usage: _Usages, slot_bytes: int, keep: Collection[SlotRef], spared: Spared
    ) -> None:
        self._txn, self._usage, self._slot_bytes = txn, usage, slot_bytes
        self._spared = spared
        self._done = set(keep)
        self._sizes: dict[int, int] = {}

    def __call__(
        self, count: int, candidates: Sequence[Candidate], namespaces: Collection[int] | None
    ) -> list[SlotRef]:
        """Up to ``count`` victims, of these namespaces only where any are named."""
        victims: list[SlotRef] = []
        for candidate in candidates:
            if len(victims) >= count:
                break
            if candidate.ref not in self._done and self._evict(candidate, namespaces):
                self._done.add(candidate.ref)
                victims.append(candidate.ref)
        return victims

    def _evict(self, candidate: Candidate, namespaces: Collection[int] | None) -> bool:
        txn, ref = self._txn, candidate.ref
        index_key = txn.get(Database.SLOTS, slot_key(ref))
        raw = txn.get(Database.BLOCKS, index_key) if index_key is not None else None
        if index_key is None or raw is None:
            return False
        entry = Entry.unpack(raw)
        if entry.ref != ref or after(entry.state, Step.REMOVE) is None or self._spared(candidate, entry):
            return False
        if namespaces is not None and entry.namespace not in namespaces:
            return False
        if ref.segment not in self._sizes:
            self._sizes[ref.segment] = get_segment(txn, ref.segment).slot_bytes
        if self._sizes[ref.segment] != self._slot_bytes:
            return False
        txn.delete(Database.BLOCKS, index_key)
        txn.delete(Database.SLOTS, slot_key(ref))
        self._usage.add(entry.namespace, -1, self._slot_bytes)
        return True


def _mark_writing(txn: Transaction, placement: Placement, terms: Terms) -> None:
    name = placement.name
    entry = Entry(
        key=name.key,
        state=State.WRITING,
        tokens=name.tokens,
        ref=placement.ref,
        generation=placement.generation,
        namespace=terms.namespace,
        epoch=terms.epoch,
        owner=terms.owner,
        rest=name.rest,
    )
    txn.put(Database.BLOCKS, name.index_key, entry.pack())
    txn.put(Database.SLOTS, slot_key(placement.ref), name.index_key)
    txn.put(Database.WRITING, terms.owner + slot_key(placement.ref), name.index_key)


def _own(txn: Transaction, owner: bytes, placement: Placement) -> Entry | None:
    """The placement's entry, if it is still WRITING and the owner's."""
    raw = txn.get(Database.BLOCKS, placement.name.index_key)
    entry = Entry.unpack(raw) if raw is not None else None
    if entry is None or entry.state is not State.WRITING or entry.owner != owner:
        return None
    return entry if entry.ref == placement.ref and entry.generation == placement.generation else None


def leased_slots(txn: Transaction, now: int) -> Mapping[int, set[int]]:
    """Slots under an unexpired lease, by segment; now: CLOCK_BOOTTIME in ns."""
    held: dict[int, set[int]] = {}
    for _, raw in txn.scan(Database.LEASES):
        deadline, runs = unpack_lease(raw)
        if deadline > now:
            for run in runs:
                held.setdefault(run.segment, set()).update(range(run.first, run.first + run.count))
    return held
