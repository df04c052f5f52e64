"""What was explicitly evicted: tombstones in the index of the lowest tier, numbered by the purge epoch.

LRU eviction leaves no tombstone, since a key is its content. An explicit eviction must hold in every process: each
load compares the epoch with the one it knows and first drops what newer tombstones name.
"""

from __future__ import annotations

from kvstore.index import Index
from kvstore.records import Tombstone
from kvstore.transaction import PAGE, Database, Transaction, get_number, put_number

EPOCH, FLOOR = b"purge epoch", b"purge floor"
KEPT = 1024
"""Tombstones kept; who lags behind further drops everything."""
KEYS_A_STONE = 4096
INDEX_SHARE = 16
"""Tombstones take at most one part in this many of the index, so that evicting never fills it."""


class PurgeLog:
    """The purge epoch and its tombstones, shared by every process of the store."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def epoch(self) -> int:
        """The number of the newest tombstone."""
        with self._index.read() as txn:
            return get_number(txn, EPOCH)

    def newer(self, epoch: int) -> list[Tombstone]:
        """Tombstones after ``epoch``; one that names everything where some of them are gone."""
        with self._index.read() as txn:
            now = get_number(txn, EPOCH)
            if now <= epoch:
                return []
            if epoch < get_number(txn, FLOOR):
                return [Tombstone(now, everything=True)]
            start = (epoch + 1).to_bytes(8, "big")
            return [Tombstone.unpack(raw) for _, raw in txn.scan(Database.PURGE, start=start)]

    def add(self, *, everything: bool = False, root: bytes = b"", keys: tuple[bytes, ...] = ()) -> range:
        """Record an eviction; returns its epochs. It must be recorded before the blocks are removed."""
        stones = (
            [(everything, root, ())]
            if everything or root
            else [(False, b"", keys[at : at + KEYS_A_STONE]) for at in range(0, len(keys), KEYS_A_STONE)]
        )

        def work(txn: Transaction) -> range:
            epoch = get_number(txn, EPOCH)
            for all_of_it, of_root, named in stones:
                epoch += 1
                stone = Tombstone(epoch, all_of_it, of_root, tuple(named))
                txn.put(Database.PURGE, epoch.to_bytes(8, "big"), stone.pack())
            put_number(txn, EPOCH, epoch)
            _trim(txn, epoch, self._index.size // PAGE // INDEX_SHARE)
            return range(epoch - len(stones) + 1, epoch + 1)

        return self._index.write(work)


def _trim(txn: Transaction, epoch: int, most_pages: int) -> None:
    """Drop the oldest tombstones, the one just written too if it alone is too large."""
    floor = before = get_number(txn, FLOOR)
    for key in [key for key, _ in txn.scan(Database.PURGE)]:
        if int.from_bytes(key, "big") > epoch - KEPT and txn.pages(Database.PURGE) <= most_pages:
            break
        txn.delete(Database.PURGE, key)
        floor = int.from_bytes(key, "big")
    if floor > before:
        put_number(txn, FLOOR, floor)
