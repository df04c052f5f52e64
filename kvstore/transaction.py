"""What can be done inside a transaction of an index: the named databases, and reads and writes of their bytes.

LMDB's own transaction is handed in by `Index`, the only module that imports ``lmdb``. What the bytes mean is the affair
of `records`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, TypeAlias, cast

_Items: TypeAlias = Iterator[tuple[bytes, bytes]]

PAGE = 4096
_ZEROS = bytes(PAGE - 16)
"""A value that takes a page of its own, behind LMDB's header."""


class Database(StrEnum):
    """The named databases; `FORMAT.md` describes their records."""

    BLOCKS = "blocks"
    SLOTS = "slots"
    WRITING = "writing"
    SEGMENTS = "segments"
    FREE = "free"
    LEASES = "leases"
    NAMES = "names"
    NAMESPACES = "namespaces"
    USAGE = "usage"
    PURGE = "purge"
    DAYS = "days"
    META = "meta"


class Transaction:
    """A read or write transaction; valid on the thread and in the block it was opened in."""

    def __init__(self, txn: Any, handles: dict[Database, Any]) -> None:
        self._txn = txn
        self._handles = handles

    def get(self, db: Database, key: bytes) -> bytes | None:
        """The value of a key."""
        return cast("bytes | None", self._txn.get(key, db=self._handles[db]))

    def get_many(self, db: Database, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of many keys, by one call into LMDB."""
        with self._txn.cursor(self._handles[db]) as cursor:
            found = cast("dict[bytes, bytes]", dict(cursor.getmulti(keys)))
        return [found.get(key) for key in keys]

    def put(self, db: Database, key: bytes, value: bytes) -> None:
        """Set a key's value."""
        self._txn.put(key, value, db=self._handles[db])

    def put_many(self, db: Database, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Set many keys, by one call into LMDB."""
        with self._txn.cursor(self._handles[db]) as cursor:
            cursor.putmulti(items)

    def delete(self, db: Database, key: bytes) -> bool:
        """Delete a key; False when it was not there."""
        return bool(self._txn.delete(key, db=self._handles[db]))

    def pop(self, db: Database, key: bytes) -> bytes | None:
        """Delete a key and return its value."""
        return cast("bytes | None", self._txn.pop(key, db=self._handles[db]))

    def append(self, db: Database, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Set keys that come in order, behind all that the database has."""
        with self._txn.cursor(self._handles[db]) as cursor:
            cursor.putmulti(items, append=True)

    def fill(self, db: Database, prefix: bytes, count: int) -> None:
        """Take ``count`` pages, each by a record under ``prefix`` whose value is one page of zeros."""
        for number in range(count):
            self.put(db, prefix + number.to_bytes(4, "big"), _ZEROS)

    def unfill(self, db: Database, prefix: bytes) -> None:
        """Delete all records under ``prefix``."""
        for key in [key for key, _ in self.scan(db, prefix)]:
            self.delete(db, key)

    @property
    def number(self) -> int:
        """The transaction's number in the life of the environment."""
        return int(self._txn.id())

    def clear(self, db: Database) -> None:
        """Delete every key of a database."""
        self._txn.drop(self._handles[db], delete=False)

    def count(self, db: Database) -> int:
        """How many keys a database has."""
        return int(self._txn.stat(self._handles[db])["entries"])

    def pages(self, db: Database) -> int:
        """How many pages a database takes."""
        stat = self._txn.stat(self._handles[db])
        return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])

    def live_bytes(self) -> int:
        """Bytes of the pages that all databases take now."""
        return PAGE * sum(self.pages(db) for db in Database)

    def scan(self, db: Database, prefix: bytes = b"", start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Keys with a prefix, in order, from ``start`` on. The database must not be changed meanwhile."""
        with self._txn.cursor(self._handles[db]) as cursor:
            begin = start if start is not None else prefix
            if not (cursor.set_range(begin) if begin else cursor.first()):
                return
            for key, value in cast("_Items", cursor.iternext(keys=True, values=True)):
                if not key.startswith(prefix):
                    return
                yield key, value

    def scan_back(self, db: Database, prefix: bytes, before: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys with a prefix that come before ``before``, nearest first."""
        with self._txn.cursor(self._handles[db]) as cursor:
            placed = cursor.prev() if cursor.set_range(before) else cursor.last()
            if not placed:
                return
            for key, value in cast("_Items", cursor.iterprev(keys=True, values=True)):
                if not key.startswith(prefix):
                    return
                yield key, value

    def last(self, db: Database) -> tuple[bytes, bytes] | None:
        """The largest key and its value."""
        with self._txn.cursor(self._handles[db]) as cursor:
            return cast("tuple[bytes, bytes]", cursor.item()) if cursor.last() else None


def get_number(txn: Transaction, key: bytes) -> int:
    """A number of the ``meta`` database; 0 when it was never set."""
    return int.from_bytes(txn.get(Database.META, key) or b"", "little")


def put_number(txn: Transaction, key: bytes, value: int) -> None:
    """Set a number of the ``meta`` database."""
    txn.put(Database.META, key, value.to_bytes(8, "little"))
