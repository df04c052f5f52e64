"""Observers may do anything: call the store, take their time, raise what they like. No thread of the store minds."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from known_kv import NARROW, PARTED, PLAIN, Speaker, load_match, save

from kvstore import serving
from kvstore.core import Core
from kvstore.events import Event, Events, Evicted, EvictReason, Moved, Notice
from kvstore.kv import HostKV
from kvstore.match import Match
from kvstore.store import Store
from kvstore.tiers.ram import RamTier

Reopen = Callable[..., Store]


def tokens(seed: int, blocks: int, size: int = 16) -> list[int]:
    return [seed * 100_000 + at for at in range(blocks * size)]


class Nosy:
    """On every event that it does not cause itself, it saves, matches, evicts and asks."""

    def __init__(self, store: Store) -> None:
        self.store, self.seen, self._mine, self._turn = store, list[Event](), threading.local(), 0

    def __call__(self, event: Event) -> None:
        self.seen.append(event)
        if getattr(self._mine, "busy", False) or len(self.seen) > 300:
            return
        self._mine.busy = True
        try:
            self._turn += 1
            save(self.store, Speaker(PLAIN, "nosy"), tokens(50 + self._turn % 5, 3))
            self.store.match(self.store.namespace(PLAIN, salt="nosy"), tokens(50, 3))
            self.store.evict(unused_s=1e6)
            self.store.stats()
        finally:
            self._mine.busy = False


def test_an_observer_may_call_the_store_whatever_it_hears(reopen: Reopen) -> None:
    store = reopen(ram="2MiB", nvme="3MiB")
    nosy = Nosy(store)
    store.events.subscribe(nosy)
    wide, plain = Speaker(NARROW, "wide"), Speaker(PLAIN, "plain")
    for seed in range(8):
        save(store, plain, tokens(seed, 30))
    for seed in range(8, 16):
        save(store, wide, tokens(seed, 20, 64))
    save(store, plain, tokens(99, 4))
    piece = next(iter(store.match(store.namespace(PLAIN, salt="plain"), tokens(99, 4)).pieces.values()))[0]
    store._core.ram.slot(piece.entry.ref, 12288)[5000] ^= 1
    store.verify(repair=True)
    store.evict(salt="wide")
    store.flush(30)
    store.close()
    reasons = {event.reason for event in nosy.seen if isinstance(event, Evicted)}
    assert reasons >= {EvictReason.LRU, EvictReason.RECUT, EvictReason.CORRUPT, EvictReason.EVICT}


def test_of_a_block_found_damaged_by_a_load_an_observer_may_evict(reopen: Reopen) -> None:
    """It is removed by the index's own thread, which must not wait for itself."""
    store, gone = reopen(nvme=0), threading.Event()

    def evicting(event: Event) -> None:
        if isinstance(event, Evicted) and event.reason is EvictReason.CORRUPT:
            store.evict(everything=True)
            gone.set()

    store.events.subscribe(evicting)
    me = Speaker(PLAIN, "a")
    save(store, me, tokens(1, 4))
    space = store.namespace(PLAIN, salt="a")
    match = store.match(space, tokens(1, 4))
    store._core.ram.slot(next(iter(match.pieces.values()))[0].entry.ref, 12288)[5000] ^= 1
    assert store.load(match, HostKV.stacked(PLAIN, np.zeros((2, 2, 2, 64, 16), np.uint32))).tokens == 0
    assert gone.wait(60)
    assert store.match(space, tokens(1, 4)).tokens == 0
    assert save(store, me, tokens(1, 4)).new_blocks == 4


def test_a_writer_that_would_wait_for_itself_says_so(reopen: Reopen) -> None:
    store = reopen()
    index = store._core.ram.index
    told = index.submit(lambda txn: index.write(lambda other: None))
    with pytest.raises(RuntimeError, match="wait for itself"):
        told.result(60)
    assert save(store, Speaker(PLAIN, "a"), tokens(1, 4)).new_blocks == 4


