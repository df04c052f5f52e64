"""A medium that fails on purpose: `FaultMedium` wraps another one and follows rules.

It ships, since it serves more than the tests here: put around a tier's medium by ``kvstore.open(path, wrap=…)`` it
shows what an engine does when its disk is full, broken or lying. Which rule fires, and which bit is flipped, follows
from the rules, the seed and the order of the calls alone. It knows segments and bytes, not slots.

A memory medium is read and written through its window, which no wrapper sees: there only ``allocate`` and ``prepare``
can fail.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvstore.errors import NoSpaceError, SettingsError, StorageError
from kvstore.kv import Bytes
from kvstore.tiers.medium import ALIGNMENT, Medium, aligned_buffer


class Operation(StrEnum):
    """What can fail."""

    ALLOCATE = "allocate"
    PREPARE = "prepare"
    READ = "read"
    WRITE = "write"
    SYNC = "sync"


class Effect(StrEnum):
    """How it fails."""

    ENOSPC = "no space"
    """NoSpaceError, and nothing is done."""
    EIO = "i/o error"
    """StorageError, and nothing is done."""
    SHORT = "short"
    """Half of the bytes are moved, then StorageError."""
    TORN = "torn"
    """Half of the bytes are moved, and success is reported."""
    FLIP = "flip"
    """One bit of what is moved is wrong, and success is reported."""
    STALE = "stale"
    """Nothing is done, and success is reported: a write leaves the old bytes, a read the buffer as it was."""


_LOUD = frozenset({Effect.EIO})
_TRANSFER = _LOUD | {Effect.SHORT, Effect.TORN, Effect.FLIP, Effect.STALE}
POSSIBLE = {
    Operation.ALLOCATE: _LOUD | {Effect.ENOSPC},
    Operation.PREPARE: _LOUD | {Effect.ENOSPC},
    Operation.READ: _TRANSFER,
    Operation.WRITE: _TRANSFER | {Effect.ENOSPC},
    Operation.SYNC: _LOUD | {Effect.STALE},
}
"""Effects that each operation can have."""


@dataclass(frozen=True, slots=True)
class FaultRule:
    """When one fault happens.

    Calls of ``operation`` that touch ``segment`` (None: any) are counted from 1. From call ``first`` on, each fails
    with ``probability``, until the rule has fired ``times`` times (None: for ever). Raises SettingsError for what
    cannot happen.
    """

    operation: Operation
    effect: Effect
    first: int = 1
    times: int | None = None
    probability: float = 1.0
    segment: int | None = None

    def __post_init__(self) -> None:
        if self.effect not in POSSIBLE[self.operation]:
            effects = ", ".join(effect.name for effect in Effect if effect in POSSIBLE[self.operation])
            raise SettingsError(f"{self.operation} cannot have the effect {self.effect.name}", f"use one of {effects}")
        if self.first < 1 or (self.times is not None and self.times < 1) or not 0 < self.probability <= 1:
            raise SettingsError(
                f"a rule from call {self.first} on, {self.times} times, with probability {self.probability}",
                "count calls and times from 1, and use a probability above 0 and up to 1",
            )


class FaultMedium:
    """Another medium, with faults. rules: the first that fires decides. seed: of what is random. For any thread."""

    def __init__(self, inner: Medium, rules: Iterable[FaultRule] = (), *, seed: int = 0) -> None:
        self.inner = inner
        self.name = inner.name
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._rules: tuple[FaultRule, ...] = ()
        self._seen: Counter[int] = Counter()
        self._fired: Counter[int] = Counter()
        self._injected: Counter[Operation] = Counter()
        self.inject(rules)

    def inject(self, rules: Iterable[FaultRule] = ()) -> None:
        """Follow these rules from now on, their counts at 0; none: be a good medium again."""
        with self._lock:
            self._rules = tuple(rules)
            self._seen.clear()
            self._fired.clear()

    def injected(self, operation: Operation | None = None) -> int:
        """How many faults there have been, of one operation or of all."""
        with self._lock:
            return self._injected.total() if operation is None else self._injected[operation]

    def allocate(self, segment: int, size: int) -> None:
        """Allocate, or not."""
        self._refuse(self._effect(Operation.ALLOCATE, [segment]), f"allocating segment {segment}")
        self.inner.allocate(segment, size)

    def prepare(self, segment: int, size: int) -> None:
        """Prepare, or not."""
        self._refuse(self._effect(Operation.PREPARE, [segment]), f"preparing segment {segment}")
        self.inner.prepare(segment, size)

    def join(self, segment: int) -> None:
        """Join; never fails."""
        self.inner.join(segment)

    def remove(self, segment: int) -> None:
        """Remove; never fails."""
        self.inner.remove(segment)

    def length(self, segment: int) -> int | None:
        """As the inner medium says."""
        return self.inner.length(segment)

    def window(self, segment: int, size: int) -> Bytes | None:
        """The inner medium's memory, as it is."""
        return self.inner.window(segment, size)

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        """Read, or not, or wrongly."""
        effect = self._effect(Operation.READ, [segment])
        where = f"reading segment {segment} at byte {offset}"
        self._refuse(effect, where)
        if effect is Effect.STALE:
            return
        self.inner.read(segment, offset, _half(into) if effect in (Effect.SHORT, Effect.TORN) else into)
        if effect is Effect.SHORT:
            raise _short(where)
        if effect is Effect.FLIP:
            self._flip(into)

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        """Write, or not, or something else; the caller's buffers stay as they are."""
        effect = self._effect(Operation.WRITE, [segment])
        where = f"writing segment {segment} at byte {offset}"
        self._refuse(effect, where)
        if effect is Effect.STALE:
            return
        if effect is Effect.FLIP:
            data = [_copy(part) for part in data]
            self._flip(data)
        self.inner.write(segment, offset, _half(data) if effect in (Effect.SHORT, Effect.TORN) else data)
        if effect is Effect.SHORT:
            raise _short(where)

    def sync(self, segments: Iterable[int]) -> None:
        """Sync, or not."""
        named = sorted(set(segments))
        effect = self._effect(Operation.SYNC, named)
        self._refuse(effect, f"syncing segments {named}")
        if effect is not Effect.STALE:
            self.inner.sync(named)

    def close(self) -> None:
        """Close the inner medium."""
        self.inner.close()

    def _effect(self, operation: Operation, segments: Sequence[int]) -> Effect | None:
        with self._lock:
            for at, rule in enumerate(self._rules):
                if rule.operation is not operation or not (rule.segment is None or rule.segment in segments):
                    continue
                self._seen[at] += 1
                spent = rule.times is not None and self._fired[at] >= rule.times
                if self._seen[at] < rule.first or spent or self._random.random() >= rule.probability:
                    continue
                self._fired[at] += 1
                self._injected[operation] += 1
                return rule.effect
        return None

    def _refuse(self, effect: Effect | None, where: str) -> None:
        if effect is Effect.ENOSPC:
            raise NoSpaceError(f"{where}: no space left on device (injected)", "take the fault out")
        if effect is Effect.EIO:
            raise StorageError(f"{where}: input/output error (injected)", "take the fault out")

    def _flip(self, buffers: Sequence[Bytes]) -> None:
        """Turn over one bit somewhere in the buffers."""
        size = sum(len(buffer) for buffer in buffers)
        if not size:
            return
        with self._lock:
            at, bit = self._random.randrange(size), self._random.randrange(8)
        for buffer in buffers:
            if at < len(buffer):
                buffer[at] ^= np.uint8(1 << bit)
                return
            at -= len(buffer)


def _short(where: str) -> StorageError:
    return StorageError(f"{where}: ended early (injected)", "take the fault out")


def _copy(buffer: Bytes) -> Bytes:
    """The same bytes in memory that O_DIRECT takes."""
    copy = aligned_buffer(len(buffer))
    np.copyto(copy, buffer)
    return copy


def _half(buffers: Sequence[Bytes]) -> list[Bytes]:
    """The first half of the buffers' bytes, in whole pages."""
    left = sum(len(buffer) for buffer in buffers) // 2 // ALIGNMENT * ALIGNMENT
    kept: list[Bytes] = []
    for buffer in buffers:
        if left <= 0:
            break
        kept.append(buffer[:left])
        left -= len(kept[-1])
    return kept
