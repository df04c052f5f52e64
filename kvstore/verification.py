"""Verify: every tier's books, and every slot's header and checksum; repair removes what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError
from kvstore.events import EvictReason
from kvstore.header import inspect_slot, slot_bytes
from kvstore.kv import Bytes
from kvstore.layout import Layout
from kvstore.records import Entry, key_part
from kvstore.states import State
from kvstore.tiers import integrity, namespaces, repair
from kvstore.tiers.medium import aligned_buffer
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database

READ_SLOTS = 16


@dataclass(slots=True)
class Report:
    """What was found. checked: blocks whose payload was compared. repaired: blocks removed to mend it."""

    problems: list[str] = field(default_factory=list)
    checked: int = 0
    repaired: int = 0

    @property
    def ok(self) -> bool:
        """Nothing was wrong."""
        return not self.problems


Progress = Callable[[int, int], None]


def verify(
    tiers: Sequence[SlottedTier],
    live: Collection[bytes],
    *,
    payloads: bool,
    mend: bool,
    progress: Progress | None = None,
) -> Report:
    """Check tiers. live: owners that may be writing. mend: remove what is wrong and rebuild counters."""
    report = Report()
    for tier in tiers:
        found = integrity.check(tier, live)
        report.problems += found
        if found and mend:
            report.repaired += repair.rebuild_books(tier, live)
    if payloads:
        total = sum(usage.blocks for tier in tiers for usage in tier.usage().values())
        for tier in tiers:
            _payloads(tier, report, total, mend, progress)
    return report


def _payloads(tier: SlottedTier, report: Report, total: int, mend: bool, progress: Progress | None) -> None:
    with tier.index.read() as txn:
        layouts = {number: Layout.from_json(record.layout) for number, record in namespaces.listing(txn)}
        entries = [
            (key, entry)
            for key, raw in txn.scan(Database.BLOCKS)
            if (entry := Entry.unpack(raw)).state is State.READY and entry.namespace in layouts
        ]
    entries.sort(key=lambda item: item[1].ref)
    for first in range(0, len(entries), READ_SLOTS):
        batch = entries[first : first + READ_SLOTS]
        bad = [item for item in batch if (why := _inspect(tier, layouts, *item, report)) is not None and why]
        if bad and mend:
            report.repaired += tier.remove([(key, entry.key) for key, entry in bad], EvictReason.CORRUPT)
        report.checked += len(batch)
        if progress is not None:
            progress(report.checked, total)


def _inspect(tier: SlottedTier, layouts: dict[int, Layout], index_key: bytes, entry: Entry, report: Report) -> bool:
    """Whether a block is bad; one that was evicted meanwhile is not."""
    layout, part = layouts[entry.namespace], key_part(index_key)
    size = slot_bytes(layout.payload_bytes(part.group))
    try:
        image = _image(tier, entry, size)
        cause = inspect_slot(
            image, entry.key, entry.tokens, layout.payload_bytes(part.group, entry.tokens), entry.checksum
        )
        why = None if cause is None else f"its {cause} is wrong"
        if not tier.unchanged([entry])[0]:
            return False
    except KVStoreError as error:
        why = error.problem
    if why is not None:
        report.problems.append(f"{tier.name}: the block in {entry.ref}: {why}")
    return why is not None


def _image(tier: SlottedTier, entry: Entry, size: int) -> Bytes:
    if isinstance(tier, RamTier):
        return tier.slot(entry.ref, size)
    assert isinstance(tier, NvmeTier)
    image = aligned_buffer(size)
    tier.read([entry.ref], size, [image])
    return image
