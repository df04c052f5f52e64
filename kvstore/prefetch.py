"""Prefetch: a load that stops at `ram`, in the background; once for all who ask, cancellable, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvstore.errors import KVStoreError
from kvstore.events import Events, Fault
from kvstore.host import boottime_ns
from kvstore.loading import Loader
from kvstore.match import Match, Piece

STEP_BLOCKS = 64


class Prefetch:
    """A prefetch under way, the same object for all who asked for these blocks meanwhile.

    tokens: how many of the match's are in `ram` so far, from its start on.
    """

    def __init__(self, match: Match, deadline: float | None) -> None:
        self.match = match
        self.tokens = 0
        self._deadline = deadline
        self._cancelled = threading.Event()
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, whole or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False when ``timeout`` seconds passed before."""
        return self._done.wait(timeout)

    def cancel(self) -> None:
        """Stop after the blocks being read now, for everybody who has joined it."""
        self._cancelled.set()

    @property
    def stopped(self) -> bool:
        """Cancelled, or past its deadline."""
        return self._cancelled.is_set() or (self._deadline is not None and time.monotonic() > self._deadline)


class Prefetches:
    """The prefetches of a process; one at a time, in order, each chain's once."""

    def __init__(self, loader: Loader, events: Events, purged: Callable[[Match], bool], *, memory_tier: str) -> None:
        self._loader, self._events, self._purged = loader, events, purged
        self._memory_tier = memory_tier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-prefetch")
        self._running: dict[bytes, Prefetch] = {}
        self._lock = threading.Lock()

    def start(self, match: Match, deadline_s: float | None = None) -> Prefetch:
        """Begin, or join one that is under way for the same blocks: as it is, whatever deadline is asked for now."""
        last = [pieces[-1].name.key for pieces in match.pieces.values() if pieces]
        key = b"".join(last)
        with self._lock:
            known = self._running.get(key)
            if known is not None and not known.stopped:
                return known
            fresh = Prefetch(match, None if deadline_s is None else time.monotonic() + deadline_s)
            self._running[key] = fresh
        try:
            self._thread.submit(self._run, key, fresh)
        except BaseException as error:  # nobody must wait for one that is never run
            fresh.cancel()
            self._run(key, fresh)
            if not isinstance(error, RuntimeError):
                raise
            # the store, or the program, is ending: nothing is worth fetching ahead
            self._events.emit(Fault(self._memory_tier, "prefetch", str(error)))
        return fresh

    def close(self) -> None:
        """Cancel what runs, and wait for it to stop."""
        with self._lock:
            for prefetch in self._running.values():
                prefetch.cancel()
        self._thread.shutdown(wait=True)

    def _run(self, key: bytes, prefetch: Prefetch) -> None:
        try:
            self._promote(prefetch)
        except KVStoreError as error:
            self._events.emit(Fault(self._memory_tier, "prefetch", error.problem))
        except Exception as error:  # noqa: BLE001  nobody waits for the pool's answer, so it is told here
            self._events.emit(Fault(self._memory_tier, "prefetch", repr(error)))
        finally:
            with self._lock:
                if self._running.get(key) is prefetch:
                    del self._running[key]
            prefetch._done.set()

    def _promote(self, prefetch: Prefetch) -> None:
        match = prefetch.match
        now = boottime_ns()
        reached = match.tokens
        for part, pieces in match.pieces.items():
            done = 0
            for first in range(0, len(pieces), STEP_BLOCKS):
                if prefetch.stopped or self._purged(match):
                    break
                step: tuple[Piece, ...] = pieces[first : first + STEP_BLOCKS]
                outcome = self._loader.load(replace(match, pieces={part: step}), part, None, now)
                good = sum(piece.take for piece, cause in zip(step, outcome.causes, strict=True) if cause is None)
                done += good
                prefetch.tokens = done
                if good < sum(piece.take for piece in step):
                    break
            reached = min(reached, done)
        prefetch.tokens = reached
