"""One LMDB environment of a tier: its files, read transactions, and the one thread that writes.

The only module that imports ``lmdb``; it knows bytes, not what they mean. LMDB's writer lock is the store's only lock
between processes, so what runs under it is small: no payload is copied and no file allocated inside a write
transaction. Readers take no lock.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from kvstore.errors import BusyError, ClosedError, DamagedError, KVStoreError, NoSpaceError, StorageError
from kvstore.transaction import PAGE, Database, Transaction

T = TypeVar("T")

MAX_READERS = 510
FULL_PAUSES_S = (0.0, 0.01, 0.05)
"""How long the writer waits for readers of a full index to end, before it tries once more."""
_DAMAGE = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)
LOCK_BYTES = 8 * PAGE
"""Size of ``lock.mdb``: LMDB's header and 64 bytes a reader."""


class _Job:
    """Work queued for the writer."""

    __slots__ = ("alone", "future", "work")

    def __init__(self, work: Callable[[Transaction], Any], alone: bool) -> None:
        self.work, self.alone = work, alone
        self.future: Future[Any] = Future()


class Index:
    """An LMDB environment, preallocated to its full size.

    directory: holds ``data.mdb`` and ``lock.mdb``; created with mode 0700. size: bytes of ``data.mdb``, a multiple of
    4096. durable: commits reach the disk (all but the last after a power failure); else they only survive the process.
    Raises DamagedError for truncated or foreign files, NoSpaceError when the medium cannot hold ``size``.
    """

    def __init__(self, directory: Path, size: int, *, durable: bool, name: str) -> None:
        self.directory = directory
        self.size = size
        self.name = name
        directory.mkdir(mode=0o700, exist_ok=True)
        data = directory / "data.mdb"
        fresh = not data.exists()
        if not fresh and data.stat().st_size < size:
            raise DamagedError(
                f"{data} has {data.stat().st_size} bytes, it was made with {size}",
                f"restore the file, or remove {directory.parent}: its cached blocks are lost, nothing else",
            )
        self._preallocate_lock()
        with _translated(f"opening the {name} index"):
            self._env = lmdb.open(
                os.fspath(directory),
                map_size=size,
                max_dbs=len(Database),
                max_readers=MAX_READERS,
                metasync=False,
                sync=durable,
                readahead=False,
                mode=0o600,
            )
        try:
            self._preallocate(fresh)
            with _translated(f"opening the {name} index"):
                self._handles: dict[Database, Any] = {db: self._env.open_db(db.value.encode()) for db in Database}
                self._env.reader_check()
        except BaseException:
            self._env.close()
            raise
        self._closed = False
        self._readers: set[object] = set()
        self._idle = threading.Condition()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._next: _Job | None = None
        """Taken from the queue for a group that it must not be in. Only the writer thread knows it."""
        self._thread = threading.Thread(target=self._run, name=f"kvstore-{name}-writer", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no thread is to be had, or Ctrl-C; LMDB opens no environment twice in a process
            self._queue.put(None)
            self._env.close()
            raise

    @property
    def allocated(self) -> int:
        """Bytes of the environment's files."""
        return sum(path.stat().st_size for path in self.directory.iterdir())

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A consistent view. Raises ClosedError after `close`."""
        reader = object()
        try:
            with self._idle:
                if self._closed:
                    raise ClosedError(f"the {self.name} index is closed", "open the store again")
                self._readers.add(reader)
            try:
                with self._env.begin(buffers=False) as txn:
                    yield Transaction(txn, self._handles)
            except lmdb.Error as error:
                raise _as_ours(f"reading the {self.name} index", error) from error
        finally:
            try:
                self._left(reader)
            except BaseException:  # Ctrl-C in there: `close` would wait for this reader for ever
                self._left(reader)
                raise

    def _left(self, reader: object) -> None:
        with self._idle:
            self._readers.discard(reader)
            self._idle.notify_all()

    def submit(self, work: Callable[[Transaction], T], *, alone: bool = False) -> Future[T]:
        """Queue ``work`` for the writer thread; the future is done after the commit.

        Works that are queued together share a transaction, unless ``alone``: what reads the last commit beside its
        transaction does not see what others of a group did. ``work`` may be run again when another one of the group
        fails, so it must have no effect outside its transaction.
        """
        job = _Job(work, alone)
        with self._idle:
            if self._closed:
                raise ClosedError(f"the {self.name} index is closed", "open the store again")
            self._queue.put(job)
        return job.future

    def write(
        self,
        work: Callable[[Transaction], T],
        timeout: float | None = None,
        *,
        alone: bool = False,
        unheard: Callable[[T], object] | None = None,
    ) -> T:
        """Run ``work`` in a write transaction, ``alone`` as in `submit`, and wait for its commit.

        unheard: gets the result where a Ctrl-C ends the wait and the work is done all the same; must not wait. Raises
        BusyError when the writer lock was not had within ``timeout`` seconds: then ``work`` never runs.
        """
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError(f"the {self.name} index's writer would wait for itself")
        future = self.submit(work, alone=alone)

        def told(done: Future[T]) -> None:
            if unheard is not None and not done.cancelled() and done.exception() is None:
                unheard(done.result())

        try:
            try:
                return future.result(timeout)
            except FutureTimeout:
                if not future.cancel():
                    return future.result()
        except BaseException:
            if not future.cancel():
                future.add_done_callback(told)
            raise
        problem = f"the {self.name} index is locked by another process"
        raise BusyError(problem, "try again; `kvstore doctor` lists the owners")

    def check_readers(self) -> int:
        """Free the reader slots of dead processes; returns how many."""
        return int(self._env.reader_check())

    def oldest_reader(self) -> int | None:
        """The number of the oldest transaction that a reader of any process still sees; None without readers."""
        rows = (line.split() for line in str(self._env.readers()).splitlines())
        return min((int(row[2]) for row in rows if len(row) == 3 and row[2].isdigit()), default=None)

    def used_bytes(self) -> int:
        """Bytes of pages in use, freed pages included."""
        return int(self._env.info()["last_pgno"] + 1) * int(self._env.stat()["psize"])

    def sync(self) -> None:
        """Flush everything to the medium."""
        with _translated(f"syncing the {self.name} index"):
            self._env.sync(True)

    def close(self) -> None:
        """Finish what is queued and close. Waits for readers; safe to call again, also after an interrupt."""
        with self._idle:
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        with self._idle:
            self._idle.wait_for(lambda: not self._readers)
            self._env.close()

    def _preallocate(self, fresh: bool) -> None:
        """Give ``data.mdb`` all its blocks; LMDB must have made it, since a file of zeros is none of its own."""
        self._allocate(self.directory / "data.mdb", self.size, fresh=fresh)

    def _preallocate_lock(self) -> None:
        """Give ``lock.mdb`` all its blocks, before LMDB opens it.

        Never afterwards: closing a file drops all POSIX locks that the process has on it, LMDB's among them, and the
        next process to open the index would find nobody there and make the lock anew under those who write.
        """
        self._allocate(self.directory / "lock.mdb", LOCK_BYTES, fresh=False)

    def _allocate(self, path: Path, size: int, *, fresh: bool) -> None:
        """All blocks of a file: a full medium must not stop an eviction, or turn a page into a SIGBUS."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if fresh or os.fstat(fd).st_blocks * 512 < max(size, os.fstat(fd).st_size):
                os.posix_fallocate(fd, 0, max(size, os.fstat(fd).st_size))
        except OSError as error:
            raise NoSpaceError(
                f"no room for the {self.name} index of {self.size} bytes: {error.strerror}",
                "free some space, or lower the budget",
            ) from error
        finally:
            os.close(fd)

    def _run(self) -> None:
        running = True
        while running:
            job, self._next = self._next or self._queue.get(), None
            if job is None:
                return
            try:
                running = self._group(job)
            except BaseException as error:  # noqa: BLE001  the caller gets it; the writer must live on
                if not job.future.done():
                    job.future.set_exception(error)

    def _group(self, first: _Job) -> bool:
        """One transaction for ``first`` and all that is queued; False when the index is being closed."""
        running = True
        jobs: list[_Job] = []
        failed = False
        results: list[Any] = []
        txn = None
        try:
            txn = self._env.begin(write=True, buffers=False)
            queued = [first]
            while not (first.alone or self._next or self._queue.empty()):
                job = self._queue.get()
                if job is None:
                    running = False
                elif job.alone:
                    self._next = job
                else:
                    queued.append(job)
            jobs = [job for job in queued if job.future.set_running_or_notify_cancel()]
            for job in jobs:
                results.append(job.work(Transaction(txn, self._handles)))
            txn.commit()
        except BaseException as raised:  # noqa: BLE001  handed to the caller below
            error = raised
            if isinstance(raised, lmdb.Error):
                error = _as_ours(f"writing the {self.name} index", raised)
                error.__cause__ = raised  # `raise … from`, for one that the caller's thread will raise
            failed = True
            if txn is not None:
                txn.abort()
            if txn is None or (len(jobs) == 1 and not isinstance(error, NoSpaceError)):
                for job in jobs or [first]:
                    job.future.set_exception(error)
                return running
        if not failed:
            for job, result in zip(jobs, results, strict=True):
                job.future.set_result(result)
            return running
        for job in jobs:
            self._alone(job)
        return running

    def _alone(self, job: _Job) -> None:
        """A transaction for one job, after its group failed.

        A full index is often full of pages that only a reader keeps: a dead one is shown out, a living one is done
        in a moment.
        """
        for pause in (*FULL_PAUSES_S, None):
            try:
                with _translated(f"writing the {self.name} index"), self._env.begin(write=True, buffers=False) as txn:
                    result = job.work(Transaction(txn, self._handles))
            except BaseException as error:  # noqa: BLE001  handed to the caller
                if pause is None or not isinstance(error, NoSpaceError) or not self._showed_out():
                    job.future.set_exception(error)
                    return
                time.sleep(pause)
            else:
                job.future.set_result(result)
                return

    def _showed_out(self) -> bool:
        """Free the reader slots of the dead; False when the reader table cannot be read: then waiting is no use."""
        try:
            self._env.reader_check()
        except lmdb.Error:
            return False
        return True


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """LMDB's errors become ours. Where a request waits, `_as_ours` is called without this."""
    try:
        yield
    except lmdb.Error as error:
        raise _as_ours(what, error) from error


def _as_ours(what: str, error: lmdb.Error) -> KVStoreError:
    """The one place that knows what LMDB's errors mean."""
    if isinstance(error, lmdb.MapFullError):
        return NoSpaceError(f"{what}: the index is full", "raise the tier's budget, or use larger blocks")
    if isinstance(error, lmdb.DiskError):
        return NoSpaceError(f"{what}: the medium is full", "free some space on it")
    if isinstance(error, _DAMAGE):
        return DamagedError(f"{what}: {error}", "remove the tier's directory: cached blocks are lost, nothing else")
    if isinstance(error, lmdb.LockError):
        return BusyError(f"{what}: {error}", "close the other handle first")
    return StorageError(f"{what}: {error}", "check the disk; `kvstore doctor` helps")
