"""All stored sequences of a store, for whoever pages through them: the biggest, the hottest, the coldest, or by search.

Listing reads the whole index, so a listing is kept for a time that grows with what it cost, and may be that old. Works
on arrays: a million blocks take a second or two, and twenty megabytes until the next listing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import SettingsError
from kvstore.listing import NamespaceUse
from kvstore.records import OUTLINE, outline
from kvstore.store import Store
from kvstore.tiers import namespaces
from kvstore.tiers.slotted import SlottedTier
from kvstore.tools.standins import Spell, whole
from kvstore.transaction import Database

Sort: TypeAlias = Literal["biggest", "hottest", "coldest"]
AGE_S = 2.0
COST_SHARE = 50
"""Listing may take one part in this many of the time."""
DEEPEST = 1 << 16
FIRST = 8
_HEX = frozenset("0123456789abcdef")
_Array: TypeAlias = npt.NDArray[Any]
_Names: TypeAlias = Mapping[int, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which sequences are wanted: those that everything given holds of.

    search: a part of a label or of a name, or the beginning of a key. namespace, salt: a root, and the digest of a salt
    ("" for none), as they were told. tier: one that has a block of it. unused: seconds since its last block was used,
    or more. larger: bytes; its KV takes more.
    """

    search: str = ""
    namespace: str | None = None
    salt: str | None = None
    tier: str | None = None
    unused: float | None = None
    larger: int | None = None


@dataclass(frozen=True)
class Listing:
    """All sequences at a moment. Arrays of blocks, sorted by ``short``, and of leaves, which point into them.

    short, parent: beginnings of keys. tiers: a bit a tier. space: index into ``uses``.
    """

    uses: tuple[NamespaceUse, ...]
    names: tuple[str, ...]
    short: _Array
    parent: _Array
    tiers: _Array
    first: _Array
    leaf: _Array
    key: _Array
    space: _Array
    length: _Array
    idle: _Array
    at: float
    cost: float

    @cached_property
    def size(self) -> _Array:
        """Bytes of the KV of each, in all parts, wherever it is."""
        each = np.array([use.layout.sequence_bytes(1) for use in self.uses] or [0], np.int64)
        return self.length * each[self.space]

    @cached_property
    def touched(self) -> _Array:
        """Tiers that have a block of each."""
        bits = np.zeros(len(self.leaf), np.uint8)
        for going, here in _paths(self, np.arange(len(self.leaf))):
            bits[going] |= self.tiers[here]
        return bits


