"""The store's own threads: few, for copies and for disk reads, and the page-aligned buffers that reads may need.

torch's intra-op threads are left out of it: they collapse when another core is busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from kvstore.kv import Bytes
from kvstore.tiers.medium import aligned_buffer

T = TypeVar("T")

SPARE_BUFFERS = 4
"""Private read buffers kept for reuse: fresh pages cost more than the copy."""


class CopyThreads:
    """Two pools: ``copy`` for memory, ``read`` for disks."""

    def __init__(self, copy_threads: int, io_threads: int) -> None:
        self.copy_threads = copy_threads
        self._copy = ThreadPoolExecutor(copy_threads, thread_name_prefix="kvstore-copy")
        self._read = ThreadPoolExecutor(io_threads, thread_name_prefix="kvstore-read")
        self._spare: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def copy(self, job: Callable[[], T]) -> Future[T]:
        """Run a copy."""
        return _submit(self._copy, job)

    def read(self, job: Callable[[], T]) -> Future[T]:
        """Run a disk read."""
        return _submit(self._read, job)

    def run_length(self, blocks: int, most: int = 16) -> int:
        """Blocks to a job, so that every thread has work and a job is worth its start."""
        return max(1, min(most, -(-blocks // (4 * self.copy_threads))))

    @contextmanager
    def buffer(self, size: int) -> Iterator[Bytes]:
        """A page-aligned private buffer, reused between calls."""
        with self._lock:
            spare = self._spare.setdefault(size, [])
            memory = spare.pop() if spare else None
        if memory is None:
            memory = aligned_buffer(size)
        try:
            yield memory
        finally:
            with self._lock:
                if len(spare) < SPARE_BUFFERS:
                    spare.append(memory)

    def close(self) -> None:
        """Wait for what runs, and end the threads."""
        self._read.shutdown(wait=True)
        self._copy.shutdown(wait=True)


def _submit(pool: ThreadPoolExecutor, job: Callable[[], T]) -> Future[T]:
    """Run a job in a pool or, where no thread is to be had, here.

    Python ends its pools when the main thread ends, though other threads may go on for hours. A pool that could not
    start a thread keeps the job queued all the same; it must not run a second time then, when its slots are others'.
    """
    future: Future[T] = Future()
    claim = threading.Lock()

    def run() -> None:
        if not claim.acquire(blocking=False) or not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(error)

    try:
        pool.submit(run)
    except RuntimeError:
        run()
    return future


def wait_all(futures: Sequence[Future[T]]) -> list[T]:
    """Results of all; the first error is raised only after every job has ended, so nothing is written later."""
    error: BaseException | None = None
    results: list[T] = []
    for future in futures:
        try:
            results.append(future.result())
        except BaseException as failure:  # noqa: BLE001  raised below, when nothing runs any more
            error = error or failure
    if error is not None:
        raise error
    return results
