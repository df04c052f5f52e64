"""Save: new blocks of a chain, out of a KVBuffer into `ram` slots, and on to the mover.

The source is gathered before the call returns, since the engine may reuse its memory at once. What the store has
already drops out by its key; what finds no room is counted, never waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvstore.copying import CopyThreads, Job, ended, wait_all
from kvstore.devices import DeviceSaver
from kvstore.errors import CONTAINED, BusyError, KVStoreError, StorageError
from kvstore.events import Events, Fault, Skipped, SkipReason
from kvstore.events import Saved as SavedEvent
from kvstore.header import HEADER_BYTES, pack_header, payload_checksum, payload_hash, slot_bytes
from kvstore.identity import Chain
from kvstore.kv import Bytes, Gathering, KVBuffer
from kvstore.layout import Part
from kvstore.match import Namespace
from kvstore.mover import Move
from kvstore.purge import PurgeLog, reaching
from kvstore.records import BlockName, Entry, block_names
from kvstore.slots import SlotRef
from kvstore.states import State
from kvstore.tiers.device import Transfer
from kvstore.tiers.ledger import Placement
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier

T = TypeVar("T")

FIRST_BATCH, BATCH = 64, 128
"""Blocks reserved in one transaction: fewer at first, so that copying begins soon, then more for each commit."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What a save did, in blocks (parts of blocks where a layout has several).

    known: the store had them. new: now readable in `ram`. skipped: see `kvstore.events.SkipReason`.
    """

    new_blocks: int
    known_blocks: int
    skipped_blocks: int
    bytes: int
    seconds: float


def together(done: Sequence[Saving]) -> Saving:
    """What saves of several parts did."""
    return Saving(
        sum(one.new_blocks for one in done),
        sum(one.known_blocks for one in done),
        sum(one.skipped_blocks for one in done),
        sum(one.bytes for one in done),
        sum(one.seconds for one in done),
    )


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One part of one chain to be saved. epoch: the purge epoch known. now: `boottime_ns` of the request."""

    space: Namespace
    chain: Chain
    part: Part
    buffer: KVBuffer
    epoch: int
    now: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots it needs."""
        return slot_bytes(self.space.layout.payload_bytes(self.part.group))

    def payload(self, tokens: int) -> int:
        """Bytes of a payload with so many tokens."""
        return self.space.layout.payload_bytes(self.part.group, tokens)


@dataclass(slots=True)
class _Tally:
    new: int = 0
    known: int = 0
    skipped: int = 0
    bytes: int = 0
    moves: list[Move] = field(default_factory=list)


@dataclass(slots=True)
class _Fill:
    """A batch being copied: its slots, the copies under way, and the checksums that come of them.

    waiting: blocks that no thread has begun: what gathers each, its number there, and its slot. bare: blocks whose
    payload is in its slot, with the checksum, and whose header is not.
    """

    placed: Sequence[Placement]
    futures: list[Job[None]] = field(default_factory=list)
    checksums: dict[SlotRef, bytes] = field(default_factory=dict)
    waiting: deque[tuple[Gathering, int, Placement]] = field(default_factory=deque)
    bare: deque[tuple[Placement, bytes]] = field(default_factory=deque)


class Saver:
    """Gathers new blocks into `ram`. timeout: seconds that a save waits for the index."""

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeTier | None,
        purge: PurgeLog,
        threads: CopyThreads,
        events: Events,
        submit: Callable[[Sequence[Move]], None],
        *,
        timeout: float,
        device: DeviceSaver | None = None,
    ) -> None:
        self._ram, self._nvme, self._purge, self._device = ram, nvme, purge, device
        self._threads, self._events, self._submit = threads, events, submit
        self._timeout = timeout

    def save(self, job: SaveJob) -> Saving:
        """Save one part of a chain. Raises what the buffer raises; the store's own troubles are counted."""
        began = time.perf_counter()
        names = block_names(job.chain, job.part)
        tally = _Tally()
        try:
            self._save(job, names, tally)
        except CONTAINED as error:
            rest = len(names) - tally.new - tally.known - tally.skipped
            tally.skipped += rest
            self.failed(error, rest)
        finally:
            if tally.moves:
                self._submit(tally.moves)
        seconds = time.perf_counter() - began
        if tally.new:
            self._events.emit(SavedEvent(self._ram.name, tally.new, tally.bytes, seconds, job.space.root))
        return Saving(tally.new, tally.known, tally.skipped, tally.bytes, seconds)

    def failed(self, error: KVStoreError, blocks: int) -> None:
        """Tell of blocks that an error of the store's keeps from being saved."""
        reason = SkipReason.BUSY if isinstance(error, BusyError) else SkipReason.FAULT
        if blocks:
            self._events.emit(Skipped(self._ram.name, reason, blocks))
        self._events.emit(Fault(self._ram.name, "save", error.problem))

    def _save(self, job: SaveJob, names: Sequence[BlockName], tally: _Tally) -> None:
        """Reserve the next batch and publish the last one while this one is copied."""
        wanted = self._unknown(names, job.now, tally)
        home = self._ram.space(job.space.record, self._timeout)
        under_way: list[_Fill] = []
        offered = 0
        try:
            for batch in _batches(wanted):
                offered += len(batch)
                reserved = self._ram.reserve(batch, home, job.slot_bytes, job.epoch, self._timeout, now=job.now)
                under_way.append(_Fill(reserved.placed))
                self._fill(under_way[-1], job, tally)
                tally.known += len(reserved.known)
                self._skip(SkipReason.WRITING, reserved.writing, tally)
                if len(under_way) > 1:
                    self._finish(under_way, job, tally)
                if reserved.left:
                    reason = SkipReason.QUOTA if reserved.over_quota else SkipReason.FULL
                    self._skip(reason, len(reserved.left) + len(wanted) - offered, tally)
                    break
            while under_way:
                self._finish(under_way, job, tally)
        finally:
            self._give_up(under_way)

    def _finish(self, under_way: list[_Fill], job: SaveJob, tally: _Tally) -> None:
        """Publish the oldest batch, as soon as it is copied."""
        fill = under_way[0]
        wait_all(fill.futures)
        published = self._publish([(placed, fill.checksums[placed.ref]) for placed in fill.placed], job, tally)
        del under_way[0]
        tally.new += len(published)
        self._skip(SkipReason.PURGED, len(fill.placed) - len(published), tally)
        tally.bytes += sum(job.payload(placement.name.tokens) for placement in published)

    def _skip(self, reason: SkipReason, blocks: int, tally: _Tally) -> None:
        """Count blocks that are not saved, and tell of them."""
        if blocks:
            tally.skipped += blocks
            self._events.emit(Skipped(self._ram.name, reason, blocks))

    def _give_up(self, under_way: Sequence[_Fill]) -> None:
        """After an error: give slots back, when nothing is written to them any more."""
        interrupt: BaseException | None = None
        for fill in under_way:
            fill.waiting.clear()
            for future in fill.futures:
                future.cancel()
            interrupt = ended(fill.futures) or interrupt
            fill.futures.clear()  # they hold the fill, and with it the request's buffer
            self._ram.abandon(fill.placed)
        if interrupt is not None:
            raise interrupt

    def _unknown(self, names: Sequence[BlockName], now: int, tally: _Tally) -> list[BlockName]:
        """Blocks that no tier has; those that one has are touched, and counted."""
        rest, writing = list(names), 0
        for tier in (self._ram, self._nvme):
            if tier is None or not rest:
                continue
            found: list[tuple[BlockName, Entry]] = []
            missing: list[BlockName] = []
            for name, entry in zip(rest, tier.find(rest), strict=True):
                if entry is None or (entry.state is State.WRITING and tier is not self._ram):
                    missing.append(name)
                elif entry.state is State.READY:
                    found.append((name, entry))
                else:
                    writing += 1
            tier.touch([entry.ref for _, entry in found], [name.depth for name, _ in found], now)
            tally.known += len(found)
            rest = missing
        self._skip(SkipReason.WRITING, writing, tally)
        return rest

    def _fill(self, fill: _Fill, job: SaveJob, tally: _Tally) -> None:
        """Begin to gather payloads into slots, each with its header and checksum."""
        if job.buffer.device is not None:
            self._fill_from_device(fill, job, tally)
            return
        if not fill.placed:
            return
        for row in _rows(fill.placed, job.chain.block_tokens):
            name = row[0].name
            run = self._ram.run(row[0].ref, len(row), job.slot_bytes, name.tokens)
            gathering = job.buffer.gathering(name.depth * job.chain.block_tokens, run)
            fill.waiting.extend((gathering, at, placement) for at, placement in enumerate(row))
        self._threads.share(partial(self._gather, fill, job), len(fill.placed), fill.futures)

    def _fill_from_device(self, fill: _Fill, job: SaveJob, tally: _Tally) -> None:
        """The same by way of `hbm`; blocks that find no staging there are given back at once."""
        assert self._device is not None
        size, block_tokens = job.slot_bytes, job.chain.block_tokens
        transfer, fill.placed, left = self._device.begin(fill.placed, job.buffer, block_tokens, size)
        self._ram.abandon(left)
        tally.skipped += len(left)  # told as what `hbm` has no staging for
        self._threads.copy(partial(self._arrived, transfer, fill, job), fill.futures)

    def _arrived(self, transfer: Transfer, fill: _Fill, job: SaveJob) -> None:
        """When a device's copies have landed: headers and checksums."""
        assert self._device is not None
        if not transfer.wait():
            self._device.failed(fill.placed)
            raise StorageError("the device failed while a save was copied", "see the device's own errors")
        for placement in fill.placed:
            image = self._ram.slot(placement.ref, job.slot_bytes)
            payload = image[HEADER_BYTES : HEADER_BYTES + job.payload(placement.name.tokens)]
            fill.checksums[placement.ref] = _head(image, placement.name, len(payload), payload_checksum(payload))

    def _gather(self, fill: _Fill, job: SaveJob) -> None:
        """Block by block until none waits, so that all threads end together.

        A checksum is taken of what a core has just written, while it is in its cache. Headers are written at the end,
        one after the other, since copies leave no code in a core's cache. The first thread to end writes those of all
        others, while they still copy.
        """
        for gather, at, placement in _taken(fill.waiting):
            checksum = payload_hash()
            try:
                gather(at, checksum.update)
            except BaseException:
                fill.waiting.clear()
                raise
            fill.bare.append((placement, checksum.digest()))
        for placement, digest in _taken(fill.bare):
            image = self._ram.slot(placement.ref, job.slot_bytes)
            fill.checksums[placement.ref] = _head(image, placement.name, job.payload(placement.name.tokens), digest)

    def _publish(self, done: Sequence[tuple[Placement, bytes]], job: SaveJob, tally: _Tally) -> list[Placement]:
        if not done:
            return []
        stones = reaching(self._purge.newer(job.epoch), job.space.record, job.chain)
        published = self._ram.publish(done, stones, self._timeout, now=job.now)
        if self._device is not None and len(published) < len(done):
            kept = {placement.ref for placement in published}
            self._device.forget([placement for placement, _ in done if placement.ref not in kept])
        if self._nvme is None:
            return published
        checksums = {placement.ref: checksum for placement, checksum in done}
        for placement in published:
            entry = _entry(placement, checksums[placement.ref], job.epoch)
            size = job.payload(placement.name.tokens)
            tally.moves.append(Move(placement.name, entry, job.space.record, job.slot_bytes, size, job.now))
        return published


