"""What a store's days are worth: tokens and seconds of prefill that were not repeated, money, and what the store cost.

Pure functions over days; the estimates, and what they rest on, are named. Must not know a store or a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.days import Day

MILLION = 1_000_000
DAYS_A_MONTH = 30.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Money a million input tokens, without a unit; read, write: factors on what is read from and written to a cache.

    ram, disk: money a GB (10⁹ bytes) and month of what the store takes.
    """

    input: float = 0.0
    read: float = 0.1
    write: float = 1.25
    ram: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True, slots=True)
class Worth:
    """Of some days of one namespace, or of all.

    reused: tokens served and not run again. prefill_s: what running them would have taken, None where no speed is
    known. load_s, save_s, move_s: what the store took, the last two beside requests. saved_s: prefill_s − load_s.
    written: prompt tokens that were stored anew. without, with_cache: money for input tokens.
    """

    day: Day
    reused: int
    tokens_a_second: float | None
    prefill_s: float | None
    load_s: float
    save_s: float
    move_s: float
    saved_s: float | None
    written: int
    without: float
    with_cache: float

    @property
    def money(self) -> float:
        """What the cache saved by the price of input tokens; negative where writing cost more than reading saved."""
        return self.without - self.with_cache

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "asked_tokens": self.day.asked,
            "served_tokens": {tier: getattr(self.day, tier) for tier in ("hbm", "ram", "nvme")},
            "recomputed_tokens": self.day.rerun,
            "reused_tokens": self.reused,
            "prefill_tokens_a_second": self.tokens_a_second,
            "prefill_s_not_repeated": self.prefill_s,
            "load_s": self.load_s,
            "seconds_saved": self.saved_s,
            "save_s": self.save_s,
            "nvme_write_s": self.move_s,
            "loaded_bytes": self.day.loaded_bytes,
            "saved_bytes": self.day.saved_bytes,
            "nvme_written_bytes": self.day.moved_bytes,
            "written_tokens": self.written,
            "money_without": self.without,
            "money_with": self.with_cache,
            "money_saved": self.money,
        }


def worth(day: Day, token_bytes: int | None, rate: float | None, prices: Prices) -> Worth:
    """token_bytes: of KV, None where the namespace is gone. rate: tokens a second of a prefill, None where unknown."""
    reused = max(0, day.served - day.rerun)
    missed = day.asked - reused
    written = min(missed, day.saved_bytes // token_bytes) if token_bytes else 0
    prefill = reused / rate if rate else None
    load = day.load_us / 1e6
    a_token = prices.input / MILLION
    paid = reused * prices.read + written * prices.write + (missed - written)
    return Worth(
        day=day,
        reused=reused,
        tokens_a_second=rate,
        prefill_s=prefill,
        load_s=load,
        save_s=day.save_us / 1e6,
        move_s=day.move_us / 1e6,
        saved_s=None if prefill is None else prefill - load,
        written=written,
        without=day.asked * a_token,
        with_cache=paid * a_token,
    )


def total(parts: list[Worth]) -> Worth:
    """Several, added up; seconds of prefill are None where one that reused something has none."""
    day = sum((one.day for one in parts), Day())
    known = [one.prefill_s for one in parts if one.prefill_s is not None]
    whole = all(one.prefill_s is not None or not one.reused for one in parts)
    prefill = sum(known) if whole and known else None
    load = day.load_us / 1e6
    return Worth(
        day=day,
        reused=sum(one.reused for one in parts),
        tokens_a_second=None,
        prefill_s=prefill,
        load_s=load,
        save_s=day.save_us / 1e6,
        move_s=day.move_us / 1e6,
        saved_s=None if prefill is None else prefill - load,
        written=sum(one.written for one in parts),
        without=sum(one.without for one in parts),
        with_cache=sum(one.with_cache for one in parts),
    )


def measured_rate(day: Day) -> float | None:
    """Tokens a second at which an engine ran prompts of which it found nothing; None where it ran none."""
    return day.cold / (day.cold_us / 1e6) if day.cold and day.cold_us else None


def storage(allocated: Mapping[str, int], days: float, prices: Prices) -> float:
    """Money for what the tiers' files take, for so many days."""
    a_month = allocated.get("ram", 0) / 1e9 * prices.ram + allocated.get("nvme", 0) / 1e9 * prices.disk
    return a_month * days / DAYS_A_MONTH
