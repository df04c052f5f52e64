"""What a store holds and has done, as values: by tier, and counted over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.records import Usage, slot_counts
from kvstore.tiers.segments import ASKED, WHY
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database, get_number


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. Bytes; ``used_bytes`` are of slots that hold a block, ``allocated_bytes`` of files.

    asked_bytes: the budget that was asked for; capped: why less is in force, empty where it is not.
    """

    name: str
    budget_bytes: int
    allocated_bytes: int
    index_bytes: int
    index_used_bytes: int
    segments: int
    slots: int
    free_slots: int
    blocks: int
    used_bytes: int
    asked_bytes: int = 0
    capped: str = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """A store at a moment. counters: what `kvstore.events.Counters` lists, over all processes.

    asked_tokens = sum of hit_tokens + sum of miss_tokens. hbm: this process's own, None without one.
    """

    path: str
    tiers: tuple[TierStats, ...]
    asked_tokens: int
    hit_tokens: Mapping[str, int]
    miss_tokens: Mapping[str, int]
    counters: Mapping[str, int]
    mover_blocks: int
    mover_bytes: int
    mover_paused: bool
    processes: int
    namespaces: int
    names: int
    hbm: Mapping[str, int | str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def tier_stats(tier: SlottedTier) -> TierStats:
    """What a tier holds now."""
    with tier.index.read() as txn:
        segments, slots, free = slot_counts(raw for _, raw in txn.scan(Database.SEGMENTS))
        asked = get_number(txn, ASKED)
        why = (txn.get(Database.META, WHY) or b"").decode()
    usage = sum_usage(tier.usage().values())
    return TierStats(
        name=tier.name,
        budget_bytes=tier.budget(),
        allocated_bytes=tier.allocated(),
        index_bytes=tier.index.size,
        index_used_bytes=tier.index.used_bytes(),
        segments=segments,
        slots=slots,
        free_slots=free,
        blocks=usage.blocks,
        used_bytes=usage.size,
        asked_bytes=asked,
        capped=why,
    )


def sum_usage(usages: Sequence[Usage] | Any) -> Usage:
    """Usages added up."""
    listed = list(usages)
    return Usage(sum(usage.blocks for usage in listed), sum(usage.size for usage in listed))


def by_middle(counters: Mapping[str, int], first: str, last: str) -> dict[str, int]:
    """Counters ``first.X.last`` by X."""
    found: dict[str, int] = {}
    for name, amount in counters.items():
        if name.startswith(f"{first}.") and name.endswith(f".{last}"):
            found[name[len(first) + 1 : -len(last) - 1]] = amount
    return found


def merged(shared: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """Shared counters and what this process has not shared yet."""
    total = dict(shared)
    for name, amount in own.items():
        total[name] = total.get(name, 0) + amount
    return total
