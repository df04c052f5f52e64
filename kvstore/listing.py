"""What is in there: namespaces with what they hold, and the sequences of one, by their first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.layout import Layout, Part
from kvstore.records import Entry, NamespaceRecord, Usage, entry_namespace, key_depth, key_part, key_tokens
from kvstore.states import State
from kvstore.tiers import namespaces
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database

FIRST_TOKENS = 32
FIRST_PART = Part()
_PARENT, _SHORT = slice(12, 20), 8


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """A namespace, and its blocks and bytes of slots by tier."""

    record: NamespaceRecord
    by_tier: dict[str, Usage]

    @property
    def layout(self) -> Layout:
        """Its layout. Raises LayoutError when the record is of another version."""
        return Layout.from_json(self.record.layout)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A stored sequence that no other one continues.

    tokens: its length. first_tokens: the first of them, where its first block is still there. whole: whether every
    block from the first on is. idle_s: seconds since its last block was used. by_tier: blocks along it, by tier.
    """

    key: bytes
    tokens: int
    first_tokens: tuple[int, ...]
    whole: bool
    idle_s: float
    by_tier: dict[str, int]


@dataclass(slots=True)
class _Node:
    parent: bytes
    depth: int
    tokens: tuple[int, ...]
    count: int
    key: bytes
    idle_s: float
    tiers: list[str]


def namespace_uses(tiers: Sequence[SlottedTier]) -> list[NamespaceUse]:
    """All namespaces, in the order in which they came."""
    found: dict[bytes, NamespaceUse] = {}
    for tier in tiers:
        with tier.index.read() as txn:
            for number, record in namespaces.listing(txn):
                usage = Usage.unpack(txn.get(Database.USAGE, number.to_bytes(4, "big")))
                found.setdefault(record.root, NamespaceUse(record, {})).by_tier[tier.name] = usage
    return sorted(found.values(), key=lambda use: use.record.created)


def prefixes(tiers: Sequence[SlottedTier], root: bytes) -> list[Prefix]:
    """The sequences of a namespace, the most recently used first."""
    nodes: dict[bytes, _Node] = {}
    block_tokens = 0
    for tier in tiers:
        with tier.index.read() as txn:
            number = namespaces.number_of(txn, root)
            record = dict(namespaces.listing(txn)).get(number) if number is not None else None
            if record is None:
                continue
            block_tokens = Layout.from_json(record.layout).block_tokens
            entries = [
                (index_key, entry)
                for index_key, raw in txn.scan(Database.BLOCKS)
                if entry_namespace(raw) == number
                and (entry := Entry.unpack(raw)).state is State.READY
                and key_part(index_key) == FIRST_PART
            ]
        now = tier.oldest_stamp(0)
        for index_key, entry in entries:
            _add(nodes, tier, index_key, entry, now)
    inner = {node.parent for node in nodes.values()}
    leaves = [node for short, node in nodes.items() if short not in inner]
    found = [_prefix(nodes, leaf, root, block_tokens) for leaf in leaves]
    return sorted(found, key=lambda prefix: prefix.idle_s)


def _add(nodes: dict[bytes, _Node], tier: SlottedTier, index_key: bytes, entry: Entry, now: int) -> None:
    short = entry.key[:_SHORT]
    stamp = int(tier.arrays.of(entry.ref.segment).stamps[entry.ref.slot])
    idle = max(0.0, (now - stamp) / 1e9)
    node = nodes.get(short)
    if node is None:
        depth = key_depth(index_key)
        head = np.frombuffer(key_tokens(index_key, entry), ">u4")[:FIRST_TOKENS].tolist() if depth == 0 else ()
        node = _Node(index_key[_PARENT], depth, tuple(head), entry.tokens, entry.key, idle, [])
        nodes[short] = node
    node.idle_s = min(node.idle_s, idle)
    node.tiers.append(tier.name)


def _prefix(nodes: dict[bytes, _Node], leaf: _Node, root: bytes, block_tokens: int) -> Prefix:
    by_tier: dict[str, int] = {}
    node: _Node | None = leaf
    top = leaf
    while node is not None:
        top = node
        for name in node.tiers:
            by_tier[name] = by_tier.get(name, 0) + 1
        node = nodes.get(node.parent)
    whole = top.depth == 0 and top.parent == root[:_SHORT]
    return Prefix(leaf.key, leaf.depth * block_tokens + leaf.count, top.tokens, whole, leaf.idle_s, by_tier)
