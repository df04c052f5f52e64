"""Page-locking of host memory, so that a device copies to and from it by itself: within a budget, in the background.

Segments are registered one by one by a thread of its own, since pinning a gigabyte takes a good part of a second and
must not be waited for. Until a segment is registered, copies of it go through a small ring of pinned pieces. Knows
address ranges, not slots or blocks; imports torch only once it is asked to work for a CUDA device.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstore.errors import BudgetError
from kvstore.events import Events, Notice
from kvstore.kv import Bytes

if TYPE_CHECKING:
    import torch

    from kvstore.tiers.lanes import Lane, Lanes, Mark

RING_PIECES, RING_PIECE_BYTES = 4, 4 << 20

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Registrar(Protocol):
    """What page-locks memory. Called from one thread at a time."""

    def register(self, address: int, size: int) -> None:
        """Lock the pages of a range. Raises OSError that says why not."""

    def unregister(self, address: int, size: int) -> None:
        """Unlock them. Raises OSError."""


class CudaRegistrar:
    """cudaHostRegister, for one device's context."""

    def __init__(self, device: str) -> None:
        import torch

        cuda: Any = torch.cuda
        self._device = torch.device(device)
        self._guard: Callable[[torch.device], Any] = cuda.device
        self._cudart: Any = cuda.cudart()

    def register(self, address: int, size: int) -> None:
        """Pin the range. The calling thread must launch no kernels: a refused call leaves its error behind there."""
        with self._guard(self._device):
            self._check("cudaHostRegister", self._cudart.cudaHostRegister(address, size, _PORTABLE))

    def unregister(self, address: int, size: int) -> None:
        """Unpin the range that was registered at ``address``."""
        with self._guard(self._device):
            self._check("cudaHostUnregister", self._cudart.cudaHostUnregister(address))

    def _check(self, call: str, code: Any) -> None:
        if int(code):
            raise OSError(f"{call}: {self._cudart.cudaGetErrorString(code)}")


