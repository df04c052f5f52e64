"""What is used in `ram` is no colder on `nvme`; what `nvme` lost, or never got, is written to it while `ram` has it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from children import KILLED, Child
from known_kv import SPEAKERS, open_small, save, slots_of
from stores import BLOCK, LAYOUT, PART, SLOT, StoreBench, StoreMaker, kv_of, tokens_of

from kvstore.errors import BusyError
from kvstore.identity import salt_digest
from kvstore.kv import HostKV
from kvstore.records import Entry, block_names
from kvstore.rescan import dirty_moves, unwritten
from kvstore.tiers import reservation
from kvstore.tiers.medium import aligned_buffer

HOUR = 3600.0
Tokens = npt.NDArray[np.uint32]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def copies(bench: StoreBench, tokens: Tokens, salt: str = "") -> list[Entry]:
    """The entries of a sequence's blocks on `nvme`."""
    chain = bench.store.match(bench.space(salt=salt), tokens).chain
    return [entry for entry in bench.tier("nvme").find(block_names(chain, PART)) if entry is not None]


def carry(bench: StoreBench) -> None:
    bench.store._core.keeper._carry()


def an_hour_passes(bench: StoreBench) -> None:
    for tier in bench.store._core.tiers:
        tier._stamp_base += round(HOUR * 1e9)


def moved(bench: StoreBench, seed: int, blocks: int = 20, salt: str = "") -> Tokens:
    """Tokens that are saved, and written to `nvme`."""
    tokens = tokens_of(seed, blocks * BLOCK)
    assert bench.save(tokens, salt=salt).new_blocks == blocks
    bench.settle()
    assert len(copies(bench, tokens, salt)) == blocks
    return tokens


def busy(*given: object) -> None:
    raise BusyError("the index is locked", "try again")


# -------------------------------------------------------------------- recency


def test_the_hottest_prefix_outlives_all_others_on_nvme_and_is_there_after_a_restart(make_store: StoreMaker) -> None:
    bench = make_store()
    hot = moved(bench, 1)
    for seed in range(2, 50):  # more than `nvme` holds
        bench.save(tokens_of(seed, 32 * BLOCK))
        bench.settle()
        assert bench.load(hot).by_tier == {"ram": len(hot)}
        assert bench.save(hot).known_blocks == 20
    wait_for(lambda: len(copies(bench, hot)) == 20)
    bench.close()
    shutil.rmtree(bench.shm)
    bench.shm.mkdir()
    assert bench.load(hot).by_tier == {"nvme": len(hot)}


def test_a_use_in_ram_gives_the_copy_on_nvme_the_same_moment(make_store: StoreMaker) -> None:
    bench = make_store()
    ram, nvme = bench.tier("ram"), bench.tier("nvme")
    nvme._stamp_base += 1 << 60  # as after restarts of the host
    tokens = moved(bench, 1)

    def used(tier: Any) -> list[int]:
        found = tier.find(block_names(bench.store.match(bench.space(), tokens).chain, PART))
        stamps = [int(tier.arrays.of(entry.ref.segment).stamps[entry.ref.slot]) for entry in found]
        return [stamp - tier.stamp_base for stamp in stamps]

    before = used(nvme)
    assert bench.load(tokens[: 10 * BLOCK]).tokens == 10 * BLOCK
    carry(bench)
    assert used(nvme) == used(ram)
    assert [now > then for now, then in zip(used(nvme), before, strict=True)] == [True] * 10 + [False] * 10


def test_another_process_use_counts_too(tmp_path: Path, memory: Path) -> None:
    tokens = list(range(160))
    with open_small(tmp_path / "kv", memory) as store:
        save(store, SPEAKERS[0], tokens)
        assert store.flush(60)
        nvme = store._core.tiers[1]
        before = [nvme.arrays.stamps(segment) for segment in nvme.segment_list()]
        with Child(tmp_path / "kv", memory) as child:
            assert child.do("load", tokens=tokens)[0] == 160
            store._core.keeper._carry()
        after = [nvme.arrays.stamps(segment) for segment in nvme.segment_list()]
        assert sum(int(np.count_nonzero(now > then)) for now, then in zip(after, before, strict=True)) == 10


def test_an_eviction_of_what_is_unused_spares_what_ram_serves(make_store: StoreMaker) -> None:
    bench = make_store()
    hot, cold = moved(bench, 1), moved(bench, 2, 10)
    an_hour_passes(bench)
    assert bench.load(hot).by_tier == {"ram": len(hot)}
    assert bench.store.evict(unused_s=HOUR / 2, dry_run=True) == {"ram": 10, "nvme": 10}
    assert bench.store.evict(unused_s=HOUR / 2) == {"ram": 10, "nvme": 10}
    assert bench.load(cold).tokens == 0
    bench.drop("ram")
    assert bench.load(hot).by_tier == {"nvme": len(hot)}


