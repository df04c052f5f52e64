"""A tier with slots: an index, a medium, arrays, and the three steps reserve, copy, publish between them.

What `ram` and `nvme` have in common. Copying is the caller's business, between `reserve` and `publish`; readers look
up, copy, and then ask `unchanged`. It does not know layouts, only names, slot sizes and namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import DamagedError, KVStoreError
from kvstore.events import Events, Evicted, EvictReason
from kvstore.host import boottime_ns
from kvstore.identity import Chain
from kvstore.index import Index
from kvstore.layout import Part
from kvstore.policy import Policy
from kvstore.records import BlockName, Entry, NamespaceRecord, Segment, Usage, entry_namespace
from kvstore.slots import SlotRef
from kvstore.tiers import ledger, lookup, namespaces, reservation, segments, wiping
from kvstore.tiers.arrays import ArrayFiles
from kvstore.tiers.growth import AHEAD_SHARE, Grower
from kvstore.tiers.ledger import Placement
from kvstore.tiers.medium import Medium
from kvstore.tiers.reservation import Candidate, Reserved, Terms
from kvstore.tiers.victims import ColdSlots
from kvstore.tombstone import Tombstone
from kvstore.transaction import Database, Transaction, get_number

STAMP_BASE = b"stamp base"


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace as one tier knows it: its number there, its root, the digest of its salt, and its record."""

    number: int
    root: bytes
    salt: bytes
    record: NamespaceRecord | None = field(default=None, compare=False)


