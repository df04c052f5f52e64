"""Processes that die at any moment, and processes that crowd each other: no wrong byte, no leaked slot.

What is loaded is compared with what its tokens say it must be, not with a checksum; `verify` finds what is leaked.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from children import Child, Nursery, conversations
from known_kv import PLAIN, SPEAKERS, Array, Speaker, load, save

from kvstore.events import Cause, Event, Evicted
from kvstore.host import boottime_ns
from kvstore.index import Index
from kvstore.kv import HostKV, Run
from kvstore.records import block_names
from kvstore.store import Store
from kvstore.transaction import Database

Reopen = Callable[..., Store]
KILLS, AT_ONCE = 200, 5


@pytest.mark.slow
def test_two_hundred_kills_leave_no_wrong_byte_and_no_leaked_slot(reopen: Reopen, tmp_path: Path, memory: Path) -> None:
    seen: Counter[str] = Counter()

    def watch(event: Event) -> None:
        if isinstance(event, Evicted):
            seen[f"{event.tier} {event.reason}"] += event.blocks

    dice, nursery = random.Random(5), Nursery()
    try:
        for round_ in range(KILLS // AT_ONCE):
            seeds = range(round_ * AT_ONCE, (round_ + 1) * AT_ONCE)
            writers = [nursery.writer(tmp_path / "kv", memory, seed) for seed in seeds]
            for pid in writers:
                time.sleep(dice.expovariate(1 / 0.03))
                nursery.kill(pid)
            store = reopen(observers=[watch])
            assert store.verify().problems == []
            draw = conversations(10_000 + round_)
            for speaker in SPEAKERS:
                for _ in range(4):
                    got, wrong = load(store, speaker, draw())
                    seen["loaded"] += got.tokens
                    assert wrong == 0
            if round_ % 8 == 7:
                store.evict(everything=True)
                assert all(tier.free_slots == tier.slots > 0 for tier in store.stats().tiers)
                assert save(store, SPEAKERS[round_ % 5], draw()[:64]).new_blocks > 0
            assert store.flush(60)
            store.close()
    finally:
        nursery.close()
    assert seen["loaded"] > 10_000
    assert seen["ram dead owner"] > 0
    assert seen["nvme dead owner"] > 0


@pytest.mark.slow
def test_four_processes_at_three_times_the_budget_never_load_a_wrong_byte(
    reopen: Reopen, tmp_path: Path, memory: Path
) -> None:
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(tmp_path / "kv", memory, settings={"churn": [seed, 30.0], "verify_share": 64}, wait=False)
            )
            for seed in range(4)
        ]
        for child in children:
            assert child.answer() == "open"
        counts = [child.answer() for child in children]
        assert [child.end() for child in children] == [0, 0, 0, 0]
    total = {name: sum(one[name] for one in counts) for name in counts[0]}
    assert total["wrong"] == 0
    assert total["loaded"] > 100_000
    store = reopen()
    assert store.verify().problems == []
    held = sum(tier.slots for tier in store.stats().tiers if tier.name == "ram")
    assert total["saved"] > 3 * held


class Slow(HostKV):
    """A destination that lets something happen between the decision to read a slot and the copy."""

    meanwhile: Callable[[], None]

    def scatter(self, start: int, run: Run) -> None:
        self.meanwhile()
        super().scatter(start, run)


def test_a_slot_reused_under_a_reader_is_a_miss(reopen: Reopen) -> None:
    store = reopen(nvme="0", verify_share=1 << 30)
    mine, other = Speaker(PLAIN), Speaker(PLAIN, "other")
    tokens = list(range(16))
    save(store, mine, tokens)
    match = store.match(store.namespace(PLAIN), tokens)
    layers: list[tuple[Array, Array]] = [(np.zeros((2, 16, 16), "u4"), np.zeros((2, 16, 16), "u4")) for _ in range(2)]
    destination = Slow.layered(PLAIN, layers)
    assert isinstance(destination, Slow)

    def crowd() -> None:
        for first in range(0, 4000, 160):
            save(store, other, range(first, first + 160))

    destination.meanwhile = crowd
    loaded = store.load(match, destination)
    assert (loaded.tokens, loaded.stop) == (0, Cause.CHANGED)
    assert not (layers[0][0] == 0).all()
    assert (layers[0][0] != mine._layers(tokens, next(iter(PLAIN.parts())))[0][0]).any(), "the slot was not reused"


def test_a_promotion_whose_source_was_reused_is_a_miss(reopen: Reopen, tmp_path: Path, memory: Path) -> None:
    store = reopen()
    mine = Speaker(PLAIN)
    tokens = list(range(160))
    save(store, mine, tokens)
    assert store.flush(60)
    store.evict(everything=True, tier="ram")
    match = store.match(store.namespace(PLAIN), tokens)
    assert match.by_tier == {"nvme": 160}
    with Child(tmp_path / "kv", memory) as child:
        for first in range(1000, 9000, 240):
            child.do("save", speaker=1, tokens=list(range(first, first + 240)))
            child.do("flush")
    blank = mine.blank(160)
    loaded = store.load(match, blank.buffers)
    assert (loaded.tokens, loaded.stop) == (0, Cause.CHANGED)


LOCKED = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("locked")
"""


def test_an_open_index_keeps_its_lock_so_that_nobody_makes_it_anew(
    reopen: Reopen, tmp_path: Path, memory: Path
) -> None:
    reopen()
    files = [*memory.rglob("lock.mdb"), *tmp_path.rglob("lock.mdb")]
    assert len(files) == 2
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size > 0
        told = subprocess.run([sys.executable, "-c", LOCKED, str(file)], capture_output=True, text=True, check=True)
        assert told.stdout == "locked\n"


READER = """
import os, pathlib, signal, sys
from kvstore.index import Index
index = Index(pathlib.Path(sys.argv[1]), 1 << 20, durable=False, name="ram")
with index.read():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_that_died_does_not_fill_the_index(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", 1 << 20, durable=False, name="ram")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    died = subprocess.run([sys.executable, "-c", READER, str(tmp_path / "index")], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    for turn in range(2000):  # each commit writes its pages anew, and the dead reader keeps the old ones
        index.write(lambda txn, turn=turn: txn.put(Database.META, b"turn", str(turn).encode() * 200))
    index.close()


def test_what_could_not_be_given_back_at_close_is_taken_back_by_the_next(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen()
    ram = store._core.ram
    space = store.namespace(PLAIN)
    names = block_names(store.match(space, range(64)).chain, next(iter(PLAIN.parts())))
    assert len(ram.reserve(names, ram.space(space.record), 12288, 0, now=boottime_ns()).placed) == 4
    store.close()
    assert len(list((tmp_path / "kv" / "owners").iterdir())) == 1
    store = reopen()
    assert store.verify().problems == []
    assert save(store, Speaker(PLAIN), range(64)).new_blocks == 4
    store.close()
    assert list((tmp_path / "kv" / "owners").iterdir()) == []
