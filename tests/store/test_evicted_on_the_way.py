"""What is on its way while it is evicted stays away, although nobody could name it block by block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from children import Child
from known_kv import PLAIN, Speaker, load, load_match, save, slots_of

from kvstore.events import Cause
from kvstore.eviction import Eviction
from kvstore.identity import as_tokens, chain
from kvstore.kv import Gathering, HostKV, Run
from kvstore.purge import reaching
from kvstore.store import Store
from kvstore.tombstone import Tombstone

Reopen = Callable[..., Store]
ME = Speaker(PLAIN, "a")
ROOMY = {"ram": "8MiB", "nvme": "8MiB"}
LONG = list(range(197 * 16))
"""Blocks of three batches of a save, and more."""


class HookedKV(HostKV):
    """A source that does something once, in the saving thread, before rows of blocks from a token on are read."""

    at: int
    hook: Callable[[], object] | None

    def gathering(self, start: int, run: Run) -> Gathering:
        hook = self.hook
        if start >= self.at and hook is not None:
            self.hook = None
            hook()
        return super().gathering(start, run)


def save_with_hook(store: Store, tokens: Sequence[int], at: int, hook: Callable[[], object]) -> Any:
    """Save, and do something when the save comes to a token."""
    source = HookedKV.layered(PLAIN, ME._layers(tokens, next(iter(PLAIN.parts()))))
    assert isinstance(source, HookedKV)
    source.at, source.hook = at, hook
    done = store.save(store.namespace(PLAIN, salt="a"), tokens, source)
    assert source.hook is None
    return done


def matched(store: Store, tokens: Sequence[int]) -> Any:
    return store.match(store.namespace(PLAIN, salt="a"), tokens)


def is_settled(store: Store) -> bool:
    assert store.flush(60)
    return store.verify().problems == []


@pytest.mark.parametrize("block", [2, 50, 66, 150, 170])
@pytest.mark.parametrize("prefix", [32, 40, 16, 10])
def test_a_prefix_evicted_beside_a_save_takes_all_that_the_save_would_have_added(
    reopen: Reopen, block: int, prefix: int
) -> None:
    """Whatever the save had published by then, and whatever it had yet to reserve."""
    store = reopen(**ROOMY)
    save(store, ME, LONG[:prefix])
    assert store.flush(60)
    evicted = matched(store, LONG[:prefix])
    save_with_hook(store, LONG, block * 16, lambda: store.evict(prefix=evicted))
    assert is_settled(store)
    assert slots_of(store) == {"ram": 0, "nvme": 0}
    save(store, ME, LONG[:1280])
    assert load(store, ME, LONG)[0].tokens == 1280
    assert is_settled(store)


@pytest.mark.parametrize("prefix", [40, 48])
def test_it_takes_them_where_others_share_the_head(reopen: Reopen, prefix: int) -> None:
    store = reopen(**ROOMY)
    others = [*LONG[:32], *range(7000, 7100)]
    save(store, ME, others)
    save(store, ME, LONG[:prefix])
    assert store.flush(60)
    evicted = matched(store, LONG[:prefix])
    save_with_hook(store, LONG[:2400], 50 * 16, lambda: store.evict(prefix=evicted))
    assert is_settled(store)
    assert load(store, ME, others)[0].tokens == len(others)
    save(store, ME, LONG[:1280])
    assert load(store, ME, LONG)[0].tokens == 1280


def test_a_save_of_something_else_beside_it_is_left_alone(reopen: Reopen) -> None:
    store = reopen(**ROOMY)
    save(store, ME, [*LONG[:32], *range(7000, 7100)])
    save(store, ME, LONG[:40])
    evicted = matched(store, [*LONG[:32], *range(7000, 7004)])
    done = save_with_hook(store, LONG[:2400], 50 * 16, lambda: store.evict(prefix=evicted))
    assert (done.skipped_blocks, load(store, ME, LONG)[0].tokens) == (0, 2400)


@pytest.mark.parametrize("reserved", [False, True])
def test_what_is_saved_between_the_two_looks_is_not_moved(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, reserved: bool
) -> None:
    """The mover has it before the tombstone is written, and gets its slots before the second look, or after."""
    store = reopen(**ROOMY)
    save(store, ME, LONG[:32])
    assert store.flush(60)
    nvme = store._core.nvme
    assert nvme is not None
    began, go_on = threading.Event(), threading.Event()
    where = "write" if reserved else "reserve"
    real, bury = getattr(nvme, where), Eviction._bury

    def held(*given: Any, **named: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return real(*given, **named)

    def burying(self: Eviction, target: Any, victims: Any) -> Any:
        monkeypatch.setattr(Eviction, "_bury", bury)
        save(store, ME, LONG[:96])
        assert began.wait(60)
        return bury(self, target, victims)

    monkeypatch.setattr(nvme, where, held)
    monkeypatch.setattr(Eviction, "_bury", burying)
    assert store.evict(prefix=matched(store, LONG[:32])) == {"ram": 6, "nvme": 2}
    go_on.set()
    assert is_settled(store)
    assert slots_of(store) == {"ram": 0, "nvme": 0}


def test_a_move_that_knows_only_the_first_tombstone_is_found_by_the_last_look(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets its slots after the second look, and reads the tombstones before that of what was found late."""
    store = reopen(**ROOMY)
    save(store, ME, LONG[:32])
    assert store.flush(60)
    nvme, purge = store._core.nvme, store._core.purge
    assert nvme is not None
    reserve, publish, add, bury = nvme.reserve, nvme.publish, purge.add, Eviction._bury
    may_reserve, has_read, may_publish = threading.Event(), threading.Event(), threading.Event()
    stones: list[range] = []

    def reserving(*given: Any, **named: Any) -> Any:
        assert may_reserve.wait(60)
        return reserve(*given, **named)

    def publishing(*given: Any, **named: Any) -> Any:
        has_read.set()
        assert may_publish.wait(60)
        return publish(*given, **named)

    def adding(**named: Any) -> range:
        if stones:
            may_reserve.set()
            assert has_read.wait(60)
        stones.append(add(**named))
        return stones[-1]

    def burying(self: Eviction, target: Any, victims: Any) -> Any:
        save(store, ME, LONG[:96])
        return bury(self, target, victims)

    monkeypatch.setattr(nvme, "reserve", reserving)
    monkeypatch.setattr(nvme, "publish", publishing)
    monkeypatch.setattr(purge, "add", adding)
    monkeypatch.setattr(Eviction, "_bury", burying)
    store.evict(prefix=matched(store, LONG[:32]))
    may_publish.set()
    assert len(stones) == 2
    assert is_settled(store)
    assert slots_of(store) == {"ram": 0, "nvme": 0}


