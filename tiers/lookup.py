"""What a tier has of a chain: whole blocks by their names, and the child that goes on longest with the same tokens.

Functions over one read transaction; nothing is changed, so a lookup may be repeated or forgotten at no cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.identity import Chain, block_key
from kvstore.layout import Part
from kvstore.records import KEY_TOKENS, BlockName, Entry, family_key, key_tokens
from kvstore.states import State
from kvstore.transaction import Database, Transaction

NEIGHBOURS = 16
"""Entries looked at on either side of the probe: more than one only where neighbours are being written."""
EQUAL_SIBLINGS = 256
"""Siblings equal in all tokens of the key that are compared by their remaining tokens."""
_KEY_CUT = 4 * KEY_TOKENS


@dataclass(frozen=True, slots=True)
class Nearest:
    """A stored block that begins with ``shared`` of the tokens asked for; ``name`` finds it again."""

    name: BlockName
    entry: Entry
    shared: int


def find(txn: Transaction, names: Sequence[BlockName]) -> list[Entry | None]:
    """Entries of blocks, WRITING ones included; the full key is compared."""
    raws = txn.get_many(Database.BLOCKS, [name.index_key for name in names])
    return [entry_of(raw, name) for raw, name in zip(raws, names, strict=True)]


def entry_of(raw: bytes | None, name: BlockName) -> Entry | None:
    """The entry of a block, out of what is stored under its index key: that may be another block's with that key."""
    entry = Entry.unpack(raw) if raw is not None else None
    return entry if entry is not None and entry.key == name.key else None


def nearest(txn: Transaction, chain: Chain, part: Part, index: int, tokens: int) -> Nearest | None:
    """The READY child of block ``index``'s parent that shares the longest run with the chain's tokens there.

    tokens: how many of the block's tokens to compare. Children are neighbours in the index's order, so the best one is
    next to where the tokens asked for would be. Its full key is recomputed from its tokens: a child of another parent
    with the same short key is never taken.
    """
    start = index * chain.block_tokens
    wanted = chain.tokens[start : start + tokens].astype(">u4").tobytes()
    family = family_key(chain.ancestor(index), index, chain.parent(index), part)
    best: Nearest | None = None
    for index_key, raw in _around(txn, family, wanted):
        entry = Entry.unpack(raw)
        if entry.state is not State.READY:
            continue
        stored = key_tokens(index_key, entry)
        shared = _common(stored, wanted) // 4
        if shared <= (best.shared if best else 0) or not _is_child(chain, index, entry, stored):
            continue
        best = Nearest(BlockName(index_key, entry.rest, entry.key, entry.tokens, part), entry, shared)
        if shared == tokens:
            break
    return best


def _around(txn: Transaction, family: bytes, wanted: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Entries of a family near the tokens wanted, those equal up to the key's cut first."""
    probe = family + wanted[:_KEY_CUT]
    if len(wanted) > _KEY_CUT:
        for count, item in enumerate(txn.scan(Database.BLOCKS, probe)):
            if count == EQUAL_SIBLINGS:
                break
            yield item
    for count, item in enumerate(txn.scan(Database.BLOCKS, family, probe)):
        if count == NEIGHBOURS:
            break
        yield item
    for count, item in enumerate(txn.scan_back(Database.BLOCKS, family, probe)):
        if count == NEIGHBOURS:
            break
        yield item


def _common(a: bytes, b: bytes) -> int:
    """Length of the common beginning of two byte strings."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    differs = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    return int(np.argmax(differs))


def _is_child(chain: Chain, index: int, entry: Entry, stored: bytes) -> bool:
    little = np.frombuffer(stored, ">u4").astype("<u4")
    return block_key(chain.parent(index), little.data, chain.extra(index)) == entry.key
