"""Explicit eviction: which blocks a target names, and their removal everywhere, tombstone first.

A prefix is evicted with everything that continues it and with those of its heads that nothing else uses; heads that
other sequences share stay. So it is with sequences of more than a size, of which what is pinned stays as well. Each
tier notes which tombstones were applied to it, so that an eviction whose process died, or did not see a tier, is
finished by `catch_up`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from kvstore.errors import SettingsError
from kvstore.events import EvictReason
from kvstore.identity import ANCESTOR_BLOCKS
from kvstore.layout import Layout, Part
from kvstore.match import Match
from kvstore.purge import PurgeLog
from kvstore.records import (
    Entry,
    NamespaceRecord,
    entry_key,
    entry_namespace,
    family_key,
    key_depth,
    key_part,
    key_tokens,
    slot_key,
)
from kvstore.slots import SlotRef
from kvstore.states import State
from kvstore.tiers import namespaces
from kvstore.tiers.slotted import SlottedTier
from kvstore.tombstone import Tombstone
from kvstore.transaction import Database, Transaction, get_number, put_number

FIRST_PART = Part()
_PARENT, _SHORT = slice(12, 20), 8
APPLIED = b"purge applied"
"""In each tier: the newest tombstone up to which all were applied to it."""

Victim = tuple[bytes, bytes]
"""Index key and key."""


class Selection(TypedDict, total=False):
    """What to evict, as `Store.evict` and `Store.losing` take it: exactly one of these."""

    everything: bool
    namespace: bytes | None
    """A root."""
    salt: bytes | str | None
    """All namespaces under it."""
    prefix: Match | None
    """Goes with all that continues it and with heads that nothing else uses."""
    name: str | None
    """A prefix by what it was named, all of which is stored."""
    unused_s: float | None
    """What was not used for so many seconds."""
    larger: int | None
    """Bytes; sequences whose KV takes more, but for what others share and what is pinned."""


def refuse_unless_one(selection: Mapping[str, object]) -> None:
    """Raises SettingsError unless exactly one field of a `Selection` is given, TypeError for what is none."""
    known = tuple(Selection.__annotations__)
    for name in selection:
        if name not in known:
            raise TypeError(f"{name!r} selects nothing to evict")
    given = [name for name, value in selection.items() if value is not None and value is not False]
    if len(given) != 1:
        raise SettingsError(
            f"an eviction needs exactly one of {', '.join(known)}; given: {', '.join(given) or 'none'}",
            "name one; combine two by evicting twice",
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A `Selection` as tiers know it: one of these.

    unused_s: blocks not used for so many seconds. larger: bytes; sequences whose KV takes more. keys: blocks.
    """

    everything: bool = False
    root: bytes | None = None
    salt: bytes | None = None
    prefix: Match | None = None
    unused_s: float | None = None
    larger: int | None = None
    keys: frozenset[bytes] | None = None

    @property
    def whole(self) -> bool:
        """Whether it goes by namespaces."""
        return self.everything or self.root is not None or self.salt is not None

    def takes(self, record: NamespaceRecord) -> bool:
        """Whether it names a namespace as a whole."""
        return self.everything or self.root == record.root or (self.salt is not None and self.salt == record.salt)


