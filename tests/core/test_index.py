"""The index: one writer, groups, deadlines, and files that are whole or refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import BusyError, ClosedError, DamagedError, KVStoreError, NoSpaceError
from kvstore.index import Index
from kvstore.scrubbing import rewrite
from kvstore.transaction import Database, Transaction

SIZE = 1 << 20


@pytest.fixture
def index(shm: Path) -> Iterator[Index]:
    opened = Index(shm / "index", SIZE, durable=False, name="test")
    yield opened
    opened.close()


def put(key: bytes, value: bytes = b"v") -> object:
    return lambda txn: txn.put(Database.META, key, value)


def get(index: Index, key: bytes) -> bytes | None:
    with index.read() as txn:
        return txn.get(Database.META, key)


class Held:
    """Occupies the writer until it is let go, so that works queue up behind it."""

    def __init__(self, index: Index) -> None:
        self._go, entered = threading.Event(), threading.Event()

        def work(txn: Transaction) -> None:
            entered.set()
            assert self._go.wait(30)

        self.future = index.submit(work)
        assert entered.wait(30)

    def let_go(self) -> None:
        self._go.set()
        self.future.result(30)


def test_works_that_queue_up_share_a_transaction_and_each_gets_its_answer(index: Index) -> None:
    held = Held(index)
    seen: list[object] = []

    def work(number: int) -> object:
        def inside(txn: Transaction) -> int:
            seen.append(txn._txn.id())
            txn.put(Database.META, b"%d" % number, b"v")
            return number * number

        return inside

    futures = [index.submit(work(number)) for number in range(5)]  # type: ignore[arg-type]
    held.let_go()
    assert [future.result(30) for future in futures] == [0, 1, 4, 9, 16]
    assert len(set(seen)) == 1
    assert get(index, b"4") == b"v"


def test_a_work_that_fails_spoils_only_itself(index: Index) -> None:
    def wrong(txn: Transaction) -> None:
        txn.put(Database.META, b"half", b"done")
        raise ZeroDivisionError("on purpose")

    held = Held(index)
    futures = [index.submit(one) for one in (put(b"a"), wrong, put(b"b"))]  # type: ignore[arg-type]
    held.let_go()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        futures[1].result(30)
    futures[0].result(30)
    futures[2].result(30)
    assert (get(index, b"a"), get(index, b"half"), get(index, b"b")) == (b"v", None, b"v")
    index.write(put(b"c"))  # type: ignore[arg-type]
    assert get(index, b"c") == b"v"


def test_a_work_whose_caller_gave_up_never_runs(index: Index) -> None:
    held = Held(index)
    with pytest.raises(BusyError):
        index.write(put(b"late"), timeout=0.01)  # type: ignore[arg-type]
    after = index.submit(put(b"after"))  # type: ignore[arg-type]
    held.let_go()
    after.result(30)
    assert (get(index, b"late"), get(index, b"after")) == (None, b"v")


def test_a_reader_sees_one_moment(index: Index) -> None:
    index.write(put(b"k", b"old"))  # type: ignore[arg-type]
    with index.read() as txn:
        index.write(put(b"k", b"new"))  # type: ignore[arg-type]
        assert txn.get(Database.META, b"k") == b"old"
    assert get(index, b"k") == b"new"


def test_scans_go_both_ways_and_stop_at_their_prefix(index: Index) -> None:
    keys = [b"a", b"b1", b"b2", b"b3", b"c"]
    index.write(lambda txn: txn.put_many(Database.META, [(key, key) for key in keys]))
    with index.read() as txn:
        assert [key for key, _ in txn.scan(Database.META)] == keys
        assert [key for key, _ in txn.scan(Database.META, b"b")] == keys[1:4]
        assert [key for key, _ in txn.scan(Database.META, b"b", b"b2")] == keys[2:4]
        assert [key for key, _ in txn.scan_back(Database.META, b"b", b"b3")] == [b"b2", b"b1"]
        assert [key for key, _ in txn.scan_back(Database.META, b"b", b"b9")] == [b"b3", b"b2", b"b1"]
        assert [key for key, _ in txn.scan_back(Database.META, b"c", b"zzz")] == [b"c"]
        assert txn.get_many(Database.META, [b"c", b"none", b"a", b"c"]) == [b"c", None, b"a", b"c"]
        assert txn.last(Database.META) == (b"c", b"c")
        assert txn.count(Database.META) == 5


def test_a_full_index_says_so_and_room_can_still_be_made(index: Index) -> None:
    value = b"v" * 1000

    def fill(txn: Transaction, first: int) -> None:
        for number in range(first, first + 50):
            txn.put(Database.BLOCKS, b"%06d" % number, value)

    first, told = 0, None
    while told is None:
        try:
            index.write(lambda txn, first=first: fill(txn, first))
            first += 50
        except NoSpaceError as error:
            told = error
    assert "full" in told.problem
    with index.read() as txn:
        assert txn.count(Database.BLOCKS) == first, "the batch that did not fit left nothing"
    for number in range(0, first, 10):
        index.write(lambda txn, number=number: txn.delete(Database.BLOCKS, b"%06d" % number))
    for number in range(first):
        index.write(lambda txn, number=number: txn.delete(Database.BLOCKS, b"%06d" % number))
    index.write(lambda txn: fill(txn, 0))
    assert index.allocated == sum(path.stat().st_size for path in index.directory.iterdir())


def test_pages_that_only_a_reader_keeps_are_waited_for(index: Index) -> None:
    """A fifth of the index is rewritten again and again; whoever reads meanwhile keeps the old pages for a moment."""
    value = b"v" * 1000
    rows = [(b"%06d" % number, value) for number in range(180)]
    index.write(lambda txn: txn.put_many(Database.BLOCKS, rows))
    failed = 0
    for _ in range(8):
        reading = threading.Event()

        def read(reading: threading.Event = reading) -> None:
            with index.read() as txn:
                txn.count(Database.BLOCKS)
                reading.set()
                time.sleep(0.01)

        thread = threading.Thread(target=read)
        thread.start()
        assert reading.wait(30)
        for _ in range(3):
            try:
                index.write(lambda txn: txn.put_many(Database.BLOCKS, rows))
            except NoSpaceError:
                failed += 1
        thread.join()
    assert failed == 0


def test_files_have_all_their_blocks_from_the_start(index: Index) -> None:
    for path in index.directory.iterdir():
        stat = path.stat()
        assert stat.st_blocks * 512 >= stat.st_size
    assert (index.directory / "data.mdb").stat().st_size == SIZE


def test_what_was_committed_is_there_after_reopening(shm: Path) -> None:
    first = Index(shm / "index", SIZE, durable=True, name="test")
    first.write(put(b"k"))  # type: ignore[arg-type]
    first.close()
    again = Index(shm / "index", SIZE, durable=True, name="test")
    assert get(again, b"k") == b"v"
    again.close()


def test_a_closed_index_refuses_and_finishes_what_was_queued(shm: Path) -> None:
    index = Index(shm / "index", SIZE, durable=False, name="test")
    held = Held(index)
    queued = [index.submit(put(b"%d" % number)) for number in range(20)]  # type: ignore[arg-type]
    held.let_go()
    index.close()
    assert all(future.done() and future.exception() is None for future in queued)
    for call in (lambda: index.submit(put(b"x")), lambda: index.write(put(b"x")), lambda: get(index, b"x")):  # type: ignore[arg-type]
        with pytest.raises(ClosedError):
            call()
    index.close()


def test_every_work_is_answered_whoever_closes_when(shm: Path) -> None:
    for turn in range(20):
        index = Index(shm / f"index{turn}", SIZE, durable=False, name="test")
        answers: list[str] = []
        start = threading.Barrier(3)

        def work(index: Index = index, answers: list[str] = answers, start: threading.Barrier = start) -> None:
            start.wait(30)
            for number in range(30):
                try:
                    index.write(put(b"%d" % number), timeout=30)  # type: ignore[arg-type]
                    answers.append("done")
                except ClosedError:
                    answers.append("closed")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait(30)
        index.close()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 60


@pytest.mark.parametrize("keep", [0, 1, 100, 4096, 8192, SIZE // 2, SIZE - 4096, SIZE - 1])
def test_a_truncated_file_is_refused(shm: Path, keep: int) -> None:
    Index(shm / "index", SIZE, durable=True, name="test").close()
    os.truncate(shm / "index" / "data.mdb", keep)
    with pytest.raises(DamagedError, match=r"data\.mdb"):
        Index(shm / "index", SIZE, durable=True, name="test")


@pytest.mark.parametrize("content", [b"not an index", b"\0", bytes(range(7, 256, 3))])
def test_a_foreign_file_is_refused(shm: Path, content: bytes) -> None:
    (shm / "index").mkdir()
    (shm / "index" / "data.mdb").write_bytes((content * (SIZE // len(content) + 1))[:SIZE])
    with pytest.raises(KVStoreError) as told:
        Index(shm / "index", SIZE, durable=True, name="test")
    assert told.value.remedy


def test_an_index_that_does_not_fit_is_refused(shm: Path) -> None:
    with pytest.raises(NoSpaceError):
        Index(shm / "index", 1 << 46, durable=False, name="test")


def test_a_rewriting_keeps_what_was_queued_around_it(index: Index) -> None:
    """It copies the last commit: in one transaction with others it would undo what they did, untold."""
    index.write(put(b"old"))
    held = Held(index)
    with ThreadPoolExecutor(1) as rewriting:
        before = [index.submit(put(b"before %d" % number)) for number in range(3)]
        waiting = index._queue.qsize()
        done = rewriting.submit(rewrite, index)
        while index._queue.qsize() == waiting:
            time.sleep(0.001)
        after = [index.submit(put(b"after %d" % number)) for number in range(3)]
        held.let_go()
        for future in [*before, done, *after]:
            future.result(30)
    wanted = [b"old", *(b"%s %d" % (when, number) for when in (b"before", b"after") for number in range(3))]
    assert {key: get(index, key) for key in wanted} == dict.fromkeys(wanted, b"v")