class MlockRegistrar:
    """mlock: keeps pages in memory without a device. It bounds what RLIMIT_MEMLOCK allows; no device knows of it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def register(self, address: int, size: int) -> None:
        """Lock the range."""
        self._call("mlock", address, size)

    def unregister(self, address: int, size: int) -> None:
        """Unlock it."""
        self._call("munlock", address, size)

    def _call(self, name: str, address: int, size: int) -> None:
        if getattr(self._libc, name)(ctypes.c_void_p(address), ctypes.c_size_t(size)):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True, slots=True)
class PageLockStats:
    """enabled: whether anything is ever locked; reason: why not, else empty. Sizes in bytes, counts of segments.

    over_budget, failed: segments that go through the ring for good, because the budget was full or the system refused.
    """

    enabled: bool
    reason: str
    budget: int
    locked_bytes: int
    locked: int
    waiting: int
    over_budget: int
    failed: int

    def to_dict(self) -> dict[str, int | str | bool]:
        """Every field by name."""
        return asdict(self)


def registrar_for(device: str | None) -> tuple[Registrar | None, str]:
    """What locks pages for a device, or None and the reason."""
    if device is None or not device.startswith("cuda"):
        return None, f"the device is {device or 'the host'}: its copies need no page-locked memory"
    try:
        import torch
    except ModuleNotFoundError:
        return None, "torch is not installed"
    if not torch.cuda.is_available():
        return None, "there is no CUDA device"
    return CudaRegistrar(device), ""


class PageLock:
    """Page-locked segments. All methods may be called from any thread, and none but `wait` and `close` waits.

    budget: bytes that may be locked at most. registrar: None when nothing is to be locked, for ``reason``.
    Raises BudgetError for a negative budget, or one larger than the memory of the machine.
    """

    def __init__(
        self, budget: int, registrar: Registrar | None, *, reason: str = "", events: Events | None = None
    ) -> None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if not 0 <= budget <= memory:
            raise BudgetError(
                f"{budget} bytes cannot be page-locked on a machine with {memory}",
                "give page-locking at most the ram tier's budget",
            )
        self.budget = budget
        self._registrar = registrar if budget else None
        self._reason = reason if registrar is None else "" if budget else "its budget is 0"
        self._events = events or Events()
        self._state = threading.Condition()
        self._tasks: queue.SimpleQueue[tuple[str, Bytes] | None] = queue.SimpleQueue()
        self._pending = 0
        self._wanted: set[int] = set()
        self._locked: dict[int, Bytes] = {}
        self._starts: list[int] = []
        self._over_budget: set[int] = set()
        self._failed: set[int] = set()
        self._closed = False
        self._thread: threading.Thread | None = None
        if self._registrar is not None:
            self._thread = threading.Thread(target=self._work, name="kvstore-pagelock", daemon=True)
            try:
                self._thread.start()
            except BaseException:  # a Ctrl-C may come when it runs
                self._tasks.put(None)
                raise

    @classmethod
    def for_device(cls, budget: int, device: str | None, events: Events | None = None) -> PageLock:
        """With cudaHostRegister where the device is a CUDA one; else one that locks nothing and says so."""
        registrar, reason = registrar_for(device)
        return cls(budget, registrar, reason=reason, events=events)

    def add(self, segments: Sequence[Bytes]) -> None:
        """Have segments locked, in order. A segment is a writable, mapped, page-aligned array; it is kept alive."""
        if self._registrar is None:
            return
        with self._state:
            for memory in segments:
                address = _address(memory)
                if not self._closed and address not in self._wanted:
                    self._wanted.add(address)
                    self._pending += 1
                    self._tasks.put(("add", memory))

    def remove(self, segments: Sequence[Bytes]) -> None:
        """Have segments unlocked, before they are unmapped. No copy of them may be under way."""
        if self._registrar is None:
            return
        with self._state:
            for memory in segments:
                address = _address(memory)
                self._over_budget.discard(address)
                self._failed.discard(address)
                if not self._closed and address in self._wanted:
                    self._wanted.discard(address)
                    self._hide(address)
                    self._pending += 1
                    self._tasks.put(("remove", memory))

    def covers(self, memory: Bytes) -> bool:
        """Whether all of ``memory`` lies in one locked segment."""
        start = _address(memory)
        with self._state:
            at = bisect.bisect_right(self._starts, start) - 1
            return at >= 0 and start + memory.nbytes <= self._starts[at] + self._locked[self._starts[at]].nbytes

    def wait(self, timeout: float) -> bool:
        """Wait until everything asked for was done or refused; whether it was, in ``timeout`` seconds."""
        with self._state:
            return self._state.wait_for(lambda: not self._pending, timeout)

    def stats(self) -> PageLockStats:
        """State and counters."""
        with self._state:
            return PageLockStats(
                enabled=self._registrar is not None,
                reason=self._reason,
                budget=self.budget,
                locked_bytes=sum(memory.nbytes for memory in self._locked.values()),
                locked=len(self._locked),
                waiting=self._pending,
                over_budget=len(self._over_budget),
                failed=len(self._failed),
            )

    def close(self) -> None:
        """Unlock everything and end the thread. No copy may be under way: close the device tier first.

        Safe to call again, also after an interrupt.
        """
        with self._state:
            self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            verb, memory = task
            if verb == "add" and not self._closed:
                self._lock_segment(memory)
            elif verb == "remove":
                self._unlock(memory)
            with self._state:
                self._pending -= 1
                self._state.notify_all()
        with self._state:
            locked = list(self._locked.values())
            self._starts.clear()
        for memory in locked:
            self._unlock(memory)

    def _lock_segment(self, memory: Bytes) -> None:
        assert self._registrar is not None
        address, size = _address(memory), memory.nbytes
        used = self.stats().locked_bytes
        if used + size > self.budget:
            self._refuse(self._over_budget, address, f"its budget of {self.budget} bytes is full at {used}: raise it")
            return
        try:
            self._registrar.register(address, size)
        except OSError as error:
            self._refuse(self._failed, address, f"{error}; copies go through pinned memory of the store's own, slower")
            return
        with self._state:
            self._locked[address] = memory
            bisect.insort(self._starts, address)

    def _unlock(self, memory: Bytes) -> None:
        assert self._registrar is not None
        address = _address(memory)
        with self._state:
            known = self._locked.pop(address, None)
            self._hide(address)
        if known is None:
            return
        try:
            self._registrar.unregister(address, known.nbytes)
        except OSError as error:
            self._events.emit(Notice("pagelock", f"a segment stays locked: {error}"))

    def _hide(self, address: int) -> None:
        """No new copy may count on the segment; called with the lock held."""
        if address in self._starts:
            self._starts.remove(address)

    def _refuse(self, kind: set[int], address: int, why: str) -> None:
        with self._state:
            first = not kind
            kind.add(address)
        if first:
            self._events.emit(Notice("pagelock", why))


class PinnedRing:
    """Pinned pieces through which copies of memory that is not locked go.

    Pieces are handed out one at a time, so several threads can copy; a piece is used again once the device is done
    with it. A thread waits for a piece only while others copy through it.
    """

    def __init__(self, lanes: Lanes, pieces: int = RING_PIECES, piece_bytes: int = RING_PIECE_BYTES) -> None:
        import torch

        from kvstore.tiers.lanes import PASSED

        self._lanes = lanes
        self._bytes = piece_bytes
        self._pieces: queue.SimpleQueue[tuple[torch.Tensor, Mark]] = queue.SimpleQueue()
        pinned = lanes.needs_pinned and torch.cuda.is_available()
        for _ in range(pieces):
            self._pieces.put((torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pinned), PASSED))

    def upload(self, lane: Lane, target: torch.Tensor, source: Bytes) -> None:
        """Queue a copy of flat bytes to the device on ``lane``; ``source`` has been read when this returns."""
        for start in range(0, len(source), self._bytes):
            part = source[start : start + self._bytes]
            with self._piece(lane) as piece:
                filled = piece[: len(part)]
                np.copyto(filled.numpy(), part)
                self._copy(lane, target[start : start + len(part)], filled)

    def download(self, lane: Lane, target: Bytes, source: torch.Tensor) -> None:
        """Copy flat bytes from the device, after what ``lane`` has queued; ``target`` is complete on return."""
        for start in range(0, len(target), self._bytes):
            part = target[start : start + self._bytes]
            with self._piece(lane) as piece:
                filled = piece[: len(part)]
                self._copy(lane, filled, source[start : start + len(part)])
                self._lanes.mark(lane).wait()
                np.copyto(part, filled.numpy())

    @contextmanager
    def _piece(self, lane: Lane) -> Iterator[torch.Tensor]:
        """A piece that no copy uses; it may be used again once ``lane`` has done what it was given meanwhile."""
        piece, mark = self._pieces.get()
        try:
            mark.wait()
            yield piece
        finally:
            try:
                mark = self._lanes.mark(lane)
            finally:
                self._pieces.put((piece, mark))

    def _copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        def work() -> None:
            target.copy_(source, non_blocking=True)

        self._lanes.submit(lane, work)


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address