class Eviction:
    """Evicts from tiers; log: where tombstones go."""

    def __init__(self, tiers: Sequence[SlottedTier], log: PurgeLog) -> None:
        self._tiers, self._log = tiers, log

    def run(self, target: Target, tier: str | None = None, *, dry_run: bool = False) -> dict[str, int]:
        """Evict; returns blocks by tier. tier: only the copies there, which leaves no tombstone.

        Raises SettingsError for a tier that is not there.
        """
        chosen = [one for one in self._tiers if tier in (None, one.name)]
        if not chosen:
            names = ", ".join(one.name for one in self._tiers)
            raise SettingsError(f"there is no tier {tier!r}", f"choose one of {names}")
        target = self._settled(target)
        victims = {one.name: self._victims(one, target) for one in chosen}
        if dry_run:
            return {name: len(found) for name, found in victims.items()}
        buried: list[range] = []
        if tier is None:
            buried = self._bury(target, victims)
            named = _keys(victims)
            victims = {one.name: self._victims(one, target) for one in chosen}
            late = _keys(victims) - named
            if late and not target.whole:  # saved in between: it may be on its way to a tier that was looked at
                buried.append(self._log.add(keys=tuple(sorted(late))))
                victims = {one.name: self._victims(one, target) for one in chosen}
        counts = {one.name: one.remove(victims[one.name], EvictReason.EVICT, doom=True) for one in chosen}
        for one in chosen if buried else ():
            _mark(one, buried)
        return counts

    def named(self, target: Target) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """Roots of namespaces that go as a whole, and keys of all blocks that go."""
        target = self._settled(target)
        roots: set[bytes] = set()
        keys: set[bytes] = set()
        for one in self._tiers:
            keys.update(key for _, key in self._victims(one, target))
            whole = [record for _, record in _spaces(one) if target.takes(record)]
            roots.update(record.root for record in whole)
        return frozenset(roots), frozenset(keys)

    def _settled(self, target: Target) -> Target:
        """The same, by keys where it goes by size: what it names must not change between its tombstone and its end."""
        if target.larger is None:
            return target
        return replace(target, larger=None, keys=_larger(self._tiers, target.larger))

    def _bury(self, target: Target, victims: dict[str, list[Victim]]) -> list[range]:
        """The tombstones, before the first block goes; their epochs."""
        if target.everything:
            return [self._log.add(everything=True)]
        if target.root is not None:
            return [self._log.add(root=target.root)]
        if target.salt is not None:
            first = self._log.add(salt=target.salt)  # before it is asked which namespaces are there
            spaces = [record for one in self._tiers for _, record in _spaces(one)]
            roots = sorted({one.root for one in spaces if one.salt == target.salt})
            return [first, *(self._log.add(root=root) for root in roots)]
        keys = tuple(sorted(_keys(victims)))
        if target.prefix is not None and target.prefix.tokens:
            chain, tokens = target.prefix.chain, target.prefix.tokens
            last = (tokens - 1) // chain.block_tokens
            begun = chain.tokens[last * chain.block_tokens : tokens].astype(">u4").tobytes()
            return [self._log.add(parent=chain.parent(last), tokens=begun, keys=keys)]
        return [self._log.add(keys=keys)] if keys else []

    def _victims(self, tier: SlottedTier, target: Target) -> list[Victim]:
        if target.prefix is not None:
            return self._of_prefix(tier, target.prefix)
        with tier.index.read() as txn:
            if target.unused_s is not None:
                return _unused(tier, txn, target.unused_s)
            if target.everything:
                return [(key, entry_key(raw)) for key, raw in txn.scan(Database.BLOCKS)]
            if target.keys is not None:
                every = ((index_key, entry_key(raw)) for index_key, raw in txn.scan(Database.BLOCKS))
                return [(index_key, key) for index_key, key in every if key in target.keys]
            numbers = {
                number
                for number, record in namespaces.listing(txn)
                if record.root == target.root or (target.salt is not None and record.salt == target.salt)
            }
            found = ((key, raw) for key, raw in txn.scan(Database.BLOCKS) if entry_namespace(raw) in numbers)
            return [(key, entry_key(raw)) for key, raw in found]

    def _of_prefix(self, tier: SlottedTier, match: Match) -> list[Victim]:
        """A tier's blocks of a prefix; a head goes only if no tier has another child of it."""
        victims: list[Victim] = []
        for part in match.pieces:
            doomed, heads = self._tree(match, part)
            with tier.index.read() as txn:
                for index_key in [*heads, *doomed]:
                    raw = txn.get(Database.BLOCKS, index_key)
                    if raw is not None:
                        victims.append((index_key, Entry.unpack(raw).key))
        return victims

    def _tree(self, match: Match, part: Part) -> tuple[list[bytes], list[bytes]]:
        """Index keys of the blocks that continue a prefix, and of the heads that only these use."""
        pieces = match.pieces[part]
        if not pieces:
            return [], []
        chain, last = match.chain, len(pieces) - 1
        wanted = chain.tokens[last * chain.block_tokens : match.tokens].astype(">u4").tobytes()
        doomed: list[bytes] = []
        for index_key, entry in self._children(chain.ancestor(last), last, chain.parent(last), part):
            if key_tokens(index_key, entry).startswith(wanted):
                doomed.append(index_key)
                doomed += self._below(chain.ancestor(last), last, entry.key, part)
        gone = set(doomed)
        heads: list[bytes] = []
        for index in range(last - 1, -1, -1):
            parent = chain.keys[index]
            below = self._children(chain.ancestor(index + 1), index + 1, parent, part)
            if any(index_key not in gone for index_key, _ in below):
                break
            heads.append(pieces[index].name.index_key)
            gone.add(pieces[index].name.index_key)
        return doomed, heads

    def _below(self, ancestor: bytes, depth: int, key: bytes, part: Part) -> list[bytes]:
        """Index keys of everything under a block."""
        found: list[bytes] = []
        waiting = [(ancestor, depth, key)]
        while waiting:
            ancestor, depth, key = waiting.pop()
            below = depth + 1
            shared = key if below % ANCESTOR_BLOCKS == 0 else ancestor
            for index_key, entry in self._children(shared, below, key, part):
                found.append(index_key)
                waiting.append((shared, key_depth(index_key), entry.key))
        return found

    def _children(self, ancestor: bytes, depth: int, parent: bytes, part: Part) -> list[tuple[bytes, Entry]]:
        """Blocks that follow a block, in any tier."""
        family = family_key(ancestor, depth, parent, part)
        found: dict[bytes, Entry] = {}
        for tier in self._tiers:
            with tier.index.read() as txn:
                found.update((key, Entry.unpack(raw)) for key, raw in txn.scan(Database.BLOCKS, family))
        return list(found.items())


