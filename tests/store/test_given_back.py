"""What a request took is given back however it ends, and the store's own troubles never get out of a request."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from stores import BLOCK, LAYOUT, PART, SLOT, StoreBench, StoreMaker, kv_of, tokens_of

from kvstore.errors import BusyError, DamagedError, SettingsError, UnsupportedError
from kvstore.events import Fault, Skipped
from kvstore.host import boottime_ns
from kvstore.index import Index
from kvstore.kv import Gathering, HostKV, Run
from kvstore.layout import Layout, Part
from kvstore.tiers.growth import Grower
from kvstore.tiers.ledger import leased_slots
from kvstore.tiers.medium import allocate_file
from kvstore.transaction import Database

PROGRAM = """
import sys, threading
import numpy as np
import kvstore
from kvstore.kv import HostKV
from kvstore.layout import Layout

store = kvstore.open(
    sys.argv[1], ram="8MiB", nvme="16MiB", ram_directory=sys.argv[2],
    ram_segment_bytes="1MiB", nvme_segment_bytes="2MiB",
)

def serve():
    threading.main_thread().join()
    layout = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
    space, kv = store.namespace(layout), np.ones((2, 2, 2, 640, 16), np.float32)
    print(store.save(space, np.arange(640), HostKV.stacked(layout, kv)).new_blocks)
    store.flush()
    store.evict(everything=True, tier="ram")
    print(store.load(store.match(space, np.arange(640)), HostKV.stacked(layout, kv)).tokens)
    print(store.prefetch(store.match(space, np.arange(640))).wait(30))

