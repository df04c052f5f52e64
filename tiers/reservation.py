"""Reservation: slots for the blocks a writer wants, free ones first, then victims'; and what becomes of them.

One transaction each: `reserve` takes slots and marks them WRITING, `publish` makes them READY, `abandon` gives them
back. Nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvstore.records import BlockName, Entry, ready_record, slot_key, writing_record
from kvstore.slots import SlotRef, SlotRun, choose_runs
from kvstore.states import State, Step, after
from kvstore.tiers.ledger import Bitmaps, Placement, Removal, Usages, get_segment, own
from kvstore.tiers.lookup import entry_of
from kvstore.tombstone import Tombstone
from kvstore.transaction import Database, Transaction


class Candidate(NamedTuple):
    """A slot whose block may be evicted, and the stamp it had when it was picked."""

    ref: SlotRef
    stamp: int


@dataclass(slots=True)
class Reserved:
    """What `reserve` did with each wanted block.

    left: blocks there was no slot for, in order; over_quota: how many of them for a quota's sake. writing: blocks that
    somebody is writing. evicted: slots whose blocks had to go. free: slots of the size that stay free.
    """

    placed: list[Placement] = field(default_factory=list)
    known: list[Entry] = field(default_factory=list)
    left: list[BlockName] = field(default_factory=list)
    writing: int = 0
    over_quota: int = 0
    free: int = 0
    evicted: list[SlotRef] = field(default_factory=list)

    def add(self, later: Reserved) -> None:
        """Take up what a later transaction did with what was left."""
        self.placed += later.placed
        self.known += later.known
        self.writing += later.writing
        self.evicted += later.evicted
        self.left, self.over_quota, self.free = later.left, later.over_quota, later.free


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


def reserve(
    txn: Transaction,
    wants: Sequence[BlockName],
    terms: Terms,
    candidates: Sequence[Candidate],
    spared: Spared,
    generations: Callable[[Sequence[SlotRef]], list[int]],
) -> Reserved:
    """Take a slot for every wanted block that is not there yet: a free one, else a victim's.

    Blocks that find no slot are left; heads come before tails, so what is placed is a prefix. A victim is taken only
    if it is READY and ``spared`` does not hold for it. generations: of slots, at this moment.
    """
    result = Reserved()
    fresh = _unknown(txn, wants, result)
    if not fresh:
        return result
    usage, bitmaps = Usages(txn), Bitmaps(txn)
    room = _quota_room(usage, terms)
    within = len(fresh) if room is None else min(max(room, 0), len(fresh))
    runs = bitmaps.runs(terms.slot_bytes)
    refs = [ref for run in choose_runs(runs, within) for ref in _taken(bitmaps, run)]
    result.free = sum(run.count for run in runs) - len(refs)
    if candidates and len(refs) < len(fresh):
        keep = {entry.ref for entry in result.known}
        pick = _Pick(txn, usage, terms.slot_bytes, keep, spared)
        result.evicted = pick(within - len(refs), candidates, None)
        if within < len(fresh):
            result.evicted += pick(len(fresh) - within, candidates, set(terms.siblings))
        refs += sorted(result.evicted)
    result.placed = mark_writing(txn, fresh, refs, generations(refs), terms)
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
    ready: list[tuple[bytes, bytes]] = []
    published: list[Placement] = []
    dropped: list[Placement] = []
    records = txn.get_many(Database.BLOCKS, [placement.name.index_key for placement, _ in done])
    for (placement, checksum), record in zip(done, records, strict=True):
        if record != placement.record or _purged(placement, tombstones):
            dropped.append(placement)
            continue
        ready.append((placement.name.index_key, ready_record(record, checksum)))
        published.append(placement)
    txn.put_many(Database.BLOCKS, ready)
    for placement in published:
        txn.delete(Database.WRITING, owner + slot_key(placement.ref))
    abandon(txn, owner, dropped)
    return published


def abandon(txn: Transaction, owner: bytes, placements: Iterable[Placement]) -> int:
    """Give slots back that were reserved and not published."""
    removal = Removal(txn)
    count = 0
    for placement in placements:
        entry = own(txn, owner, placement)
        if entry is not None:
            removal.drop(placement.name.index_key, entry)
            count += 1
    removal.flush()
    return count


def _unknown(txn: Transaction, wants: Sequence[BlockName], result: Reserved) -> list[BlockName]:
    """Wanted blocks that are not there; those that are, or are being written, are noted in the result."""
    fresh: dict[bytes, BlockName] = {}
    raws = txn.get_many(Database.BLOCKS, [name.index_key for name in wants])
    for name, raw in zip(wants, raws, strict=True):
        entry = entry_of(raw, name)
        if entry is not None and entry.state is State.READY:
            result.known.append(entry)
        elif raw is not None or name.index_key in fresh:
            result.writing += 1
        else:
            fresh[name.index_key] = name
    return list(fresh.values())


def _purged(placement: Placement, tombstones: Sequence[Tombstone]) -> bool:
    return any(
        stone.epoch > placement.epoch and stone.names(placement.root, placement.name.key) for stone in tombstones
    )


def _quota_room(usage: Usages, terms: Terms) -> int | None:
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
        self, txn: Transaction, usage: Usages, slot_bytes: int, keep: Collection[SlotRef], spared: Spared
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
        at = 0
        while len(victims) < count and at < len(candidates):
            batch = candidates[at : at + count - len(victims)]
            at += len(batch)
            fresh = [candidate for candidate in batch if candidate.ref not in self._done]
            victims += self._evict(fresh, namespaces)
        self._done.update(victims)
        return victims

    def _evict(self, batch: Sequence[Candidate], namespaces: Collection[int] | None) -> list[SlotRef]:
        """Those of a batch that may go, gone. Their ``slots`` records are overwritten by who takes the slots."""
        txn = self._txn
        named = txn.get_many(Database.SLOTS, [slot_key(candidate.ref) for candidate in batch])
        index_keys = [index_key for index_key in named if index_key is not None]
        records = dict(zip(index_keys, txn.get_many(Database.BLOCKS, index_keys), strict=True))
        gone: list[SlotRef] = []
        for candidate, index_key in zip(batch, named, strict=True):
            raw = records.get(index_key) if index_key is not None else None
            if index_key is not None and raw is not None and self._may_go(candidate, Entry.unpack(raw), namespaces):
                txn.delete(Database.BLOCKS, index_key)
                gone.append(candidate.ref)
        return gone

    def _may_go(self, candidate: Candidate, entry: Entry, namespaces: Collection[int] | None) -> bool:
        segment = candidate.ref.segment
        if entry.ref != candidate.ref or after(entry.state, Step.REMOVE) is None or self._spared(candidate, entry):
            return False
        if namespaces is not None and entry.namespace not in namespaces:
            return False
        if segment not in self._sizes:
            self._sizes[segment] = get_segment(self._txn, segment).slot_bytes
        if self._sizes[segment] != self._slot_bytes:
            return False
        self._usage.add(entry.namespace, -1, self._slot_bytes)
        return True


def mark_writing(
    txn: Transaction, names: Sequence[BlockName], refs: Sequence[SlotRef], generations: Sequence[int], terms: Terms
) -> list[Placement]:
    """Record the first blocks, as many as there are slots, as WRITING. generations: what the slots' have been."""
    placed: list[Placement] = []
    blocks: list[tuple[bytes, bytes]] = []
    slots: list[tuple[bytes, bytes]] = []
    writing: list[tuple[bytes, bytes]] = []
    namespace, epoch, root, owner = terms.namespace, terms.epoch, terms.root, terms.owner
    for name, (ref, generation) in zip(names, zip(refs, generations, strict=True), strict=False):
        index_key, place = name.index_key, slot_key(ref)
        record = writing_record(name, ref, generation + 1, namespace, epoch, owner)
        placed.append(Placement(name, ref, generation + 1, epoch, root, record))
        blocks.append((index_key, record))
        slots.append((place, index_key))
        writing.append((owner + place, index_key))
    txn.put_many(Database.BLOCKS, blocks)
    txn.put_many(Database.SLOTS, slots)
    txn.put_many(Database.WRITING, writing)
    return placed