def behind(tier: SlottedTier, log: PurgeLog) -> int | None:
    """The newest tombstone up to which all were applied to a tier; None when it has nothing to catch up with."""
    newest, done = log.epoch(), applied(tier)
    if done == newest:
        return None
    return done if done < newest else 0  # a log that was lost began anew


def applied(tier: SlottedTier) -> int:
    """The newest tombstone up to which all were applied to a tier."""
    with tier.index.read() as txn:
        return get_number(txn, APPLIED)


def catch_up(tier: SlottedTier, log: PurgeLog) -> int:
    """Remove what tombstones name and the tier still has; returns how many blocks.

    Blocks that were written since their tombstone stay.
    """
    since = behind(tier, log)
    if since is None:
        return 0
    newest = log.epoch()
    named = _Named(log.newer(since))
    victims: dict[bytes, bytes] = {}
    with tier.index.read() as txn:
        spaces = dict(namespaces.listing(txn))
        waiting: list[tuple[bytes, bytes, int]] = []
        for index_key, raw in txn.scan(Database.BLOCKS):
            entry = Entry.unpack(raw)
            buried = named(spaces.get(entry.namespace), index_key, entry)
            if entry.epoch < buried:
                waiting.append((index_key, entry.key, buried))
        while waiting:
            index_key, key, buried = waiting.pop()
            if index_key not in victims:
                victims[index_key] = key
                below = txn.scan(Database.BLOCKS, _family(index_key, key))
                found = ((child, Entry.unpack(raw)) for child, raw in below)
                waiting += [(child, entry.key, buried) for child, entry in found if entry.epoch < buried]
    gone = tier.remove(list(victims.items()), EvictReason.EVICT, doom=True)
    tier.index.write(lambda txn: put_number(txn, APPLIED, newest))
    return gone