def test_a_ttl_spares_what_ram_serves(make_store: StoreMaker) -> None:
    bench = make_store()
    space = bench.store.namespace(LAYOUT, ttl=round(HOUR / 2))
    hot, cold = tokens_of(1, 20 * BLOCK), tokens_of(2, 10 * BLOCK)
    for tokens in (hot, cold):
        bench.store.save(space, tokens, HostKV.stacked(LAYOUT, kv_of(tokens)))
    bench.settle()
    an_hour_passes(bench)
    assert bench.load(hot).by_tier == {"ram": len(hot)}
    bench.store._core.keeper.expire()
    assert (len(copies(bench, hot)), len(copies(bench, cold))) == (20, 0)


def test_a_quota_on_nvme_keeps_what_ram_serves(make_store: StoreMaker) -> None:
    bench = make_store()
    hot, cold = moved(bench, 1, 20, "tenant"), moved(bench, 2, 20, "tenant")
    assert bench.load(hot, salt="tenant").by_tier == {"ram": len(hot)}
    assert bench.store.set_quota("tenant", nvme=20 * SLOT) == {"nvme": 20}
    assert (len(copies(bench, hot, "tenant")), len(copies(bench, cold, "tenant"))) == (20, 0)


# -------------------------------------------------------------------- what nvme lost


@pytest.mark.parametrize("how", ["evicted", "removed", "repaired"])
def test_what_nvme_lost_is_written_to_it_again(make_store: StoreMaker, how: str) -> None:
    bench = make_store()
    tokens = moved(bench, 1)
    if how == "evicted":
        assert bench.store.evict(everything=True, tier="nvme") == {"nvme": 20}
    elif how == "removed":
        bench.close()
        shutil.rmtree(bench.path / "nvme")
    else:
        nvme: Any = bench.tier("nvme")
        nvme.write([entry.ref for entry in copies(bench, tokens)], SLOT, [aligned_buffer(SLOT)] * 20)
        assert bench.store.verify(repair=True).repaired == 20
    wait_for(lambda: len(copies(bench, tokens)) == 20)
    bench.settle()
    bench.drop("ram")
    assert bench.load(tokens).by_tier == {"nvme": len(tokens)}
    assert bench.store.verify().problems == []


# -------------------------------------------------------------------- what nvme never got


def test_a_writer_killed_while_it_publishes_keeps_nothing_from_nvme(tmp_path: Path, memory: Path) -> None:
    """Its second batch, of 128 blocks, has stamps and is not READY."""
    sizes = {"ram": "16MiB", "nvme": "32MiB"}
    with open_small(tmp_path / "kv", memory, **sizes) as store:
        with Child(tmp_path / "kv", memory, settings=sizes) as child:
            child.do("die", point=["kvstore.tiers.reservation:publish", "before", None, 2])
            child.tell("save", tokens=list(range(192 * 16)))
            assert child.end() == KILLED
        wait_for(lambda: slots_of(store) == {"ram": 64, "nvme": 64})
        wait_for(lambda: unwritten(store._core.ram) == 0)  # the mover flags what it has published


def test_slots_given_up_while_publishing_keep_nothing_from_nvme(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_store()
    ram: Any = bench.tier("ram")
    with monkeypatch.context() as patch:
        patch.setattr(reservation, "publish", busy)
        assert bench.save(tokens_of(1, 192 * BLOCK)).skipped_blocks == 192
    bench.settle()
    tokens = tokens_of(2, 10 * BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(bench.store._core.mover, "submit", lambda moves: None)  # as a full queue does
        assert bench.save(tokens).new_blocks == 10
        stamped = sum(int(np.count_nonzero(ram.arrays.stamps(segment))) for segment in ram.segment_list())
        assert stamped == 74, "those that were given up have kept their stamps"
        assert unwritten(ram) == len(dirty_moves(ram, 64)) == 10
    wait_for(lambda: len(copies(bench, tokens)) == 10)


@pytest.mark.parametrize("how", ["set", "reopened", "in time"])
def test_what_a_quota_kept_out_is_written_once_there_is_room(make_store: StoreMaker, how: str) -> None:
    bench = make_store()
    bench.store.set_quota("tenant", nvme=0)
    tokens = tokens_of(1, 20 * BLOCK)
    bench.save(tokens, salt="tenant")
    bench.settle()
    assert copies(bench, tokens, "tenant") == []
    if how == "set":
        bench.store.set_quota("tenant", nvme=None)
    else:
        bench.store._core.quotas.set("nvme", salt_digest("tenant"), None)
    if how == "reopened":
        bench.close()
    elif how == "in time":
        bench.store._core._retry = 0.0
    wait_for(lambda: len(copies(bench, tokens, "tenant")) == 20)
