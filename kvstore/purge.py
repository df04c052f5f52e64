"""What was explicitly evicted: tombstones in the index of the lowest tier, numbered by the purge epoch.

LRU eviction leaves no tombstone, since a key is its content. An explicit eviction must hold in every process: each
load compares the epoch with the one it knows and first drops what newer tombstones name. What is on its way while
blocks are evicted cannot be named block by block; whoever knows its chain takes all that follows a named block for
named (`reaching`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvstore.identity import Chain
from kvstore.index import Index
from kvstore.records import BlockName, NamespaceRecord, key_tokens
from kvstore.tombstone import Tombstone
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

    def add(
        self,
        *,
        everything: bool = False,
        root: bytes = b"",
        keys: tuple[bytes, ...] = (),
        parent: bytes = b"",
        tokens: bytes = b"",
        salt: bytes | None = None,
    ) -> range:
        """Record an eviction, named as in `Tombstone`; returns its epochs. It must be recorded before blocks go."""
        parts = [keys[at : at + KEYS_A_STONE] for at in range(0, len(keys), KEYS_A_STONE)]
        stones = [Tombstone(0, keys=frozenset(part)) for part in parts]
        if everything or root or parent or salt is not None:
            stones.insert(0, Tombstone(0, everything, root, frozenset(), parent, tokens, salt))

        def work(txn: Transaction) -> range:
            epoch = get_number(txn, EPOCH)
            for stone in stones:
                epoch += 1
                txn.put(Database.PURGE, epoch.to_bytes(8, "big"), replace(stone, epoch=epoch).pack())
            put_number(txn, EPOCH, epoch)
            _trim(txn, epoch, self._index.size // PAGE // INDEX_SHARE)
            return range(epoch - len(stones) + 1, epoch + 1)

        return self._index.write(work)


def reaching(
    stones: Sequence[Tombstone], space: NamespaceRecord, chain: Chain, names: Iterable[BlockName] = ()
) -> list[Tombstone]:
    """The tombstones, and one more that names all that follows what they name, in a chain or among ``names``.

    names: blocks that continue the chain, wherever they leave it.
    """
    if not stones:
        return []
    cut = min(_reach(stone, space, chain) for stone in stones)
    keys = set(chain.keys[cut:])
    for name in names:
        if name.depth >= cut or any(_continues(stone, chain, name) for stone in stones):
            keys.add(name.key)
    return [*stones, Tombstone(max(stone.epoch for stone in stones), keys=frozenset(keys))] if keys else list(stones)


def _reach(stone: Tombstone, space: NamespaceRecord, chain: Chain) -> int:
    """How many blocks of a chain come before the first that a tombstone names; one more than all where none is."""
    if stone.everything or stone.root == chain.root or stone.salt == space.salt:
        return 0
    if stone.parent == chain.root or stone.parent in chain.keys:
        depth = 0 if stone.parent == chain.root else chain.keys.index(stone.parent) + 1
        return depth if _begin_alike(chain, depth, stone.tokens) else len(chain) + 1
    return next((depth for depth, key in enumerate(chain.keys) if key in stone.keys), len(chain) + 1)


def _begin_alike(chain: Chain, depth: int, tokens: bytes) -> bool:
    return depth < len(chain) and chain.block(depth).astype(">u4").tobytes().startswith(tokens)


def _continues(stone: Tombstone, chain: Chain, name: BlockName) -> bool:
    """Whether a block that follows the chain begins with a tombstone's prefix."""
    follows = stone.parent == chain.parent(name.depth)
    return follows and key_tokens(name.index_key, name).startswith(stone.tokens)


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
