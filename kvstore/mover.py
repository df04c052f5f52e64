"""The mover: one thread that copies new blocks from `ram` to `nvme`, in batches, behind everybody's back.

Its queue is bounded; when it is full the oldest waiting blocks are dropped and counted: they stay in `ram`, and
`rescan` offers them again when the mover has nothing to do. It is the only one, besides administration, that writes to
the `nvme` index.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from kvstore.errors import BusyError, ClosedError, DamagedError, KVStoreError, NoSpaceError, StorageError
from kvstore.events import Events, Fault, Moved, Notice, Skipped
from kvstore.policy import CLEAN, REFUSED
from kvstore.purge import PurgeLog
from kvstore.records import BlockName, Entry, NamespaceRecord
from kvstore.slots import SlotRef
from kvstore.tiers.ledger import Placement
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.reservation import Reserved

FAULTS_BEFORE_PAUSE = 3
PAUSE_S = 30.0
_T = TypeVar("_T")
Written: TypeAlias = list[tuple[Placement, bytes]]
"""Blocks whose slots hold them now, with their checksums."""


@dataclass(frozen=True, slots=True)
class Move:
    """A block in `ram` that `nvme` should have. now: when it was last used, `boottime_ns`."""

    name: BlockName
    entry: Entry
    record: NamespaceRecord
    slot_bytes: int
    payload_bytes: int
    now: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks on their way: what was reserved for them, and the write, which gives what was written, with checksums."""

    moves: list[Move]
    reserved: Reserved
    written: Future[Written]
    epoch: int
    now: int
    began: float