class Catalogue:
    """Listings of one store. Safe for any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._last: Listing | None = None
        self._stale = False

    def forget(self) -> None:
        """What is listed next is read anew: something was changed by hand."""
        self._stale = True

    def listing(self) -> Listing:
        """A listing that is not too old; where one is being made, the one before."""
        last = self._last
        if last is not None and not self._stale and time.monotonic() - last.at < max(AGE_S, COST_SHARE * last.cost):
            return last
        if not self._lock.acquire(blocking=last is None or self._stale):
            return last  # type: ignore[return-value]  # not blocking, so there is one
        try:
            if self._last is last or self._stale:
                self._stale = False
                self._last = _read(self._store)
            return self._last  # type: ignore[return-value]
        finally:
            self._lock.release()

    def page(
        self, chosen: Selection, *, sort: Sort, offset: int, limit: int | None, spell: Spell = whole
    ) -> dict[str, Any]:
        """Some of the chosen sequences. limit: None for all from ``offset`` on.

        spell: how digests are told, and asked for; unless they are told whole, no tokens are. Raises SettingsError for
        a tier that is not there.
        """
        found = self.listing()
        pinned = _names(self._store)
        fitting = np.flatnonzero(_fits(found, chosen, pinned, spell))
        order = {"biggest": -found.length, "hottest": found.idle, "coldest": -found.idle}[sort]
        fitting = fitting[np.argsort(order[fitting], kind="stable")]
        shown = fitting[offset:][:limit]
        named: dict[int, list[int]] = {}
        heads, blocks = _walked(found, shown, pinned, named)
        rows = []
        for row, leaf in enumerate(shown.tolist()):
            use, key = found.uses[int(found.space[leaf])], spell(found.key[leaf].tobytes())
            head = int(heads[row])
            count = min(int(found.length[leaf]), FIRST) if head >= 0 and spell is whole else 0
            rows.append(
                {
                    "key": key,
                    "namespace": spell(use.record.root),
                    "label": use.record.label,
                    "tokens": int(found.length[leaf]),
                    "bytes": int(found.size[leaf]),
                    "first_tokens": found.first[head][:count].tolist() if count else [],
                    "whole": head >= 0,
                    "idle_s": round(float(found.idle[leaf]), 3),
                    "blocks": dict(zip(found.names, blocks[row].tolist(), strict=True)),
                    "names": [one for short in named.get(row, ()) for one in pinned[short]],
                }
            )
        return {"age_s": round(time.monotonic() - found.at, 3), "total": len(fitting), "prefixes": rows}


def _read(store: Store) -> Listing:
    began = time.monotonic()
    uses = tuple(store.namespaces())
    place = {use.record.root: at for at, use in enumerate(uses)}
    tiers = store._core.tiers
    tables = [_blocks(tier, place) for tier in tiers]
    short = np.concatenate([_short(table) for table, _, _ in tables])
    bits = np.concatenate([np.full(len(table), 1 << at, np.uint8) for at, (table, _, _) in enumerate(tables)])
    merged = np.concatenate([table for table, _, _ in tables])
    idle = np.concatenate([idle for _, idle, _ in tables])
    space = np.concatenate([space for _, _, space in tables])
    short, index, inverse = np.unique(short, return_index=True, return_inverse=True)
    in_tiers, last_used = np.zeros(len(short), np.uint8), np.full(len(short), np.inf)
    np.bitwise_or.at(in_tiers, inverse, bits)
    np.minimum.at(last_used, inverse, idle)
    merged, space = merged[index], space[index]
    parent = merged["parent"].astype(np.uint64)
    leaf = np.flatnonzero(~np.isin(short, parent))
    block_tokens = np.array([use.layout.block_tokens for use in uses] or [1])
    depth, tokens = merged["depth"][leaf].astype(np.int64), merged["tokens"][leaf].astype(np.int64)
    heads = merged["depth"] == 0
    first = np.zeros((len(short), FIRST), np.uint32)
    first[heads] = merged["first"][heads]
    return Listing(
        uses=uses,
        names=tuple(tier.name for tier in tiers),
        short=short,
        parent=parent,
        tiers=in_tiers,
        first=first,
        leaf=leaf,
        key=np.ascontiguousarray(merged["key"][leaf]),
        space=space[leaf],
        length=depth * block_tokens[space[leaf]] + tokens,
        idle=last_used[leaf],
        at=time.monotonic(),
        cost=time.monotonic() - began,
    )


def _blocks(tier: SlottedTier, place: Mapping[bytes, int]) -> tuple[_Array, _Array, _Array]:
    """READY blocks of the first part: their outlines, seconds since each was used, and the place of its namespace."""
    with tier.index.read() as txn:
        number_place = {number: place.get(record.root, -1) for number, record in namespaces.listing(txn)}
        raw = b"".join(one for key, value in txn.scan(Database.BLOCKS) if (one := outline(key, value)) is not None)
    table = np.frombuffer(raw, np.dtype(list(OUTLINE)))
    numbers, inverse = np.unique(table["namespace"], return_inverse=True)
    places = np.array([number_place.get(int(number), -1) for number in numbers], np.int64)
    space = places[inverse] if len(numbers) else np.zeros(0, np.int64)
    known = space >= 0
    table, space = table[known], space[known]
    stamps = np.zeros(len(table), np.uint64)
    order = np.argsort(table["segment"], kind="stable")
    segments, starts = np.unique(table["segment"][order], return_index=True)
    for segment, rows in zip(segments.tolist(), np.split(order, starts[1:]), strict=False):
        stamps[rows] = tier.arrays.of(segment).stamps[table["slot"][rows]]
    now = tier.oldest_stamp(0)
    return table, np.maximum(now - stamps.astype(np.float64), 0) / 1e9, space


def _short(table: _Array) -> _Array:
    """The beginnings of keys, as numbers."""
    return np.ascontiguousarray(table["key"]).view(">u8").reshape(-1, 4)[:, 0].astype(np.uint64)


def _walked(found: Listing, shown: _Array, pinned: _Names, named: dict[int, list[int]]) -> tuple[_Array, _Array]:
    """For some leaves: the block each begins with (-1: that is gone), and its blocks by tier.

    named: gets, by row, which of the blocks along it a name ends in.
    """
    ends = np.array(sorted(pinned), np.uint64)
    heads = np.full(len(shown), -1, np.int64)
    blocks = np.zeros((len(shown), len(found.names)), np.int64)
    roots = np.array([int.from_bytes(use.record.root[:8], "big") for use in found.uses] or [0], np.uint64)
    wanted_root = roots[found.space[shown]]
    for going, here in _paths(found, shown):
        for bit in range(len(found.names)):
            blocks[going, bit] += (found.tiers[here] >> bit) & 1
        for row in np.flatnonzero(np.isin(found.short[here], ends)).tolist() if len(ends) else ():
            named.setdefault(int(going[row]), []).append(int(found.short[here[row]]))
        ended = found.parent[here] == wanted_root[going]
        heads[going[ended]] = here[ended]
    return heads, blocks


def _paths(found: Listing, leaves: _Array) -> Iterator[tuple[_Array, _Array]]:
    """From some leaves up, a block at a time: which of them go on, and the block that each is at."""
    going, here = np.arange(len(leaves)), found.leaf[leaves].astype(np.int64)
    for _ in range(DEEPEST):
        if not len(going):
            return
        yield going, here
        parent = found.parent[here]
        above = np.minimum(np.searchsorted(found.short, parent), len(found.short) - 1)
        there = found.short[above] == parent
        going, here = going[there], above[there]


def _fits(found: Listing, chosen: Selection, pinned: _Names, spell: Spell) -> _Array:
    fits = np.ones(len(found.leaf), np.bool_)
    if chosen.namespace is not None:
        fits &= np.isin(
            found.space, [at for at, use in enumerate(found.uses) if spell(use.record.root) == chosen.namespace]
        )
    if chosen.salt is not None:
        fits &= np.isin(found.space, [at for at, use in enumerate(found.uses) if spell(use.record.salt) == chosen.salt])
    if chosen.unused is not None:
        fits &= found.idle >= chosen.unused
    if chosen.larger is not None:
        fits &= found.size > chosen.larger
    if chosen.tier is not None:
        if chosen.tier not in found.names:
            raise SettingsError(f"there is no tier {chosen.tier!r}", f"choose one of {', '.join(found.names)}")
        fits &= (found.touched >> found.names.index(chosen.tier)) & 1 == 1
    if chosen.search:
        words = chosen.search.lower()
        labels = [at for at, use in enumerate(found.uses) if words in use.record.label.lower()]
        matching = np.isin(found.space, labels)
        short = found.short[found.leaf]
        for low, high in _ranges(words, pinned, spell is whole):
            matching |= (short >= np.uint64(low)) & (short <= np.uint64(high))
        fits &= matching
    return fits


def _ranges(words: str, pinned: _Names, by_key: bool) -> Iterator[tuple[int, int]]:
    """Ranges of keys' beginnings that a search may mean: a key's first digits, and keys of names."""
    if by_key and set(words) <= _HEX:
        digits = words[:16]
        yield int(digits.ljust(16, "0"), 16), int(digits.ljust(16, "f"), 16)
    for key, names in pinned.items():
        if any(words in one["name"].lower() for one in names):
            yield key, key


def _names(store: Store) -> _Names:
    """Names by the beginning of the key of the block that they end in."""
    now = time.time()
    told: dict[int, list[dict[str, Any]]] = {}
    for name, record in sorted(store.names().items()):
        kept = record.pinned and (not record.expires or record.expires > now)
        one = {"name": name, "pinned": kept, "tokens": len(record.tokens) // 4, "expires": record.expires or None}
        for key in record.keys[-1:]:
            told.setdefault(int.from_bytes(key[:8], "big"), []).append(one)
    return told