@pytest.mark.parametrize("raised", [asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit, ValueError])
def test_whatever_an_observer_raises_ends_no_thread_of_the_store(raised: type[BaseException], reopen: Reopen) -> None:
    store, seen = reopen(), list[Event]()

    def raising(event: Event) -> None:
        if isinstance(event, Moved):
            raise raised

    store.events.subscribe(raising)
    store.events.subscribe(seen.append)
    for seed in range(2):
        save(store, Speaker(PLAIN, "a"), tokens(seed, 4))
        assert store.flush(60)
    assert sum(event.blocks for event in seen if isinstance(event, Moved)) == 8
    assert "observer dropped" in [event.subject for event in seen if isinstance(event, Notice)]


def test_a_ctrl_c_in_an_observer_is_the_programs_own() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Events([interrupted]).emit(Notice("a", "b"))


def test_what_is_told_elsewhere_keeps_its_order_and_its_end_is_known() -> None:
    seen, go = list[Event](), threading.Event()

    def slow(event: Event) -> None:
        go.wait(60)
        seen.append(event)

    events, told = Events([slow]), [Notice("count", str(number)) for number in range(50)]
    for event in told:
        events.emit_elsewhere(event)
    assert not events.settle(0.01)
    assert seen == []
    go.set()
    assert events.settle(60)
    assert seen == told


def test_nothing_minds_a_segment_in_the_making(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claimed in the index, and its files not there yet."""
    store, failed, asked = reopen(nvme=0), list[BaseException](), 0
    core = store._core
    allocate = core.ram.arrays.allocate

    def making(segment: int, size: int) -> None:
        nonlocal asked
        asked += 1
        try:
            store.evict(unused_s=1e6)
            store.set_quota("b", ram=1 << 20)
            core.keeper.expire()
        except BaseException as error:  # noqa: BLE001  told below
            failed.append(error)
        allocate(segment, size)

    monkeypatch.setattr(core.ram.arrays, "allocate", making)
    for seed in range(4):
        save(store, Speaker(PLAIN, "b"), tokens(seed, 20))
    assert asked
    assert failed == []


def test_a_label_and_a_ttl_given_later_in_one_process_count(reopen: Reopen) -> None:
    store = reopen()
    kv = HostKV.stacked(PLAIN, np.zeros((2, 2, 2, 32, 16), np.uint32))
    for seed, given in enumerate(({}, {"ttl": 60, "label": "x"}, {})):
        store.save(store.namespace(PLAIN, **given), tokens(seed, 2), kv)
        known = [(one.record.ttl, one.record.label) for one in store.namespaces()]
        assert known == [(0, "") if seed == 0 else (60, "x")]


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[set[bytes]]:
    """Keys of the blocks that each load holds."""
    taken: list[set[bytes]] = []
    real, lease = serving._try_lease, RamTier.lease

    def loading(core: Core, match: Match) -> Any:
        taken.append(set())
        return real(core, match)

    def leasing(self: RamTier, blocks: Sequence[Any], *given: Any) -> Any:
        taken[-1] |= {name.key for name, _ in blocks}
        return lease(self, blocks, *given)

    monkeypatch.setattr(serving, "_try_lease", loading)
    monkeypatch.setattr(RamTier, "lease", leasing)
    return taken


def test_parts_of_which_one_is_on_nvme_alone_are_leased_while_they_are_loaded(
    reopen: Reopen, leases: list[set[bytes]]
) -> None:
    store, me = reopen(), Speaker(PARTED, "a")
    save(store, me, tokens(1, 4))
    assert store.flush(60)
    space = store.namespace(PARTED, salt="a")
    first, second = itertools.islice(PARTED.parts(), 2)
    pieces = store.match(space, tokens(1, 4)).pieces
    gone = [piece.name for piece in (*pieces[first], pieces[second][1])]
    store._core.ram.remove([(name.index_key, name.key) for name in gone], EvictReason.LRU)
    match = store.match(space, tokens(1, 4))
    assert match.by_tier == {"nvme": 64}, "of the first part"
    loaded, wrong = load_match(store, me, tokens(1, 4), match)
    assert (loaded.tokens, wrong) == (64, 0)
    assert leases == [{piece.name.key for some in match.pieces.values() for piece in some if piece.tier == "ram"}]