@pytest.mark.parametrize("how", ["prefix", "everything", "salt"])
@pytest.mark.parametrize("fetched", [False, True])
def test_a_match_made_while_blocks_go_promotes_none_of_them(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, how: str, fetched: bool
) -> None:
    """It is younger than the tombstone, and has seen what the tombstone names."""
    store = reopen(**ROOMY)
    save(store, ME, LONG[:160])
    assert store.flush(60)
    store.evict(everything=True, tier="ram")
    target = {
        "prefix": {"prefix": matched(store, LONG[:100])},
        "everything": {"everything": True},
        "salt": {"salt": "a"},
    }
    ram = store._core.ram
    remove, found = ram.remove, []

    def removing(*given: Any, **named: Any) -> int:
        found.append(matched(store, LONG[:160]))
        return remove(*given, **named)

    monkeypatch.setattr(ram, "remove", removing)
    store.evict(**target[how])
    assert found[0].tokens == 160
    if fetched:
        assert store.prefetch(found[0]).wait(60)
    else:
        loaded, wrong = load_match(store, ME, LONG[:160], found[0])
        assert (loaded.tokens, loaded.stop, wrong) == (0, Cause.PURGED, 0)
    assert is_settled(store)
    assert slots_of(store) == {"ram": 0, "nvme": 0}


