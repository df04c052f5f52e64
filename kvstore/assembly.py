"""What a store is made of on this host: its tiers and the logs in their indexes, opened, recovered, and let go of.

Opening is the one moment at which processes wait for each other. Whoever opens first after a crash, a restart of the
host or damage to files sets right what they left. Must not know loads, saves or engines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

from kvstore import superblock
from kvstore.days import DayBook
from kvstore.events import Events, Notice
from kvstore.eviction import catch_up
from kvstore.host import boot_id, ram_cap, supports_o_direct
from kvstore.memory_home import MemoryHome, sweep
from kvstore.owners import Owner
from kvstore.pins import Pins
from kvstore.policy import POLICIES
from kvstore.purge import PurgeLog
from kvstore.quotas import Quotas
from kvstore.scrubbing import WipeLog
from kvstore.settings import Settings
from kvstore.tiers import integrity, opening
from kvstore.tiers.medium import DirectMedium, MappedMedium, Medium
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.pagelock import PageLock
from kvstore.tiers.ram import RamTier
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database, Transaction

Wrap: TypeAlias = Callable[[Medium], Medium]
"""Puts a medium of one's own around a tier's: faults, throttling, tracing."""

BOOT = b"boot"
_T = TypeVar("_T", bound=SlottedTier)


class Assembly:
    """The tiers of one directory as this process has them open, its owner, and what is kept in the lowest index.

    device: what memory is page-locked for, None without. Raises what a wrong path, a full medium, another format or a
    process in another namespace raise; then nothing stays open.
    """

    def __init__(self, settings: Settings, wrap: Wrap, device: str | None, events: Events) -> None:
        self._settings, self._events = settings, events
        path = settings.path
        superblock.prepare_directory(path)
        self._opened: list[SlottedTier] = []
        self._home: MemoryHome | None = None
        self.pagelock: PageLock | None = None
        with superblock.opening(path):
            self._store = superblock.store_id(path)
            owners, memory = path / superblock.OWNERS, settings.ram_directory
            self.owner = Owner(owners, device=bool(settings.hbm), disk=bool(settings.nvme), memory=memory)
            try:
                self._alone = superblock.refuse_other_namespaces(path, self.owner.id)
                superblock.refuse_other_tiers(path, self.owner.id, bool(settings.nvme))
                superblock.refuse_other_memory(path, self.owner.id, memory)
                self._home = self._find_home()
                self.nvme = self._open_nvme(wrap) if settings.nvme else None
                self.ram = self._open_ram(wrap, self._home.path, device)
                self._open_logs()
            except BaseException:
                self.let_go()
                raise

    @property
    def tiers(self) -> tuple[SlottedTier, ...]:
        """Tiers with slots, the fastest first."""
        return (self.ram,) if self.nvme is None else (self.ram, self.nvme)

    def let_go(self) -> None:
        """Close what was opened before opening failed, so that this process can open the store again."""
        if self.pagelock is not None:
            self.pagelock.close()
        for tier in reversed(self._opened):
            tier.close()
        if self._home is not None:
            self._home.close()
        self.owner.close()

    def close(self) -> None:
        """Close everything. Nothing may be copied any more."""
        if self.pagelock is not None:
            self.pagelock.close()
        clean = [tier.close() for tier in self.tiers]
        if self._home is not None:
            self._home.close()
        if all(clean):
            self.owner.close()
        else:
            self.owner.disown()  # its file stays, unlocked: whoever comes next takes back what it left

    def disown(self) -> None:
        """In a forked child: the parent's locks stay the parent's."""
        self.owner.disown()
        if self._home is not None:
            self._home.close()

    # ---------------------------------------------------------------- opening

    def _find_home(self) -> MemoryHome:
        for orphan in sweep(self._settings.ram_directory):
            self._events.emit(Notice("orphan removed", f"{orphan} held memory for a store that is gone"))
        return MemoryHome(self._settings.ram_directory, self._settings.path, self._store)

    def _open_nvme(self, wrap: Wrap) -> NvmeTier:
        settings = self._settings
        directory = settings.path / "nvme"
        opening.refuse_larger_than_medium("nvme", settings.nvme, directory)
        direct = settings.direct_io == "on" or (settings.direct_io == "auto" and supports_o_direct(settings.path))
        if not direct and settings.direct_io == "auto":
            self._events.emit(Notice("buffered", f"{settings.path} has no O_DIRECT: the page cache is used"))
        return self._tier(NvmeTier, directory, wrap(DirectMedium(directory, direct=direct)), settings.nvme)

    def _open_ram(self, wrap: Wrap, directory: Path, device: str | None) -> RamTier:
        settings = self._settings
        there = directory.rglob("*") if directory.exists() else ()
        have = sum(file.stat().st_size for file in there if file.is_file())
        cap = ram_cap(settings.ram, settings.ram_directory, have)
        if cap.reason:
            self._events.emit(Notice("ram capped", cap.reason))
        self.pagelock = pagelock = PageLock.for_device(cap.bytes if settings.hbm else 0, device, self._events)
        medium = MappedMedium(
            directory,
            mapped=lambda window: pagelock.add([window]),
            unmapped=lambda window: pagelock.remove([window]),
            join_first=device is not None,
        )
        return self._tier(RamTier, directory, wrap(medium), cap.bytes, cap.reason or "")

    def _tier(self, kind: type[_T], directory: Path, medium: Medium, budget: int, why: str = "") -> _T:
        settings = self._settings
        durable = kind is NvmeTier
        index, block = opening.open_index(
            medium.name,
            directory,
            store=self._store,
            budget=budget,
            asked=settings.nvme if durable else settings.ram,
            why=why,
            segment_bytes=settings.nvme_segment_bytes if durable else settings.ram_segment_bytes,
            index_bytes=None,
            durable=durable,
            alone=self._alone,
            events=self._events,
        )
        try:
            tier = kind(
                medium.name,
                directory,
                index,
                medium,
                owner=self.owner.id,
                segment_bytes=block.segment_bytes,
                policy=POLICIES["lru" if durable or not settings.nvme else "lru-clean-first"],
                events=self._events,
                respects_leases=not durable,
            )
        except BaseException:
            index.close()
            raise
        self._opened.append(tier)
        return tier

    def _open_logs(self) -> None:
        """What the lowest index keeps for all tiers; then every tier is set right by it."""
        log = (self.nvme or self.ram).index
        self.purge, self.pins, self.quotas = PurgeLog(log), Pins(log, self._smallest), Quotas(log)
        self.days, self.wipes = DayBook(log), WipeLog(log)
        self._events.subscribe(self.days)
        for tier in self.tiers:
            tier.pins = self.pins.keys
            tier.quota = self.quotas.reader(tier.name)
            self._recover(tier)

    def _smallest(self) -> int:
        """Bytes of the smallest tier's budget."""
        return min(tier.budget() for tier in self.tiers)

    def _recover(self, tier: SlottedTier) -> None:
        """What the first opener does after a crash, a restart of the host, or damage to files."""
        damaged = {
            segment.number: why for segment in tier.segment_list() if (why := integrity.missing_files(tier, segment))
        }
        if damaged:
            gone = integrity.drop_segments(tier, damaged.keys())
            self._events.emit(
                Notice("segments dropped", f"{tier.name}: {'; '.join(damaged.values())}; {gone} blocks lost")
            )
        here = boot_id()
        with tier.index.read() as txn:
            before = txn.get(Database.META, BOOT)
        if before != here and self._alone:
            if before is not None:
                integrity.rebuild(tier)
            tier.index.write(lambda txn: _set_boot(txn, here))
            tier.reload()
        if self._alone:
            integrity.sweep(tier)
            opening.shrink(tier)
        catch_up(tier, self.purge)


def _set_boot(txn: Transaction, boot: bytes) -> None:
    txn.put(Database.META, BOOT, boot)
