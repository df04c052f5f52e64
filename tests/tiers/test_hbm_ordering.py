"""Copies are ordered with the engine's work and with each other: by marks alone, not by luck.

`ShuffledLanes` does the device's work in random order wherever no mark forbids it, so that a missing order shows as
wrong bytes. The engine here reads, writes and reuses its tensors in the only way an engine knows: in its own lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch

from kvstore.header import slot_bytes
from kvstore.kv import Bytes, HostKV, Run
from kvstore.layout import Layout
from kvstore.tiers.device import DeviceItem
from kvstore.tiers.devicekv import DeviceKV
from kvstore.tiers.flights import TransferHandle
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.pagelock import MlockRegistrar, PageLock
from kvstore.tiers.shuffled import ShuffledLanes

BLOCK, BLOCKS, SEEDS = 4, 12, 60
LAYOUT = Layout.uniform(layers=2, heads=1, k_dim=4, dtype="float32", block_tokens=BLOCK)
PAYLOAD, STRIDE = LAYOUT.payload_bytes(), slot_bytes(LAYOUT.payload_bytes())


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, PAYLOAD, np.uint8)


CONTENT = [content(number) for number in range(40)]


@dataclass
class Snapshot:
    """What the engine saw at a point of its lane, and what it should have seen."""

    seen: torch.Tensor
    items: list[DeviceItem]

    def check(self) -> None:
        view = HostKV.stacked(LAYOUT, self.seen.view(torch.int32).numpy().view(np.uint32))
        for item in self.items:
            found = np.zeros(PAYLOAD, np.uint8)
            view.gather(item.start, Run(found, 0, PAYLOAD, 1, BLOCK, BLOCK))
            assert np.array_equal(found, CONTENT[int.from_bytes(item.key, "big")])


class Engine:
    """Tensors, and a lane in which they are read and written."""

    def __init__(self, lanes: ShuffledLanes, lane: str, thread: str) -> None:
        self.lanes, self.lane, self.thread = lanes, lane, thread
        self.tensor = torch.zeros(2, 2, 1, BLOCKS * BLOCK, 4)
        self.kv = DeviceKV.stacked(LAYOUT, self.tensor)
        self.kv.lane = lane
        self.view = HostKV.stacked(LAYOUT, self.tensor.view(torch.int32).numpy().view(np.uint32))

    def compute(self, items: list[DeviceItem], on: str) -> None:
        """The model writes the KV of items."""

        def work() -> None:
            for item in items:
                payload = CONTENT[int.from_bytes(item.key, "big")]
                self.view.scatter(item.start, Run(payload, 0, PAYLOAD, 1, BLOCK, BLOCK))

        self.lanes.submit(on, work)

    def reuse(self, on: str) -> None:
        """The model overwrites everything."""
        self.lanes.submit(on, lambda: self.tensor.fill_(-1.0))

    def look(self, items: list[DeviceItem], on: str) -> Snapshot:
        """The model reads the KV of items."""
        seen = torch.empty_like(self.tensor)
        self.lanes.submit(on, lambda: seen.copy_(self.tensor))
        return Snapshot(seen, items)


class Play:
    """One random run of engine, store and tier."""

    def __init__(self, seed: int, *, needs_pinned: bool, locked: bool, slots: int) -> None:
        self.random = Random(seed)
        self.lanes = ShuffledLanes(seed, needs_pinned=needs_pinned, eagerness=self.random.choice([0.05, 0.3, 1.0]))
        self.memory = [np.zeros(BLOCKS * STRIDE, np.uint8) for _ in range(3)]
        self.pagelock = PageLock(64 << 20, MlockRegistrar())
        if locked:
            self.pagelock.add(self.memory)
            assert self.pagelock.wait(10)
        batch = self.random.choice([1, 2, 100]) * STRIDE
        self.tier = HbmTier(slots * STRIDE, "cpu", lanes=self.lanes, pagelock=self.pagelock, batch_bytes=batch)
        # the second engine's tensors have another lane than its thread: both must be ordered, and nothing else orders
        # the two engines with each other than the tier
        self.engines = [Engine(self.lanes, "engine", "engine"), Engine(self.lanes, "elsewhere", "thread")]
        self.busy: dict[int, TransferHandle] = {}
        self.pending: list[Callable[[], None]] = []
        self.snapshots: list[Snapshot] = []

    def items(self, segment: int) -> list[DeviceItem]:
        first, count = self.random.randrange(20), self.random.randint(1, BLOCKS)
        places = list(range(count)) if self.random.random() < 0.7 else self.random.sample(range(BLOCKS), count)
        return [
            DeviceItem(
                (first + at).to_bytes(32, "big"),
                b"r" * 32,
                at * BLOCK,
                BLOCK,
                BLOCK,
                Run(self.memory[segment], place * STRIDE + 4096, STRIDE, 1, BLOCK, BLOCK),
            )
            for at, place in enumerate(places)
        ]

    def save(self, engine: Engine, segment: int) -> None:
        on = self.random.choice([engine.thread, engine.lane])
        items = self.items(segment)
        if self.random.random() < 0.2:
            items = [replace(item, host=None) for item in items]
        engine.reuse(on)
        engine.compute(items, on)
        saved = self.tier.save(engine.kv, items)
        engine.reuse(self.random.choice([on, engine.lane]))

        def check() -> None:
            assert saved.wait()
            for item, taken in zip(items, saved.taken, strict=True):
                if taken and item.host is not None:
                    assert np.array_equal(item.host.payload(0, PAYLOAD), CONTENT[int.from_bytes(item.key, "big")])

        self.busy[segment] = saved
        self.pending.append(check)

    def load(self, engine: Engine, segment: int) -> None:
        on = self.random.choice([engine.thread, engine.lane])
        items = self.items(segment)
        self.memory[segment][:] = 0xEE
        for item in items:
            assert item.host is not None
            item.host.payload(0, PAYLOAD)[:] = CONTENT[int.from_bytes(item.key, "big")]
        there = self.tier.lookup([item.key for item in items])
        items = [
            replace(i, host=None) if ok and self.random.random() < 0.5 else i
            for i, ok in zip(items, there, strict=True)
        ]
        earlier = engine.look([], on)
        loaded = self.tier.load(engine.kv, items)
        arrived = [item for item, taken in zip(items, loaded.taken, strict=True) if taken]
        self.snapshots += [earlier, engine.look(arrived, self.random.choice([engine.thread, engine.lane]))]

        def check() -> None:
            assert loaded.wait()
            self.memory[segment][:] = 0x55  # the host slots may be released now
            loaded.keep([item.key for item in items if self.random.random() < 0.8])

        self.busy[segment] = loaded
        self.pending.append(check)

    def step(self) -> None:
        engine = self.random.choice(self.engines)
        self.lanes.use(engine.thread)
        free = [segment for segment in range(len(self.memory)) if segment not in self.busy]
        choice = self.random.random()
        if not free or choice < 0.35:
            if self.pending:
                self.pending.pop(self.random.randrange(len(self.pending)))()
                self.busy = {segment: handle for segment, handle in self.busy.items() if handle._outcome is None}
        elif choice < 0.65:
            self.save(engine, self.random.choice(free))
        elif choice < 0.95:
            self.load(engine, self.random.choice(free))
        else:
            self.tier.drop([number.to_bytes(32, "big") for number in self.random.sample(range(40), 5)])
        self.lanes.follow(engine.lane, self.lanes.mark(engine.thread))
        self.lanes.follow(engine.thread, self.lanes.mark(engine.lane))

    def finish(self) -> None:
        for check in self.pending:
            check()
        self.lanes.settle()
        for snapshot in self.snapshots:
            snapshot.check()
        stats = self.tier.stats()
        assert (stats.staged, stats.in_use, stats.transfers) == (0, 0, 0)
        assert self.tier.check_integrity() == []
        self.tier.close()
        self.pagelock.close()


@pytest.mark.parametrize(
    ("needs_pinned", "locked"),
    [(False, False), (True, True), (True, False)],
    ids=["any host memory", "page-locked", "through the ring"],
)
@pytest.mark.parametrize("slots", [3, 8, 30])
def test_bytes_are_right_in_whatever_order_the_device_works(needs_pinned: bool, locked: bool, slots: int) -> None:
    for seed in range(SEEDS):
        play = Play(1000 * slots + seed, needs_pinned=needs_pinned, locked=locked, slots=slots)
        for _ in range(25):
            play.step()
        play.finish()


def test_a_load_does_not_wait_for_the_device_and_a_save_neither() -> None:
    lanes = ShuffledLanes(1, needs_pinned=False, eagerness=0.0)
    tier = HbmTier(8 * STRIDE, "cpu", lanes=lanes)
    engine = Engine(lanes, "engine", "engine")
    memory = np.zeros(8 * STRIDE, np.uint8)
    items = [
        DeviceItem(
            n.to_bytes(32, "big"), b"r" * 32, n * BLOCK, BLOCK, BLOCK, Run(memory, n * STRIDE, STRIDE, 1, BLOCK, BLOCK)
        )
        for n in range(4)
    ]
    saved = tier.save(engine.kv, items)
    loaded = tier.load(engine.kv, [replace(item, host=None) for item in items])
    assert (saved.done(), loaded.done()) == (False, False)
    assert tier.stats().in_use == 4
    assert (
        tier.save(engine.kv, [replace(item, key=b"n" * 31 + item.key[:1]) for item in items] * 2).taken.count(True) == 4
    )
    lanes.settle()
    assert (saved.done(), loaded.done()) == (True, True)
    assert tier.stats().in_use == 0
    tier.close()


def test_work_that_no_mark_orders_is_done_in_both_orders() -> None:
    orders = set()
    for seed in range(20):
        lanes = ShuffledLanes(seed, eagerness=0.0)
        done: list[str] = []
        lanes.submit("a", lambda done=done: done.append("a"))
        lanes.submit("b", lambda done=done: done.append("b"))
        lanes.settle()
        orders.add("".join(done))
    assert orders == {"ab", "ba"}


def test_work_that_a_mark_orders_is_done_in_that_order() -> None:
    for seed in range(20):
        lanes = ShuffledLanes(seed, eagerness=0.0)
        done: list[str] = []
        lanes.submit("a", lambda done=done: done.append("a"))
        lanes.follow("b", lanes.mark("a"))
        lanes.submit("b", lambda done=done: done.append("b"))
        lanes.mark("b").wait()
        assert done == ["a", "b"]