class _Named:
    """By which of some tombstones a block is named, 0 for none, without a walk over the tombstones for each."""

    def __init__(self, stones: Sequence[Tombstone]) -> None:
        self._everything = 0
        self._by_name: dict[bytes, int] = {}
        self._by_salt: dict[bytes, int] = {}
        self._by_parent: dict[bytes, list[Tombstone]] = {}
        for stone in stones:  # the newest last
            if stone.everything:
                self._everything = stone.epoch
            if stone.salt is not None:
                self._by_salt[stone.salt] = stone.epoch
            if stone.parent:
                self._by_parent.setdefault(stone.parent[:_SHORT], []).append(stone)
            self._by_name.update(dict.fromkeys((stone.root, *stone.keys) if stone.root else stone.keys, stone.epoch))

    def __call__(self, space: NamespaceRecord | None, index_key: bytes, entry: Entry) -> int:
        buried = max(self._everything, self._by_name.get(entry.key, 0))
        if space is not None:
            buried = max(buried, self._by_name.get(space.root, 0), self._by_salt.get(space.salt, 0))
        for stone in self._by_parent.get(index_key[_PARENT], ()):
            if key_tokens(index_key, entry).startswith(stone.tokens):
                buried = max(buried, stone.epoch)
        return buried


def _family(index_key: bytes, key: bytes) -> bytes:
    """What the index keys of a block's children, of its own part, begin with."""
    below = key_depth(index_key) + 1
    return family_key(key if below % ANCESTOR_BLOCKS == 0 else index_key, below, key, key_part(index_key))


def _keys(victims: Mapping[str, Sequence[Victim]]) -> set[bytes]:
    return {key for found in victims.values() for _, key in found}


def _mark(tier: SlottedTier, buried: Sequence[range]) -> None:
    """Note that tombstones were applied, unless an earlier one was not yet: then `catch_up` does them all."""

    def work(txn: Transaction) -> None:
        applied = get_number(txn, APPLIED)
        for epochs in buried:
            if applied >= epochs.start - 1:
                applied = max(applied, epochs.stop - 1)
        put_number(txn, APPLIED, applied)

    tier.index.write(work)


def _spaces(tier: SlottedTier) -> Iterator[tuple[int, NamespaceRecord]]:
    with tier.index.read() as txn:
        yield from namespaces.listing(txn)


def _larger(tiers: Sequence[SlottedTier], limit: int) -> frozenset[bytes]:
    """Keys of the blocks that only sequences of more than ``limit`` bytes use, without pinned ones.

    Sequences are those of `listing.prefixes`: READY blocks of the first part that no other one continues, in any tier.
    """
    parents: dict[bytes, bytes] = {}
    keys: dict[bytes, bytes] = {}
    sizes: dict[bytes, int] = {}
    for tier in tiers:
        with tier.index.read() as txn:
            layouts = {number: Layout.from_json(record.layout) for number, record in namespaces.listing(txn)}
            for index_key, raw in txn.scan(Database.BLOCKS):
                entry = Entry.unpack(raw)
                layout = layouts.get(entry.namespace)
                if layout is None or entry.state is not State.READY or key_part(index_key) != FIRST_PART:
                    continue
                short = entry.key[:_SHORT]
                parents[short], keys[short] = index_key[_PARENT], entry.key
                sizes[short] = layout.sequence_bytes(key_depth(index_key) * layout.block_tokens + entry.tokens)
    kept: set[bytes] = set()
    for leaf in sizes.keys() - set(parents.values()):
        short = leaf
        while sizes[leaf] <= limit and short in parents and short not in kept:
            kept.add(short)
            short = parents[short]
    pinned = frozenset[bytes]().union(*(tier.pins() for tier in tiers))
    return frozenset(key for short, key in keys.items() if short not in kept) - pinned


def _unused(tier: SlottedTier, txn: Transaction, seconds: float) -> list[Victim]:
    oldest = tier.oldest_stamp(seconds)
    victims: list[Victim] = []
    for segment in tier.cut_segments():
        stamps = tier.arrays.stamps(segment)
        for slot in np.flatnonzero((stamps > 0) & (stamps < oldest)).tolist():
            index_key = txn.get(Database.SLOTS, slot_key(SlotRef(segment.number, slot)))
            raw = txn.get(Database.BLOCKS, index_key) if index_key is not None else None
            if index_key is not None and raw is not None:
                victims.append((index_key, Entry.unpack(raw).key))
    return victims
