"""Transfers under way: what must stay in place until the device is done with it, and the handles that callers hold.

A *flight* is the tier's side: it is landed, its slots released and its memory let go, once its marks have passed,
whether or not anybody waits. A handle that is garbage-collected only leaves its flight on a list, for the tier to
take up at its next call: a finalizer may run anywhere, also under the tier's lock. Must not know how copies are made.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch

from kvstore.kv import Bytes
from kvstore.tiers.arena import Entry
from kvstore.tiers.lanes import UNSEALED, Mark


@dataclass(slots=True, eq=False)
class Flight:
    """One call's copies.

    marks: have passed when all copies are done; until the call is over, one that never passes. queued: what becomes
    of them then. entries: one use
    of each is the flight's. promised: one use of each is the handle's, until it says what becomes resident. memory:
    host memory that is read or written. deferred: host memory still to be filled from the device by whoever waits,
    since it is not page-locked.
    """

    marks: list[Mark] = field(default_factory=lambda: [UNSEALED])
    queued: list[Mark] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    promised: list[Entry] = field(default_factory=list)
    memory: list[Bytes] = field(default_factory=list)
    deferred: list[tuple[Bytes, torch.Tensor]] = field(default_factory=list)

    def done(self) -> bool:
        """Whether nothing of it is outstanding; False for ever when the device failed, so that no slot is reused."""
        try:
            return not self.deferred and all(mark.done() for mark in self.marks)
        except RuntimeError:
            return False


class Landing(Protocol):
    """What handles need of the tier. Safe for any thread."""

    abandoned: deque[Flight]

    def download(self, target: Bytes, source: torch.Tensor) -> None:
        """Copy from the device, through pinned memory, behind the outbound lane. Raises RuntimeError."""

    def land(self, flight: Flight) -> None:
        """Release what a flight has held, once."""

    def failed(self, what: str, error: RuntimeError) -> None:
        """The device failed."""

    def settle(self, flight: Flight, chosen: Sequence[Entry]) -> int:
        """Make chosen promised blocks resident and release all of them."""


class TransferHandle:
    """`kvstore.tiers.device.Transfer` and `Load`."""

    def __init__(self, tier: Landing, flight: Flight, taken: Sequence[bool], size: int) -> None:
        self._tier = tier
        self._flight = flight
        self._taken = tuple(taken)
        self._size = size
        self._waiting = threading.Lock()
        self._outcome: bool | None = None
        _abandon(self, tier, flight)

    @property
    def taken(self) -> tuple[bool, ...]:
        """For each item, whether it is part of the transfer."""
        return self._taken

    @property
    def size(self) -> int:
        """Payload bytes that cross between host and device."""
        return self._size

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._outcome is not None or self._flight.done()

    def wait(self) -> bool:
        """Return when host memory is no longer in use; whether the copies were made."""
        with self._waiting:
            if self._outcome is None:
                self._outcome = self._finish()
            return self._outcome

    def keep(self, keys: Collection[bytes] | None = None) -> int:
        """Make blocks that came from the host resident. Returns how many became so."""
        whole = self.wait()
        named = None if keys is None else frozenset(keys)
        chosen = [entry for entry in self._flight.promised if whole and (named is None or entry.key in named)]
        return self._tier.settle(self._flight, chosen)

    def _finish(self) -> bool:
        flight = self._flight
        try:
            for target, source in flight.deferred:
                self._tier.download(target, source)
            for mark in flight.marks:
                mark.wait()
        except RuntimeError as error:
            self._tier.failed("wait", error)
            return False
        finally:
            flight.deferred = []
        self._tier.land(flight)
        return True


class HeldBlocks:
    """`kvstore.tiers.device.Held`."""

    def __init__(self, tier: Landing, flight: Flight, found: Sequence[bool]) -> None:
        self._tier = tier
        self._flight = flight
        self._found = tuple(found)
        _abandon(self, tier, flight)

    @property
    def found(self) -> tuple[bool, ...]:
        """For each key, whether its block is held."""
        return self._found

    def release(self) -> None:
        """Let go of the blocks."""
        self._tier.settle(self._flight, ())

    def __enter__(self) -> HeldBlocks:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""
        self.release()


def _abandon(handle: object, tier: Landing, flight: Flight) -> None:
    weakref.finalize(handle, tier.abandoned.append, flight).atexit = False
