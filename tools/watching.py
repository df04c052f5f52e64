"""What a store did between two moments, and where it is under pressure, in sentences.

Pure functions over `Stats`; must not know a store or a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.sizes import counted, format_size
from kvstore.statistics import Stats, TierStats, by_middle

FULL_SHARE = 0.98
"""Of a tier's budget that is allocated, and of its slots that are taken, when it counts as full."""
LOW_HITS = 0.2
REMEDIES = {
    "full": "Unpin what is not needed, or raise the tier's budget.",
    "quota": "kvstore quota tells whose, and raises it.",
    "busy": "Another process keeps the index locked: kvstore doctor lists them.",
    "writing": "Nothing to do: somebody else saves the same.",
    "purged": "Nothing to do: it was evicted by hand meanwhile.",
    "queue full": "nvme is slower than what is saved: a larger mover_queue_bytes bridges peaks.",
    "closing": "Let the engine end by itself: it writes what waits.",
    "evicted before": "nvme is slower than what is saved: a larger ram budget keeps blocks until they are written.",
    "fault": "The system's log tells more of the medium; kvstore verify finds what it lost.",
    "staging": "Raise the budget of hbm.",
    "mismatch": "The model or the mode does something to its cache that the adapter does not know: report it.",
    "changed": "Weights were changed under way: nothing to do, if that was meant.",
}
"""What to do when blocks are not saved, by the reason of `kvstore.events.Skipped`."""
ASKED_MIN = 1000
"""Tokens asked for below which a share says nothing."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened in ``seconds``. hits, misses: tokens by tier and by cause. rates: bytes a second by what moved."""

    seconds: float
    asked: int
    hits: Mapping[str, int]
    misses: Mapping[str, int]
    rates: Mapping[str, float]
    evicted: Mapping[str, int]
    skipped: Mapping[str, int]
    faults: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "seconds": self.seconds,
            "asked_tokens": self.asked,
            "hit_tokens": dict(self.hits),
            "miss_tokens": dict(self.misses),
            "bytes_a_second": dict(self.rates),
            "evicted_blocks": dict(self.evicted),
            "skipped_blocks": dict(self.skipped),
            "faults": dict(self.faults),
        }


def between(before: Stats, now: Stats, seconds: float) -> Interval:
    """What was counted from one moment to the next."""
    grown = {name: amount - before.counters.get(name, 0) for name, amount in now.counters.items()}
    grown = {name: amount for name, amount in grown.items() if amount > 0}
    rates = {f"load from {tier}": size / seconds for tier, size in by_middle(grown, "hit", "bytes").items()}
    rates |= {f"save to {tier}": size / seconds for tier, size in by_middle(grown, "save", "bytes").items()}
    rates |= {
        f"move {way.replace('.', ' to ')}": size / seconds for way, size in by_middle(grown, "move", "bytes").items()
    }
    return Interval(
        seconds,
        grown.get("asked.tokens", 0),
        by_middle(grown, "hit", "tokens"),
        by_middle(grown, "miss", "tokens"),
        rates,
        by_middle(grown, "evict", "blocks"),
        by_middle(grown, "skip", "blocks"),
        {name.removeprefix("fault."): amount for name, amount in grown.items() if name.startswith("fault.")},
    )


def is_full(tier: TierStats) -> bool:
    """Whether what comes next into a tier pushes something out."""
    grown = tier.allocated_bytes >= FULL_SHARE * tier.budget_bytes
    return bool(tier.slots) and grown and tier.free_slots <= (1 - FULL_SHARE) * tier.slots


def pressure(now: Stats, last: Interval) -> list[str]:
    """What somebody who runs the store should know, the gravest first."""
    found: list[str] = []
    if now.mover_paused:
        found.append(
            "nvme is not written at present, after faults of the disk: nothing new survives a restart. "
            "kvstore doctor and the system's log tell more."
        )
    for fault, count in last.faults.items():
        what = f"{counted(count, 'fault')} of {fault.replace('.', ': ')}"
        found.append(f"{what}: kvstore verify and the system's log tell more.")
    for what, blocks in last.skipped.items():
        where, _, reason = what.partition(".")
        found.append(f"Not saved to {where} ({reason}): {counted(blocks, 'block')}. {REMEDIES.get(reason, '')}".strip())
    evicted = {name.partition(".")[0]: blocks for name, blocks in last.evicted.items() if name.endswith(".lru")}
    for tier in now.tiers:
        if evicted.get(tier.name):  # full, be it of blocks, or of entries in its index
            told = f"{tier.name} is full: {counted(evicted[tier.name], 'block')} had to make room."
            found.append(f"{told} A larger budget than {format_size(tier.budget_bytes)} would keep them.")
        elif is_full(tier):
            found.append(f"{tier.name} is full: what is saved next pushes out what was not used for longest.")
    found += [f"{tier.name} has less than was asked for: {tier.capped}." for tier in now.tiers if tier.capped]
    if now.mover_bytes > last.seconds * max(1.0, last.rates.get("move ram to nvme", 0.0)) * 10:
        found.append(
            f"{format_size(now.mover_bytes)} wait for nvme: it is slower than what is saved. Put it on a faster disk."
        )
    hits = sum(last.hits.values())
    if last.asked >= ASKED_MIN and hits < LOW_HITS * last.asked:
        found.append(f"Only {hits / last.asked:.0%} of the tokens asked for were found: kvstore explain tells why.")
    return found or ["No pressure."]
