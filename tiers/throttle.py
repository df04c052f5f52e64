"""A medium that is slower than it need be: `ThrottleMedium` wraps another one and holds its transfers back.

It ships for tests, for demos (what a resume costs from a slow disk, on a fast one) and for users who want to know
whether loading would still be worth it. It knows bytes and time only. A memory medium is read and written through its
window, which no wrapper sees: there only `prepare` is held back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvstore.errors import SettingsError
from kvstore.kv import Bytes
from kvstore.tiers.medium import Medium


class ThrottleMedium:
    """Another medium at ``bytes_per_s`` for all calls together, and ``latency_s`` more for each of them.

    Calls share the rate as they would share a device's: in turn. What the inner medium takes counts. clock, sleep: in
    seconds, as `time.monotonic` and `time.sleep`. Raises SettingsError for a rate or a latency that cannot be.
    """

    def __init__(
        self,
        inner: Medium,
        bytes_per_s: float = math.inf,
        latency_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0 or not 0 <= latency_s < math.inf:
            raise SettingsError(
                f"a medium of {bytes_per_s} bytes a second with a latency of {latency_s} s",
                "use a rate above 0 and a latency of 0 or more",
            )
        self.inner = inner
        self.name = inner.name
        self._rate, self._latency = bytes_per_s, latency_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def allocate(self, segment: int, size: int) -> None:
        """Allocate at full speed: no bytes move."""
        self.inner.allocate(segment, size)

    def prepare(self, segment: int, size: int) -> None:
        """Prepare at the rate of writes."""
        until = self._book(size)
        self.inner.prepare(segment, size)
        self._wait(until)

    def join(self, segment: int) -> None:
        """Join; never fails."""
        self.inner.join(segment)

    def remove(self, segment: int) -> None:
        """Remove at full speed."""
        self.inner.remove(segment)

    def length(self, segment: int) -> int | None:
        """As the inner medium says."""
        return self.inner.length(segment)

    def window(self, segment: int, size: int) -> Bytes | None:
        """The inner medium's memory, at its own speed."""
        return self.inner.window(segment, size)

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        """Read, and return no sooner than the rate allows."""
        until = self._book(sum(len(part) for part in into))
        self.inner.read(segment, offset, into)
        self._wait(until)

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        """Write, and return no sooner than the rate allows."""
        until = self._book(sum(len(part) for part in data))
        self.inner.write(segment, offset, data)
        self._wait(until)

    def sync(self, segments: Iterable[int]) -> None:
        """Sync; takes the latency."""
        until = self._book(0)
        self.inner.sync(segments)
        self._wait(until)

    def close(self) -> None:
        """Close the inner medium."""
        self.inner.close()

    def _book(self, size: int) -> float:
        """Take the next ``size`` bytes' time of the device; returns when the call may end."""
        with self._lock:
            self._free_at = max(self._clock(), self._free_at) + size / self._rate
            return self._free_at + self._latency

    def _wait(self, until: float) -> None:
        left = until - self._clock()
        if left > 0:
            self._sleep(left)
