"""Namespaces in a tier's index: a root's record, its number there, and which of them share a salt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstore.index import Database, Transaction
from kvstore.records import NamespaceRecord

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
        last = 0
        for key, _ in txn.scan(Database.NAMESPACES, _RECORD):
            last = int.from_bytes(key[1:], "big")
        number = last + 1
    raw = number.to_bytes(4, "big")
    txn.put(Database.NAMESPACES, _ROOT + record.root, raw)
    txn.put(Database.NAMESPACES, _RECORD + raw, record.pack())
    return number


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
