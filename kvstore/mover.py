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
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from kvstore.errors import BusyError, ClosedError, DamagedError, KVStoreError, NoSpaceError, StorageError
from kvstore.events import Events, Fault, Moved, Notice, Skipped, SkipReason
from kvstore.policy import CLEAN, REFUSED
from kvstore.purge import PurgeLog
from kvstore.records import BlockName, Entry, NamespaceRecord
from kvstore.slots import SlotRef
from kvstore.tiers.ledger import Placement
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tombstone import Tombstone

RESERVE_BATCHES, AHEAD = 4, 2
"""Batches that get their slots by one commit, and how many of them are left when the next get theirs. A commit to the
index of a disk that is being written lasts as long as the write: there is time for one a batch, which publishes."""
FAULTS_BEFORE_PAUSE = 3
PAUSE_S = 30.0
Written: TypeAlias = list[tuple[Placement, bytes]]
"""Blocks whose slots hold them now, with their checksums."""


class Move(NamedTuple):
    """A block in `ram` that `nvme` should have. now: when it was last used, `boottime_ns`."""

    name: BlockName
    entry: Entry
    record: NamespaceRecord
    slot_bytes: int
    payload_bytes: int
    now: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks on their way: the slots they have got, and the write, which gives what was written, with checksums."""

    pairs: list[tuple[Placement, Move]]
    written: Future[Written]
    epoch: int
    now: int
    began: float


class Mover:
    """Copies from `ram` to `nvme`. write: runs writes, one after the other, in another thread.

    batch_bytes: written at once; queue_bytes: what may wait for slots.
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
        self._under_way: deque[_Batch] = deque()
        self._busy = False
        self._stopping = False
        self._faults = 0
        self._given_up = self._flushed = 0
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
        dropped, reason = 0, SkipReason.QUEUE_FULL
        with self._changed:
            if self._stopping:
                dropped, reason = len(moves), SkipReason.CLOSING
            else:
                self._queue.extend(moves)
                self._queued += sum(move.slot_bytes for move in moves)
                while self._queued > self._queue_bytes and self._queue:
                    self._queued -= self._queue.popleft().slot_bytes
                    dropped += 1
                self._changed.notify_all()
            self._given_up += dropped
        self._tell(reason, dropped)

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
        """Wait until nothing waits; True when all that was submitted since it last did is on `nvme`.

        False when that took longer than ``timeout`` seconds, at once while nothing is written after faults, and when
        blocks were given up: the queue or `nvme` was full, a quota, a lock or a fault was in the way, the store closed,
        or they were gone from `ram` too early. Not for what was explicitly evicted meanwhile (`Store.evict` from all
        tiers, or from `nvme`), nor for what another process is writing. What was given up and is still in `ram` is
        offered again by `rescan`, unless `nvme` or a quota was full; a later True says nothing of it.
        """
        with self._changed:
            before = self._flushed
            self._changed.wait_for(lambda: self.idle or (self.paused and not self._busy), timeout)
            if not self.idle:
                return False
            self._flushed = self._given_up
            return self._given_up == before

    def close(self, timeout: float) -> bool:
        """Finish what waits, as far as that is done within ``timeout`` seconds or until a Ctrl-C, then stop.

        Returns what `flush` did.
        """
        try:
            return self.flush(timeout)
        finally:
            self._stop()

    def _stop(self) -> None:
        left = self._halt()
        self._tell(SkipReason.CLOSING, left)
        self._thread.join()

    def _halt(self) -> int:
        """Have the thread end after what is being written; returns how many blocks wait for slots."""
        with self._changed:
            self._stopping = True
            for batch in self._under_way.copy():
                batch.written.cancel()
            left, self._queued = len(self._queue), 0
            self._given_up += left
            self._queue.clear()
            self._changed.notify_all()
        return left

    def _run(self) -> None:
        """Have batches written before the last are done, and finish the oldest: the disk never waits for the index."""
        under_way = self._under_way
        while True:
            with self._changed:
                while not under_way and not (self._stopping or (self._queue and not self.paused)):
                    self._changed.wait(self._wait())
                if self._stopping and not under_way:
                    return
                more = self._queue and len(under_way) <= AHEAD and not (self.paused or self._stopping)
                moves = self._take() if more else []
                self._busy = True
            if moves:
                self._guarded(moves, partial(self._begin, moves))
            if under_way:
                batch = under_way.popleft()
                self._guarded(batch.pairs, partial(self._finish, batch))
            with self._changed:
                self._busy = bool(under_way)
                self._changed.notify_all()

    def _guarded(self, unsettled: Sequence[object], step: Callable[[], None]) -> None:
        """Do a step; when it fails, that is told. unsettled: blocks of which nothing else was told until then."""
        try:
            step()
        except (BusyError, ClosedError) as error:
            self._give_up(SkipReason.BUSY, len(unsettled))
            self._events.emit(Fault(self._nvme.name, "move", error.problem))
        except KVStoreError as error:
            self._fault(error, len(unsettled))
        except Exception as error:  # noqa: BLE001  the mover must outlive anything, and say so
            self._fault(StorageError(repr(error), ""), len(unsettled))

    def _wait(self) -> float | None:
        """Nobody tells of the end of a pause; what was queued during one waits for it."""
        return max(0.05, self._paused_until - time.monotonic()) if self._queue else None

    def _take(self) -> list[Move]:
        """The oldest moves that go together: one slot size, one namespace, a few batches' bytes."""
        first = self._queue[0]
        together: list[Move] = []
        while self._queue and len(together) < RESERVE_BATCHES * self._batch_blocks(first):
            following = self._queue[0]
            if following.slot_bytes != first.slot_bytes or following.record.root != first.record.root:
                break
            together.append(self._queue.popleft())
        self._queued -= len(together) * first.slot_bytes
        return together

    def _batch_blocks(self, move: Move) -> int:
        """How many blocks of this size are written at once."""
        return max(1, self._batch_bytes // move.slot_bytes)

    def _begin(self, moves: list[Move]) -> None:
        """Reserve slots, and have them written, batch by batch. Leaves in ``moves`` those not settled, if it fails."""
        began = time.perf_counter()
        first = moves[0]
        space = self._nvme.space(first.record)
        self._drop_gone(moves)  # before room is made for them at the cost of what is there
        if not moves:
            return
        named = {move.name.index_key: move for move in moves}
        moves[:] = named.values()  # of one that was pushed out and saved again, the last alone
        epoch = min(move.entry.epoch for move in moves)
        now = max(move.now for move in moves)
        reserved = self._nvme.reserve([move.name for move in moves], space, first.slot_bytes, epoch, now=now)
        pairs = [(placement, named.pop(placement.name.index_key)) for placement in reserved.placed]
        try:
            left = [named.pop(name.index_key) for name in reserved.left]
            self._mark(left, REFUSED)
            known = {entry.key for entry in reserved.known}
            self._mark([move for move in named.values() if move.name.key in known], CLEAN)
            self._give_up(SkipReason.QUOTA if reserved.over_quota else SkipReason.FULL, len(left))
            self._leave([move for move in named.values() if move.name.key not in known])
            moves[:] = [move for _, move in pairs]
            count = self._batch_blocks(first)
            while pairs and not self._stopping:
                written = self._run_write(partial(self._write, pairs[:count], first.slot_bytes))
                self._under_way.append(_Batch(pairs[:count], written, epoch, now, began))
                del pairs[:count], moves[:count]
        except BaseException:
            self._nvme.abandon([placement for placement, _ in pairs])
            raise
        self._give_back(pairs)

    def _finish(self, batch: _Batch) -> None:
        """When a batch is written: publish it, and flag its `ram` slots as clean."""
        placed = [placement for placement, _ in batch.pairs]
        try:
            done = batch.written.result()
            stones = self._purge.newer(batch.epoch)
            published = self._nvme.publish(done, stones, now=batch.now)
        except CancelledError:
            self._give_back(batch.pairs)
            return
        except BaseException:
            self._nvme.abandon(placed)
            raise
        kept = {placement.ref for placement in published}
        self._nvme.abandon([placement for placement in placed if placement.ref not in kept])
        moved = [move for placement, move in batch.pairs if placement.ref in kept]
        self._mark(moved, CLEAN)
        self._faults = 0
        if moved:
            size, now = sum(move.payload_bytes for move in moved), time.perf_counter()
            seconds = now - max(batch.began, self._finished)  # batches overlap; no second is counted twice
            root = moved[0].record.root
            self._events.emit(Moved(self._ram.name, self._nvme.name, len(moved), size, seconds, root))
        if len(moved) < len(placed):
            written = {placement.ref for placement, _ in done}
            self._tell(SkipReason.PURGED, len(done) - len(published))
            self._tell_gone([move for placement, move in batch.pairs if placement.ref not in written], stones)
        self._finished = time.perf_counter()

    def _drop_gone(self, moves: list[Move]) -> None:
        """Leave in ``moves`` those whose blocks are still in `ram`, and tell of the others that `nvme` has not."""
        live = self._ram.unchanged([move.entry for move in moves])
        if all(live):
            return
        gone = [move for move, same in zip(moves, live, strict=True) if not same]
        moves[:] = [move for move, same in zip(moves, live, strict=True) if same]
        there = self._nvme.find([move.name for move in gone])
        missed = [move for move, entry in zip(gone, there, strict=True) if entry is None or entry.key != move.name.key]
        if missed:
            self._tell_gone(missed, self._purge.newer(min(move.entry.epoch for move in missed)))

    def _tell_gone(self, gone: Sequence[Move], stones: Sequence[Tombstone]) -> None:
        """Of blocks that left `ram` before they were written: evicted on purpose, or too early."""
        purged = sum(_purged(move, stones) for move in gone)
        self._tell(SkipReason.PURGED, purged)
        self._give_up(SkipReason.EVICTED_BEFORE, len(gone) - purged)

    def _give_back(self, pairs: Sequence[tuple[Placement, Move]]) -> None:
        """Of blocks that are not written since the store closes: their slots."""
        if pairs:
            self._nvme.abandon([placement for placement, _ in pairs])
            self._give_up(SkipReason.CLOSING, len(pairs))

    def _leave(self, moves: Sequence[Move]) -> None:
        """Of blocks that somebody is writing to `nvme`: what is under way here is told of when it is finished."""
        here = {move.name.index_key: _slot(move) for batch in self._under_way for _, move in batch.pairs}
        others = [move for move in moves if move.name.index_key not in here]
        self._tell(SkipReason.WRITING, len(others))
        # Evicted and saved anew since it is under way: what is written may be dropped.
        again = [move for move in moves if here.get(move.name.index_key, _slot(move)) != _slot(move)]
        self._give_up(SkipReason.WRITING, len(again))

    def _give_up(self, reason: SkipReason, blocks: int) -> None:
        """Count blocks that will not be moved, though `flush` would have them moved, and tell of them."""
        with self._changed:
            self._given_up += blocks
        self._tell(reason, blocks)

    def _tell(self, reason: SkipReason, blocks: int) -> None:
        if blocks:
            self._events.emit(Skipped(self._nvme.name, reason, blocks))

    def _write(self, pairs: list[tuple[Placement, Move]], slot_bytes: int) -> Written:
        """Write slot images straight from `ram`; what left it before, or under the write, is left out."""
        live = self._ram.unchanged([move.entry for _, move in pairs])
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
        self._give_up(SkipReason.FAULT, blocks)
        self._faults += 1
        if self._faults >= FAULTS_BEFORE_PAUSE and isinstance(error, StorageError | NoSpaceError | DamagedError):
            self._paused_until = time.monotonic() + PAUSE_S
            self._events.emit(Notice("nvme read-only", f"{error.problem}; tried again in {PAUSE_S:.0f} s"))


def _slot(move: Move) -> tuple[SlotRef, int]:
    """Which content of which `ram` slot it moves."""
    return move.entry.ref, move.entry.generation


def _purged(move: Move, stones: Sequence[Tombstone]) -> bool:
    """Whether its block was explicitly evicted since it was saved."""
    return any(stone.epoch > move.entry.epoch and stone.names(move.record.root, move.name.key) for stone in stones)
