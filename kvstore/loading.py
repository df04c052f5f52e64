"""Load: a match's blocks, verified, into a KVBuffer; what was only on `nvme` is promoted to `ram` on the way.

A block that cannot be had or verified ends the prefix there; nothing is raised for it. What is on `nvme` is read
straight into reserved `ram` slots, or into a private buffer where none can be had; reads overlap with the scatter of
earlier blocks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvstore.copying import CopyThreads, Job, wait_all
from kvstore.errors import CONTAINED, KVStoreError
from kvstore.events import Cause, Events, EvictReason, Fault, Moved
from kvstore.header import HEADER_BYTES, inspect_header, inspect_slot, slot_bytes
from kvstore.kv import Bytes, KVBuffer, Run
from kvstore.layout import Layout, Part
from kvstore.match import Match, Piece
from kvstore.policy import CLEAN
from kvstore.purge import PurgeLog, reaching
from kvstore.slots import join_runs
from kvstore.tiers.ledger import Placement
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier

READ_BYTES = 4 << 20
"""Bytes of one disk read: large enough for the medium's speed, small enough to overlap with the scatter."""

SCATTERS_BEHIND = 4
"""Reads into private memory run ahead of their scatters by so many, whatever the size of the load."""


@dataclass(slots=True)
class PartLoad:
    """One part's outcome: for each piece None, or why it failed, and the tier that served it; seconds by tier."""

    causes: list[Cause | None]
    seconds: dict[str, float] = field(default_factory=dict)
    promoted: int = 0
    tiers: list[str] = field(default_factory=list)


class Loader:
    """Copies matched blocks upward, and makes them the most recently used first, so that none is evicted meanwhile.

    verify_share: one in this many `ram` blocks is compared with its checksum.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeTier | None,
        purge: PurgeLog,
        threads: CopyThreads,
        events: Events,
        *,
        verify_share: int,
        timeout: float,
    ) -> None:
        self._ram, self._nvme, self._purge = ram, nvme, purge
        self._threads, self._events = threads, events
        self._verify_share, self._timeout = verify_share, timeout
        self._count = itertools.count()

    def load(self, match: Match, part: Part, buffer: KVBuffer | None, now: int) -> PartLoad:
        """Load one part's pieces; buffer None: only promote them to `ram`. now: `boottime_ns` of the request."""
        pieces = match.pieces[part]
        outcome = PartLoad([Cause.IO] * len(pieces), tiers=[piece.tier for piece in pieces])
        size = slot_bytes(match.space.layout.payload_bytes(part.group))
        shape = _Shape(match.space.layout, part, size)
        disk = [at for at, piece in enumerate(pieces) if piece.tier != self._ram.name]
        memory = [at for at, piece in enumerate(pieces) if piece.tier == self._ram.name]
        began = time.perf_counter()
        self._ram.touch([pieces[at].entry.ref for at in memory], [pieces[at].name.depth for at in memory], now)
        promotion = _Promotion(self, match, pieces, disk, shape, buffer, outcome) if disk else None
        jobs: list[Job[None]] = []
        try:
            if promotion is not None:
                promotion.start(now)
            if buffer is not None:
                self._memory_jobs(jobs, pieces, memory, shape, buffer, outcome)
            else:
                self._only_check(pieces, memory, outcome)
        finally:
            try:
                wait_all(jobs)
                outcome.seconds[self._ram.name] = time.perf_counter() - began
            finally:
                if promotion is not None:
                    promotion.finish(now)
                    outcome.seconds[promotion.tier.name] = time.perf_counter() - began
        self._ram.expect_use(pieces[at].entry.ref for at in memory)
        self._discard_damaged(pieces, outcome)
        return outcome

    # ---------------------------------------------------------------- ram

    def _memory_jobs(
        self,
        jobs: list[Job[None]],
        pieces: Sequence[Piece],
        places: Sequence[int],
        shape: _Shape,
        buffer: KVBuffer,
        outcome: PartLoad,
    ) -> None:
        limit = self._threads.run_length(len(places))
        for group in _groups(pieces, places, shape.layout.block_tokens, limit):
            self._threads.copy(partial(self._scatter, pieces, group, shape, buffer, outcome), jobs)

    def _scatter(
        self, pieces: Sequence[Piece], group: Sequence[int], shape: _Shape, buffer: KVBuffer, outcome: PartLoad
    ) -> None:
        """Copy one run of `ram` slots into the buffer, then ask whether they were still the same."""
        chosen = [pieces[at] for at in group]
        first = chosen[0]
        try:
            run = self._ram.run(first.entry.ref, len(group), shape.slot_bytes, first.entry.tokens, first.take)
            buffer.scatter(first.start, run)
            bad = [self._sampled(piece, shape) for piece in chosen]
            same = self._ram.unchanged([piece.entry for piece in chosen])
        except CONTAINED as error:
            self._events.emit(Fault(self._ram.name, "load", error.problem))
            return
        for at, cause, unchanged in zip(group, bad, same, strict=True):
            outcome.causes[at] = cause if unchanged else Cause.CHANGED

    def _sampled(self, piece: Piece, shape: _Shape) -> Cause | None:
        """Check every block's header, and compare one in ``verify_share`` blocks with its checksum."""
        image = self._ram.slot(piece.entry.ref, shape.slot_bytes)
        size = shape.payload(piece.entry.tokens)
        inspect = inspect_header if next(self._count) % self._verify_share else inspect_slot
        return inspect(image, piece.name.key, piece.entry.tokens, size, piece.entry.checksum)

    def _only_check(self, pieces: Sequence[Piece], places: Sequence[int], outcome: PartLoad) -> None:
        same = self._ram.unchanged([pieces[at].entry for at in places])
        for at, unchanged in zip(places, same, strict=True):
            outcome.causes[at] = None if unchanged else Cause.CHANGED

    def _discard_damaged(self, pieces: Sequence[Piece], outcome: PartLoad) -> None:
        """Throw out what is damaged, so that it is not tried again."""
        for piece, cause in zip(pieces, outcome.causes, strict=True):
            if cause in (Cause.HEADER, Cause.CHECKSUM):
                tier = self._ram if piece.tier == self._ram.name else self._nvme
                self._events.emit(Fault(piece.tier, "verify", f"{piece.entry.ref}: {cause}"))
                if tier is not None:
                    tier.discard(piece.name, piece.entry, EvictReason.CORRUPT)


