"""Names and pins of prefixes: records in the index of the lowest tier, so that they survive restarts.

A pin keeps a prefix's blocks from eviction in every tier and every process, until it expires or is taken off. Pins
take at most half a tier: those of the highest priority hold, and among equals the oldest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from kvstore.errors import BudgetError, NotFoundError, SettingsError
from kvstore.index import Index
from kvstore.records import NameRecord
from kvstore.sizes import format_size
from kvstore.transaction import Database, Transaction, get_number, put_number

EPOCH = b"pin epoch"
NAME_LIMIT = 500
PINNED_SHARE = 2
NAMES_SHARE = 16
"""Names take at most one part in this many of the index they are in."""


class Pins:
    """The names of a store. ``keys()`` is cheap: it is read again only after a change anywhere."""

    def __init__(self, index: Index, smallest: Callable[[], int]) -> None:
        """smallest: bytes of the smallest tier's budget."""
        self._index, self._smallest = index, smallest
        self._read: tuple[int, float, frozenset[bytes]] = (-1, 0.0, frozenset())
        """Epoch, end and keys, set by one assignment: the writers of two indexes ask at the same time."""

    def keys(self) -> frozenset[bytes]:
        """Keys of all blocks that a pin keeps now."""
        with self._index.read() as txn:
            epoch = get_number(txn, EPOCH)
            now = time.time()
            known, until, keys = self._read
            if epoch == known and now < until:
                return keys
            live = _live(_records(txn), now)
        keys = frozenset(key for name in _holding(live, self._smallest()) for key in live[name].keys)
        until = min((record.expires for record in live.values() if record.expires), default=float("inf"))
        self._read = (epoch, until, keys)
        return keys

    def holding(self) -> frozenset[str]:
        """Names whose pin keeps its blocks now: not expired, and among those there is room for."""
        return _holding(_live(self.listing(), time.time()), self._smallest())

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

    def put(self, name: str, record: NameRecord) -> frozenset[str]:
        """Set a name; returns the names whose pins let go for it, since their priority is lower.

        Raises BudgetError when pins of its priority and above leave too little of half the smallest tier.
        """
        key, budget = _key(name), self._smallest()

        def work(txn: Transaction) -> frozenset[str]:
            before = _live(_records(txn), time.time())
            held = _holding({**before, name: record}, budget) if record.pinned else frozenset()
            let_go = (_holding(before, budget) - held - {name}) if record.pinned else frozenset()
            if record.pinned and (name not in held or any(before[one].priority >= record.priority for one in let_go)):
                above = [one for known, one in before.items() if known != name and one.priority >= record.priority]
                wanted = sum(_sizes([*above, record]).values())
                raise BudgetError(
                    f"pins would hold {format_size(wanted)}, more than half of {format_size(budget)}",
                    "unpin something first, give it a higher priority, or raise the budget",
                )
            raw, size = record.pack(), self._index.size // NAMES_SHARE
            if len(raw) + sum(len(other) for known, other in txn.scan(Database.NAMES) if known != key) > size:
                raise BudgetError(
                    f"names would take more than {format_size(size)} of the index",
                    "unpin something first, or raise the budget of the lowest tier",
                )
            txn.put(Database.NAMES, key, raw)
            _changed(txn)
            return let_go

        return self._index.write(work)

    def drop(self, name: str) -> None:
        """Forget a name. Raises NotFoundError."""
        key = _key(name)

        def work(txn: Transaction) -> bool:
            _changed(txn)
            return txn.delete(Database.NAMES, key)

        if not self._index.write(work):
            raise NotFoundError(f"no prefix is named {name!r}", "`kvstore names` lists the names")

    def of(self, roots: Collection[bytes], keys: Collection[bytes]) -> list[str]:
        """Names in namespaces, by root, and those with one of some block keys."""
        with self._index.read() as txn:
            return sorted(_of(_records(txn), roots, frozenset(keys)))

    def drop_wiped(self, roots: Collection[bytes], keys: Collection[bytes]) -> list[str]:
        """Forget names in namespaces, by root, and those with one of some block keys; returns the names."""

        def work(txn: Transaction) -> list[str]:
            gone = _of(_records(txn), roots, wanted)
            for name in gone:
                txn.delete(Database.NAMES, _key(name))
            if gone:
                _changed(txn)
            return gone

        wanted = frozenset(keys)
        return self._index.write(work)


def _records(txn: Transaction) -> dict[str, NameRecord]:
    return {key.decode(): NameRecord.unpack(raw) for key, raw in txn.scan(Database.NAMES)}


def _of(records: Mapping[str, NameRecord], roots: Collection[bytes], keys: frozenset[bytes]) -> list[str]:
    return [name for name, one in records.items() if one.root in roots or not keys.isdisjoint(one.keys)]


def _live(records: Mapping[str, NameRecord], now: float) -> dict[str, NameRecord]:
    """Those whose pin has not expired."""
    return {name: one for name, one in records.items() if one.pinned and (not one.expires or one.expires > now)}


def _sizes(records: Iterable[NameRecord]) -> dict[bytes, int]:
    """Bytes of a slot for every block that one of them names."""
    return {key: record.slot_bytes for record in records for key in record.keys}


def _holding(live: Mapping[str, NameRecord], budget: int) -> frozenset[str]:
    """Names that there is room for, one after the other: the highest priority first, and the oldest among equals."""
    room, sizes = budget // PINNED_SHARE, dict[bytes, int]()
    held: set[str] = set()
    for name, record in sorted(live.items(), key=lambda one: (-one[1].priority, one[1].created, one[0])):
        more = {key: size for key, size in _sizes([record]).items() if key not in sizes}
        if sum(more.values()) <= room:
            room -= sum(more.values())
            sizes |= more
            held.add(name)
    return frozenset(held)


def _changed(txn: Transaction) -> None:
    epoch = get_number(txn, EPOCH) + 1
    put_number(txn, EPOCH, epoch)


def _key(name: str) -> bytes:
    raw = name.encode(errors="replace")
    if not raw or len(raw) > NAME_LIMIT:
        raise SettingsError(f"a name of {len(raw)} bytes", f"use 1 to {NAME_LIMIT} bytes of UTF-8")
    return raw
