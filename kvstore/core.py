"""A store as one process has it open: tiers, threads, owner, and who is told what. One a directory and process.

`Store` is its face; several handles may share one core. Must not know engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from kvstore import superblock
from kvstore.assembly import Assembly, Wrap
from kvstore.copying import CopyThreads
from kvstore.devices import DeviceLoader, DeviceSaver
from kvstore.errors import ClosedError, KVStoreError, UnsupportedError
from kvstore.events import Counters, Events, Fault, Observer
from kvstore.eviction import Eviction, Target, applied
from kvstore.keeper import Keeper, shared_counters
from kvstore.kv import KVBuffer
from kvstore.loading import Loader
from kvstore.match import Match
from kvstore.mover import Move, Mover
from kvstore.owners import survey
from kvstore.prefetch import Prefetches
from kvstore.purge import reaching
from kvstore.recency import Recency
from kvstore.rescan import dirty_moves, offer_again
from kvstore.saving import Saver
from kvstore.settings import Settings
from kvstore.statistics import Stats, by_middle, merged, tier_stats
from kvstore.tiers.device import DeviceTier, open_device_tier
from kvstore.tiers.medium import Medium
from kvstore.tiers.slotted import SlottedTier
from kvstore.verification import Progress, Report, verify
from kvstore.wiping import Step, Wiped, Wiper

RESCAN_BLOCKS = 64
SETTLE_S = 5.0
"""How long a store that is closed waits for observers of what is told by a thread of its own."""
RETRY_S = 60.0
"""How often the hottest of what `nvme` had no room for are offered again."""


def _as_it_is(medium: Medium) -> Medium:
    return medium


class Core:
    """Everything behind the handles of one directory."""

    def __init__(self, settings: Settings, wrap: Wrap | None, observers: tuple[Observer, ...]) -> None:
        self.settings, self.wrap = settings, wrap
        self.events = Events(observers)
        self.counters = Counters()
        self.events.subscribe(self.counters)
        self.device = (settings.device or "cuda") if settings.hbm else None
        self.closed = False
        self.handles = 0
        self._users: set[object] = set()
        self._unused = threading.Condition()
        self._assembly = assembly = Assembly(settings, wrap or _as_it_is, self.device, self.events)
        self.owner, self.ram, self.nvme = assembly.owner, assembly.ram, assembly.nvme
        self.purge, self.pins, self.quotas = assembly.purge, assembly.pins, assembly.quotas
        self.days, self.wipes = assembly.days, assembly.wipes
        self.hbm: DeviceTier | None = None
        with ExitStack() as undo:  # what fails later leaves nothing open, so that this process can open the store again
            undo.callback(assembly.let_go)
            if self.device is not None:
                self.hbm = open_device_tier(settings.hbm, self.device, events=self.events, pagelock=assembly.pagelock)
                undo.callback(self.hbm.close)
            self._start(undo)
            undo.pop_all()

    @property
    def tiers(self) -> tuple[SlottedTier, ...]:
        """Tiers with slots, the fastest first."""
        return self._assembly.tiers

    @property
    def lowest(self) -> SlottedTier:
        """The tier whose index keeps names, pins, quotas and tombstones."""
        return self.nvme or self.ram

    def require_open(self) -> None:
        """Raises ClosedError after `close`, or in a forked child."""
        if self.closed:
            raise ClosedError(
                "this store is closed, or was opened before a fork",
                "open it again; in a child process, start that by spawn or open the store only there",
            )

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep the core open for as long as slots are written or read. Raises ClosedError.

        A copy that went on after `close` would write into slots that others may have been given.
        """
        user = object()
        try:
            with self._unused:
                self.require_open()
                self._users.add(user)
            yield
        finally:
            try:
                self._left(user)
            except BaseException:  # Ctrl-C in there: `close` would wait for this user for ever
                self._left(user)
                raise

    def _left(self, user: object) -> None:
        with self._unused:
            self._users.discard(user)
            self._unused.notify_all()

    def close(self) -> None:
        """Wait for loads and saves, write what waits, as far as it is done in time, and let go.

        A Ctrl-C ends the wait for what is still to be written, no other, and is raised at the end: this process could
        not open again what is closed half.
        """
        with self._unused:
            if self.closed:
                return
            self.closed = True
        first: BaseException | None = None
        for step in self._ending():
            ended = False
            while not ended:
                try:
                    step()
                    ended = True
                except Exception as error:  # noqa: BLE001  raised below
                    first, ended = first or error, True
                except BaseException as interrupt:  # noqa: BLE001  likewise; this step is done once more
                    first = first or interrupt
        if first is not None:
            raise first

    def _ending(self) -> Iterator[Callable[[], object]]:
        """What `close` does, in order. Each may be done again after an interrupt."""
        yield self._wait_for_users
        yield self._populating.join
        yield self.prefetches.close
        if self.mover is not None:
            yield partial(self.mover.close, timeout=self.settings.mover_queue_bytes / 100e6 + 10)
        yield partial(self.events.settle, SETTLE_S)  # the keeper shares what observers have counted
        yield self.keeper.close
        yield self.threads.close
        if self.hbm is not None:
            yield self.hbm.close
        yield self._assembly.close

    def _wait_for_users(self) -> None:
        with self._unused:
            self._unused.wait_for(lambda: not self._users)

    def disown(self) -> None:
        """In a forked child: nothing here may be used, and the parent's locks stay the parent's."""
        self.closed = True
        self._assembly.disown()

    # ---------------------------------------------------------------- answers

    def loader_for(self, buffer: KVBuffer) -> Loader | DeviceLoader:
        """What loads into a buffer that is within reach."""
        if buffer.device is None:
            return self.loader
        assert self.device_loader is not None
        return self.device_loader

    def require_reach(self, buffer: KVBuffer) -> None:
        """Raises UnsupportedError for tensors on another device than `hbm` is on."""
        if buffer.device is None or (self.hbm is not None and buffer.device == self.hbm.device):
            return
        raise UnsupportedError(
            f"the tensors are on {buffer.device}, and hbm is {f'on {self.hbm.device}' if self.hbm else 'off'}",
            "open the store with hbm=1GiB or more, and device= the tensors' own",
        )

    def living(self) -> set[bytes]:
        """Owners that may be writing: this process and the others that live."""
        return {self.owner.id, *survey(self.settings.path / superblock.OWNERS, self.owner.id)[0]}

    def applied(self) -> int:
        """The newest tombstone up to which all were applied in every tier: they name nothing that is found there."""
        return min(self.purge.epoch(), *(applied(tier) for tier in self.tiers))

    def purged(self, match: Match) -> bool:
        """Whether a block of the match was explicitly evicted since it was matched."""
        names = [piece.name for pieces in match.pieces.values() for piece in pieces]
        stones = reaching(self.purge.newer(match.epoch), match.space.record, match.chain, names)
        keys = [name.key for name in names]
        return any(stone.names(match.space.root, key) for stone in stones for key in keys)

    def evict(self, target: Target, tier: str | None, *, dry_run: bool, names: bool = False) -> dict[str, int]:
        """Evict from the tiers with slots, tombstone first. names: those of what goes are forgotten too."""
        self._carry_for(target)
        eviction = Eviction(self.tiers, self.purge)
        if names and not dry_run:
            self.pins.drop_wiped(*eviction.named(target))
        gone = eviction.run(target, tier, dry_run=dry_run)
        if self.device_loader is not None and not dry_run:
            self.device_loader.forget_purged()
        if tier == self.lowest.name and not dry_run:
            self.carry(afresh=True)  # what `ram` still has of it is to be written again
        return gone

    def losing(self, target: Target) -> list[str]:
        """Names of what an eviction would take blocks of."""
        self._carry_for(target)
        return self.pins.of(*Eviction(self.tiers, self.purge).named(target))

    def carry(self, *, afresh: bool = False) -> None:
        """Before anything is decided about `nvme` by age, or after its copies went otherwise: see `Recency.carry`."""
        if self.recency is not None:
            self.recency.carry(afresh=afresh)

    def quotas_changed(self) -> None:
        """Before quotas are kept: by the uses in all tiers, and with what the old ones kept out of `nvme`."""
        self.carry()
        offer_again(self.ram)

    def _carry_for(self, target: Target) -> None:
        if target.unused_s is not None:
            self.carry()

    def verify(self, *, payloads: bool, repair: bool, progress: Progress | None) -> Report:
        """Check every tier. repair: what is wrong is removed."""
        try:
            return verify(self.tiers, self.living(), payloads=payloads, mend=repair, progress=progress)
        finally:
            if repair:
                self.carry(afresh=True)

    def wipe(self, step: Step) -> Wiped:
        """Leave no byte of what is not stored any more. Raises ClosedError when the core is closed meanwhile."""

        def going_on(what: str, done: int, total: int) -> None:
            self.require_open()
            step(what, done, total)

        with self.use():
            if self.device_loader is not None:
                self.device_loader.forget_purged()
            others = self.living() - {self.owner.id}
            return Wiper(self.tiers, self.wipes, lambda: others & self.living()).run(going_on)

    def stats(self) -> Stats:
        """The store at this moment."""
        with self.keeper.sharing:
            counters = merged(shared_counters(self.ram), self.counters.pending())
        blocks, waiting = self.mover.depth if self.mover is not None else (0, 0)
        return Stats(
            path=str(self.settings.path),
            tiers=tuple(tier_stats(tier) for tier in self.tiers),
            asked_tokens=counters.get("asked.tokens", 0),
            hit_tokens=by_middle(counters, "hit", "tokens"),
            miss_tokens=by_middle(counters, "miss", "tokens"),
            counters=counters,
            mover_blocks=blocks,
            mover_bytes=waiting,
            mover_paused=self.mover is not None and self.mover.paused,
            processes=len(self.living()),
            namespaces=len({root for tier in self.tiers for root in tier.usage()}),
            names=len(self.pins.listing()),
            hbm=self.hbm.stats().to_dict() if self.hbm is not None else None,
        )

    # ---------------------------------------------------------------- starting

    def _start(self, undo: ExitStack) -> None:
        """Start every thread. undo: gets what ends it again."""
        settings = self.settings
        self.threads = CopyThreads(settings.copy_threads, settings.io_threads)
        undo.callback(self.threads.close)
        self.mover: Mover | None = None
        self.recency: Recency | None = None
        if self.nvme is not None:
            self.recency = Recency(self.ram, self.nvme)
            offer_again(self.ram)  # the budget may be another
            self._retry = time.monotonic() + RETRY_S
            self.mover = Mover(
                self.ram,
                self.nvme,
                self.purge,
                self.events,
                self.threads.write,
                batch_bytes=settings.mover_batch_bytes,
                queue_bytes=settings.mover_queue_bytes,
            )
            undo.callback(self.mover.close, 0.0)
        timeout = settings.lock_timeout_s
        self.loader = Loader(
            self.ram,
            self.nvme,
            self.purge,
            self.threads,
            self.events,
            verify_share=settings.verify_share,
            timeout=timeout,
        )
        self.device_loader: DeviceLoader | None = None
        device_saver: DeviceSaver | None = None
        if self.hbm is not None:
            device_saver = DeviceSaver(self.hbm, self.ram, self.events)
            self.device_loader = DeviceLoader(
                self.hbm,
                self.ram,
                self.tiers,
                self.loader,
                self.purge,
                self.events,
                verify_share=settings.verify_share,
            )
        self.saver = Saver(
            self.ram,
            self.nvme,
            self.purge,
            self.threads,
            self.events,
            self._submit,
            timeout=timeout,
            device=device_saver,
        )
        self.prefetches = Prefetches(self.loader, self.events, self.purged, memory_tier=self.ram.name)
        undo.callback(self.prefetches.close)
        self._populating = threading.Thread(target=self._populate, name="kvstore-populate", daemon=True)
        self._populating.start()
        undo.callback(self._populating.join)
        self.keeper = Keeper(
            self.tiers,
            settings.path / superblock.OWNERS,
            self.owner.id,
            self.purge,
            self.pins,
            self.wipes,
            self.counters,
            self.days,
            self.events,
            grace=settings.dead_owner_grace_s,
            carry=self.carry,
            idle_work=self._rescan,
        )

    def _populate(self) -> None:
        """Enter what `ram` holds already into this process's page tables, so that no request has to."""
        for segment in self.ram.segment_list():
            if self.closed or segment.allocating:
                continue
            try:
                self.ram.medium.prepare(segment.number, segment.size)
            except KVStoreError as error:
                self.events.emit(Fault(self.ram.name, "populate", error.problem))

    def _rescan(self) -> None:
        if self.mover is not None and self.mover.idle and not self.mover.paused:
            if time.monotonic() >= self._retry:
                offer_again(self.ram, RESCAN_BLOCKS)
                self._retry = time.monotonic() + RETRY_S
            self.mover.submit(dirty_moves(self.ram, RESCAN_BLOCKS))

    def _submit(self, moves: Sequence[Move]) -> None:
        if self.mover is not None and moves:
            self.mover.submit(moves)
