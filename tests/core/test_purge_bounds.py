"""Tombstones and names share an index with blocks, and never crowd it out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import BudgetError
from kvstore.index import Index
from kvstore.pins import NAMES_SHARE, Pins
from kvstore.purge import INDEX_SHARE, KEPT, PurgeLog
from kvstore.records import NameRecord
from kvstore.transaction import Database

SIZE = 1 << 20


@pytest.fixture
def index(shm: Path) -> Iterator[Index]:
    opened = Index(shm / "index", SIZE, durable=False, name="test")
    yield opened
    opened.close()


def keys(first: int, count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(32, "big") for number in range(first, first + count))


def stored(index: Index, db: Database) -> list[bytes]:
    with index.read() as txn:
        return [raw for _, raw in txn.scan(db)]


def test_tombstones_stay_within_their_share_and_who_lags_behind_drops_everything(index: Index) -> None:
    log = PurgeLog(index)
    for turn in range(60):
        epoch = log.add(keys=keys(turn * 500, 500))[-1]
        assert sum(map(len, stored(index, Database.PURGE))) <= SIZE // INDEX_SHARE
        assert log.epoch() == epoch
    (newest,) = log.newer(epoch - 1)
    assert newest.names(b"", keys(59 * 500, 1)[0])
    assert not newest.names(b"", keys(0, 1)[0])
    (all_of_it,) = log.newer(1)
    assert all_of_it.everything
    assert log.newer(epoch) == []


def test_one_eviction_of_more_than_the_share_is_still_told_to_everybody(index: Index) -> None:
    log = PurgeLog(index)
    before = log.epoch()
    log.add(keys=keys(0, 20_000))
    assert sum(map(len, stored(index, Database.PURGE))) <= SIZE // INDEX_SHARE
    assert any(stone.names(b"", keys(7, 1)[0]) for stone in log.newer(before))


def test_tombstones_that_are_too_old_are_thrown_away(index: Index) -> None:
    log = PurgeLog(index)
    index.write(lambda txn: txn.put(Database.META, b"purge epoch", (KEPT - 3).to_bytes(8, "little")))
    for _ in range(10):
        log.add(root=b"r" * 32)
    index.write(lambda txn: txn.put(Database.PURGE, (1).to_bytes(8, "big"), b""))
    log.add(root=b"r" * 32)
    assert len(stored(index, Database.PURGE)) == 11
    with index.read() as txn:
        assert int.from_bytes(txn.get(Database.META, b"purge floor") or b"", "little") == 1


def test_names_stay_within_their_share(index: Index) -> None:
    pins = Pins(index, lambda: 1 << 30)
    record = NameRecord(b"r" * 32, keys(0, 10), bytes(16 * 40), False)
    most = SIZE // NAMES_SHARE // len(record.pack())
    for number in range(most):
        pins.put(f"name {number}", record)
    with pytest.raises(BudgetError, match="names"):
        pins.put("one too many", record)
    assert sum(map(len, stored(index, Database.NAMES))) <= SIZE // NAMES_SHARE
    pins.put("name 0", record)
    pins.drop("name 1")
    pins.put("another", record)
