"""What nobody waits for leaves the cores to those that compute; what somebody waits for does not."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import StoreMaker, tokens_of

from kvstore.background import NICENESS, step_back, stepped_back
from kvstore.copying import CopyThreads, Job, wait_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to a process")

BEHIND = ("kvstore-mover", "kvstore-write", "kvstore-keeper", "kvstore-grow", "kvstore-populate", "kvstore-behind")


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


def test_threads_that_nobody_waits_for_have_stepped_back_and_the_others_have_not(make_store: StoreMaker) -> None:
    bench, mine = make_store(), niceness()
    tokens = tokens_of(1, 64)
    bench.save(tokens)
    assert bench.store.flush(60)
    bench.load(tokens)
    found = of_threads()
    assert {"kvstore-mover", "kvstore-write_0", "kvstore-keeper", "kvstore-copy_0"} <= set(found)
    for name, nice in found.items():
        assert nice == (max(mine, NICENESS) if name.startswith(BEHIND) else mine), name
    assert niceness() == mine


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
