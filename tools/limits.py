"""What the machine can do at best: copies between memory, and direct reads and writes of a file.

Each limit is measured with the same number of threads, the same block sizes and the same kinds of memory as the
figure beside it: anonymous memory and a mapping of a tmpfs file, all of it touched before. Disk limits use O_DIRECT on
a preallocated file filled with zeros, and ``fdatasync`` at the end of each batch. Must not know the store.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import PathError

Bytes: TypeAlias = npt.NDArray[np.uint8]
PAGE = 4096
FILL_BYTES = 8 << 20


class Memory:
    """``size`` bytes, page-aligned and touched: anonymous, or the mapping of a file on tmpfs."""

    def __init__(self, size: int, folder: Path | None = None) -> None:
        """folder: where a shared mapping's file lies (on tmpfs); None makes anonymous memory, in huge pages if it can.

        Raises PathError when the file cannot be allocated.
        """
        length = -(-size // PAGE) * PAGE
        if folder is None:
            self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):
                    self._map.madvise(mmap.MADV_HUGEPAGE)
        else:
            self._map = _mapped(folder / f"limit-{secrets.token_hex(6)}", length)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.bytes[:] = 1
        self.bytes = self.bytes[:size]

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Some bytes, writable, for preadv and pwritev."""
        return [memoryview(self._map)[start:stop]]


class Pieces:
    """Memory that lies in several places, as one: what a store has its blocks in."""

    def __init__(self, places: Sequence[Bytes]) -> None:
        self.places = tuple(places)

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Some bytes, writable, for preadv and pwritev."""
        return [place.data for place in cut(self.places, start, stop)]


def cut(places: Sequence[Bytes], start: int, stop: int) -> list[Bytes]:
    """The bytes ``start`` … ``stop`` of several places one behind the other."""
    found: list[Bytes] = []
    for place in places:
        if start < len(place) and stop > 0:
            found.append(place[max(start, 0) : min(stop, len(place))])
        start, stop = start - len(place), stop - len(place)
    return found


def _mapped(path: Path, length: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)
        os.posix_fallocate(descriptor, 0, length)
        return mmap.mmap(descriptor, length)
    except OSError as error:
        raise PathError(f"{length} bytes cannot be allocated in {path.parent}: {error}", "free some space") from error
    finally:
        os.close(descriptor)


def shares(total: int, parts: int, unit: int) -> list[tuple[int, int]]:
    """``total`` split into at most ``parts`` spans at multiples of ``unit``, nearly equal."""
    units = -(-total // unit)
    edges = [min(total, units * index // parts * unit) for index in range(parts + 1)]
    return [(a, b) for a, b in pairwise(edges) if b > a]


def memcpy(target: Sequence[Bytes], source: Sequence[Bytes], pool: ThreadPoolExecutor, threads: int) -> float:
    """Seconds to copy ``source`` to ``target`` with ``threads`` threads, each one contiguous span of them.

    Each is in places of the same sizes, in the same order.
    """
    spans = shares(sum(map(len, source)), threads, PAGE)

    def copy(span: tuple[int, int]) -> None:
        for into, out_of in zip(cut(target, *span), cut(source, *span), strict=True):
            np.copyto(into, out_of)

    return timed(lambda: run_all(pool, copy, spans))


def run_all(
    pool: ThreadPoolExecutor, work: Callable[[tuple[int, int]], None], spans: Sequence[tuple[int, int]]
) -> None:
    """``work`` on every span: the calling thread takes the first, the pool the others."""
    others = [pool.submit(work, span) for span in spans[1:]]
    work(spans[0])
    for other in others:
        other.result()


def timed(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class RawFile:
    """A preallocated, zero-filled file for direct reads and writes; deleted at the end. `over`: one that was there.

    ``direct`` tells whether the filesystem took O_DIRECT; where it does not, reads and writes are buffered, as the
    store's are, and a read first drops the file from the page cache.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Raises PathError when ``size`` bytes (a multiple of 4096) cannot be had in ``folder``."""
        self.size = size
        self.path = folder / f"raw-{secrets.token_hex(6)}"
        self._made = True
        try:
            self._fd, self.direct = _open_direct(self.path)
        except OSError as error:
            raise PathError(f"{folder} cannot be written: {error}", "choose a folder you may write to") from error
        try:
            os.posix_fallocate(self._fd, 0, size)
            zeros = mmap.mmap(-1, FILL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for at in range(0, size, FILL_BYTES):
                os.pwritev(self._fd, [memoryview(zeros)[: min(FILL_BYTES, size - at)]], at)
            os.fdatasync(self._fd)
        except OSError as error:
            self.close()
            raise PathError(f"{size} bytes cannot be written in {folder}: {error}", "free some space") from error

    @classmethod
    def over(cls, path: Path, size: int) -> Self:
        """The first ``size`` bytes of a file that is there and stays; `write` destroys what they hold."""
        there = cls.__new__(cls)
        there.size, there.path, there._made = size, path, False
        there._fd, there.direct = _open_direct(path)
        return there

    def write(
        self, memory: Memory | Pieces, block: int, pool: ThreadPoolExecutor, threads: int, batch: int | None = None
    ) -> float:
        """Seconds to write the file from ``memory``, ``block`` bytes a call, ``fdatasync`` after each ``batch``."""
        return timed(lambda: self._batches(memory, block, pool, threads, batch or self.size))

    def read(self, memory: Memory | Pieces, block: int, pool: ThreadPoolExecutor, threads: int) -> float:
        """Seconds to read the file into ``memory``, ``block`` bytes a call."""
        if not self.direct:
            os.posix_fadvise(self._fd, 0, self.size, os.POSIX_FADV_DONTNEED)

        def work(span: tuple[int, int]) -> None:
            for at in range(*span, block):
                stop = min(at + block, span[1])
                while at < stop:
                    at += os.preadv(self._fd, memory.views(at, stop), at)

        return timed(lambda: run_all(pool, work, shares(self.size, threads, block)))

    def _batches(self, memory: Memory | Pieces, block: int, pool: ThreadPoolExecutor, threads: int, batch: int) -> None:
        for start in range(0, self.size, batch):
            stop = min(start + batch, self.size)

            def work(span: tuple[int, int], start: int = start) -> None:
                for at in range(start + span[0], start + span[1], block):
                    end = min(at + block, start + span[1])
                    while at < end:
                        at += os.pwritev(self._fd, memory.views(at, end), at)

            run_all(pool, work, shares(stop - start, threads, block))
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file, and delete it if it was made here."""
        os.close(self._fd)
        if self._made:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_direct(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600), False
