"""One LMDB environment of a tier: named databases, read transactions, and the one thread that writes.

The only module that imports ``lmdb``; it knows bytes, not what they mean. LMDB's writer lock is the store's only lock
between processes, so what runs under it is small: no payload is copied and no file allocated inside a write
transaction. Readers take no lock.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import lmdb

from kvstore.errors import BusyError, ClosedError, DamagedError, KVStoreError, NoSpaceError, StorageError

T = TypeVar("T")
_Items: TypeAlias = Iterator[tuple[bytes, bytes]]

MAX_READERS = 510
FULL_PAUSES_S = (0.0, 0.01, 0.05)
"""How long the writer waits for readers of a full index to end, before it tries once more."""
PAGE = 4096
_ZEROS = bytes(PAGE - 16)
"""A value that takes a page of its own, behind LMDB's header."""
LOCK_BYTES = 8 * PAGE
"""Size of ``lock.mdb``: LMDB's header and 64 bytes a reader."""


class Database(StrEnum):
    """The named databases; `FORMAT.md` describes their records."""

    BLOCKS = "blocks"
    SLOTS = "slots"
    WRITING = "writing"
    SEGMENTS = "segments"
    FREE = "free"
    LEASES = "leases"
    NAMES = "names"
    NAMESPACES = "namespaces"
    USAGE = "usage"
    PURGE = "purge"
    DAYS = "days"
    META = "meta"


class Transaction:
    """A read or write transaction; valid on the thread and in the block it was opened in."""

    def __init__(self, txn: lmdb.Transaction, handles: dict[Database, Any]) -> None:
        self._txn = txn
        self._handles = handles

    def get(self, db: Database, key: bytes) -> bytes | None:
        """The value of a key."""
        return cast("bytes | None", self._txn.get(key, db=self._handles[db]))

    def get_many(self, db: Database, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of many keys, by one call into LMDB."""
        with self._txn.cursor(self._handles[db]) as cursor:
            found = cast("dict[bytes, bytes]", dict(cursor.getmulti(keys)))
        return [found.get(key) for key in keys]

    def put(self, db: Database, key: bytes, value: bytes) -> None:
        """Set a key's value."""
        self._txn.put(key, value, db=self._handles[db])

    def put_many(self, db: Database, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Set many keys, by one call into LMDB."""
        with self._txn.cursor(self._handles[db]) as cursor:
            cursor.putmulti(items)

    def delete(self, db: Database, key: bytes) -> bool:
        """Delete a key; False when it was not there."""
        return bool(self._txn.delete(key, db=self._handles[db]))

    def pop(self, db: Database, key: bytes) -> bytes | None:
        """Delete a key and return its value."""
        return cast("bytes | None", self._txn.pop(key, db=self._handles[db]))

    def append(self, db: Database, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Set keys that come in order, behind all that the database has."""
        with self._txn.cursor(self._handles[db]) as cursor:
            cursor.putmulti(items, append=True)

    def fill(self, db: Database, prefix: bytes, count: int) -> None:
        """Take ``count`` pages, each by a record under ``prefix`` whose value is one page of zeros."""
        for number in range(count):
            self.put(db, prefix + number.to_bytes(4, "big"), _ZEROS)

    def unfill(self, db: Database, prefix: bytes) -> None:
        """Delete all records under ``prefix``."""
        for key in [key for key, _ in self.scan(db, prefix)]:
            self.delete(db, key)

    @property
    def number(self) -> int:
        """The transaction's number in the life of the environment."""
        return int(self._txn.id())

    def clear(self, db: Database) -> None:
        """Delete every key of a database."""
        self._txn.drop(self._handles[db], delete=False)

    def count(self, db: Database) -> int:
        """How many keys a database has."""
        return int(self._txn.stat(self._handles[db])["entries"])

    def pages(self, db: Database) -> int:
        """How many pages a database takes."""
        stat = self._txn.stat(self._handles[db])
        return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])

    def live_bytes(self) -> int:
        """Bytes of the pages that all databases take now."""
        return PAGE * sum(self.pages(db) for db in Database)

    def scan(self, db: Database, prefix: bytes = b"", start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Keys with a prefix, in order, from ``start`` on. The database must not be changed meanwhile."""
        with self._txn.cursor(self._handles[db]) as cursor:
            begin = start if start is not None else prefix
            if not (cursor.set_range(begin) if begin else cursor.first()):
                return
            for key, value in cast("_Items", cursor.iternext(keys=True, values=True)):
                if not key.startswith(prefix):
                    return
                yield key, value

    def scan_back(self, db: Database, prefix: bytes, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys with a prefix that come before ``before``, nearest first."""
        with self._txn.cursor(self._handles[db]) as cursor:
            placed = cursor.prev() if cursor.set_range(before) else cursor.last()
            if not placed:
                return
            for key, value in cast("_Items", cursor.iterprev(keys=True, values=True)):
                if not key.startswith(prefix):
                    return
                yield key, value

    def last(self, db: Database) -> tuple[bytes, bytes] | None:
        """The largest key and its value."""
        with self._txn.cursor(self._handles[db]) as cursor:
            return cast("tuple[bytes, bytes]", cursor.item()) if cursor.last() else None


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
        except BaseException:  # no thread is to be had; LMDB opens no environment twice in a process
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
            with _translated(f"reading the {self.name} index"), self._env.begin(buffers=False) as txn:
                yield Transaction(txn, self._handles)
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
        """Finish what is queued and close. Waits for readers; safe to call twice."""
        with self._idle:
            if self._closed:
                return
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
            with _translated(f"writing the {self.name} index"):
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
            with _translated(f"writing the {self.name} index"):
                for job in jobs:
                    results.append(job.work(Transaction(txn, self._handles)))
                txn.commit()
        except BaseException as error:  # noqa: BLE001  handed to the caller below
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
    """The one place where LMDB's errors become ours."""
    try:
        yield
    except KVStoreError:
        raise
    except lmdb.MapFullError as error:
        raise NoSpaceError(f"{what}: the index is full", "raise the tier's budget, or use larger blocks") from error
    except lmdb.DiskError as error:
        raise NoSpaceError(f"{what}: the medium is full", "free some space on it") from error
    except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError) as error:
        raise DamagedError(
            f"{what}: {error}", "remove the tier's directory: cached blocks are lost, nothing else"
        ) from error
    except lmdb.LockError as error:
        raise BusyError(f"{what}: {error}", "close the other handle first") from error
    except lmdb.Error as error:
        raise StorageError(f"{what}: {error}", "check the disk; `kvstore doctor` helps") from error