def _rows(placed: Sequence[Placement], block_tokens: int) -> Iterator[Sequence[Placement]]:
    """Blocks (one or more) in order, as rows: whole ones that follow each other in the sequence and in their slots."""
    begin = 0
    for at in range(1, len(placed)):
        before, here = placed[at - 1], placed[at]
        (segment, slot), name = before.ref, here.name
        if here.ref != (segment, slot + 1) or name.tokens != block_tokens or name.depth != before.name.depth + 1:
            yield placed[begin:at]
            begin = at
    yield placed[begin:]


def _taken(queue: deque[T]) -> Iterator[T]:
    """What one of several threads gets of a queue, until nothing is left."""
    with suppress(IndexError):
        while True:
            yield queue.popleft()


def _head(image: Bytes, name: BlockName, size: int, checksum: bytes) -> bytes:
    """Write what is around a slot's payload of ``size`` bytes: the header, and zeros; returns the checksum."""
    group, shard = name.part.group, name.part.shard
    image.data[:HEADER_BYTES] = pack_header(name.key, group, shard, name.tokens, size, checksum)
    if HEADER_BYTES + size < len(image):
        image[HEADER_BYTES + size :] = 0  # a wipe does not look into slots that hold a block
    return checksum


def _batches(names: Sequence[BlockName]) -> Iterator[Sequence[BlockName]]:
    first, count = 0, FIRST_BATCH
    while first < len(names):
        yield names[first : first + count]
        first, count = first + count, min(2 * count, BATCH)


def _entry(placement: Placement, checksum: bytes, epoch: int) -> Entry:
    """The entry of a block just published, as far as the mover needs it."""
    name = placement.name
    return Entry(name.key, State.READY, name.tokens, placement.ref, placement.generation, 0, epoch, checksum=checksum)
