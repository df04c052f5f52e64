"""Host memory for KV buffers, kept warm between requests.

Fresh pages cost several times the copy that fills them, so memory is reused, and advised to be huge pages before its
first touch. A block comes back by itself when the last tensor or array over it is gone: as long as anybody can see a
buffer, it is never handed out again. Must not know shapes, caches or models.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20
KEEP_BLOCKS = 4
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module of Python 3.11 has no name for it


class Pool:
    """Anonymous mappings that are reused.

    ``keep_bytes`` bounds what lies idle here; what is in use is not counted. All methods may be called from any thread.
    """

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self.keep_bytes = keep_bytes
        self.made = 0
        self.reused = 0
        self._lock = Lock()
        self._free: list[mmap.mmap] = []
        # A finalizer may run inside `take`, on the same thread, while the lock is held: it only appends here.
        self._returned: deque[mmap.mmap] = deque()

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """A page-aligned array of at least ``size`` bytes; what is in it is undefined."""
        wanted = _rounded(size)
        with self._lock:
            self._collect()
            fitting = [block for block in self._free if wanted <= len(block) <= 2 * wanted]
            block = min(fitting, key=len, default=None)
            if block is not None:
                self._free.remove(block)
                self.reused += 1
        if block is None:
            block = _mapping(wanted)
            self.made += 1
        array: npt.NDArray[np.uint8] = np.frombuffer(block, np.uint8)
        weakref.finalize(array, self._returned.append, block).atexit = False
        return array

    def warm(self, size: int) -> None:
        """Have a block of at least ``size`` bytes lie here with its pages already faulted in."""
        array = self.take(size)
        populate(array)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return self

    def _collect(self) -> None:
        """Take back what was returned; drop the oldest above the bounds."""
        while self._returned:
            self._free.append(self._returned.popleft())
        while self._free and (len(self._free) > KEEP_BLOCKS or sum(map(len, self._free)) > self.keep_bytes):
            self._free.pop(0)


def populate(array: npt.NDArray[np.uint8]) -> None:
    """Fault the pages of ``array`` in; its contents are lost."""
    block: Any = array.base
    if isinstance(block, memoryview):
        block = block.obj
    if isinstance(block, mmap.mmap):
        try:
            block.madvise(_POPULATE_WRITE)
            return
        except OSError:
            pass  # an older kernel: writing does the same, more slowly
    array.fill(0)


def _mapping(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size)
    with suppress(OSError):  # a kernel without transparent huge pages: small pages work as well
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _rounded(size: int) -> int:
    """``size`` up to the next of eight steps a power of two, so that a growing chat finds its block again."""
    step = max(HUGE_PAGE, 1 << max(0, size.bit_length() - 4))
    return -(-max(size, 1) // step) * step