class SlottedTier:
    """Blocks in equal slots of segments, on any medium.

    owner: 16 bytes that name this process in the index. pins: keys that must not be evicted. quota: bytes of slots a
    salt (by its digest) may hold in this tier, None without. All methods may be called from any thread; those with a
    ``timeout`` raise BusyError when the index stays locked longer.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        index: Index,
        medium: Medium,
        *,
        owner: bytes,
        segment_bytes: int,
        policy: Policy,
        events: Events,
        pins: Callable[[], frozenset[bytes]] = frozenset,
        quota: Callable[[bytes], int | None] = lambda salt: None,
        respects_leases: bool = False,
    ) -> None:
        self.name = name
        self.directory = directory
        self.index = index
        self.medium = medium
        self.events = events
        self.owner = owner
        self.pins = pins
        self.quota = quota
        self.limits = segments.Limits(segment_bytes, index.size)
        self.arrays = ArrayFiles(directory, name, self.segment_bytes)
        self._cold = ColdSlots(index, self.arrays, policy)
        self._respects_leases = respects_leases
        self._grower = Grower(self, self._cold)
        self._sizes: dict[int, int] = {}
        self._spaces: dict[tuple[bytes, str, int], Space] = {}
        self._stamp_base = 0
        self.reload()

    # ---------------------------------------------------------------- looking

    def find(self, names: Sequence[BlockName]) -> list[Entry | None]:
        """Entries of blocks, WRITING ones included, None where there is none."""
        with self.index.read() as txn:
            return lookup.find(txn, names)

    def nearest(self, chain: Chain, part: Part, index: int, tokens: int) -> lookup.Nearest | None:
        """The stored block that shares the longest run of tokens with the chain's block ``index``."""
        with self.index.read() as txn:
            return lookup.nearest(txn, chain, part, index, tokens)

    def unchanged(self, entries: Sequence[Entry]) -> list[bool]:
        """For each entry, whether its slot still has the generation the entry was looked up with.

        To be asked after the copy: True means the bytes copied are the entry's.
        """
        now = self.arrays.generations([entry.ref for entry in entries])
        return [entry.generation == generation for entry, generation in zip(entries, now, strict=True)]

    def segment_bytes(self, segment: int) -> int:
        """Bytes of a segment, which never change. Raises DamagedError for an unknown one."""
        size = self._sizes.get(segment)
        if size is None:
            with self.index.read() as txn:
                self._sizes.update({known.number: known.size for known in ledger.segments(txn)})
            if segment not in self._sizes:
                raise DamagedError(
                    f"segment {segment} of {self.name} is not in the index", "run `kvstore verify --repair`"
                )
            size = self._sizes[segment]
        return size

    def know_segment(self, segment: int, size: int) -> None:
        """Note the size of a segment that was just made."""
        self._sizes[segment] = size

    # ---------------------------------------------------------------- recency

    def reload(self) -> None:
        """Read again what stamps are counted from: nanoseconds since boot, on top of the largest of earlier boots."""
        with self.index.read() as txn:
            self._stamp_base = get_number(txn, STAMP_BASE)

    @property
    def stamp_base(self) -> int:
        """A stamp is this, plus the `boottime_ns` of the use, less the block's depth."""
        return self._stamp_base

    def touch(self, refs: Sequence[SlotRef], depths: Sequence[int], now: int, flags: int | None = None) -> None:
        """Note that blocks were used. depths: how many blocks come before each; now: `boottime_ns` of the operation.

        Tails get older stamps than heads, so that a prefix outlives its continuations. flags: what the slots' flags
        become, before the stamps change; None leaves them as they are.
        """
        latest = self._stamp_base + now
        self.arrays.use(refs, [latest - depth for depth in depths], flags)

    def oldest_stamp(self, seconds: float) -> int:
        """The stamp a block has that was last used ``seconds`` ago."""
        return max(0, self._stamp_base + boottime_ns() - round(seconds * 1e9))

    def flag(self, refs: Sequence[SlotRef], flags: int) -> None:
        """Set the flags of slots (`kvstore.policy.CLEAN`)."""
        self.arrays.flag(refs, flags)

    # ---------------------------------------------------------------- writing

    def space(self, record: NamespaceRecord, timeout: float | None = None) -> Space:
        """The tier's own number for a namespace, registered when it is new, or comes with another label or TTL."""
        said = record.root, record.label, record.ttl
        known = self._spaces.get(said)
        if known is None:
            number = self.index.write(lambda txn: namespaces.register(txn, record), timeout)
            known = self._spaces.setdefault(said, Space(number, record.root, record.salt, record))
        return known

    def reserve(
        self,
        names: Sequence[BlockName],
        space: Space,
        slot_bytes: int,
        epoch: int,
        timeout: float | None = None,
        *,
        now: int,
    ) -> Reserved:
        """Take slots for the blocks that are not there; grows the tier, or evicts, as its budget allows.

        names: from head to tail. slot_bytes: size of the slots. epoch: the purge epoch known to the caller. now: when
        they were used, as for `touch`: only what was used before goes, so a sequence never evicts its own head. What
        is placed must be published or abandoned. Raises BusyError, StorageError, NoSpaceError (the index is full).
        """
        total = Reserved(left=list(names))
        try:
            self._reserve(total, space, slot_bytes, epoch, timeout, now)
        except BaseException:
            self.abandon(total.placed)  # of an earlier round: the caller never hears of them
            raise
        if total.evicted:
            self.events.emit(Evicted(self.name, EvictReason.LRU, len(total.evicted)))
        return total

    def _reserve(
        self, total: Reserved, space: Space, slot_bytes: int, epoch: int, timeout: float | None, now: int
    ) -> None:
        """Rounds of `reserve`, until nothing is left or nothing more can be had."""
        names = total.left
        before = self._stamp_base + now - max((name.depth for name in names), default=0)
        evict, afresh = not self._grower.may_grow(slot_bytes), False
        while total.left:
            cold = self._candidates(slot_bytes, len(total.left), space, afresh) if evict else []
            kept = {entry.ref for entry in total.known}
            candidates = [one for one in cold if one.stamp < before and one.ref not in kept]
            held: list[SlotRef] = []
            plan = self._plan(total.left, space, slot_bytes, epoch, candidates, held)
            result = self.index.write(plan, timeout, unheard=lambda lost: self.abandon(lost.placed))
            total.add(result)
            self._begin(result.placed)
            if not total.left:
                break
            if not evict:
                evict = len(total.left) == total.over_quota or not self._grower.grow(slot_bytes, timeout)
            elif afresh and not result.evicted and not held:
                break
            else:
                self.touch(held, range(0, -len(held), -1), now)
                afresh = True
        if not evict and total.free * slot_bytes < self.limits.segment_bytes // AHEAD_SHARE:
            self.grow_ahead(slot_bytes)

    def grow_ahead(self, slot_bytes: int) -> None:
        """Make room for slots of a size in the background, where the budget allows and none is being made."""
        self._grower.ahead(slot_bytes)

    def publish(
        self,
        done: Sequence[tuple[Placement, bytes]],
        tombstones: Sequence[Tombstone] = (),
        timeout: float | None = None,
        *,
        now: int,
        flags: int = 0,
    ) -> list[Placement]:
        """Make written blocks READY (done: with each payload's checksum); returns those that became readable.

        tombstones: of purges since the blocks were reserved. now: when they were used, as for `touch`.
        """
        self.touch(
            [placement.ref for placement, _ in done], [placement.name.depth for placement, _ in done], now, flags
        )
        published = self.index.write(lambda txn: reservation.publish(txn, self.owner, done, tombstones), timeout)
        if len(published) < len(done):
            kept = {placement.ref for placement in published}
            self._forget([placement for placement, _ in done if placement.ref not in kept])
        return published

    def take_free(self, segment: Segment, first: int, most: int) -> list[Placement]:
        """Take up to ``most`` free slots of a segment, from ``first`` on, to write over; none once recut."""
        terms = self.owner, segment, first, most, self.arrays.generations
        taken = self.index.write(lambda txn: wiping.take_free(txn, *terms), unheard=self.abandon)
        self._begin(taken)
        return taken

    def abandon(self, placements: Sequence[Placement]) -> None:
        """Give back what was reserved and will not be published. Never waits: the writer does it in its time."""
        if placements:
            self.index.submit(lambda txn: reservation.abandon(txn, self.owner, placements))

    # ---------------------------------------------------------------- removing

    def remove(
        self,
        victims: Sequence[tuple[bytes, bytes]],
        reason: EvictReason,
        timeout: float | None = None,
        *,
        doom: bool = False,
    ) -> int:
        """Remove READY blocks, named by (index key, key); returns how many were there.

        doom: blocks that are being written will be dropped when their owner publishes them.
        """
        gone: list[Entry] = []
        for start in range(0, len(victims), 1024):
            batch = victims[start : start + 1024]
            gone += self.index.write(lambda txn: ledger.remove(txn, batch, doom=doom), timeout)  # noqa: B023
        self._forget(gone)
        if gone:
            self.events.emit(Evicted(self.name, reason, len(gone)))
            self._grower.room_was_made()
        return len(gone)

    def discard(self, name: BlockName, entry: Entry, reason: EvictReason) -> None:
        """Remove one block that turned out bad, if it is still the one that was read. Never waits."""

        def work(txn: Transaction) -> list[Entry]:
            return ledger.remove(txn, [(name.index_key, entry.key)], entry.generation)

        def told(done: Future[list[Entry]]) -> None:
            if not done.cancelled() and done.exception() is None and done.result():
                self._forget(done.result())
                self.events.emit_elsewhere(Evicted(self.name, reason, 1))

        self.index.submit(work).add_done_callback(told)

    def take_back(self, owner: bytes) -> int:
        """Free what a dead owner left behind; returns how many slots. Its half-made segments are finished."""
        gone, unfinished = self.index.write(lambda txn: ledger.take_back(txn, owner))
        self._forget(gone)
        for segment in unfinished:
            adopted = self.index.write(lambda txn: segments.adopt(txn, segment.number, owner, self.owner))  # noqa: B023
            if adopted is not None:
                self._grower.make(segments.Growth(adopted, new=True), 0, None)
        if gone:
            self.events.emit(Evicted(self.name, EvictReason.DEAD_OWNER, len(gone)))
        return len(gone)

    # ---------------------------------------------------------------- numbers

    def usage(self) -> dict[bytes, Usage]:
        """What each namespace holds, by root."""
        with self.index.read() as txn:
            return {
                record.root: Usage.unpack(txn.get(Database.USAGE, number.to_bytes(4, "big")))
                for number, record in namespaces.listing(txn)
            }

    def allocated(self) -> int:
        """Bytes of the tier's files, as counted against its budget."""
        with self.index.read() as txn:
            return get_number(txn, segments.ALLOCATED)

    def budget(self) -> int:
        """The tier's budget in bytes."""
        with self.index.read() as txn:
            return get_number(txn, segments.BUDGET)

    def segment_list(self) -> list[Segment]:
        """Records of all segments."""
        with self.index.read() as txn:
            return ledger.segments(txn)

    def cut_segments(self) -> list[Segment]:
        """Records of those that can hold blocks; the files of others may still be in the making."""
        return [segment for segment in self.segment_list() if segment.slots]

    def close(self) -> bool:
        """Finish what is queued, and let go of files. False when others have something to take back from this owner."""
        self._grower.close()
        try:
            owes = self.index.write(lambda txn: ledger.owes(txn, self.owner))  # behind all that was abandoned
        except KVStoreError:
            owes = True
        self.index.close()
        self.arrays.close()
        self.medium.close()
        return not owes

    # ---------------------------------------------------------------- inside

    def _plan(
        self,
        names: Sequence[BlockName],
        space: Space,
        slot_bytes: int,
        epoch: int,
        candidates: Sequence[Candidate],
        held: list[SlotRef],
    ) -> Callable[[Transaction], Reserved]:
        """The work of one reservation. held: gets the candidates that a lease or a pin kept."""

        def work(txn: Transaction) -> Reserved:
            number = space.number
            if space.record is not None:  # somebody may have dropped it while it was empty
                number = namespaces.restore(txn, number, space.record)
            quota = self.quota(space.salt) if space.salt else None
            siblings = namespaces.under_salt(txn, space.salt) if quota is not None else ()
            terms = Terms(self.owner, number, space.root, slot_bytes, epoch, siblings, quota)
            held.clear()
            spared = self.spared_in(txn, held)
            return reservation.reserve(txn, names, terms, candidates, spared, self.arrays.generations)

        return work

    def spared_in(self, txn: Transaction, held: list[SlotRef]) -> Callable[[Candidate, Entry], bool]:
        """Which victims must not be taken, as a transaction sees it: leased, pinned, or used since picked.

        held: gets those that a lease or a pin keeps. What is leased and pinned is looked up for the first candidate.
        """
        leased: Mapping[int, set[int]] = {}
        pins: frozenset[bytes] | None = None

        def spared(candidate: Candidate, entry: Entry) -> bool:
            nonlocal leased, pins
            if pins is None:
                leased = ledger.leased_slots(txn, boottime_ns()) if self._respects_leases else {}
                pins = self.pins()
            ref = candidate.ref
            if entry.key in pins or ref.slot in leased.get(ref.segment, ()):
                held.append(ref)
                return True
            return int(self.arrays.of(ref.segment).stamps[ref.slot]) != candidate.stamp

        return spared

    def _begin(self, placed: Sequence[Placement]) -> None:
        """After the commit that unmapped the old blocks, before the first new byte: the generations go up."""
        if placed:
            namespace = entry_namespace(placed[0].record)  # who reserves has one
            self.arrays.begin([one.ref for one in placed], [one.generation for one in placed], namespace)

    def _forget(self, gone: Sequence[Entry] | Sequence[Placement]) -> None:
        """Clear the stamps of blocks that are gone, unless their slots have new owners already."""
        self.arrays.forget([one.ref for one in gone], [one.generation for one in gone])

    def _candidates(self, slot_bytes: int, needed: int, space: Space, afresh: bool) -> list[Candidate]:
        if not space.salt or self.quota(space.salt) is None:
            return self._cold.take(slot_bytes, needed, afresh=afresh)
        with self.index.read() as txn:
            own = namespaces.under_salt(txn, space.salt)
        return self._cold.first_of(slot_bytes, needed, own)
