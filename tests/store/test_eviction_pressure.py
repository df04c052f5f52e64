"""Who has to go when there is no room, and who must not: pins, leases, quotas, other layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from children import Child
from known_kv import NARROW, PLAIN, SPEAKERS, Speaker, load, save
from stores import came_to_rest

from kvstore.errors import SettingsError
from kvstore.events import Cause
from kvstore.store import Store

TWO = Speaker(PLAIN), Speaker(NARROW)
Reopen = Callable[..., Store]


def fresh(seed: int, count: int = 40, tokens: int = 12 * 16) -> list[list[int]]:
    """Conversations that share nothing."""
    drawn: list[list[int]] = np.random.default_rng(seed).integers(0, 1000, (count, tokens)).tolist()
    return drawn


def test_pins_as_the_coldest_blocks_do_not_hide_every_victim(reopen: Reopen) -> None:
    store = reopen(ram="8MiB", nvme="0", ram_segment_bytes=1 << 20)
    pinned = list(range(70 * 16))
    save(store, TWO[0], pinned)
    store.pin("kept", store.namespace(PLAIN), pinned)
    for tokens in fresh(1):
        assert save(store, TWO[0], tokens).skipped_blocks == 0
    got, wrong = load(store, TWO[0], pinned)
    assert (got.tokens, wrong) == (len(pinned), 0)


def test_blocks_that_lost_their_pin_age_and_go(reopen: Reopen) -> None:
    store = reopen(nvme="0")
    pinned = list(range(20 * 16))
    save(store, TWO[0], pinned)
    store.pin("kept", store.namespace(PLAIN), pinned)
    for tokens in fresh(1):
        save(store, TWO[0], tokens)
    store.unpin("kept")
    for tokens in fresh(2):
        save(store, TWO[0], tokens)
    assert load(store, TWO[0], pinned)[0].tokens == 0


def test_a_new_layout_gets_room_from_a_store_full_of_another(reopen: Reopen) -> None:
    store = reopen(nvme="0")
    for tokens in fresh(1):
        save(store, TWO[0], tokens)
    for at, tokens in enumerate(fresh(2)):
        assert save(store, TWO[at % 2], tokens).skipped_blocks == 0
    assert store.verify().problems == []


def test_pins_survive_restarts_and_eviction_in_both_tiers(reopen: Reopen, memory: Path) -> None:
    store = reopen()
    pinned = list(range(200))
    save(store, TWO[0], pinned)
    store.pin("kept", store.namespace(PLAIN), pinned)
    store.close()
    store = reopen()
    for seed in range(4):
        for tokens in fresh(seed):
            save(store, TWO[0], tokens)
        assert came_to_rest(store)
    assert store.match(store.namespace(PLAIN), pinned).by_tier == {"ram": 200}
    store.evict(everything=True, tier="ram")
    got, wrong = load(store, TWO[0], pinned)
    assert (got.tokens, got.by_tier, wrong) == (200, {"nvme": 200}, 0)
    assert store.names()["kept"].pinned


def test_a_quota_holds_one_salt_and_leaves_the_others_alone(reopen: Reopen) -> None:
    store = reopen()
    held, free = Speaker(PLAIN, "held"), Speaker(PLAIN, "free")
    store.set_quota("held", ram=10 * 12288, nvme=20 * 12288)
    for tokens in fresh(1, 10):
        save(store, held, tokens)
    for tokens in fresh(2, 4):
        assert save(store, free, tokens).skipped_blocks == 0
    assert came_to_rest(store)
    use = {one.record.salt: one.by_tier for one in store.namespaces()}
    bytes_of = {speaker.salt: use[store.namespace(PLAIN, salt=speaker.salt).record.salt] for speaker in (held, free)}
    assert 0 < bytes_of["held"]["ram"].size <= 10 * 12288
    assert 0 < bytes_of["held"]["nvme"].size <= 20 * 12288
    assert bytes_of["free"]["ram"].blocks == bytes_of["free"]["nvme"].blocks == 48


def test_the_empty_salt_cannot_have_a_quota_that_nothing_enforces(reopen: Reopen) -> None:
    with pytest.raises(SettingsError):
        reopen().set_quota("", ram=1 << 20)


def test_a_lease_holds_against_every_process_and_ends_with_its_own(
    reopen: Reopen, tmp_path: Path, memory: Path
) -> None:
    store = reopen(nvme="0")
    held = list(range(20 * 16))
    save(store, SPEAKERS[0], held)
    with Child(tmp_path / "kv", memory, settings={"nvme": "0"}) as child:
        assert child.do("match", tokens=held) == len(held)
        assert child.do("lease") == len(held)
        for tokens in fresh(1):
            assert save(store, SPEAKERS[0], tokens).skipped_blocks == 0
        assert child.do("load match", tokens=held) == [len(held), 0, Cause.LIMIT]
        child.kill()
        store._core.keeper.take_back_the_dead()
        assert store.stats().processes == 1
    for tokens in fresh(2):
        save(store, SPEAKERS[0], tokens)
    assert load(store, SPEAKERS[0], held)[0].tokens == 0
    assert store.verify().problems == []
