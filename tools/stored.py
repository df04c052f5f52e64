"""Stored sequences with all their tokens, in one pass over the index; and how two layouts differ.

`listing` gives the first tokens of a sequence; here is what commands need that compare, export or show one whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.identity import Tokens, as_tokens
from kvstore.layout import Layout
from kvstore.records import Entry, key_depth, key_part, key_tokens
from kvstore.states import State
from kvstore.store import Store
from kvstore.tiers import namespaces
from kvstore.transaction import Database

_PARENT, _SHORT = slice(12, 20), 8
EVERY = 8192
"""Entries between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A stored sequence that no other one continues, whole from its first token on. key: of its last block.

    idle_s: seconds since its last block was used.
    """

    key: bytes
    tokens: Tokens
    idle_s: float


@dataclass(slots=True)
class _Block:
    parent: bytes
    depth: int
    tokens: bytes
    key: bytes
    idle_s: float


def sequences(
    store: Store, root: bytes, most: int | None = None, step: Callable[[int, int], None] | None = None
) -> list[Sequence]:
    """Sequences of a namespace, the most recently used first, ``most`` of them. step: told entries read, and how many.

    Those that have lost their beginning are left out: nothing of them can be served.
    """
    blocks: dict[bytes, _Block] = {}
    for tier in store._core.tiers:
        with tier.index.read() as txn:
            number = namespaces.number_of(txn, root)
            total = txn.count(Database.BLOCKS)
            for done, (index_key, raw) in enumerate(txn.scan(Database.BLOCKS)):
                if step is not None and done % EVERY == 0:
                    step(done, total)
                part = key_part(index_key)
                entry = Entry.unpack(raw)
                if entry.namespace != number or entry.state is not State.READY or part.group or part.shard:
                    continue
                stamp = int(tier.arrays.of(entry.ref.segment).stamps[entry.ref.slot])
                idle = max(0.0, (tier.oldest_stamp(0) - stamp) / 1e9)
                known = blocks.get(entry.key[:_SHORT])
                if known is None:
                    tokens = key_tokens(index_key, entry)
                    known = _Block(index_key[_PARENT], key_depth(index_key), tokens, entry.key, idle)
                    blocks[entry.key[:_SHORT]] = known
                known.idle_s = min(known.idle_s, idle)
    parents = {block.parent for block in blocks.values()}
    leaves = sorted((block for short, block in blocks.items() if short not in parents), key=lambda block: block.idle_s)
    found: list[Sequence] = []
    for leaf in leaves:
        whole = _walk(blocks, leaf, root)
        if whole is not None:
            found.append(Sequence(leaf.key, whole, leaf.idle_s))
        if most is not None and len(found) >= most:
            break
    return found


def _walk(blocks: dict[bytes, _Block], leaf: _Block, root: bytes) -> Tokens | None:
    """All tokens up to a leaf; None where its beginning is gone."""
    pieces: list[bytes] = []
    block: _Block | None = leaf
    while block is not None:
        pieces.append(block.tokens)
        if block.depth == 0:
            break
        block = blocks.get(block.parent)
    if block is None or block.parent != root[:_SHORT]:
        return None
    return as_tokens(np.frombuffer(b"".join(reversed(pieces)), ">u4"))


def layout_difference(mine: Layout, other: Layout) -> list[tuple[str, str, str]]:
    """What tells two layouts apart: each thing's name, and its value in the first and in the second."""
    found: list[tuple[str, str, str]] = []
    for name in ("dtype", "block_tokens", "shards"):
        pair = str(getattr(mine, name)), str(getattr(other, name))
        if pair[0] != pair[1]:
            found.append((name, *pair))
    if mine.groups != other.groups:
        found.append(("shapes", _shapes(mine), _shapes(other)))
    traits = dict(mine.traits), dict(other.traits)
    for name in sorted(traits[0].keys() | traits[1].keys()):
        pair = traits[0].get(name, "none"), traits[1].get(name, "none")
        if pair[0] != pair[1]:
            found.append((name, *pair))
    return found


def _shapes(layout: Layout) -> str:
    """Layers and their shapes in words."""
    told = []
    for group in layout.groups:
        kinds = list(dict.fromkeys(group))
        shapes = [f"{group.count(one)} × {one.heads} heads of {one.k_dim}+{one.v_dim}" for one in kinds]
        told.append(", ".join(shapes))
    return "; ".join(told)
