"""A store as one process has it open: tiers, threads, owner, and who is told what. One a directory and process.

`Store` is its face; several handles may share one core. Must not know engines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from kvstore import superblock
from kvstore.copying import CopyThreads
from kvstore.days import DayBook
from kvstore.devices import DeviceLoader, DeviceSaver
from kvstore.errors import ClosedError, KVStoreError, SettingsError, UnsupportedError
from kvstore.events import Counters, Events, Fault, Notice, Observer
from kvstore.eviction import Eviction, Target, catch_up
from kvstore.host import boot_id, ram_cap, supports_o_direct
from kvstore.index import Database, Transaction
from kvstore.keeper import Keeper, shared_counters
from kvstore.kv import KVBuffer
from kvstore.loading import Loader
from kvstore.match import Match
from kvstore.memory_home import MemoryHome, sweep
from kvstore.mover import Move, Mover
from kvstore.owners import Owner, survey
from kvstore.pins import Pins
from kvstore.policy import POLICIES
from kvstore.prefetch import Prefetches
from kvstore.purge import PurgeLog
from kvstore.quotas import Quotas
from kvstore.rescan import dirty_moves
from kvstore.saving import Saver
from kvstore.scrubbing import WipeLog
from kvstore.settings import Settings
from kvstore.statistics import Stats, by_middle, merged, tier_stats
from kvstore.tiers import integrity, opening
from kvstore.tiers.device import DeviceTier, open_device_tier
from kvstore.tiers.medium import DirectMedium, MappedMedium, Medium
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.pagelock import PageLock
from kvstore.tiers.ram import RamTier
from kvstore.tiers.slotted import SlottedTier
from kvstore.wiping import Step, Wiped, Wiper

Wrap: TypeAlias = Callable[[Medium], Medium]
"""Puts a medium of one's own around a tier's: faults, throttling, tracing."""

BOOT = b"boot"
RESCAN_BLOCKS = 64
_T = TypeVar("_T", bound=SlottedTier)


class Core:
    """Everything behind the handles of one directory."""

    _home: MemoryHome | None = None

    def __init__(self, settings: Settings, wrap: Wrap, observers: tuple[Observer, ...]) -> None:
        self.settings = settings
        self.events = Events(observers)
        self.counters = Counters()
        self.events.subscribe(self.counters)
        self.device = (settings.device or "cuda") if settings.hbm else None
        self.closed = False
        self.handles = 0
        self._users = 0
        self._unused = threading.Condition()
        path = settings.path
        if not settings.ram:
            raise SettingsError("ram is 0: every block passes through it", "give ram a budget, 64MiB or more")
        superblock.prepare_directory(path)
        with superblock.opening(path):
            identity = superblock.store_id(path)
            self.owner = Owner(path / superblock.OWNERS, device=bool(settings.hbm), disk=bool(settings.nvme))
            self._tiers: list[SlottedTier] = []
            try:
                alone = superblock.refuse_other_namespaces(path, self.owner.id)
                superblock.refuse_other_tiers(path, self.owner.id, bool(settings.nvme))
                self._open_tiers(identity, wrap, alone)
            except BaseException:
                self._let_go()
                raise
        self.hbm: DeviceTier | None = None
        if self.device is not None:
            try:
                self.hbm = open_device_tier(settings.hbm, self.device, events=self.events, pagelock=self.pagelock)
            except BaseException:
                self.pagelock.close()
                self._let_go()
                raise
        self._start()

    def _let_go(self) -> None:
        """Of what was opened before opening failed, so that this process can open the store again."""
        for tier in self._tiers:
            tier.close()
        if self._home is not None:
            self._home.close()
        self.owner.close()

    @property
    def tiers(self) -> tuple[SlottedTier, ...]:
        """Tiers with slots, the fastest first."""
        return (self.ram,) if self.nvme is None else (self.ram, self.nvme)

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
        with self._unused:
            self.require_open()
            self._users += 1
        try:
            yield
        finally:
            with self._unused:
                self._users -= 1
                self._unused.notify_all()

    def close(self) -> None:
        """Wait for loads and saves, write what waits, as far as it is done in time, and let go."""
        with self._unused:
            if self.closed:
                return
            self.closed = True
            self._unused.wait_for(lambda: not self._users)
        self._populating.join()
        self.prefetches.close()
        if self.mover is not None:
            self.mover.close(timeout=self.settings.mover_queue_bytes / 100e6 + 10)
        self.keeper.close()
        self.threads.close()
        if self.hbm is not None:
            self.hbm.close()
        self.pagelock.close()
        clean = [tier.close() for tier in self._tiers]
        if self._home is not None:
            self._home.close()
        if all(clean):
            self.owner.close()
        else:
            self.owner.disown()  # its file stays, unlocked: whoever comes next takes back what it left

    def disown(self) -> None:
        """In a forked child: nothing here may be used, and the parent's locks stay the parent's."""
        self.closed = True
        self.owner.disown()
        if self._home is not None:
            self._home.close()

    # ---------------------------------------------------------------- answers

    def loader_for(self, buffer: KVBuffer) -> Loader | DeviceLoader:
        """What loads into a buffer. Raises UnsupportedError for a device without `hbm`."""
        if buffer.device is None:
            return self.loader
        if self.device_loader is None:
            raise UnsupportedError(
                f"the tensors are on {buffer.device}, and hbm is off", "open the store with hbm=1GiB or more"
            )
        return self.device_loader

    def living(self) -> set[bytes]:
        """Owners that may be writing: this process and the others that live."""
        return {self.owner.id, *survey(self.settings.path / superblock.OWNERS, self.owner.id)[0]}

    def purged(self, match: Match) -> bool:
        """Whether a block of the match was explicitly evicted since it was matched."""
        stones = self.purge.newer(match.epoch)
        keys = [piece.name.key for pieces in match.pieces.values() for piece in pieces]
        return any(stone.names(match.space.root, key) for stone in stones for key in keys)

    def evict(self, target: Target, tier: str | None, *, dry_run: bool, names: bool = False) -> dict[str, int]:
        """Evict from the tiers with slots, tombstone first. names: those of what goes are forgotten too."""
        eviction = Eviction(self.tiers, self.purge)
        if names and not dry_run:
            self.pins.drop_wiped(*eviction.named(target))
        gone = eviction.run(target, tier, dry_run=dry_run)
        if self.device_loader is not None and not dry_run:
            self.device_loader.forget_purged()
        return gone

    def wipe(self, step: Step) -> Wiped:
        """Leave no byte of what is not stored any more."""
        if self.device_loader is not None:
            self.device_loader.forget_purged()
        others = self.living() - {self.owner.id}
        return Wiper(self.tiers, self.wipes, lambda: others & self.living()).run(step)

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

    # ---------------------------------------------------------------- opening

    def _open_tiers(self, identity: bytes, wrap: Wrap, alone: bool) -> None:
        settings = self.settings
        self.nvme: NvmeTier | None = None
        for orphan in sweep(settings.ram_directory):
            self.events.emit(Notice("orphan removed", f"{orphan} held memory for a store that is gone"))
        self._home = MemoryHome(settings.ram_directory, settings.path, identity)
        ram_directory = self._home.path
        have = (
            sum(file.stat().st_size for file in ram_directory.rglob("*") if file.is_file())
            if ram_directory.exists()
            else 0
        )
        cap = ram_cap(settings.ram, settings.ram_directory, have)
        if cap.reason:
            self.events.emit(Notice("ram capped", cap.reason))
        if settings.nvme:
            directory = settings.path / "nvme"
            opening.refuse_larger_than_medium("nvme", settings.nvme, directory)
            direct = settings.direct_io == "on" or (settings.direct_io == "auto" and supports_o_direct(settings.path))
            if not direct and settings.direct_io == "auto":
                self.events.emit(Notice("buffered", f"{settings.path} has no O_DIRECT: the page cache is used"))
            medium = wrap(DirectMedium(directory, direct=direct))
            self.nvme = self._tier(NvmeTier, directory, medium, identity, settings.nvme, alone, durable=True)
        lowest = self.nvme
        self.pagelock = PageLock.for_device(cap.bytes if settings.hbm else 0, self.device, self.events)
        medium = wrap(
            MappedMedium(
                ram_directory,
                mapped=lambda window: self.pagelock.add([window]),
                unmapped=lambda window: self.pagelock.remove([window]),
            )
        )
        self.ram = self._tier(RamTier, ram_directory, medium, identity, cap.bytes, alone, durable=False)
        self._tiers.reverse()
        log = (lowest or self.ram).index
        self.purge, self.pins, self.quotas = PurgeLog(log), Pins(log), Quotas(log)
        self.days, self.wipes = DayBook(log), WipeLog(log)
        self.events.subscribe(self.days)
        for tier in self._tiers:
            tier.pins = self.pins.keys
            tier.quota = self.quotas.reader(tier.name)
            self._recover(tier, alone)

    def _tier(
        self,
        kind: type[_T],
        directory: Path,
        medium: Medium,
        identity: bytes,
        budget: int,
        alone: bool,
        *,
        durable: bool,
    ) -> _T:
        name = medium.name
        wanted = self.settings.nvme_segment_bytes if durable else self.settings.ram_segment_bytes
        index, block = opening.open_index(
            name,
            directory,
            store=identity,
            budget=budget,
            asked=self.settings.nvme if durable else self.settings.ram,
            segment_bytes=wanted,
            index_bytes=None,
            durable=durable,
            alone=alone,
            events=self.events,
        )
        tier = kind(
            name,
            directory,
            index,
            medium,
            owner=self.owner.id,
            segment_bytes=block.segment_bytes,
            policy=POLICIES["lru" if durable or not self.settings.nvme else "lru-clean-first"],
            events=self.events,
            respects_leases=not durable,
        )
        self._tiers.append(tier)
        return tier

    def _recover(self, tier: SlottedTier, alone: bool) -> None:
        """What the first opener does after a crash, a restart of the host, or damage to files."""
        damaged = {
            segment.number: why for segment in tier.segment_list() if (why := integrity.missing_files(tier, segment))
        }
        if damaged:
            gone = integrity.drop_segments(tier, damaged.keys())
            self.events.emit(
                Notice("segments dropped", f"{tier.name}: {'; '.join(damaged.values())}; {gone} blocks lost")
            )
        here = boot_id()
        with tier.index.read() as txn:
            before = txn.get(Database.META, BOOT)
        if before != here and alone:
            if before is not None:
                integrity.rebuild(tier)
            tier.index.write(lambda txn: _set_boot(txn, here))
            tier.reload()
        if alone:
            integrity.sweep(tier)
            opening.shrink(tier)
        catch_up(tier, self.purge)

    def _start(self) -> None:
        settings = self.settings
        self.threads = CopyThreads(settings.copy_threads, settings.io_threads)
        self.mover: Mover | None = None
        if self.nvme is not None:
            self.mover = Mover(
                self.ram,
                self.nvme,
                self.purge,
                self.events,
                batch_bytes=settings.mover_batch_bytes,
                queue_bytes=settings.mover_queue_bytes,
            )
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
        self._populating = threading.Thread(target=self._populate, name="kvstore-populate", daemon=True)
        self._populating.start()
        self.keeper = Keeper(
            self.tiers,
            settings.path / superblock.OWNERS,
            self.owner.id,
            self.purge,
            self.wipes,
            self.counters,
            self.days,
            self.events,
            grace=settings.dead_owner_grace_s,
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
            self.mover.submit(dirty_moves(self.ram, RESCAN_BLOCKS))

    def _submit(self, moves: Sequence[Move]) -> None:
        if self.mover is not None and moves:
            self.mover.submit(moves)


def _set_boot(txn: Transaction, boot: bytes) -> None:
    txn.put(Database.META, BOOT, boot)