def before_reserving(store: Store, monkeypatch: pytest.MonkeyPatch, hook: Callable[[], object]) -> None:
    """Do something when the next save has looked which blocks are new, and has registered nothing yet."""
    ram = store._core.ram
    space = ram.space

    def registering(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(ram, "space", space)
        hook()
        return space(*given, **named)

    monkeypatch.setattr(ram, "space", registering)


def test_a_prefix_that_ends_within_a_block_takes_what_no_index_knows_yet(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save's block begins like the evicted one and has another key; the blocks before both are others' as well."""
    store = reopen(**ROOMY)
    save(store, ME, [*LONG[:32], *range(7000, 7100)])
    save(store, ME, LONG[:40])
    evicted = matched(store, LONG[:40])
    before_reserving(store, monkeypatch, lambda: store.evict(prefix=evicted))
    assert save(store, ME, LONG[:2400]).new_blocks == 0
    assert is_settled(store)
    assert load(store, ME, LONG)[0].tokens == 32


def test_a_salt_evicted_beside_its_first_save_takes_it(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tier knows yet that there is a namespace under the salt."""
    store = reopen(**ROOMY)
    before_reserving(store, monkeypatch, lambda: store.evict(salt="a"))
    assert save(store, ME, LONG[:160]).new_blocks == 0
    assert is_settled(store)
    assert slots_of(store) == {"ram": 0, "nvme": 0}
    assert save(store, ME, LONG[:160]).new_blocks == 10


@pytest.mark.parametrize("block", [2, 50, 66])
def test_a_save_under_way_in_another_process_does_not_bring_back_an_evicted_prefix(
    reopen: Reopen, tmp_path: Path, memory: Path, block: int
) -> None:
    store = reopen(**ROOMY)
    save(store, ME, LONG[:40])
    assert store.flush(60)
    with Child(tmp_path / "kv", memory, settings=ROOMY) as child:
        child.tell("save slowly", speaker=1, tokens=LONG, at=block * 16)
        assert child.answer() == "reached"
        store.evict(prefix=matched(store, LONG[:40]))
        child.tell("go on")
        assert child.answer() <= 64, "only the first batch was readable for a while"
        assert child.do("flush")
        save(store, ME, LONG[:1280])
        assert child.do("load", speaker=1, tokens=LONG)[:2] == [1280, 0]
    assert is_settled(store)


def test_what_follows_a_named_block_is_named(reopen: Reopen) -> None:
    space = reopen().namespace(PLAIN, salt="a")
    ids = as_tokens(range(100))
    linked = chain(space.root, ids, 16)
    raw, keys = ids.astype(">u4").tobytes(), linked.keys

    def first(**stone: Any) -> int:
        stones = reaching([Tombstone(5, **stone)], space.record, linked)
        assert {one.epoch for one in stones} == {5}
        named = [any(one.names(space.root, key) for one in stones) for key in keys]
        assert named == sorted(named), "what follows a named block is named"
        return named.count(False)

    assert [first(everything=True), first(root=space.root), first(salt=space.record.salt)] == [0, 0, 0]
    assert [first(root=b"x" * 32), first(salt=b""), first(keys=frozenset([b"x" * 32]))] == [7, 7, 7]
    assert [first(keys=frozenset([keys[5], keys[3], b"x" * 32])), first(keys=frozenset([keys[6]]))] == [3, 6]
    assert first(parent=space.root, tokens=raw[:4]) == 0
    assert first(parent=space.root, tokens=raw[4:8]) == 7, "it begins with another token"
    assert [first(parent=keys[1], tokens=raw[128:192]), first(parent=keys[1], tokens=raw[128:132])] == [2, 2]
    assert [first(parent=keys[5], tokens=raw[384:400]), first(parent=keys[5], tokens=raw[384:] + raw[:4])] == [6, 7]
    assert first(parent=keys[6], tokens=raw[:4]) == 7, "it continues the chain past its end"
    assert reaching([], space.record, linked) == []
