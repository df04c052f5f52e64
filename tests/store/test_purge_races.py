"""What was explicitly evicted stays away: in other processes, and when a save, a move or a promotion is under way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from children import Child
from known_kv import PLAIN, Speaker, load, load_match, save, slots_of

from kvstore.events import Cause
from kvstore.kv import Bytes, Gathering, HostKV, Run, Told
from kvstore.store import Store
from kvstore.tiers.medium import Medium

Reopen = Callable[..., Store]
ME = Speaker(PLAIN, "a")
TOKENS = list(range(100))


class Gate:
    """A place where a thread stops until it is let through."""

    def __init__(self) -> None:
        self.shut = False
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        if self.shut:
            self.reached.set()
            assert self.opened.wait(60)

    def close(self) -> None:
        self.shut = True

    def wait(self) -> None:
        """Until somebody stands before it."""
        assert self.reached.wait(60)

    def open(self) -> None:
        self.shut = False
        self.opened.set()


class GatedMedium:
    """A medium with a gate before each kind of transfer."""

    def __init__(self, inner: Medium, gates: dict[str, Gate]) -> None:
        self._inner, self._gates = inner, gates
        self.name = inner.name

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        self._gates["read"].pass_through()
        self._inner.read(segment, offset, into)

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        self._gates["write"].pass_through()
        self._inner.write(segment, offset, data)

    def sync(self, segments: Iterable[int]) -> None:
        self._gates["sync"].pass_through()
        self._inner.sync(segments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class GatedKV(HostKV):
    """A source with a gate before every gather."""

    gate: Gate

    def gathering(self, start: int, run: Run) -> Gathering:
        gather = super().gathering(start, run)

        def gated(at: int, told: Told) -> None:
            self.gate.pass_through()
            gather(at, told)

        return gated


def evict_all(store: Store) -> None:
    store.evict(everything=True)


def evict_namespace(store: Store) -> None:
    store.evict(namespace=store.namespace(PLAIN, salt="a").root)


def evict_salt(store: Store) -> None:
    store.evict(salt="a")


def evict_prefix(store: Store) -> None:
    store.evict(prefix=store.match(store.namespace(PLAIN, salt="a"), TOKENS[:20]))


WAYS = pytest.mark.parametrize("evict", [evict_all, evict_namespace, evict_salt, evict_prefix])


def is_gone(store: Store, reopen: Reopen) -> bool:
    """Nothing of it in any tier, now and after a restart, and the books agree."""
    held = []
    for again in (False, True):
        if again:
            store.close()
            store = reopen()
        assert store.flush(60)
        held += [load(store, ME, TOKENS)[0].tokens, *slots_of(store).values()]
        assert store.verify().problems == []
    return not any(held)


@WAYS
def test_a_match_held_in_another_process_misses_after_an_eviction(
    evict: Callable[[Store], None], reopen: Reopen, tmp_path: Path, memory: Path
) -> None:
    store = reopen()
    save(store, ME, TOKENS)
    with Child(tmp_path / "kv", memory) as child:
        assert child.do("match", speaker=1, tokens=TOKENS) == 100
        evict(store)
        assert child.do("load match", speaker=1, tokens=TOKENS) == [0, 0, Cause.PURGED]
        assert child.do("load", speaker=1, tokens=TOKENS) == [0, 0, Cause.ABSENT]


@WAYS
def test_a_save_under_way_does_not_bring_back_what_was_evicted(evict: Callable[[Store], None], reopen: Reopen) -> None:
    store = reopen()
    save(store, ME, TOKENS[:40])
    source = GatedKV.layered(PLAIN, ME._layers(TOKENS, next(iter(PLAIN.parts()))))
    assert isinstance(source, GatedKV)
    source.gate = gate = Gate()
    gate.close()
    space = store.namespace(PLAIN, salt="a")
    done: list[Any] = []
    saving = threading.Thread(target=lambda: done.append(store.save(space, TOKENS, source)))
    saving.start()
    gate.wait()
    evict(store)
    gate.open()
    saving.join(60)
    assert done[0].new_blocks == 0
    assert is_gone(store, reopen)


@WAYS
@pytest.mark.parametrize("where", ["write", "sync"])
def test_the_mover_does_not_bring_back_what_was_evicted(
    where: str, evict: Callable[[Store], None], reopen: Reopen
) -> None:
    gates = {name: Gate() for name in ("read", "write", "sync")}
    store = reopen(wrap=lambda medium: GatedMedium(medium, gates) if medium.name == "nvme" else medium)
    save(store, ME, [5, 6, 7])
    assert store.flush(60)
    store.evict(everything=True)
    gates[where].close()
    save(store, ME, TOKENS)
    gates[where].wait()
    evict(store)
    gates[where].open()
    assert is_gone(store, reopen)


@WAYS
def test_a_promotion_does_not_bring_back_what_was_evicted(evict: Callable[[Store], None], reopen: Reopen) -> None:
    gates = {name: Gate() for name in ("read", "write", "sync")}
    store = reopen(wrap=lambda medium: GatedMedium(medium, gates) if medium.name == "nvme" else medium)
    save(store, ME, TOKENS)
    assert store.flush(60)
    store.evict(everything=True, tier="ram")
    gates["read"].close()
    under_way = store.prefetch(store.match(store.namespace(PLAIN, salt="a"), TOKENS))
    gates["read"].wait()
    evict(store)
    gates["read"].open()
    assert under_way.wait(60)
    assert is_gone(store, reopen)


def test_evicting_one_tier_leaves_the_other_copies(reopen: Reopen) -> None:
    store = reopen()
    save(store, ME, TOKENS)
    assert store.flush(60)
    assert store.evict(everything=True, tier="nvme") == {"nvme": 7}
    assert load(store, ME, TOKENS)[0].by_tier == {"ram": 100}
    store.evict(everything=True)
    save(store, ME, TOKENS)
    assert store.flush(60)
    assert store.evict(everything=True, tier="ram") == {"ram": 7}
    assert load(store, ME, TOKENS)[0].by_tier == {"nvme": 100}


def test_moves_and_promotions_at_full_speed_bring_nothing_back(reopen: Reopen) -> None:
    """Whatever runs when everything is evicted, nothing is there once it has ended."""
    store = reopen()
    dice = random.Random(3)
    space = store.namespace(PLAIN, salt="a")
    for round_ in range(40):
        talks = [[round_, talk, *range(200)] for talk in range(4)]
        for tokens in talks:
            save(store, ME, tokens)
        if round_ % 2:
            store.flush(60)
            store.evict(everything=True, tier="ram")
        loads = [
            threading.Thread(target=load_match, args=(store, ME, tokens, store.match(space, tokens)))
            for tokens in talks
        ]
        fetched = [store.prefetch(store.match(space, tokens)) for tokens in talks]
        for thread in loads:
            thread.start()
        threading.Event().wait(dice.random() / 200)
        store.evict(everything=True)
        for thread in loads:
            thread.join(60)
        assert all(one.wait(60) for one in fetched)
        assert store.flush(60)
        assert slots_of(store) == {"ram": 0, "nvme": 0}
    assert store.verify().problems == []


def test_hundreds_of_evictions_do_not_fill_the_index(reopen: Reopen) -> None:
    store = reopen()
    space = store.namespace(PLAIN, salt="a")
    old = list(range(1_000_000, 1_000_032))
    save(store, ME, old)
    held = store.match(space, old)
    for first in range(0, 400_000, 1000):
        tokens = list(range(first, first + 300))
        save(store, ME, tokens)
        assert sum(store.evict(prefix=store.match(space, tokens)).values()) >= 19
    assert all(tier.index_used_bytes < tier.index_bytes // 2 for tier in store.stats().tiers)
    loaded, wrong = load_match(store, ME, old, held)
    assert (loaded.tokens, loaded.stop, wrong) == (0, Cause.PURGED, 0), (
        "who lags behind the tombstones drops everything"
    )
    assert load(store, ME, old)[0].tokens == 32
