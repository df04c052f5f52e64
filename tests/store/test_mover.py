"""What waits in `ram` gets to `nvme`, once, and what cannot is not tried for ever."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore.events import Event, Moved, Skipped
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.policy import CLEAN, REFUSED
from kvstore.rescan import dirty_moves
from kvstore.tiers import segments
from kvstore.tiers.fault import Effect, FaultMedium, FaultRule, Operation
from kvstore.tiers.medium import Medium
from kvstore.tiers.throttle import ThrottleMedium

LAYOUT = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)


def open_store(path: Path, memory: Path, **settings: Any) -> kvstore.store.Store:
    given = {"ram": "8MiB", "nvme": "16MiB", "ram_segment_bytes": "1MiB", "nvme_segment_bytes": "2MiB"}
    return kvstore.open(path / "store", ram_directory=memory, **(given | settings))


def save(store: kvstore.store.Store, space: Any, seed: int, blocks: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50_000, blocks * 16)
    kv = HostKV.stacked(LAYOUT, rng.standard_normal((2, 2, 2, blocks * 16, 16)).astype(np.float32))
    assert store.save(space, tokens, kv).new_blocks == blocks
    return tokens


def test_bytes_moved_are_those_of_the_tokens_in_the_blocks(tmp_path: Path, memory: Path) -> None:
    """One block and a half: of the second, half a payload."""
    told: list[Event] = []
    moved = LAYOUT.payload_bytes(tokens=16) + LAYOUT.payload_bytes(tokens=8)
    with open_store(tmp_path, memory) as store:
        space = store.namespace(LAYOUT)
        store.events.subscribe(told.append)
        tokens, kv = np.arange(24), HostKV.stacked(LAYOUT, np.ones((2, 2, 2, 24, 16), np.float32))
        assert store.save(space, tokens, kv).bytes == moved
        assert store.flush(30)
        store.evict(everything=True, tier="ram")
        assert store.load(store.match(space, tokens), kv).by_tier == {"nvme": 24}
        moves = [(event.source, event.blocks, event.bytes, event.namespace) for event in told if type(event) is Moved]
        assert moves == [("ram", 2, moved, space.root), ("nvme", 2, moved, space.root)]
        (day,) = store.days().values()
        assert day.moved_bytes == moved


def test_what_the_full_queue_dropped_is_found_again_and_moved(tmp_path: Path, memory: Path) -> None:
    told: list[Event] = []
    with open_store(tmp_path, memory, mover_batch_bytes="64KiB", mover_queue_bytes="64KiB") as store:
        store.events.subscribe(told.append)
        tokens = save(store, store.namespace(LAYOUT), 1, 60)
        assert any(isinstance(event, Skipped) and event.reason == "queue full" for event in told)
        assert store.flush(30) is False
        deadline = time.monotonic() + 30
        while dirty_moves(store._core.ram, 1) and time.monotonic() < deadline:
            time.sleep(0.05)
        store.evict(everything=True, tier="ram")
        assert store.match(store.namespace(LAYOUT), tokens).by_tier == {"nvme": 60 * 16}


def test_what_is_saved_during_a_pause_is_moved_when_it_ends(tmp_path: Path, memory: Path) -> None:
    """Though nothing waited when it began, and nothing is saved afterwards."""
    with open_store(tmp_path, memory) as store:
        space, mover = store.namespace(LAYOUT), store._core.mover
        assert mover is not None
        save(store, space, 1, 1)
        assert store.flush(30)
        time.sleep(0.1)  # so that it waits
        mover._paused_until = time.monotonic() + 0.3
        tokens = save(store, space, 2, 10)
        time.sleep(max(0.0, mover._paused_until - time.monotonic()))
        assert store.flush(10)
        store.evict(everything=True, tier="ram")
        assert store.match(space, tokens).by_tier == {"nvme": 160}


def test_a_segment_that_is_being_made_has_nothing_to_move(tmp_path: Path, memory: Path) -> None:
    with open_store(tmp_path, memory) as store:
        save(store, store.namespace(LAYOUT), 1, 4)
        assert store.flush(10)
        ram = store._core.ram
        claim = partial(segments.plan_growth, owner=ram.owner, slot_bytes=12288, limits=ram.limits, cold=[])
        growth = ram.index.write(lambda txn: claim(txn, spared=lambda ref, entry: True))
        assert growth is not None
        assert growth.new, "its files are not there yet"
        try:
            assert dirty_moves(ram, 100) == []
        finally:
            ram.index.write(lambda txn: segments.cancel_growth(txn, growth, ram.owner))


def test_what_a_quota_keeps_out_of_nvme_is_not_offered_again(tmp_path: Path, memory: Path) -> None:
    told: list[Event] = []
    with open_store(tmp_path, memory) as store:
        store.set_quota("tenant", nvme=10 * 12288)
        store.events.subscribe(told.append)
        save(store, store.namespace(LAYOUT, salt="tenant"), 2, 30)
        assert store.flush(30) is False
        assert store.flush(30) is True, "it was told, and nothing was submitted since"
        deadline = time.monotonic() + 10
        while dirty_moves(store._core.ram, 100) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert dirty_moves(store._core.ram, 100) == []
        flags = [store._core.ram.arrays.of(s.number).flags[: s.slots] for s in store._core.ram.segment_list()]
        marks = np.concatenate(flags)
        assert np.count_nonzero(marks == CLEAN) == 10
        assert np.count_nonzero(marks == REFUSED) == 20
        refused = [event.blocks for event in told if isinstance(event, Skipped) and event.reason == "quota"]
        assert sum(refused) == 20
        assert sum(event.blocks for event in told if isinstance(event, Moved)) == 10
        assert store.verify().ok


def test_batches_reserved_ahead_and_not_begun_are_given_back_when_the_store_must_close(
    tmp_path: Path, memory: Path
) -> None:
    """Their blocks stay in `ram`, and the next process moves them."""
    told: list[Event] = []

    def slow(medium: Medium) -> Medium:
        return ThrottleMedium(medium, latency_s=0.5) if medium.name == "nvme" else medium

    store = open_store(tmp_path, memory, mover_batch_bytes="64KiB", wrap=slow)
    store.events.subscribe(told.append)
    tokens = save(store, store.namespace(LAYOUT), 1, 40)  # eight batches of five
    mover = store._core.mover
    assert mover is not None
    while not any(isinstance(event, Moved) for event in told):
        time.sleep(0.01)
    assert mover.close(0.0) is False
    moved = sum(event.blocks for event in told if isinstance(event, Moved))
    left = sum(event.blocks for event in told if isinstance(event, Skipped) and event.reason == "closing")
    assert moved + left == 40
    assert left >= 20, "a close that must end waits for what is being written, not for what is planned"
    assert store.verify().problems == []
    store.close()
    with open_store(tmp_path, memory) as again:
        assert again.verify().problems == []
        deadline = time.monotonic() + 30
        while dirty_moves(again._core.ram, 1) and time.monotonic() < deadline:
            time.sleep(0.05)
        again.evict(everything=True, tier="ram")
        assert again.match(again.namespace(LAYOUT), tokens).by_tier == {"nvme": 640}


def test_a_batch_that_fails_costs_those_reserved_with_it_nothing(tmp_path: Path, memory: Path) -> None:
    told: list[Event] = []

    def broken(medium: Medium) -> Medium:
        if medium.name != "nvme":
            return medium
        return FaultMedium(medium, [FaultRule(Operation.WRITE, Effect.EIO, first=2, times=1)])

    with open_store(tmp_path, memory, mover_batch_bytes="64KiB", wrap=broken) as store:
        store.events.subscribe(told.append)
        tokens = save(store, store.namespace(LAYOUT), 1, 20)  # four batches of five, by one reservation
        assert store.flush(30) is False
        assert sum(event.blocks for event in told if isinstance(event, Moved)) == 15
        assert [event.blocks for event in told if isinstance(event, Skipped) and event.reason == "fault"] == [5]
        assert store.verify().problems == []
        deadline = time.monotonic() + 30
        while dirty_moves(store._core.ram, 1) and time.monotonic() < deadline:
            time.sleep(0.05)  # found again, and moved
        store.evict(everything=True, tier="ram")
        assert store.match(store.namespace(LAYOUT), tokens).by_tier == {"nvme": 320}