threading.Thread(target=serve).start()
"""


class Elsewhere:
    """A buffer that says it is on a device."""

    capacity, device = 1 << 20, "cuda:0"

    def fits(self, layout: Layout, group: int) -> bool:
        return True

    def gather(self, start: int, run: Run) -> None:
        raise AssertionError("not to be read")

    scatter = gather

    def gathering(self, start: int, run: Run) -> Gathering:
        raise AssertionError("not to be read")


def counts(bench: StoreBench, tier: str, database: Database) -> int:
    with bench.tier(tier).index.read() as txn:
        return txn.count(database)


def test_threads_that_outlive_the_main_thread_are_served(tmp_path: Path, memory: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["40", "640", "True"], "")


def test_a_reservation_that_fails_half_way_keeps_nothing(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_store(nvme=0)
    bench.save(tokens_of(1, 16))

    bench.tier("ram")._grower.close()

    def busy(*given: object, **more: object) -> bool:
        raise BusyError("the ram index is locked", "try again")

    with monkeypatch.context() as patch:
        patch.setattr(Grower, "grow", busy)
        tokens = tokens_of(2, 16 * 2000)
        assert bench.save(tokens).skipped_blocks > 0
    bench.settle()
    assert counts(bench, "ram", Database.WRITING) == 0
    assert bench.save(tokens[: 16 * 20]).skipped_blocks == 0


def test_a_device_buffer_without_hbm_is_refused_and_keeps_nothing(make_store: StoreMaker) -> None:
    bench = make_store(nvme=0)
    tokens = tokens_of(1, 160)
    with pytest.raises(UnsupportedError):
        bench.store.save(bench.space(), tokens, Elsewhere())  # type: ignore[arg-type]
    bench.settle()
    assert counts(bench, "ram", Database.WRITING) == 0
    assert bench.save(tokens).new_blocks == 10


@pytest.mark.parametrize("failing", ["files", "threads", "index"])
def test_a_tier_that_cannot_grow_skips_blocks_and_keeps_its_budget(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    bench = make_store(nvme=0, lock_timeout_s=0.3)
    bench.save(tokens_of(1, 16))
    bench.tier("ram")._grower.close()
    before = bench.tier("ram").allocated()
    timers: list[threading.Timer] = []
    with monkeypatch.context() as patch:
        if failing == "files":
            patch.setattr(os, "open", _refusing(os.open))
        elif failing == "threads":
            patch.setattr(threading.Thread, "start", _no_thread)
        else:
            patch.setattr(Index, "submit", _late_finish(Index.submit, timers))
        bench.save(tokens_of(2, 16 * 100))
    assert bench.of(Fault)
    for timer in timers:
        timer.join()
    bench.tier("ram")._grower.close()
    bench.settle()
    unfinished = [segment for segment in bench.tier("ram").segment_list() if segment.allocating]
    assert not unfinished
    if failing == "files":
        assert bench.tier("ram").allocated() == before
    bench.tier("ram")._grower.room_was_made()
    assert bench.save(tokens_of(3, 16 * 100)).new_blocks == 100


def _refusing(real: Any) -> Any:
    def refuse(path: Any, *given: Any, **more: Any) -> int:
        if str(path).endswith((".seg", ".slots")):
            raise OSError(errno.EMFILE, "Too many open files")
        return int(real(path, *given, **more))

    return refuse


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _late_finish(real: Any, timers: list[threading.Timer]) -> Any:
    """The writer lock is not had in time for the last write of a growth."""

    def submit(index: Index, work: Any, **how: Any) -> Future[Any]:
        if "make" not in work.__qualname__:
            return real(index, work, **how)  # type: ignore[no-any-return]
        future: Future[Any] = Future()

        def later() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(real(index, work, **how).result())

        timers.append(threading.Timer(1.0, later))
        timers[-1].start()
        return future

    return submit


def test_a_load_larger_than_ram_keeps_no_second_copy_of_itself(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_store(ram="8MiB", nvme="64MiB", io_threads=1, copy_threads=1)
    large = Layout.uniform(layers=2, heads=2, k_dim=256, block_tokens=BLOCK)
    whole = tokens_of(7, 16 * 150)
    for upto in range(30, 151, 30):
        bench.save(whole[: 16 * upto], large)
        bench.settle()
        bench.drop("ram")
    assert bench.store.match(bench.space(large), whole).by_tier == {"nvme": len(whole)}
    threads = bench.store._core.threads
    held, most, real = 0, 0, threads.buffer

    def counted(size: int) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def one() -> Any:
            nonlocal held, most
            with real(size) as memory:
                held += 1
                most = max(most, held)
                yield memory
                held -= 1

        return one()

    monkeypatch.setattr(threads, "buffer", counted)
    monkeypatch.setattr("kvstore.loading.READ_BYTES", 1)
    monkeypatch.setattr(bench.tier("ram"), "reserve", lambda *given, **more: _nothing())
    loaded = bench.load(whole, large)
    assert loaded.tokens == len(whole)
    assert held == 0
    assert 0 < most <= 16


def _nothing() -> Any:
    from kvstore.tiers.reservation import Reserved

    return Reserved()


def test_a_prefetch_that_finds_no_slots_reads_nothing(make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_store()
    tokens = tokens_of(1, 320)
    bench.save(tokens)
    bench.settle()
    bench.drop("ram")
    read: list[object] = []
    monkeypatch.setattr(bench.tier("nvme"), "read", lambda *given: read.append(given))
    monkeypatch.setattr(bench.tier("ram"), "reserve", lambda *given, **more: _nothing())
    prefetch = bench.store.prefetch(bench.store.match(bench.space(), tokens))
    assert prefetch.wait(30)
    assert prefetch.tokens == 0
    assert read == []


def test_flush_does_not_say_done_while_nvme_is_read_only(make_store: StoreMaker) -> None:
    import time

    bench = make_store()
    mover = bench.store._core.mover
    assert mover is not None
    bench.save(tokens_of(1, 16))
    bench.settle()
    mover._paused_until = time.monotonic() + 60
    bench.save(tokens_of(2, 160))
    assert mover.paused
    assert bench.store.flush(5) is False
    assert bench.of(Skipped) == []
    with mover._changed:
        mover._paused_until = 0.0
        mover._changed.notify_all()
    assert bench.store.flush(30) is True


def test_statistics_name_the_tier_whatever_the_order_of_the_buffers(make_store: StoreMaker) -> None:
    layout = Layout(LAYOUT.dtype, LAYOUT.groups * 2, LAYOUT.block_tokens)
    bench = make_store()
    space = bench.store.namespace(layout)
    tokens = tokens_of(5, 64)
    kv = [HostKV.stacked(layout, kv_of(tokens), group) for group in (0, 1)]
    bench.store.save(space, tokens, {Part(0): kv[0], Part(1): kv[1]})
    bench.settle()
    nvme = bench.store.match(space, tokens)
    victims = [(piece.name.index_key, piece.name.key) for piece in nvme.pieces[Part(1)]]
    bench.tier("ram").remove(victims, "evict")
    match = bench.store.match(space, tokens)
    loaded = bench.store.load(match, {Part(1): kv[1], Part(0): kv[0]})
    assert loaded.tokens == 64
    assert loaded.by_tier == match.by_tier == {"ram": 64}


def test_a_pin_counts_every_part_of_its_blocks(make_store: StoreMaker) -> None:
    layout = Layout(LAYOUT.dtype, LAYOUT.groups, LAYOUT.block_tokens, shards=3)
    bench = make_store(nvme=0)
    space, tokens = bench.store.namespace(layout), tokens_of(5, 64)
    buffers = {part: HostKV.stacked(layout, kv_of(tokens)) for part in layout.parts()}
    bench.store.save(space, tokens, buffers)
    record = bench.store.pin("all three", space, tokens)
    assert len(record.keys) == 4
    assert record.slot_bytes == 3 * SLOT


def test_who_asks_for_a_prefetch_that_is_under_way_shares_it(make_store: StoreMaker) -> None:
    bench = make_store()
    bench.save(tokens_of(1, 64))
    bench.settle()
    bench.store.evict(everything=True, tier="ram")
    match, may_run = bench.store.match(bench.space(), tokens_of(1, 64)), threading.Event()
    bench.store._core.prefetches._thread.submit(may_run.wait)
    first, second = bench.store.prefetch(match, deadline_s=3600), bench.store.prefetch(match)
    assert second is first
    second.cancel()
    assert first.stopped
    other = bench.store.prefetch(match)
    assert other is not first, "one that was cancelled is not joined"
    may_run.set()
    assert first.wait(30)
    assert other.wait(30)
    assert (first.tokens, other.tokens) == (0, 64)


def test_a_pin_of_what_is_stored_in_part_says_how_much_it_keeps(make_store: StoreMaker) -> None:
    bench = make_store(nvme=0)
    bench.save(tokens_of(1, 64))
    longer = [*tokens_of(1, 64).tolist(), *range(100)]
    record = bench.store.pin("half", bench.space(), longer)
    assert len(record.tokens) == 4 * 64
    assert bench.store.names()["half"] == record


def test_another_lease_of_a_match_holds_it_after_the_first_ends(make_store: StoreMaker) -> None:
    bench = make_store(nvme=0)
    bench.save(tokens_of(1, 64))
    match = bench.store.match(bench.space(), tokens_of(1, 64))
    first = bench.store.lease(match, 0.001)
    with bench.store.lease(match, 60) as second:
        first.release()
        bench.settle()
        with bench.tier("ram").index.read() as txn:
            held = sum(map(len, leased_slots(txn, boottime_ns() + 10**9).values()))
        assert second.tokens == 64
        assert held == len(match.pieces[PART])
    bench.settle()
    assert counts(bench, "ram", Database.LEASES) == 0


def test_a_closing_store_still_ends_the_leases_of_its_loads(make_store: StoreMaker) -> None:
    bench = make_store(nvme=0)
    bench.save(tokens_of(1, 64))
    lease = bench.store.lease(bench.store.match(bench.space(), tokens_of(1, 64)))
    core = bench.store._core
    core.closed = True  # what `close` does first, while loads still run
    lease.release()
    core.closed = False
    bench.settle()
    assert counts(bench, "ram", Database.LEASES) == 0
    assert PART in bench.store.match(bench.space(), tokens_of(1, 64)).pieces


def test_a_file_that_cannot_be_made_is_an_error_of_the_stores(tmp_path: Path) -> None:
    from kvstore.errors import StorageError

    with pytest.raises(StorageError, match="gone"):
        allocate_file(tmp_path / "gone" / "00000000.seg", 4096, "ram")


def test_a_writer_that_cannot_show_readers_out_answers_all_who_wait(make_store: StoreMaker) -> None:
    from kvstore.errors import NoSpaceError

    bench = make_store(nvme=0)
    index = bench.tier("ram").index

    def full(txn: object) -> None:
        raise NoSpaceError("the index is full", "raise the budget")

    class Broken:
        def __init__(self, env: Any) -> None:
            self.env = env

        def __getattr__(self, name: str) -> Any:
            return getattr(self.env, name)

        def reader_check(self) -> int:
            import lmdb

            raise lmdb.Error("no")

    env = index._env
    index._env = Broken(env)
    try:
        with env.begin(write=True):  # so that all three share a transaction
            waiting: list[Future[None]] = [index.submit(full) for _ in range(3)]
        for future in waiting:
            assert future.exception(10) is not None
    finally:
        index._env = env


@pytest.mark.parametrize("ttl", [-1, 1.5, 1 << 64])
def test_a_ttl_that_cannot_be_is_refused_before_anything_is_saved(make_store: StoreMaker, ttl: Any) -> None:
    with pytest.raises(SettingsError, match="ttl"):
        make_store(nvme=0).store.namespace(LAYOUT, ttl=ttl)


def test_a_move_whose_marks_fail_keeps_no_slot_of_nvme(make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_store()
    bench.store.set_quota("tenant", nvme=4 * SLOT)

    def damaged(*given: object) -> None:
        raise DamagedError("the arrays of a segment are gone", "run verify")

    monkeypatch.setattr(bench.store._core.mover, "_mark", damaged)
    bench.save(tokens_of(1, 16 * 10), salt="tenant")
    bench.settle()
    assert bench.of(Fault, what="move")
    assert counts(bench, "nvme", Database.WRITING) == 0
