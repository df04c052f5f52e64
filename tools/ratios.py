"""Statistics of paired measurements: a figure beside its limit, and whether it meets its target.

Ours and the limit are measured alternately (ours, limit, limit, ours, …), so that a drift of the machine hits both;
each pair gives one ratio. The spread is the distribution-free confidence interval of the median: the interval between
two order statistics that holds the true median with at least 90 %, whatever the distribution. A target inside that
interval is *undecided*. Must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb
from statistics import median
from typing import Any

CONFIDENCE = 0.9
PAIRS_MIN = 5
"""With fewer pairs no two order statistics hold the median with 90 %."""


class Verdict(StrEnum):
    """Whether a figure meets its target."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"
    """The target lies within the spread."""


@dataclass(frozen=True, slots=True)
class Target:
    """``at_most`` says on which side of ``value`` a figure must lie."""

    value: float
    at_most: bool = False

    def verdict(self, low: float, high: float) -> Verdict:
        """For a figure that lies between low and high."""
        worst, best = (high, low) if self.at_most else (low, high)
        if self._meets(worst):
            return Verdict.MET
        return Verdict.UNDECIDED if self._meets(best) else Verdict.MISSED

    def _meets(self, value: float) -> bool:
        return value <= self.value if self.at_most else value >= self.value


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured quantity: its samples, their median and the interval that holds the true median."""

    samples: tuple[float, ...]
    median: float
    low: float
    high: float
    target: Target | None = None

    @property
    def verdict(self) -> Verdict | None:
        """None without a target."""
        return self.target.verdict(self.low, self.high) if self.target else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all samples included."""
        made: dict[str, Any] = {
            "median": self.median,
            "low": self.low,
            "high": self.high,
            "spread": self.high - self.low,
            "samples": list(self.samples),
        }
        if self.target:
            made |= {"target": ("<= " if self.target.at_most else ">= ") + f"{self.target.value:g}"}
            made |= {"verdict": str(self.verdict)}
        return made


@dataclass(frozen=True, slots=True)
class Paired:
    """Ours against its limit: both sides' seconds and the ratio of each pair."""

    ours: tuple[float, ...]
    limit: tuple[float, ...]
    ratio: Figure

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all samples of both sides included."""
        return {"ratio": self.ratio.to_dict(), "ours_s": list(self.ours), "limit_s": list(self.limit)}


def interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The narrowest pair of symmetric order statistics that holds the median with at least ``confidence``.

    Between the k-th smallest and the k-th largest of n samples the median lies with probability
    1 − 2·P(Binomial(n, ½) < k). With too few samples for the confidence, the smallest and the largest.
    """
    ordered = sorted(samples)
    count = len(ordered)
    outside, k = 0.0, 0
    while k + 1 <= (count + 1) // 2:
        outside += 2 * comb(count, k) / 2**count
        if 1 - outside < confidence:
            break
        k += 1
    at = max(k, 1) - 1
    return ordered[at], ordered[count - 1 - at]


def figure(samples: Sequence[float], target: Target | None = None) -> Figure:
    """Raises ValueError without samples."""
    if not samples:
        raise ValueError("a figure needs samples")
    low, high = interval(samples)
    return Figure(tuple(samples), median(samples), low, high, target)


def paired(ours: Sequence[float], limit: Sequence[float], target: Target | None = None, rate: bool = True) -> Paired:
    """Ratios of seconds, pair by pair.

    rate: True gives limit's seconds over ours (a rate's share of its limit, 1 is perfect); False gives ours over the
    limit's (a duration's multiple of its limit). Raises ValueError for unequal numbers.
    """
    ratios = [(b / a if rate else a / b) for a, b in zip(ours, limit, strict=True)]
    return Paired(tuple(ours), tuple(limit), figure(ratios, target))


def alternate(
    ours: Callable[[], float], limit: Callable[[], float], pairs: int, step: Callable[[int], None] | None = None
) -> tuple[list[float], list[float]]:
    """Measure ``pairs`` pairs in the order A B B A A B …; each callable returns its own seconds.

    One pair before the first is run and thrown away: memory is touched, files are open.
    """
    first: list[float] = []
    second: list[float] = []
    ours(), limit()
    for index in range(pairs):
        if index % 2 == 0:
            first.append(ours())
            second.append(limit())
        else:
            second.append(limit())
            first.append(ours())
        if step:
            step(index + 1)
    return first, second
