"""Page-locking stays within its budget, says what it refuses, and gives everything back."""

from __future__ import annotations

import mmap
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BudgetError
from kvstore.events import Event, Events, Notice
from kvstore.kv import Bytes
from kvstore.tiers.pagelock import MlockRegistrar, PageLock, PinnedRing, registrar_for
from kvstore.tiers.shuffled import ShuffledLanes

SEGMENT = 64 << 10
LIMIT = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]

pytestmark = pytest.mark.skipif(
    LIMIT != resource.RLIM_INFINITY and LIMIT < 8 * SEGMENT, reason="ulimit -l allows too little locked memory"
)


def segment(size: int = SEGMENT) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def locked_by_the_kernel() -> int:
    """Bytes of this process that mlock holds."""
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def pagelock(told: list[Event]) -> Iterator[PageLock]:
    made = PageLock(3 * SEGMENT, MlockRegistrar(), events=Events([told.append]))
    yield made
    made.close()


def test_segments_are_locked_in_the_background_and_unlocked_at_close(pagelock: PageLock) -> None:
    before = locked_by_the_kernel()
    segments = [segment(), segment()]
    pagelock.add(segments)
    pagelock.add(segments)
    assert pagelock.wait(10)
    assert locked_by_the_kernel() == before + 2 * SEGMENT
    assert all(pagelock.covers(memory) for memory in segments)
    stats = pagelock.stats()
    assert (stats.locked, stats.locked_bytes, stats.waiting, stats.reason) == (2, 2 * SEGMENT, 0, "")
    pagelock.close()
    pagelock.close()
    assert locked_by_the_kernel() == before
    assert not pagelock.covers(segments[0])
    pagelock.add(segments)
    assert pagelock.stats().waiting == 0


def test_what_is_covered_lies_whole_in_one_segment(pagelock: PageLock) -> None:
    memory = segment(2 * SEGMENT)
    first, second = memory[:SEGMENT], memory[SEGMENT:]
    pagelock.add([first])
    assert pagelock.wait(10)
    assert pagelock.covers(first[100:200])
    assert not pagelock.covers(memory[SEGMENT - 1 : SEGMENT + 1])
    assert not pagelock.covers(second)
    assert not pagelock.covers(segment())


def test_the_budget_is_a_cap_and_what_is_over_it_is_said_once(pagelock: PageLock, told: list[Event]) -> None:
    before = locked_by_the_kernel()
    segments = [segment() for _ in range(5)]
    pagelock.add(segments)
    assert pagelock.wait(10)
    assert locked_by_the_kernel() == before + 3 * SEGMENT
    assert [pagelock.covers(memory) for memory in segments] == [True] * 3 + [False] * 2
    assert pagelock.stats().over_budget == 2
    assert [type(event) for event in told] == [Notice]
    assert "raise it" in str(told[0])


def test_a_removed_segment_makes_room_for_another(pagelock: PageLock) -> None:
    before = locked_by_the_kernel()
    segments = [segment() for _ in range(3)]
    pagelock.add(segments)
    pagelock.remove(segments[:1])
    assert not pagelock.covers(segments[0]), "at once, not when the thread gets to it"
    pagelock.remove(segments[:1])
    another = segment()
    pagelock.add([another])
    assert pagelock.wait(10)
    assert pagelock.covers(another)
    assert locked_by_the_kernel() == before + 3 * SEGMENT


def test_what_the_system_refuses_is_told_with_its_reason_and_others_go_on(
    pagelock: PageLock, told: list[Event]
) -> None:
    class Unmapped:
        def __init__(self) -> None:
            self.__array_interface__ = {"data": (4096, False), "shape": (SEGMENT,), "typestr": "|u1", "version": 3}

    good = segment()
    pagelock.add([np.asarray(Unmapped()), good])
    assert pagelock.wait(10)
    assert pagelock.covers(good)
    assert pagelock.stats().failed == 1
    assert "mlock: Cannot allocate memory" in str(told[0])


def test_impossible_budgets_are_refused() -> None:
    for budget in (-1, 1 << 60):
        with pytest.raises(BudgetError, match="page-locked"):
            PageLock(budget, None)


def test_without_a_device_nothing_is_locked_and_stats_say_why() -> None:
    for device, why in ((None, "the host"), ("cpu", "cpu")):
        pagelock = PageLock.for_device(SEGMENT, device)
        memory = segment()
        pagelock.add([memory])
        assert pagelock.wait(0)
        assert not pagelock.covers(memory)
        assert not pagelock.stats().enabled
        assert why in str(pagelock.stats().to_dict()["reason"])
        pagelock.remove([memory])
        pagelock.close()
    off = PageLock(0, MlockRegistrar())
    assert (off.stats().enabled, off.stats().reason) == (False, "its budget is 0")
    if not torch.cuda.is_available():
        assert registrar_for("cuda:0") == (None, "there is no CUDA device")


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 4))
def test_bytes_go_through_the_ring_whole(seed: int, piece: int, pieces: int) -> None:
    lanes = ShuffledLanes(seed, needs_pinned=True, eagerness=0.2)
    ring = PinnedRing(lanes, pieces, piece)
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 100, np.uint8)
    expected = source.copy()
    device = torch.zeros(100, dtype=torch.uint8)
    ring.upload("a", device, source)
    source[:] = 0  # it has been read
    back = np.zeros(100, np.uint8)
    lanes.follow("b", lanes.mark("a"))
    ring.download("b", back, device)
    assert np.array_equal(back, expected)


def test_threads_share_a_ring_without_mixing_bytes() -> None:
    lanes = ShuffledLanes(3, needs_pinned=True, eagerness=0.5)
    ring = PinnedRing(lanes, 2, 16)
    problems: list[int] = []

    def work(number: int) -> None:
        source = np.full(100, number, np.uint8)
        device, back = torch.zeros(100, dtype=torch.uint8), np.zeros(100, np.uint8)
        for _ in range(20):
            ring.upload(f"lane {number}", device, source)
            ring.download(f"lane {number}", back, device)
            if not (back == number).all():
                problems.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
