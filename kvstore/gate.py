"""Load or recompute: whether bringing a prefix up is faster than running it again.

Compares the measured bandwidth of loads, by tier, with the measured speed of the model's prefill, and counts its
decisions with their reasons. Until both are measured it loads: only a load tells how fast loads are. Pure but for its
own memory. Must not know the store or engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

FLOOR_TOKENS = 16
WEIGHT = 0.25
"""Share of a new measurement in the running figure."""
LEAST_BYTES, LEAST_TOKENS = 1 << 20, 64
"""Smaller measurements are of start-up costs, not of speed, and are left out."""
PROBE_EVERY = 32
"""One in so many prefixes that lose is loaded all the same, so that a medium that recovered is noticed."""


class Why(StrEnum):
    """The reason of a decision."""

    OFF = "off"
    """The gate is off: everything is loaded."""
    SHORT = "short"
    """Below the floor: not worth a load."""
    UNMEASURED = "unmeasured"
    """Nothing to compare yet."""
    FASTER = "faster"
    """The load is expected to win."""
    SLOWER = "slower"
    """Running the prefix again is expected to win."""
    PROBE = "probe"
    """Expected to lose, and loaded to measure again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to load, why, and the seconds expected for both ways (0 where not known)."""

    load: bool
    why: Why
    load_s: float = 0.0
    prefill_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.why}: load {self.load_s:.4f} s, prefill {self.prefill_s:.4f} s"


class Gate:
    """One model's gate. on: False loads everything. floor: tokens below which nothing is loaded, on or off."""

    def __init__(self, *, on: bool = True, floor: int = FLOOR_TOKENS) -> None:
        self._on, self.floor = on, floor
        self._bytes_a_second: dict[str, float] = {}
        self._tokens_a_second = 0.0
        self._counts: Counter[Why] = Counter()
        self._lock = Lock()

    def loaded(self, by_tier: Mapping[str, int], size: int, seconds: float) -> None:
        """A load was measured: tokens by tier, bytes and seconds of all. Loads out of several tiers are left out."""
        if len(by_tier) != 1 or size < LEAST_BYTES or seconds <= 0:
            return
        tier = next(iter(by_tier))
        with self._lock:
            known = self._bytes_a_second.get(tier)
            self._bytes_a_second[tier] = _blend(known, size / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A prefill was measured."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        with self._lock:
            self._tokens_a_second = _blend(self._tokens_a_second or None, tokens / seconds)

    def decide(self, by_tier: Mapping[str, int], size: int) -> Decision:
        """Whether to load ``by_tier`` tokens, ``size`` bytes in all."""
        decision = self._decide(by_tier, size)
        with self._lock:
            self._counts[decision.why] += 1
            if decision.why is Why.SLOWER and self._counts[Why.SLOWER] % PROBE_EVERY == 0:
                decision = Decision(True, Why.PROBE, decision.load_s, decision.prefill_s)
                self._counts[Why.PROBE] += 1
        return decision

    def counts(self) -> dict[str, int]:
        """Decisions by reason."""
        with self._lock:
            return {why.value: count for why, count in self._counts.items()}

    def _decide(self, by_tier: Mapping[str, int], size: int) -> Decision:
        tokens = sum(by_tier.values())
        if tokens < self.floor or not tokens:
            return Decision(False, Why.SHORT)
        if not self._on:
            return Decision(True, Why.OFF)
        with self._lock:
            speeds = [self._bytes_a_second.get(tier) for tier in by_tier]
            prefill = self._tokens_a_second
        known = [speed for speed in speeds if speed is not None]
        if len(known) != len(speeds) or not prefill:
            return Decision(True, Why.UNMEASURED)
        load_s = sum(size * share / tokens / speed for share, speed in zip(by_tier.values(), known, strict=True))
        prefill_s = tokens / prefill
        if load_s < prefill_s:
            return Decision(True, Why.FASTER, load_s, prefill_s)
        return Decision(False, Why.SLOWER, load_s, prefill_s)


def _blend(known: float | None, fresh: float) -> float:
    return fresh if known is None else known + WEIGHT * (fresh - known)
