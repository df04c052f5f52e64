"""Saves in the background: one thread, a bounded queue, and nothing that a request waits for unless it must.

Whoever submits work promises that the memory stays as it is until the work is done. Must not know models or caches.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock

from kvstore.copying import Job
from kvstore.events import Events, Fault, Skipped, SkipReason

PENDING = 8
"""Saves that may wait. Each holds a request's buffer, so they bound memory."""


# A save copies with threads of the store's, and none starts work once the interpreter has begun to end; `atexit` is
# later than that. Where this hook is missing, a program that does not close its store may lose its last saves.
_at_exit: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)


class Saver:
    """One worker thread. At the interpreter's exit it finishes what was submitted."""

    def __init__(self, events: Events, pending: int = PENDING) -> None:
        self._events = events
        self._room = pending
        self._lock = Lock()
        self._waiting: set[Future[None]] = set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvstore-save")
        _at_exit(_flush, weakref.ref(self))

    def submit(self, work: Callable[[], object], blocks: int) -> Future[None] | None:
        """Do ``work``, which saves about ``blocks`` blocks, soon; None where too much waits already: no save."""
        job = Job(partial(self._do, work))
        with self._lock:
            room = len(self._waiting) < self._room
            if room:
                self._waiting.add(job)
        if not room:
            self._events.emit(Skipped("ram", SkipReason.BUSY, blocks))
            return None
        job.add_done_callback(self._done)
        job.begin(self._worker)
        return job

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted is done; False where ``timeout`` seconds were not enough."""
        with self._lock:
            waiting = set(self._waiting)
        return not wait(waiting, timeout).not_done

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._worker.shutdown(wait=True)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  a store that fails costs the save, never the request
            self._events.emit(Fault("adapter", "save", repr(error)))

    def _done(self, future: Future[None]) -> None:
        with self._lock:
            self._waiting.discard(future)


def _flush(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.flush()
