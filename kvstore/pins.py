"""Names and pins of prefixes: records in the index of the lowest tier, so that they survive restarts.

A pin keeps a prefix's blocks from eviction in every tier and every process, until it expires or is taken off. Pins
take at most half a tier.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from kvstore.errors import BudgetError, NotFoundError, SettingsError
from kvstore.index import Index
from kvstore.records import NameRecord
from kvstore.sizes import format_size
from kvstore.transaction import Database, Transaction

EPOCH = b"pin epoch"
NAME_LIMIT = 500
PINNED_SHARE = 2
NAMES_SHARE = 16
"""Names take at most one part in this many of the index they are in."""


class Pins:
    """The names of a store. ``keys()`` is cheap: it is read again only after a change anywhere."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._read: tuple[int, float, frozenset[bytes]] = (-1, 0.0, frozenset())
        """Epoch, end and keys, set by one assignment: the writers of two indexes ask at the same time."""

    def keys(self) -> frozenset[bytes]:
        """Keys of all pinned blocks whose pin has not expired."""
        with self._index.read() as txn:
            epoch = int.from_bytes(txn.get(Database.META, EPOCH) or b"", "little")
            now = time.time()
            known, until, keys = self._read
            if epoch != known or now >= until:
                records = [record for record in _records(txn).values() if record.pinned]
                live = [record for record in records if not record.expires or record.expires > now]
                keys = frozenset(key for record in live for key in record.keys)
                until = min((record.expires for record in live if record.expires), default=float("inf"))
                self._read = (epoch, until, keys)
        return keys

    def listing(self) -> dict[str, NameRecord]:
        """All names, expired ones included."""
        with self._index.read() as txn:
            return _records(txn)

    def get(self, name: str) -> NameRecord:
        """A name's record. Raises NotFoundError."""
        with self._index.read() as txn:
            raw = txn.get(Database.NAMES, _key(name))
        if raw is None:
            raise NotFoundError(f"no prefix is named {name!r}", "`kvstore names` lists the names")
        return NameRecord.unpack(raw)

    def put(self, name: str, record: NameRecord, budget: int) -> None:
        """Set a name. budget: of the smallest tier, in bytes. Raises BudgetError past half of it."""
        key = _key(name)

        def work(txn: Transaction) -> None:
            if record.pinned:
                others = [other for known, other in _records(txn).items() if known != name and other.pinned]
                keys = {known: other.slot_bytes for other in others for known in other.keys}
                keys |= dict.fromkeys(record.keys, record.slot_bytes)
                wanted = sum(keys.values())
                if wanted > budget // PINNED_SHARE:
                    raise BudgetError(
                        f"pins would hold {format_size(wanted)}, more than half of {format_size(budget)}",
                        "unpin something first, or raise the budget",
                    )
            raw, size = record.pack(), self._index.size // NAMES_SHARE
            if len(raw) + sum(len(other) for known, other in txn.scan(Database.NAMES) if known != key) > size:
                raise BudgetError(
                    f"names would take more than {format_size(size)} of the index",
                    "unpin something first, or raise the budget of the lowest tier",
                )
            txn.put(Database.NAMES, key, raw)
            _changed(txn)

        self._index.write(work)

    def drop(self, name: str) -> None:
        """Forget a name. Raises NotFoundError."""
        key = _key(name)

        def work(txn: Transaction) -> bool:
            _changed(txn)
            return txn.delete(Database.NAMES, key)

        if not self._index.write(work):
            raise NotFoundError(f"no prefix is named {name!r}", "`kvstore names` lists the names")

    def drop_wiped(self, roots: Collection[bytes], keys: Collection[bytes]) -> list[str]:
        """Forget names in namespaces, by root, and those with one of some block keys; returns the names."""

        def work(txn: Transaction) -> list[str]:
            known = _records(txn).items()
            gone = [name for name, one in known if one.root in roots or not wanted.isdisjoint(one.keys)]
            for name in gone:
                txn.delete(Database.NAMES, _key(name))
            if gone:
                _changed(txn)
            return gone

        wanted = frozenset(keys)
        return self._index.write(work)


def _records(txn: Transaction) -> dict[str, NameRecord]:
    return {key.decode(): NameRecord.unpack(raw) for key, raw in txn.scan(Database.NAMES)}


def _changed(txn: Transaction) -> None:
    epoch = int.from_bytes(txn.get(Database.META, EPOCH) or b"", "little") + 1
    txn.put(Database.META, EPOCH, epoch.to_bytes(8, "little"))


def _key(name: str) -> bytes:
    raw = name.encode(errors="replace")
    if not raw or len(raw) > NAME_LIMIT:
        raise SettingsError(f"a name of {len(raw)} bytes", f"use 1 to {NAME_LIMIT} bytes of UTF-8")
    return raw
