"""Namespaces in a tier's index: a root's record, its number there, and which of them share a salt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvstore.records import NamespaceRecord, Usage
from kvstore.transaction import Database, Transaction, get_number

NEXT = b"next namespace"
_RECORD, _ROOT = b"n", b"r"


def register(txn: Transaction, record: NamespaceRecord) -> int:
    """The namespace's number; its record is written when the root is new, and when a label or a TTL is given anew."""
    known = txn.get(Database.NAMESPACES, _ROOT + record.root)
    if known is not None:
        number = int.from_bytes(known, "big")
        old = txn.get(Database.NAMESPACES, _RECORD + known)
        if old is not None:
            before = NamespaceRecord.unpack(old)
            label, ttl = record.label or before.label, record.ttl or before.ttl
            record = replace(record, created=before.created, label=label, ttl=ttl)
            if record == before:
                return number
    else:
        number = _next(txn)
    raw = number.to_bytes(4, "big")
    txn.put(Database.NAMESPACES, _ROOT + record.root, raw)
    txn.put(Database.NAMESPACES, _RECORD + raw, record.pack())
    return number


def restore(txn: Transaction, number: int, record: NamespaceRecord) -> int:
    """The number of a namespace that had one: it may have been dropped while it was empty, and have got another since.

    A dropped one is registered again under the number it had: numbers are not used twice.
    """
    key = _ROOT + record.root
    known = txn.get(Database.NAMESPACES, key)
    if known is not None:
        return int.from_bytes(known, "big")
    txn.put(Database.NAMESPACES, key, number.to_bytes(4, "big"))
    txn.put(Database.NAMESPACES, _RECORD + number.to_bytes(4, "big"), record.pack())
    return number


def set_ttl(txn: Transaction, root: bytes, ttl: int) -> bool:
    """Set a namespace's TTL, 0 for none; False where it is not known."""
    number = number_of(txn, root)
    raw = txn.get(Database.NAMESPACES, _RECORD + number.to_bytes(4, "big")) if number is not None else None
    if number is None or raw is None:
        return False
    record = replace(NamespaceRecord.unpack(raw), ttl=ttl)
    txn.put(Database.NAMESPACES, _RECORD + number.to_bytes(4, "big"), record.pack())
    return True


def drop_empty(txn: Transaction, roots: Iterable[bytes]) -> int:
    """Forget those of some namespaces that have no block; how many that were."""
    gone = 0
    for root in roots:
        number = number_of(txn, root)
        raw = b"" if number is None else number.to_bytes(4, "big")
        if number is None or Usage.unpack(txn.get(Database.USAGE, raw)).blocks:
            continue
        txn.delete(Database.NAMESPACES, _ROOT + root)
        txn.delete(Database.NAMESPACES, _RECORD + raw)
        txn.delete(Database.USAGE, raw)
        gone += 1
    return gone


def _next(txn: Transaction) -> int:
    """A number that no namespace has had. Indexes from before the counter was kept count from the last one there."""
    kept = get_number(txn, NEXT)
    if not kept:
        kept = 1 + max((int.from_bytes(key[1:], "big") for key, _ in txn.scan(Database.NAMESPACES, _RECORD)), default=0)
    txn.put(Database.META, NEXT, (kept + 1).to_bytes(8, "little"))
    return kept


def listing(txn: Transaction) -> Iterator[tuple[int, NamespaceRecord]]:
    """All namespaces with their numbers, in the order in which they came."""
    for key, raw in txn.scan(Database.NAMESPACES, _RECORD):
        yield int.from_bytes(key[1:], "big"), NamespaceRecord.unpack(raw)


def number_of(txn: Transaction, root: bytes) -> int | None:
    """The number of a root, None when the tier has none of its blocks."""
    raw = txn.get(Database.NAMESPACES, _ROOT + root)
    return None if raw is None else int.from_bytes(raw, "big")


def under_salt(txn: Transaction, salt: bytes) -> tuple[int, ...]:
    """Numbers of the namespaces under a salt, by its digest."""
    return tuple(number for number, record in listing(txn) if record.salt == salt)