class Mover:
    """Copies from `ram` to `nvme`. write: runs writes, one after the other, in another thread.

    batch_bytes: moved at once; queue_bytes: what may wait.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeTier,
        purge: PurgeLog,
        events: Events,
        write: Callable[[Callable[[], Written]], Future[Written]],
        *,
        batch_bytes: int,
        queue_bytes: int,
    ) -> None:
        self._run_write = write
        self._ram, self._nvme, self._purge, self._events = ram, nvme, purge, events
        self._batch_bytes, self._queue_bytes = batch_bytes, queue_bytes
        self._queue: deque[Move] = deque()
        self._queued = 0
        self._busy = False
        self._stopping = False
        self._faults = 0
        self._finished = 0.0
        self._paused_until = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvstore-mover", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # a Ctrl-C may come when it runs
            self._halt()
            raise

    def submit(self, moves: Sequence[Move]) -> None:
        """Queue blocks; the oldest waiting ones are dropped when there are too many. Never waits."""
        dropped = 0
        with self._changed:
            if self._stopping:
                dropped = len(moves)
            else:
                self._queue.extend(moves)
                self._queued += sum(move.slot_bytes for move in moves)
                while self._queued > self._queue_bytes and self._queue:
                    self._queued -= self._queue.popleft().slot_bytes
                    dropped += 1
                self._changed.notify_all()
        if dropped:
            self._events.emit(Skipped(self._nvme.name, "queue full", dropped))

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being moved."""
        return not self._queue and not self._busy

    @property
    def depth(self) -> tuple[int, int]:
        """Blocks and bytes that wait."""
        with self._changed:
            return len(self._queue), self._queued

    @property
    def paused(self) -> bool:
        """After faults of the medium, nothing is written for a while: `nvme` is read-only."""
        return time.monotonic() < self._paused_until

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was submitted is in `nvme` or given up; False when that took too long.

        False at once while nothing is written after faults.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.idle or (self.paused and not self._busy), timeout)
            return self.idle

    def close(self, timeout: float) -> bool:
        """Finish what waits, as far as that is done within ``timeout`` seconds or until a Ctrl-C, then stop."""
        try:
            return self.flush(timeout)
        finally:
            self._stop()

    def _stop(self) -> None:
        left = self._halt()
        if left:
            self._events.emit(Skipped(self._nvme.name, "closing", left))
        self._thread.join()

    def _halt(self) -> int:
        """Have the thread end after what is under way; returns how many blocks are left."""
        with self._changed:
            self._stopping = True
            left, self._queued = len(self._queue), 0
            self._queue.clear()
            self._changed.notify_all()
        return left

    def _run(self) -> None:
        """Take a batch and begin to write it, then finish the one before: the disk never waits for the index."""
        under_way: _Batch | None = None
        while True:
            with self._changed:
                while under_way is None and not (self._stopping or (self._queue and not self.paused)):
                    self._changed.wait(self._wait())
                if self._stopping and under_way is None:
                    return
                moves = self._take() if self._queue and not (self.paused or self._stopping) else []
                self._busy = bool(moves) or under_way is not None
            begun = self._guarded(len(moves), lambda: self._begin(moves)) if moves else None  # noqa: B023
            if under_way is not None:
                batch = under_way
                self._guarded(len(batch.moves), lambda: self._finish(batch))  # noqa: B023
            under_way = begun
            with self._changed:
                self._busy = under_way is not None
                self._changed.notify_all()

    def _guarded(self, blocks: int, step: Callable[[], _T]) -> _T | None:
        """What a step gives; None when it failed, which is told."""
        try:
            return step()
        except (BusyError, ClosedError) as error:
            self._events.emit(Skipped(self._nvme.name, "busy", blocks))
            self._events.emit(Fault(self._nvme.name, "move", error.problem))
        except KVStoreError as error:
            self._fault(error, blocks)
        except Exception as error:  # noqa: BLE001  the mover must outlive anything, and say so
            self._fault(StorageError(repr(error), ""), blocks)
        return None

    def _wait(self) -> float | None:
        """Nobody tells of the end of a pause; what was queued during one waits for it."""
        return max(0.05, self._paused_until - time.monotonic()) if self._queue else None

    def _take(self) -> list[Move]:
        """The oldest moves that go together: one slot size, one namespace, one batch's bytes."""
        batch = [self._queue.popleft()]
        size = batch[0].slot_bytes
        while self._queue and size + self._queue[0].slot_bytes <= self._batch_bytes:
            following = self._queue[0]
            if following.slot_bytes != batch[0].slot_bytes or following.record.root != batch[0].record.root:
                break
            batch.append(self._queue.popleft())
            size += following.slot_bytes
        self._queued -= size
        return batch

    def _begin(self, moves: list[Move]) -> _Batch:
        """Reserve slots, and have them written."""
        began = time.perf_counter()
        first = moves[0]
        space = self._nvme.space(first.record)
        named = {move.name.index_key: move for move in moves}
        epoch = min(move.entry.epoch for move in moves)
        now = max(move.now for move in moves)
        reserved = self._nvme.reserve([move.name for move in moves], space, first.slot_bytes, epoch, now=now)
        pairs = [(placement, named[placement.name.index_key]) for placement in reserved.placed]
        try:
            if reserved.left:
                reason = "quota" if reserved.over_quota else "full"
                self._events.emit(Skipped(self._nvme.name, reason, len(reserved.left)))
                self._mark([named[name.index_key] for name in reserved.left], REFUSED)
            written = self._run_write(partial(self._write, pairs, first.slot_bytes))
        except BaseException:
            self._nvme.abandon(reserved.placed)
            raise
        return _Batch(moves, reserved, written, epoch, now, began)

    def _finish(self, batch: _Batch) -> None:
        """When a batch is written: publish it, and flag its `ram` slots as clean."""
        first, reserved = batch.moves[0], batch.reserved
        try:
            done = batch.written.result()
            published = self._nvme.publish(done, self._purge.newer(batch.epoch), now=batch.now)
        except BaseException:
            self._nvme.abandon(reserved.placed)
            raise
        kept = {placement.ref for placement in published}
        self._nvme.abandon([placement for placement in reserved.placed if placement.ref not in kept])
        clean = {placement.name.key for placement in published} | {entry.key for entry in reserved.known}
        self._mark([move for move in batch.moves if move.name.key in clean], CLEAN)
        self._faults = 0
        if published:
            size, now = len(published) * first.payload_bytes, time.perf_counter()
            seconds = now - max(batch.began, self._finished)  # batches overlap; no second is counted twice
            root = first.record.root
            self._events.emit(Moved(self._ram.name, self._nvme.name, len(published), size, seconds, root))
        self._finished = time.perf_counter()

    def _write(self, pairs: list[tuple[Placement, Move]], slot_bytes: int) -> Written:
        """Write slot images straight from `ram`; those that changed under the write are left out."""
        live = self._ram.unchanged([move.entry for _, move in pairs])
        if not all(live):
            self._events.emit(Skipped(self._nvme.name, "evicted before", live.count(False)))
        pairs = [pair for pair, same in zip(pairs, live, strict=True) if same]
        refs = [placement.ref for placement, _ in pairs]
        images = [self._ram.slot(move.entry.ref, slot_bytes) for _, move in pairs]
        self._nvme.write(refs, slot_bytes, images)
        self._nvme.sync(refs)
        same = self._ram.unchanged([move.entry for _, move in pairs])
        return [(placement, move.entry.checksum) for (placement, move), ok in zip(pairs, same, strict=True) if ok]

    def _mark(self, moves: list[Move], flag: int) -> None:
        same = self._ram.unchanged([move.entry for move in moves])
        refs: list[SlotRef] = [move.entry.ref for move, ok in zip(moves, same, strict=True) if ok]
        self._ram.flag(refs, flag)

    def _fault(self, error: KVStoreError, blocks: int) -> None:
        self._events.emit(Fault(self._nvme.name, "move", error.problem))
        self._events.emit(Skipped(self._nvme.name, "fault", blocks))
        self._faults += 1
        if self._faults >= FAULTS_BEFORE_PAUSE and isinstance(error, StorageError | NoSpaceError | DamagedError):
            self._paused_until = time.monotonic() + PAUSE_S
            self._events.emit(Notice("nvme read-only", f"{error.problem}; tried again in {PAUSE_S:.0f} s"))
