"""A worker's half: copies between the engine's pages and the store, for one rank's shard.

Loads that a step needs are done before its forward; those that a request waits for run on a thread of their own. Saves
run beside forwards, out of pages that nobody writes: a step that is given a page waits for the save that reads it. Must
not know the scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import torch

from kvstore.adapters.vllm.arrangement import Arrangement, planes
from kvstore.adapters.vllm.layout import EngineLayout
from kvstore.adapters.vllm.messages import Answer, Load, Measured, Orders, Save
from kvstore.adapters.vllm.paged import PagedKV, PagePlane, page_planes
from kvstore.adapters.vllm.paged_device import DevicePlane, PagedDeviceKV, device_planes
from kvstore.adapters.vllm.spaces import Spaces
from kvstore.background import step_back
from kvstore.copying import Job
from kvstore.errors import KVStoreError
from kvstore.events import Fault
from kvstore.kv import Array, KVBuffer
from kvstore.layout import Part
from kvstore.store import Store

MOST_SAVES = 64
"""Saves of requests that may wait."""
IDLE_WAIT_S = 0.01
"""How long an idle step waits for loads under way: an engine that spins takes the interpreter from them."""
_T = TypeVar("_T")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class WorkerHalf:
    """What the connector does beside the model. rank: the tensor-parallel one, which is its shard."""

    def __init__(self, store: Store, engine: EngineLayout, tensors: Sequence[torch.Tensor], rank: int) -> None:
        self._store, self._engine = store, engine
        self._part = Part(0, rank)
        self._spaces = Spaces(store, engine)
        self._pages = _Pages(engine, tensors)
        behind = step_back if self._pages.on_host else None
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kvstore-save", initializer=behind)
        self._loader = ThreadPoolExecutor(2, thread_name_prefix="kvstore-load")
        self._saves: deque[tuple[frozenset[int], Future[None]]] = deque()
        self._later: dict[str, tuple[Load, Future[int]]] = {}
        self._orders = Orders()
        self._loading_s = 0.0
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._measured: deque[Measured] = deque()
        self._stored: deque[tuple[str, int, bool]] = deque()

    def before(self, orders: Orders) -> None:
        """Ahead of everything else in a step: its pages still hold what they held before they were given away."""
        self._orders = orders
        self._pages.note_lane()
        for save in orders.before:
            self._submit(save)
        wait([future for pages, future in self._saves if not pages.isdisjoint(orders.fresh)])

    def begin(self, orders: Orders) -> None:
        """The step begins."""
        self._pages.note_lane()
        self._orders, self._loading_s = orders, 0.0
        for save in orders.saves:
            self._submit(save)

    def load(self) -> None:
        """Do this step's loads, and begin those that take their time."""
        began = time.perf_counter()
        for order in self._orders.loads:
            self._check(order, self._load(order))
        self._loading_s = time.perf_counter() - began
        for order in self._orders.later:
            job = Job(partial(self._load, order))
            self._later[order.request] = (order, job)
            job.begin(self._loader)

    def end(self) -> None:
        """The step is over. Saves may go on, up to a bound: an engine that computes faster than it saves is held up."""
        while self._saves and (len(self._saves) > MOST_SAVES or self._saves[0][1].done()):
            self._saves.popleft()[1].result()

    def finished(self) -> set[str]:
        """Requests whose loads are over, each once, whatever came of it."""
        waiting = [future for _, future in self._later.values()]
        if waiting and self._orders.idle:
            wait(waiting, IDLE_WAIT_S, FIRST_COMPLETED)
        over = {name for name, (_, future) in self._later.items() if future.done()}
        for name in over:
            order, future = self._later.pop(name)
            self._check(order, future.result())
        return over

    def bad_blocks(self) -> set[int]:
        """Pages that were claimed and could not be loaded, since this was last asked."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def answer(self) -> Answer:
        """What the scheduler's half has to know of this step."""
        failed, self._failed = frozenset(self._failed), set()
        loads, stored = tuple(_taken(self._measured)), tuple(_taken(self._stored))
        return Answer(self._orders.step, failed, loads, self._loading_s, stored)

    def close(self) -> None:
        """Finish what runs."""
        self._saver.shutdown(wait=True)
        self._loader.shutdown(wait=True)

    # ---------------------------------------------------------------- inside

    def _load(self, order: Load) -> int:
        """Tokens of the sequence that are in its pages now; ``order.first`` at least."""
        try:
            space = self._spaces.of(order.whose)
            match = self._store.match(space, order.tokens)
            buffer = self._pages.buffer(order.blocks, order.first)
            loaded = self._store.load(match, {self._part: buffer}, first=order.first)
        except Exception as error:  # noqa: BLE001  a load that fails is recomputed, whatever it failed of
            self._store.events.emit(Fault("adapter", "load", repr(error)))
            return order.first
        self._measured.append(
            Measured(order.request, loaded.tokens, dict(loaded.by_tier), loaded.bytes, loaded.seconds)
        )
        return max(loaded.tokens, order.first)

    def _check(self, order: Load, loaded: int) -> None:
        if loaded < len(order.tokens):
            page = self._engine.page
            self._bad_blocks |= set(order.blocks[loaded // page : -(-len(order.tokens) // page)])
            self._failed.add(order.request)

    def _submit(self, save: Save) -> None:
        job = Job(partial(self._save, save))
        self._saves.append((frozenset(save.blocks), job))
        job.begin(self._saver)

    def _save(self, save: Save) -> None:
        fresh = False
        try:
            space = self._spaces.of(save.whose)
            saving = self._store.save(space, save.tokens, {self._part: self._pages.buffer(save.blocks)})
            fresh = saving.new_blocks > 0
        except Exception as error:  # noqa: BLE001  a save that fails costs a later hit, never the request
            problem = error.problem if isinstance(error, KVStoreError) else repr(error)
            self._store.events.emit(Fault("adapter", "save", problem))
        self._stored.append((save.request, len(save.tokens), fresh))


class _Pages:
    """The engine's pages, and buffers over those of one sequence: in host memory, or on a device."""

    def __init__(self, engine: EngineLayout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout = engine.with_traits({})
        self._lane: Any = None
        self._host: tuple[PagePlane, ...] = ()
        self._device: tuple[DevicePlane, ...] = ()
        raw = [tensor.detach().view(_WORDS[layout.itemsize]) for tensor in tensors]
        pairs = [planes(tensor, engine.arrangement, layout.groups[0][0].k_dim) for tensor in raw]
        by_dim = engine.arrangement is Arrangement.COLUMNS
        if tensors[0].device.type == "cpu":
            arrays: list[tuple[Array, Array]] = [(keys.numpy(), values.numpy()) for keys, values in pairs]
            self._host = page_planes(layout, arrays, by_dim=by_dim)
        else:
            self._device = device_planes(layout, pairs, by_dim=by_dim)

    @property
    def on_host(self) -> bool:
        """Whether the engine computes on the cores that copy."""
        return bool(self._host)

    def note_lane(self) -> None:
        """Called on the engine's thread: the stream on which it works on its pages."""
        if self._device:
            self._lane = torch.cuda.current_stream(self._device[0].tensor.device)

    def buffer(self, blocks: Sequence[int], first: int = 0) -> KVBuffer:
        """Over the pages of one sequence."""
        if self._host:
            return PagedKV(self._host, blocks, first=first)
        buffer = PagedDeviceKV(self._layout, self._device, blocks, first=first)
        buffer.lane = self._lane
        return buffer


def _taken(queue: deque[_T]) -> Iterator[_T]:
    """What is in it, which other threads may add to meanwhile."""
    while queue:
        yield queue.popleft()


def in_layer_order(names: Sequence[str], tensors: Mapping[str, Any]) -> list[Any]:
    """Tensors in the order of ``names``."""
    return [tensors[name] for name in names]
