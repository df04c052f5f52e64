"""How a file's memory enters the process: mapped shared, its pages faulted in, and put together into huge ones.

A disk reads into huge pages at its own speed, into scattered small ones at less than half of it (measured: 2.9 against
1.15 GB/s); copies are a little faster too. tmpfs has small pages unless it was mounted otherwise, but since Linux 6.1 a
process may ask for huge ones (``MADV_COLLAPSE``), whatever the host's settings are. Where the kernel says no, or has
no memory in one piece, small pages stay and all else is the same. Knows address ranges, not segments.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.errors import DamagedError, StorageError
from kvstore.kv import Bytes

PAGE = 4096
HUGE_PAGE = 2 << 20

_POPULATE_WRITE, _COLLAPSE = 23, 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_TRANSIENT = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EBUSY})
"""A collapse that failed so may succeed later: a disk was reading the pages, or no memory was in one piece."""
PAUSES_S = (0.0, 0.05, 0.5, 2.0)
"""Seconds before each round of attempts at what is left."""


def map_file(path: Path, size: int) -> Bytes:
    """A whole file, mapped shared. Raises DamagedError when it is missing or shorter than ``size``."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}", "run `kvstore verify --repair`") from error
    try:
        length = os.fstat(fd).st_size
        if length < size:
            raise DamagedError(f"{path} has {length} bytes, expected {size}", "run `kvstore verify --repair`")
        return _map_aligned(fd, length) if length >= HUGE_PAGE else np.frombuffer(mmap.mmap(fd, length), np.uint8)
    except OSError as error:
        raise StorageError(f"mapping {path}: {error.strerror}", "check memory and vm.max_map_count") from error
    finally:
        os.close(fd)


def _map_aligned(descriptor: int, length: int) -> Bytes:
    """A file mapped from an address on where huge pages can be entered. Raises OSError.

    The file is put over a private mapping that is longer by a huge page; the whole goes when its memory is let go of.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = np.frombuffer(mmap.mmap(-1, length + HUGE_PAGE, flags=flags), np.uint8)
    skew = -room.ctypes.data % HUGE_PAGE
    address = room.ctypes.data + skew
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _LIBC.mmap(address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        raise _os_error()
    return room[skew : skew + length]


def populate(memory: Bytes) -> None:
    """Fault pages in for writing, without the GIL; older kernels leave it to the first touch."""
    if len(memory):
        skew = memory.ctypes.data % PAGE
        _LIBC.madvise(memory.ctypes.data - skew, len(memory) + skew, _POPULATE_WRITE)


def huge_pieces(memory: Bytes) -> list[Bytes]:
    """The 2 MiB pieces of a mapping that can be huge pages."""
    first = -memory.ctypes.data % HUGE_PAGE
    return [memory[at : at + HUGE_PAGE] for at in range(first, len(memory) - HUGE_PAGE + 1, HUGE_PAGE)]


def join_pages(piece: Bytes) -> bool:
    """Have a piece of a shared mapping made one huge page, without the GIL; False when it may be done later.

    What it holds stays as it is, for every process, also while it is read and written. Raises OSError where the
    kernel never does it.
    """
    if not _LIBC.madvise(piece.ctypes.data, HUGE_PAGE, _COLLAPSE):
        return True
    error = _os_error()
    if error.errno not in _TRANSIENT:
        raise error
    return False


class HugePages:
    """Joins the pages of mappings, one mapping after the other, in a thread that lives while there is work.

    joined: told of each mapping afterwards, also where nothing could be joined, unless it was withdrawn before.
    """

    def __init__(self, joined: Callable[[Bytes], None]) -> None:
        self._joined = joined
        self._lock = threading.Condition()
        self._waiting: deque[Bytes] = deque()
        self._at: Bytes | None = None
        self._running = self._refused = self._closed = False
        """refused: small pages stay, here and in every mapping to come."""

    def add(self, memory: Bytes) -> None:
        """Have a mapping's pages joined. Never waits."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append(memory)
            if self._running:
                return
            self._running = True
        turn = [self]  # whoever takes it out goes on: the thread, or nobody, after a Ctrl-C before it was started
        try:
            threading.Thread(target=self._begin, args=(turn,), name="kvstore-pages", daemon=True).start()
        except RuntimeError:  # no thread is to be had: small pages do as well
            self._refused = True
            self._run()
        except BaseException:
            if _taken(turn):
                self._ended()
            raise

    def withdraw(self, memory: Bytes) -> None:
        """Forget a mapping: ``joined`` is not told of it once this has returned."""
        with self._lock:
            self._waiting = deque(other for other in self._waiting if other is not memory)
            if self._at is memory:
                self._at = None
                self._lock.notify_all()

    def close(self) -> None:
        """Forget what waits, and wait for what is under way."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._running)

    def _begin(self, turn: list[HugePages]) -> None:
        if _taken(turn):
            self._run()

    def _run(self) -> None:
        try:
            self._join_all()
        except BaseException:
            self._ended()
            raise

    def _ended(self) -> None:
        """`close` must not wait for a thread that is gone."""
        with self._lock:
            self._running = False
            self._lock.notify_all()

    def _join_all(self) -> None:
        while True:
            with self._lock:
                self._running = bool(self._waiting)
                self._lock.notify_all()
                if not self._waiting:
                    return
                memory = self._at = self._waiting.popleft()
            self._join(memory)
            with self._lock:
                if self._at is memory and not self._closed:
                    self._joined(memory)
                self._at = None

    def _join(self, memory: Bytes) -> None:
        left = huge_pieces(memory)
        for pause in PAUSES_S:
            if not left or self._stopped(memory, pause):
                return
            try:
                left = [piece for piece in left if not self._stopped(memory, 0.0) and not join_pages(piece)]
            except OSError:  # not this kernel, or not this filesystem
                self._refused = True

    def _stopped(self, memory: Bytes, pause: float) -> bool:
        """Whether to leave a mapping as it is, now or during a pause of so many seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._refused or self._closed or self._at is not memory, pause)


def _taken(turn: list[HugePages]) -> bool:
    try:
        return bool(turn.pop())
    except IndexError:
        return False


def _os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.restype = ctypes.c_int
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return libc


_LIBC = _libc()
