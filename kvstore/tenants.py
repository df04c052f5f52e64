"""What is set for a salt or a namespace: quotas and how they are kept, TTLs, and namespaces that hold nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.events import EvictReason
from kvstore.quotas import Quotas
from kvstore.records import Entry, NamespaceRecord, Usage, slot_key
from kvstore.slots import SlotRef
from kvstore.tiers import namespaces
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database, Transaction

ROUNDS = 3
"""Attempts to come below a quota: what is used again meanwhile is looked at anew."""
EMPTY_KEPT = 256
"""Namespaces without a block that a tier keeps in peace; housekeeping drops them past that."""


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """Bytes of slots that the namespaces under a salt (by its digest) may hold in a tier, and what they hold."""

    salt: bytes
    tier: str
    limit: int
    used: int


def quota_uses(tiers: Sequence[SlottedTier], quotas: Quotas) -> list[QuotaUse]:
    """All quotas of the tiers there are."""
    limits = quotas.listing()
    found: list[QuotaUse] = []
    for tier in tiers:
        wanted = {salt: limit for (name, salt), limit in limits.items() if name == tier.name}
        if wanted:
            with tier.index.read() as txn:
                found += [QuotaUse(salt, tier.name, limit, _held(txn, salt)) for salt, limit in wanted.items()]
    return sorted(found, key=lambda use: (use.salt, use.tier))


def trim(tier: SlottedTier, salt: bytes, limit: int, *, dry_run: bool = False) -> int:
    """Evict what a salt's namespaces did not use for longest, until they hold no more than ``limit``; blocks that went.

    Pinned blocks stay. Copies in other tiers stay too. dry_run: only count.
    """
    gone = 0
    for _ in range(ROUNDS):
        with tier.index.read() as txn:
            excess = _held(txn, salt) - limit
            if excess <= 0:
                break
            victims = _coldest(tier, txn, set(namespaces.under_salt(txn, salt)), excess)
        if dry_run:
            return len(victims)
        if not victims:
            break
        gone += tier.remove(victims, EvictReason.QUOTA)
    return gone


def set_ttl(tiers: Sequence[SlottedTier], root: bytes, ttl: int) -> None:
    """Set a namespace's TTL in every tier that knows it; 0 takes it off."""
    for tier in tiers:
        tier.index.write(lambda txn: namespaces.set_ttl(txn, root, ttl))


def drop_empty(
    tiers: Sequence[SlottedTier], named: Collection[bytes], *, dry_run: bool = False
) -> dict[bytes, NamespaceRecord]:
    """Forget namespaces that have no block in any tier and no name; they are registered again when something is saved.

    named: roots that names refer to. Returns their records by root.
    """
    records: dict[bytes, NamespaceRecord] = {}
    full: set[bytes] = set(named)
    for tier in tiers:
        with tier.index.read() as txn:
            for number, record in namespaces.listing(txn):
                records[record.root] = record
                if Usage.unpack(txn.get(Database.USAGE, number.to_bytes(4, "big"))).blocks:
                    full.add(record.root)
    empty = {root: record for root, record in records.items() if root not in full}
    if not dry_run and empty:
        for tier in tiers:
            tier.index.write(lambda txn: namespaces.drop_empty(txn, empty))
    return empty


def crowded(tier: SlottedTier) -> bool:
    """Whether a tier knows so many namespaces that it is worth asking which of them hold nothing."""
    with tier.index.read() as txn:
        return txn.count(Database.NAMESPACES) // 2 > EMPTY_KEPT


def _held(txn: Transaction, salt: bytes) -> int:
    numbers = namespaces.under_salt(txn, salt)
    return sum(Usage.unpack(txn.get(Database.USAGE, number.to_bytes(4, "big"))).size for number in numbers)


def _coldest(tier: SlottedTier, txn: Transaction, numbers: set[int], excess: int) -> list[tuple[bytes, bytes]]:
    """Blocks of some namespaces, the least recently used first, that hold ``excess`` bytes together."""
    found: list[tuple[int, int, SlotRef]] = []
    wanted = np.array(sorted(numbers), np.uint32)
    for segment in tier.cut_segments():
        stamps = tier.arrays.stamps(segment)
        owners = tier.arrays.of(segment.number).namespaces[: segment.slots]
        for slot in np.flatnonzero((stamps > 0) & np.isin(owners, wanted)).tolist():
            found.append((int(stamps[slot]), segment.slot_bytes, SlotRef(segment.number, slot)))
    victims: list[tuple[bytes, bytes]] = []
    pins = tier.pins()
    for _, size, ref in sorted(found):
        if excess <= 0:
            break
        index_key = txn.get(Database.SLOTS, slot_key(ref))
        raw = txn.get(Database.BLOCKS, index_key) if index_key is not None else None
        if index_key is not None and raw is not None:
            entry = Entry.unpack(raw)
            if entry.namespace in numbers and entry.key not in pins:
                victims.append((index_key, entry.key))
                excess -= size
    return victims
