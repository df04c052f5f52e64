"""A save beside a forward leaves the cores to it; what somebody waits for does not."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stores import SLOT, StoreMaker, tokens_of

from kvstore.background import NICENESS, step_back, stepped_back
from kvstore.copying import CopyThreads, Job, wait_all
from kvstore.events import Evicted
from kvstore.tiers.growth import PATIENCE_S
from kvstore.tiers.ledger import free_slots
from kvstore.tiers.segments import ALLOCATED, BUDGET
from kvstore.transaction import get_number, put_number

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to a process")


class WaitedFor:
    """A lock that sets an event when somebody begins to wait for it."""

    def __init__(self, lock: threading.Lock, waited: threading.Event) -> None:
        self._lock, self._waited = lock, waited

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout != PATIENCE_S:
            self._waited.set()
        return self._lock.acquire(blocking, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def of_threads() -> dict[str, int]:
    found: dict[str, int] = {}
    for thread in threading.enumerate():
        if thread.name.startswith("kvstore") and thread.native_id is not None:
            try:
                found[thread.name] = os.getpriority(os.PRIO_PROCESS, thread.native_id)
            except ProcessLookupError:
                continue  # it has ended
    return found


def test_a_stores_own_threads_have_the_priority_of_their_process(make_store: StoreMaker) -> None:
    """A load may need Python's lock, or a segment's, from any of them."""
    bench, mine = make_store(), niceness()
    tokens = tokens_of(1, 64)
    bench.save(tokens)
    assert bench.store.flush(60)
    bench.load(tokens)
    found = of_threads()
    assert {"kvstore-mover", "kvstore-write_0", "kvstore-keeper", "kvstore-copy_0"} <= set(found)
    assert set(found.values()) == {mine}


def test_copies_for_a_caller_in_the_background_are_made_in_the_background() -> None:
    threads = CopyThreads(2, 1)
    mine = niceness()

    def asked() -> tuple[list[int], bool]:
        jobs: list[Job[int]] = []
        for _ in range(4):
            threads.copy(niceness, jobs)
        return wait_all(jobs, help_out=False), stepped_back()

    with ThreadPoolExecutor(1, initializer=step_back) as behind:
        assert behind.submit(asked).result() == ([max(mine, NICENESS)] * 4, True)
    assert asked() == ([mine] * 4, False)
    threads.close()


@pytest.mark.parametrize("budget_for_more", [True, False])
def test_who_needs_room_waits_for_the_thread_that_works_ahead_only_where_nothing_else_is_to_be_had(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch, budget_for_more: bool
) -> None:
    """And what is stored is not evicted, nor a save cut short, for what is being made."""
    bench = make_store(nvme=0)
    bench.save(tokens_of(1, 16))
    ram = bench.tier("ram")
    ram._grower.close()
    entered, go, real = threading.Event(), threading.Event(), ram.medium.allocate

    def slow(segment: int, size: int) -> None:
        if threading.current_thread().name == "kvstore-grow":
            entered.set()
            assert go.wait(60)
        real(segment, size)

    monkeypatch.setattr(ram.medium, "allocate", slow)
    seed = 2
    while not entered.wait(0.03):
        bench.save(tokens_of(seed := seed + 1, 16))
    with ram.index.read() as txn:
        blocks = free_slots(txn, SLOT) + 8
    if not budget_for_more:
        ram.index.write(lambda txn: put_number(txn, BUDGET, get_number(txn, ALLOCATED)))
        monkeypatch.setattr(ram._grower, "_under_way", WaitedFor(ram._grower._under_way, go))
    with ThreadPoolExecutor(1) as other:
        saved = other.submit(bench.save, tokens_of(2, 16 * blocks))
        try:
            assert saved.result(30).new_blocks == blocks
            assert go.is_set() is not budget_for_more
        finally:
            go.set()
    ram._grower.close()
    assert not bench.of(Evicted)
    assert bench.load(tokens_of(2, 16 * blocks)).tokens == 16 * blocks
    assert bench.store.verify().problems == []


def test_stepping_back_never_gives_a_thread_more_than_it_had() -> None:
    def twice() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        step_back()
        first = niceness()
        step_back()
        return first, niceness()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(twice).result() == (19, 19)


def test_a_save_in_the_background_is_the_same_save(make_store: StoreMaker) -> None:
    bench = make_store()
    tokens = tokens_of(2, 100)
    with ThreadPoolExecutor(1, initializer=step_back) as behind:
        saved = behind.submit(bench.save, tokens).result()
    assert saved.skipped_blocks == 0
    assert bench.load(tokens).tokens == 100


class Buffer:
    """Memory of a request, for as long as anybody holds it."""


def test_a_job_lets_go_of_its_work_before_anybody_hears_that_it_is_done() -> None:
    buffer, seen = Buffer(), []
    held = weakref.ref(buffer)
    job = Job(lambda given=buffer: id(given))
    job.add_done_callback(lambda done: seen.append(held() is None))
    del buffer
    assert held() is not None
    job.run()
    assert seen == [True]
    job.run()  # once is enough
    assert isinstance(job.result(), int)
