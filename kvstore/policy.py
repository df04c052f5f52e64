"""Which blocks go first: functions from stamps and flags to an order.

A policy never does I/O and never decides alone: each victim it names is checked again inside the transaction that
evicts it. To add one, write a function of `Policy`'s type and name it in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Stamps: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.uint32]
Order: TypeAlias = npt.NDArray[np.intp]

Policy: TypeAlias = Callable[[Stamps, Flags, int], Order]
"""(stamps, flags, count) → up to ``count`` positions, the first victim first. A stamp of 0 is no candidate."""

CLEAN = 1
"""Flag of a slot whose block is also in the tier below."""

REFUSED = 2
"""Flag of a slot whose block the tier below had no room for: it is not offered again."""

COLD_SHARE = 64
"""The coldest 1/64 is looked at in one go, so that the cost of a scan is shared by many evictions."""


def lru(stamps: Stamps, flags: Flags, count: int) -> Order:
    """Least recently used first."""
    del flags
    return _coldest(stamps, count)


def lru_clean_first(stamps: Stamps, flags: Flags, count: int) -> Order:
    """Least recently used first, but among the coldest those the tier below already has."""
    order = _coldest(stamps, count)
    dirty = (flags[order] & CLEAN) == 0
    return np.concatenate([order[~dirty], order[dirty]])


def _coldest(stamps: Stamps, count: int) -> Order:
    """Positions of the ``count`` smallest stamps above 0, ascending; by partition, so linear in the slots."""
    live = np.flatnonzero(stamps)
    if count < len(live):
        live = live[np.argpartition(stamps[live], count - 1)[:count]]
    return live[np.argsort(stamps[live], kind="stable")]


def cold_batch(live: int, needed: int) -> int:
    """How many candidates to pick at once for ``needed`` victims among ``live`` slots."""
    return max(2 * needed, live // COLD_SHARE, 64)


POLICIES: Mapping[str, Policy] = {"lru": lru, "lru-clean-first": lru_clean_first}
