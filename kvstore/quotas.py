"""Quotas by salt: how many bytes of slots the namespaces under one salt may hold in a tier.

Kept in the index of the lowest tier; enforced by each tier's `reserve`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import SettingsError
from kvstore.index import Index
from kvstore.transaction import Database, Transaction, get_number, put_number

EPOCH = b"quota epoch"
_PREFIX = b"quota:"


class Quotas:
    """The quotas of a store, by tier and digest of the salt."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._read: tuple[int, dict[tuple[str, bytes], int]] = (-1, {})
        """Epoch and limits, set by one assignment: several threads ask at the same time."""

    def reader(self, tier: str) -> Callable[[bytes], int | None]:
        """A function from a salt's digest to its quota in a tier, None without one."""
        return lambda salt: self.listing().get((tier, salt))

    def listing(self) -> dict[tuple[str, bytes], int]:
        """All quotas; read again only after a change anywhere."""
        with self._index.read() as txn:
            epoch = get_number(txn, EPOCH)
            known, limits = self._read
            if epoch != known:
                found = ((key[len(_PREFIX) :], raw) for key, raw in txn.scan(Database.META, _PREFIX))
                limits = {(key[:-16].decode(), key[-16:]): int.from_bytes(raw, "little") for key, raw in found}
                self._read = (epoch, limits)
        return limits

    def set(self, tier: str, salt: bytes, limit: int | None) -> None:
        """Set a quota in bytes, or take it off. Raises SettingsError for a number that cannot be one."""
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit < 1 << 63):
            raise SettingsError(f"a quota of {limit!r}", "give whole bytes, 0 or more; None takes it off")

        def work(txn: Transaction) -> None:
            key = _PREFIX + tier.encode() + salt
            if limit is None:
                txn.delete(Database.META, key)
            else:
                put_number(txn, key, limit)
            epoch = get_number(txn, EPOCH) + 1
            put_number(txn, EPOCH, epoch)

        self._index.write(work)
