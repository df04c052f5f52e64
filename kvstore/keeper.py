"""Housekeeping, once a second: what dead processes left is taken back, counters are shared, `nvme` hears of uses in
`ram` and gets what it lacks, old blocks expire.

Everything here may be late or left out without harm. It never runs in a request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvstore.days import DayBook
from kvstore.errors import KVStoreError
from kvstore.events import Counters, Events, EvictReason, Fault
from kvstore.eviction import behind, catch_up
from kvstore.host import boottime_ns
from kvstore.owners import bury, survey
from kvstore.pins import Pins
from kvstore.purge import PurgeLog
from kvstore.records import Entry, slot_key, unpack_lease
from kvstore.scrubbing import WipeLog, forget
from kvstore.slots import SlotRef
from kvstore.tenants import crowded, drop_empty
from kvstore.tiers import namespaces
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database, Transaction, get_number

PERIOD_S = 1.0
EXPIRY_PERIOD_S = 10.0
"""Also how often days are written: that is a commit on the disk."""
COUNTER = b"counter:"


class Keeper:
    """The housekeeping thread of one process.

    carry: notes in `nvme` what was used in `ram`. idle_work: called when there is time, to offer the mover old blocks.
    """

    def __init__(
        self,
        tiers: Sequence[SlottedTier],
        owners: Path,
        mine: bytes,
        purge: PurgeLog,
        pins: Pins,
        wipes: WipeLog,
        counters: Counters,
        days: DayBook,
        events: Events,
        *,
        grace: float,
        carry: Callable[[], None],
        idle_work: Callable[[], None],
    ) -> None:
        self._tiers, self._owners, self._mine = tuple(tiers), owners, mine
        self._purge, self._counters, self._days, self._events = purge, counters, days, events
        self._pins = pins
        self._wipes, self._wiped = wipes, wipes.epoch()
        self._behind: dict[str, int] = {}
        self._grace, self._carry, self._idle_work = grace, carry, idle_work
        self._seen_dead: dict[bytes, float] = {}
        self.sharing = threading.Lock()
        """Held while counts are between this process's counters and the shared ones; who adds both up holds it too."""
        self._stop = threading.Event()
        self.take_back_the_dead()
        self._thread = threading.Thread(target=self._run, name="kvstore-keeper", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # a Ctrl-C may come when it runs
            self._stop.set()
            raise

    def close(self) -> None:
        """Stop; what was counted is still shared."""
        self._stop.set()
        self._thread.join()
        self._attempt("counters", self.flush_counters)
        self._attempt("days", self._days.flush)

    def take_back_the_dead(self) -> int:
        """Free what dead owners were writing or holding; those with a device after a while. Returns slots freed."""
        _, dead = survey(self._owners, self._mine)
        now = time.monotonic()
        freed = 0
        for owner, card in dead.items():
            since = self._seen_dead.setdefault(owner, now)
            if card.device and now - since < self._grace:
                continue
            freed += sum(tier.take_back(owner) for tier in self._tiers)
            bury(self._owners, owner)
        if dead:
            for tier in self._tiers:
                tier.index.check_readers()
        return freed

    def flush_counters(self) -> None:
        """Add what this process counted to the counters that all share."""
        with self.sharing:
            self._share(self._counters.take())

    def _share(self, fresh: dict[str, int]) -> None:
        if not fresh:
            return

        def work(txn: Transaction) -> None:
            for name, amount in fresh.items():
                key = COUNTER + name.encode()[:400]
                total = get_number(txn, key) + amount
                txn.put(Database.META, key, total.to_bytes(16, "little"))

        try:
            self._tiers[0].index.write(work, timeout=1.0)
        except KVStoreError:
            self._counters.put_back(fresh)
            raise

    def expire(self) -> int:
        """Evict blocks not used for their namespace's TTL, in any tier, pinned ones excepted; returns how many.

        Stamps count the time: while the host is off, none passes.
        """
        self._carry()
        return sum(self._expire(tier) for tier in self._tiers)

    def finish_evictions(self) -> int:
        """Finish explicit evictions that were left half done a period ago; returns how many blocks went.

        A process that is evicting right now is not disturbed.
        """
        gone = 0
        for tier in self._tiers:
            since = behind(tier, self._purge)
            if since is not None and self._behind.get(tier.name) == since:
                gone += catch_up(tier, self._purge)
                since = None
            self._behind.pop(tier.name, None) if since is None else self._behind.update({tier.name: since})
        return gone

    def clear_memory(self) -> None:
        """After a wipe began in any process: clear what the indexes keep in this one's memory, and say so."""
        epoch = self._wipes.epoch()
        if epoch != self._wiped:
            for tier in self._tiers:
                forget(tier.index)
            self._wipes.confirm(self._mine, epoch)
            self._wiped = epoch

    def drop_empty(self) -> None:
        """Where there are very many namespaces, forget those that hold nothing: salts must not fill the index."""
        if any(crowded(tier) for tier in self._tiers):
            named = {record.root for record in self._pins.listing().values()}
            drop_empty(self._tiers, named)

    def _run(self) -> None:
        expired = time.monotonic()
        while not self._stop.wait(PERIOD_S):
            self._attempt("take back", self.take_back_the_dead)
            self._attempt("counters", self.flush_counters)
            self._attempt("leases", self._drop_leases)
            self._attempt("finish evictions", self.finish_evictions)
            self._attempt("clear memory", self.clear_memory)
            self._attempt("recency", self._carry)
            self._attempt("rescan", self._idle_work)
            if time.monotonic() - expired >= EXPIRY_PERIOD_S:
                self._attempt("expire", self.expire)
                self._attempt("days", self._days.flush)
                self._attempt("empty namespaces", self.drop_empty)
                expired = time.monotonic()

    def _attempt(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (KVStoreError, OSError) as error:
            self._events.emit(Fault("store", what, str(error)))
        except Exception as error:  # noqa: BLE001  housekeeping must outlive anything, and say so
            self._events.emit(Fault("store", what, repr(error)))

    def _drop_leases(self) -> None:
        index = self._tiers[0].index
        now = boottime_ns()
        with index.read() as txn:
            old = [key for key, raw in txn.scan(Database.LEASES) if unpack_lease(raw)[0] <= now]
        if old:
            index.write(lambda txn: [txn.delete(Database.LEASES, key) for key in old], timeout=1.0)

    def _expire(self, tier: SlottedTier) -> int:
        with tier.index.read() as txn:
            limits = {number: record.ttl for number, record in namespaces.listing(txn) if record.ttl}
            if not limits:
                return 0
            victims: list[tuple[bytes, bytes]] = []
            for ref in self._unused(tier, limits):
                index_key = txn.get(Database.SLOTS, slot_key(ref))
                raw = txn.get(Database.BLOCKS, index_key) if index_key is not None else None
                if index_key is not None and raw is not None:
                    entry = Entry.unpack(raw)
                    if entry.namespace in limits and entry.key not in tier.pins():
                        victims.append((index_key, entry.key))
        return tier.remove(victims, EvictReason.EXPIRED)

    def _unused(self, tier: SlottedTier, limits: dict[int, int]) -> list[SlotRef]:
        """Slots whose stamp is older than their namespace's TTL."""
        found: list[SlotRef] = []
        for segment in tier.cut_segments():
            stamps = tier.arrays.stamps(segment)
            numbers = tier.arrays.of(segment.number).namespaces[: segment.slots]
            for number, ttl in limits.items():
                oldest = tier.oldest_stamp(ttl)
                old = np.flatnonzero((numbers == number) & (stamps > 0) & (stamps < oldest))
                found += [SlotRef(segment.number, slot) for slot in old.tolist()]
        return found


def shared_counters(tier: SlottedTier) -> dict[str, int]:
    """What all processes have counted, as far as they have shared it."""
    with tier.index.read() as txn:
        return {
            key[len(COUNTER) :].decode(): int.from_bytes(raw, "little") for key, raw in txn.scan(Database.META, COUNTER)
        }
