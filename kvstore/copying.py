"""The store's own threads: few, for copies and for disk reads, and the page-aligned buffers that reads may need.

torch's intra-op threads are left out of it: they collapse when another core is busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from kvstore.background import step_back, stepped_back
from kvstore.kv import Bytes
from kvstore.tiers.medium import aligned_buffer

T = TypeVar("T")

SPARE_BUFFERS = 4
"""Private read buffers kept for reuse: fresh pages cost more than the copy."""


class Job(Future[T]):
    """Work for a pool, which any other thread may do instead; it is done once."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work = work
        self._claim: dict[str, object] = {}

    def run(self) -> None:
        """Do the work, unless it is done, being done, or cancelled. Errors come up where the result is asked for.

        A Ctrl-C at any moment ends it, as an error of the work: who waits for a claimed job must not wait for ever.
        What the work holds, such as a request's buffer, is let go of before anybody hears that it is done.
        """
        mine = object()
        try:
            if self._claim.setdefault("by", mine) is mine and self.set_running_or_notify_cancel():
                result = self._work()
                del self._work
                self.set_result(result)
        except BaseException as error:
            if self._claim.get("by") is not mine or self.done():
                raise
            self.set_exception(error)

    def begin(self, pool: ThreadPoolExecutor, among: list[Job[T]] | None = None) -> None:
        """Have the work done in a pool or, where no thread is to be had, here. among: gets this, before it is begun.

        Python ends its pools when the main thread ends, though other threads may go on for hours. A pool that could
        not start a thread keeps the job queued all the same; it must not run a second time then, when its slots are
        others'. With a Ctrl-C in here it is done before that is raised, or goes on among those the caller waits for.
        """
        try:
            if among is not None:
                among.append(self)
            pool.submit(self.run)
        except BaseException as error:
            self.run()
            if not isinstance(error, RuntimeError):
                raise


class CopyThreads:
    """Three pools: ``copy`` for memory, ``read`` for disks, ``write`` for what the mover writes to one.

    A caller that waits for its copies takes part in them (`wait_all`), so that one thread less is enough, and no
    more threads run than ``copy_threads``: on few cores one too many, put to sleep at the wrong moment, stops all.
    For a caller that has stepped back (`background`), threads that have do its copies.
    """

    def __init__(self, copy_threads: int, io_threads: int) -> None:
        self.copy_threads = copy_threads
        beside = max(1, copy_threads - 1)
        self._copy = ThreadPoolExecutor(beside, thread_name_prefix="kvstore-copy")
        self._behind = ThreadPoolExecutor(beside, thread_name_prefix="kvstore-behind", initializer=step_back)
        self._read = ThreadPoolExecutor(io_threads, thread_name_prefix="kvstore-read")
        self._write = ThreadPoolExecutor(1, thread_name_prefix="kvstore-write")
        self._spare: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def copy(self, work: Callable[[], T], among: list[Job[T]]) -> None:
        """Run a copy. among: gets the job."""
        Job(work).begin(self._behind if stepped_back() else self._copy, among)

    def share(self, work: Callable[[], T], most: int, among: list[Job[T]]) -> None:
        """Run a copy that takes from a queue in all the threads there are for copies, ``most`` (one or more) at most.

        among: gets the jobs; the first of several is for the caller to do while it waits for them all (`wait_all`), a
        single one for a thread.
        """
        count = min(most, self.copy_threads)
        if count > 1:
            among.append(Job(work))
        for _ in range(max(1, count - 1)):
            self.copy(work, among)

    def read(self, work: Callable[[], T], among: list[Job[T]]) -> None:
        """Run a disk read. among: gets the job."""
        Job(work).begin(self._read, among)

    def write(self, work: Callable[[], T]) -> Job[T]:
        """Run a disk write."""
        job = Job(work)
        job.begin(self._write)
        return job

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
        self._write.shutdown(wait=True)
        self._read.shutdown(wait=True)
        self._copy.shutdown(wait=True)
        self._behind.shutdown(wait=True)


def wait_all(jobs: Sequence[Job[T]], *, help_out: bool = True) -> list[T]:
    """Results of all; the first error is raised only after every job has ended, so nothing is written later.

    A Ctrl-C too: slots that a job still reads into would be given to others. help_out: do here what no thread has
    begun yet.
    """
    interrupt = ended(jobs, help_out=help_out)
    if interrupt is not None:
        raise interrupt
    return [job.result() for job in jobs]


def ended(jobs: Sequence[Job[T]], *, help_out: bool = True) -> BaseException | None:
    """The same, for jobs that may have been cancelled: waits until every one has ended; returns an interrupt."""
    interrupt: BaseException | None = None
    over = False
    while not over:
        try:
            for job in jobs if help_out else ():
                job.run()
            for job in jobs:
                job.cancelled() or job.exception()  # waits for it
            over = True
        except BaseException as error:  # noqa: BLE001  for the caller, when nothing runs any more
            interrupt = interrupt or error
    return interrupt
