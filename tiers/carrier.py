"""The copies of the `hbm` tier: engine tensors ↔ arena ↔ host memory, each on its lane, ordered by marks.

Only the engine's own lane touches the engine's tensors: gathers and scatters are queued there, so they are ordered
with the model by nature. The two side lanes touch the arena and host memory alone. Owns the arena's memory, the lanes
and the pinned ring; must not know which slots are free, or what is worth keeping.

Every method that queues copies leaves the marks behind them in ``marks``, also when it raises; where the device cannot
even be asked for a mark, one that never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from kvstore.errors import BudgetError
from kvstore.kv import Bytes
from kvstore.sizes import format_size
from kvstore.tiers.batches import Batch, Span, batches, spans
from kvstore.tiers.devicekv import DeviceKV, SlotRows, host_tensor
from kvstore.tiers.lanes import UNSEALED, Lane, Lanes, Mark
from kvstore.tiers.pagelock import PageLock, PinnedRing
from kvstore.tiers.plans import Plan


class Carrier:
    """Copies between one device's arena, engine tensors on that device, and host memory. Safe for any thread.

    budget: bytes of the arena. pagelock: knows which host memory the device can copy by itself; the rest goes through
    a pinned ring. Raises BudgetError when the device has less memory free than ``budget``.
    """

    def __init__(self, budget: int, device: torch.device, lanes: Lanes, pagelock: PageLock | None) -> None:
        self._lanes = lanes
        self._pagelock = pagelock
        with _current(device):  # or pinned memory would open a context on another device
            self._ring = PinnedRing(lanes) if lanes.needs_pinned else None
        self._arena: torch.Tensor | None = _allocate(budget, device)
        lanes.settle()  # what had this memory before may still use it, on another stream

    def load(self, kv: DeviceKV, plan: Plan, marks: list[Mark]) -> None:
        """Queue a load: host payloads to slots on the inbound lane, slots to the engine's tensors on its own.

        Raises RuntimeError when the device fails; ``plan.taken`` says what was queued before.
        """
        busy: dict[int, Mark] = {}
        with self._engine_lane(kv, marks) as lane, self._marked(self._lanes.inbound, marks):
            for batch in batches(plan.items, plan.entries, plan.incoming, plan.limit):
                if batch.incoming:
                    self._upload(lane, batch, plan, busy)
                self._scatter(kv, lane, batch, plan)
                if plan.passing:
                    busy |= dict.fromkeys(batch.slots, self._lanes.mark(lane))
                _take(plan, batch)
            for at, item in enumerate(plan.items):
                if plan.entries[at] is None and item.host is not None:
                    start, run = item.start, replace(item.host, take=item.take)
                    self._lanes.submit(lane, partial(kv.scatter, start, run))
                    plan.taken[at] = True

    def save(self, kv: DeviceKV, plan: Plan, marks: list[Mark]) -> list[tuple[Bytes, torch.Tensor]]:
        """Queue a save: the engine's tensors to slots on its own lane, slots to host payloads on the outbound one.

        Returns what the device cannot copy by itself, as pairs for `finish`. Raises as `load` does.
        """
        found = list(batches(plan.items, plan.entries, plan.incoming, plan.limit))
        with self._engine_lane(kv, marks) as lane:
            for batch in found:
                rows, start = self._rows(batch, plan), batch.items[0].start
                self._lanes.submit(lane, partial(kv.gather_rows, start, rows))
            ready = self._lanes.mark(lane)
        for entry in plan.used:
            entry.ready = ready
        return self._download(found, plan, marks)

    def copy_out(self, plan: Plan, marks: list[Mark]) -> list[tuple[Bytes, torch.Tensor]]:
        """Queue copies of slots to host payloads. Returns and raises as `save` does."""
        return self._download(list(batches(plan.items, plan.entries, plan.incoming, plan.limit)), plan, marks)

    def finish(self, target: Bytes, source: torch.Tensor) -> None:
        """Copy arena bytes to host memory through the ring, behind what the outbound lane has; returns when done."""
        assert self._ring is not None
        self._ring.download(self._lanes.outbound, target, source)

    def close(self) -> None:
        """Wait for the device and give the arena back."""
        self._lanes.settle()
        self._arena = None

    @contextmanager
    def _engine_lane(self, kv: DeviceKV, marks: list[Mark]) -> Iterator[Lane]:
        """The engine's lane, after what the calling thread's current lane has; the latter goes on after it."""
        lanes, current = self._lanes, self._lanes.current()
        lane = current if kv.lane is None else kv.lane
        if lane != current:
            lanes.follow(lane, lanes.mark(current))
        try:
            with self._marked(lane, marks):
                yield lane
        finally:
            if lane != current:
                lanes.follow(current, lanes.mark(lane))

    @contextmanager
    def _marked(self, lane: Lane, marks: list[Mark]) -> Iterator[None]:
        """A mark behind what the body gives ``lane``."""
        at = len(marks)
        marks.append(UNSEALED)
        try:
            yield
        finally:
            marks[at] = self._lanes.mark(lane)

    def _upload(self, lane: Lane, batch: Batch, plan: Plan, busy: dict[int, Mark]) -> None:
        """Host payloads to slots; ``lane`` goes on after it.

        busy: for slots that are used again within a call, the mark of the scatter that must come before.
        """
        inbound = self._lanes.inbound
        for mark in {id(busy[slot]): busy[slot] for slot in batch.slots if slot in busy}.values():
            self._lanes.follow(inbound, mark)
        locked, loose = self._by_lock(spans(batch, plan.cut.stride, plan.cut.token_bytes, over_gaps=True))
        self._copy(inbound, [(self._part(span), host_tensor(span.host())) for span in locked])
        for span in loose:
            assert self._ring is not None
            self._ring.upload(inbound, self._part(span), span.host())
        self._lanes.follow(lane, self._lanes.mark(inbound))

    def _scatter(self, kv: DeviceKV, lane: Lane, batch: Batch, plan: Plan) -> None:
        self._after_ready(lane, batch)
        rows, start = self._rows(batch, plan), batch.items[0].start
        self._lanes.submit(lane, partial(kv.scatter_rows, start, rows))

    def _download(self, found: Sequence[Batch], plan: Plan, marks: list[Mark]) -> list[tuple[Bytes, torch.Tensor]]:
        outbound = self._lanes.outbound
        deferred: list[tuple[Bytes, torch.Tensor]] = []
        with self._marked(outbound, marks):
            for batch in found:
                self._after_ready(outbound, batch)
                locked, loose = self._by_lock(spans(batch, plan.cut.stride, plan.cut.token_bytes, over_gaps=False))
                self._copy(outbound, [(host_tensor(span.host()), self._part(span)) for span in locked])
                deferred += [(span.host(), self._part(span)) for span in loose]
                _take(plan, batch)
        return deferred

    def _after_ready(self, lane: Lane, batch: Batch) -> None:
        for ready in {id(entry.ready): entry.ready for entry in batch.entries if entry.ready is not None}.values():
            self._lanes.follow(lane, ready)

    def _rows(self, batch: Batch, plan: Plan) -> SlotRows:
        assert self._arena is not None
        return SlotRows(self._arena, plan.cut.stride, batch.slots, batch.items[0].tokens, batch.items[0].take)

    def _part(self, span: Span) -> torch.Tensor:
        assert self._arena is not None
        return self._arena[span.at : span.at + span.length]

    def _by_lock(self, found: Sequence[Span]) -> tuple[list[Span], list[Span]]:
        """Spans that the device can copy by itself, and those it cannot."""
        if not self._lanes.needs_pinned:
            return list(found), []
        pagelock = self._pagelock
        covered = [pagelock is not None and pagelock.covers(span.host()) for span in found]
        locked = [span for span, ok in zip(found, covered, strict=True) if ok]
        return locked, [span for span, ok in zip(found, covered, strict=True) if not ok]

    def _copy(self, lane: Lane, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if pairs:
            self._lanes.submit(lane, _copying(pairs))


def _copying(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    def work() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return work


def _take(plan: Plan, batch: Batch) -> None:
    for index in batch.indices:
        plan.taken[index] = True


def _current(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda":
        return nullcontext()
    made: AbstractContextManager[object] = torch.cuda.device(device)
    return made


def _allocate(budget: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 memory. Raises BudgetError when there is not so much."""
    try:
        return torch.empty(budget, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise BudgetError(
            f"hbm cannot take {format_size(budget)} on {device}: {str(error).splitlines()[0]}",
            "lower hbm, or open the store before the engine takes the device's memory",
        ) from error