@dataclass(frozen=True, slots=True)
class _Shape:
    layout: Layout
    part: Part
    slot_bytes: int

    def payload(self, tokens: int) -> int:
        return self.layout.payload_bytes(self.part.group, tokens)


class _Promotion:
    """Blocks of one load that are only on `nvme`: read into `ram` slots, verified, scattered, published."""

    def __init__(
        self,
        loader: Loader,
        match: Match,
        pieces: Sequence[Piece],
        places: Sequence[int],
        shape: _Shape,
        buffer: KVBuffer | None,
        outcome: PartLoad,
    ) -> None:
        assert loader._nvme is not None
        self.tier = loader._nvme
        self._loader, self._match, self._pieces, self._places = loader, match, pieces, places
        self._shape, self._buffer, self._outcome = shape, buffer, outcome
        self._slots: dict[bytes, Placement] = {}
        self._checksums: dict[bytes, bytes] = {}
        self._reads: list[Job[None]] = []
        self._scatters: list[Job[None]] = []
        self._began = time.perf_counter()

    def start(self, now: int) -> None:
        """Reserve `ram` slots, and begin to read; without a buffer, only what has a slot."""
        loader, ram = self._loader, self._loader._ram
        names = [self._pieces[at].name for at in self._places]
        present: set[bytes] = set()
        try:
            space = ram.space(self._match.space.record, loader._timeout)
            for first in range(0, len(names), 256):
                batch = names[first : first + 256]
                size, epoch = self._shape.slot_bytes, self._match.epoch
                reserved = ram.reserve(batch, space, size, epoch, loader._timeout, now=now)
                self._slots.update({placement.name.index_key: placement for placement in reserved.placed})
                present.update(entry.key for entry in reserved.known)
                if reserved.left:
                    break
        except KVStoreError as error:
            loader._events.emit(Fault(ram.name, "promote", error.problem))
        ram.expect_reads(placement.ref for placement in self._slots.values())
        wanted = self._places
        if self._buffer is None:
            wanted = [at for at in wanted if self._pieces[at].name.index_key in self._slots]
            for at in self._places:
                if self._pieces[at].name.key in present:
                    self._outcome.causes[at] = None
        most = max(1, READ_BYTES // self._shape.slot_bytes)
        for begin, run in join_runs([self._pieces[at].entry.ref for at in wanted], most):
            chunk = wanted[begin : begin + run.count]
            loader._threads.read(partial(self._read, chunk), self._reads)

    def finish(self, now: int) -> None:
        """Wait for every read and scatter, then make what is whole readable in `ram`."""
        loader, ram = self._loader, self._loader._ram
        try:
            try:
                wait_all(self._reads, help_out=False)
            finally:
                wait_all(self._scatters)
        finally:
            good = [
                (placement, self._checksums[key]) for key, placement in self._slots.items() if key in self._checksums
            ]
            bad = [placement for key, placement in self._slots.items() if key not in self._checksums]
            ram.abandon(bad)
            published: list[Placement] = []
            try:
                match, names = self._match, (placement.name for placement, _ in good)
                stones = reaching(loader._purge.newer(match.epoch), match.space.record, match.chain, names)
                if good:
                    published = ram.publish(good, stones, loader._timeout, now=now, flags=CLEAN)
                self._outcome.promoted = len(published)
            except KVStoreError as error:
                loader._events.emit(Fault(ram.name, "promote", error.problem))
                ram.abandon([placement for placement, _ in good])
        used = [self._pieces[at] for at in self._places if self._outcome.causes[at] is None]
        self.tier.touch([piece.entry.ref for piece in used], [piece.name.depth for piece in used], now)
        if published:
            size = sum(self._shape.payload(placement.name.tokens) for placement in published)
            seconds, root = time.perf_counter() - self._began, self._match.space.root
            loader._events.emit(Moved(self.tier.name, ram.name, len(published), size, seconds, root))

    def _read(self, chunk: Sequence[int]) -> None:
        """Read one run; its verification and scatter go on in a copy thread while the next run is read.

        After an error block by block: what cannot be read is dropped, so that it is saved anew and not tried for ever.
        """
        private = ExitStack()
        try:
            images = [self._image(self._pieces[at], private) for at in chunk]
            self.tier.read([self._pieces[at].entry.ref for at in chunk], self._shape.slot_bytes, images)
        except CONTAINED as error:
            private.close()
            if len(chunk) > 1:
                for at in chunk:
                    self._read([at])
                return
            self._loader._events.emit(Fault(self.tier.name, "load", error.problem))
            piece = self._pieces[chunk[0]]
            self.tier.discard(piece.name, piece.entry, EvictReason.UNREADABLE)
            return
        self._loader._threads.copy(lambda: self._arrived(chunk, images, private), self._scatters)

    def _image(self, piece: Piece, private: ExitStack) -> Bytes:
        """A block's `ram` slot, or private memory, of which no more is in use than a few reads need."""
        placement = self._slots.get(piece.name.index_key)
        if placement is not None:
            return self._loader._ram.slot(placement.ref, self._shape.slot_bytes)
        wait(self._scatters[-2 * SCATTERS_BEHIND : -SCATTERS_BEHIND])
        return private.enter_context(self._loader._threads.buffer(self._shape.slot_bytes))

    def _arrived(self, chunk: Sequence[int], images: Sequence[Bytes], private: ExitStack) -> None:
        with private:
            self._check_and_scatter(chunk, images)

    def _check_and_scatter(self, chunk: Sequence[int], images: Sequence[Bytes]) -> None:
        same = self.tier.unchanged([self._pieces[at].entry for at in chunk])
        for at, image, unchanged in zip(chunk, images, same, strict=True):
            piece = self._pieces[at]
            size = self._shape.payload(piece.entry.tokens)
            cause: Cause | None = Cause.CHANGED
            if unchanged:
                cause = inspect_slot(image, piece.name.key, piece.entry.tokens, size, piece.entry.checksum)
            if cause is None:
                if self._buffer is not None:
                    run = Run(image, HEADER_BYTES, len(image), 1, piece.entry.tokens, piece.take)
                    self._buffer.scatter(piece.start, run)
                self._checksums[piece.name.index_key] = piece.entry.checksum
            self._outcome.causes[at] = cause


def _groups(pieces: Sequence[Piece], places: Sequence[int], block_tokens: int, limit: int) -> list[list[int]]:
    """Pieces that one scatter can serve: consecutive slots, full blocks; a partial one stands alone."""
    groups: list[list[int]] = []
    for at in places:
        piece = pieces[at]
        last = groups[-1] if groups else []
        before = pieces[last[-1]] if last else None
        joins = (
            before is not None
            and len(last) < limit
            and last[-1] == at - 1
            and before.take == piece.take == piece.entry.tokens == before.entry.tokens == block_tokens
            and piece.entry.ref.segment == before.entry.ref.segment
            and piece.entry.ref.slot == before.entry.ref.slot + 1
        )
        if joins:
            last.append(at)
        else:
            groups.append([at])
    return groups
