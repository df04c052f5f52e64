"""Why a prompt missed: what the store has of it, in which namespace, and what it says about the rest.

Asks a store and compares; must not know how a prompt was read or how an answer is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvstore.identity import Tokens as Ids
from kvstore.identity import as_tokens
from kvstore.listing import NamespaceUse
from kvstore.match import Match, Namespace
from kvstore.records import NameRecord, block_names
from kvstore.states import State
from kvstore.store import Store
from kvstore.tools.differ import Cause, Difference, Side, compare, shared_tokens
from kvstore.tools.prompts import Tokens
from kvstore.tools.stored import Sequence as Stored
from kvstore.tools.stored import layout_difference, sequences

CANDIDATES = 8
"""Stored sequences that are compared closely with the prompt."""
LATEST = 1024
"""Stored sequences that are looked at, the most recently used ones."""
CODES = {"weights": "revision", "config": "revision", "adapters": "adapter"}


@dataclass(frozen=True, slots=True)
class Nearest:
    """What the prompt was compared with. name, named: what it is called, and since when (wall clock)."""

    key: bytes
    tokens: int
    idle_s: float
    name: str | None
    named: int | None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What another namespace has of the prompt, and how it differs: each thing's name, its value here and there."""

    use: NamespaceUse
    matched: int
    differs: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer. asked, matched: tokens. causes: what the store itself knows, then what the texts show."""

    use: NamespaceUse
    asked: int
    matched: int
    by_tier: dict[str, int]
    causes: tuple[Cause, ...]
    difference: Difference | None
    nearest: Nearest | None
    elsewhere: tuple[Elsewhere, ...]

    @property
    def would_match(self) -> int:
        """Tokens that match once what was recognised is mended."""
        reached = [cause.at + cause.regained for cause in self.causes if cause.regained is not None]
        return max([self.matched, *reached])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        nearest = self.nearest
        return {
            "namespace": self.use.record.root.hex(),
            "label": self.use.record.label,
            "created": self.use.record.created,
            "asked": self.asked,
            "matched": self.matched,
            "by_tier": self.by_tier,
            "lost": self.asked - self.matched,
            "would_match": self.would_match,
            "causes": [asdict(cause) for cause in self.causes],
            "difference": None if self.difference is None else self.difference.to_dict(),
            "nearest": None
            if nearest is None
            else {
                "key": nearest.key.hex(),
                "tokens": nearest.tokens,
                "idle_s": nearest.idle_s,
                "name": nearest.name,
                "named": nearest.named,
            },
            "elsewhere": [
                {
                    "namespace": other.use.record.root.hex(),
                    "label": other.use.record.label,
                    "matched": other.matched,
                    "differs": [list(one) for one in other.differs],
                }
                for other in self.elsewhere
            ],
        }


def explain(
    store: Store,
    tokens: Sequence[int] | Ids,
    uses: Sequence[NamespaceUse],
    among: Sequence[NamespaceUse],
    tokenizer: Tokens | None = None,
    step: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Explain a prompt. uses: namespaces it may be meant for, at least one. among: all of the store's."""
    ids = as_tokens(tokens)
    matches = {use.record.root: store.match(_space(use), ids) for use in among}
    use = max(uses, key=lambda one: (matches[one.record.root].tokens, one.record.created))
    match = matches[use.record.root]
    others = [_elsewhere(use, one, matches[one.record.root]) for one in among if one.record.root != use.record.root]
    others.sort(key=lambda one: -one.matched)
    asked, matched = len(ids), match.tokens
    causes = [_other_namespace(others[0], asked, matched)] if others and others[0].matched > matched else []
    difference, nearest = None, None
    if matched < asked:
        gone = _gone(store, use, match)
        causes += [gone] if gone else []
        found = sequences(store, use.record.root, LATEST, step)
        best = _nearest(found, ids, tokenizer)
        if best is not None:
            stored, difference = best
            nearest = _with_name(store, use, stored)
            if gone is None:
                causes += difference.causes
        elif not causes:
            causes.append(_nothing(use, asked))
    tiers = dict(match.by_tier)
    return Explanation(use, asked, matched, tiers, tuple(causes), difference, nearest, tuple(others))


def _space(use: NamespaceUse) -> Namespace:
    return Namespace(use.layout, use.record.root, use.record)


def _elsewhere(use: NamespaceUse, other: NamespaceUse, match: Match) -> Elsewhere:
    differs = layout_difference(use.layout, other.layout)
    if use.record.salt != other.record.salt:
        differs.insert(0, ("salt", "salted" if use.record.salt else "none", "salted" if other.record.salt else "none"))
    return Elsewhere(other, match.tokens, tuple(differs))


def _other_namespace(other: Elsewhere, asked: int, matched: int) -> Cause:
    """It is stored, but under another salt, for other weights, with another adapter, or the like."""
    name, mine, theirs = other.differs[0] if other.differs else ("root", "", "")
    code = CODES.get(name, name)
    label = other.use.record.label or other.use.record.root.hex()[:12]
    says = {
        "salt": f"{other.matched} tokens are stored under another salt ({mine} here, {theirs} there), in {label}",
        "revision": f"{other.matched} tokens are stored for another revision of the model ({name} differs), in {label}",
        "adapter": f"{other.matched} tokens are stored with another adapter, in {label}",
    }.get(code, f"{other.matched} tokens are stored with another {name} ({mine} here, {theirs} there), in {label}")
    advice = {
        "salt": "ask with the salt it was stored under, if it is meant to be shared",
        "revision": "KV of other weights cannot be reused: warm the new revision, and evict the old one",
        "adapter": "KV of another adapter cannot be reused: warm the prompt with this one",
    }.get(code, f"open the model with the same {name}, or warm the prompt anew")
    return Cause(code, says, advice, matched, asked - matched, other.matched - matched)


def _gone(store: Store, use: NamespaceUse, match: Match) -> Cause | None:
    """The prompt was stored further than it is now: evicted by hand, pushed out, or expired."""
    chain, block, core = match.chain, use.layout.block_tokens, store._core
    first, lost = match.tokens // block, match.asked - match.tokens
    later = 0
    part = next(iter(use.layout.parts()))
    names = block_names(chain, part, first)
    for tier in core.tiers:
        found = tier.find(names)
        present = [at for at, entry in enumerate(found) if entry is not None and entry.state is State.READY]
        later = max([later, *(min((first + at + 1) * block, match.asked) for at in present if at > 0)])
    stones = core.purge.newer(0)
    named = any(stone.names(chain.root, key) and stone.keys for stone in stones for key in chain.keys[first:])
    if named:
        says = "blocks of exactly this prompt were evicted by hand"
        return Cause("evicted", says, "pin what must stay: kvstore pin", match.tokens, lost, None)
    for name, record in store.names().items():
        known = np.frombuffer(record.tokens, "<u4")
        shared = shared_tokens(known, chain.tokens) if record.root == chain.root else 0
        if shared > match.tokens:
            says = f"{shared} tokens of it were stored when it was named {name!r}, and are gone"
            advice = "warm it again; a pin that has not expired would have kept it"
            return Cause("evicted", says, advice, match.tokens, lost, shared - match.tokens)
    if later > match.tokens:
        says = f"blocks behind token {match.tokens} are still there, up to token {later}, but those before them went"
        return Cause(
            "evicted", says, "raise the budget, or pin the beginning", match.tokens, lost, later - match.tokens
        )
    if any(stone.everything or stone.root == chain.root for stone in stones) and not sum(
        usage.blocks for usage in use.by_tier.values()
    ):
        return Cause("evicted", "the namespace was evicted by hand", "warm it again", match.tokens, lost, None)
    return None


def _nothing(use: NamespaceUse, asked: int) -> Cause:
    """The namespace holds nothing that can be compared with the prompt."""
    if use.record.ttl:
        says = f"the namespace is empty, and what is not used for {use.record.ttl} s expires there"
        return Cause("expired", says, "use a longer ttl, or warm it in time", 0, asked, None)
    return Cause(
        "empty", "nothing is stored in this namespace", "warm it, or look at another one: kvstore ls", 0, asked, None
    )


def _nearest(found: list[Stored], ids: Ids, tokenizer: Tokens | None) -> tuple[Stored, Difference] | None:
    """The stored sequence that would serve most of the prompt without what was recognised, and the comparison."""
    if not found:
        return None
    wanted = np.unique(ids)

    def likeness(one: Stored) -> tuple[int, int]:
        return shared_tokens(one.tokens, ids), len(np.intersect1d(one.tokens[: 2 * len(ids)], wanted))

    likely = sorted(found, key=likeness, reverse=True)[:CANDIDATES]
    similar = sorted(found, key=lambda one: likeness(one)[1], reverse=True)[:CANDIDATES]
    prompt = _side(ids, tokenizer)
    encode = tokenizer.encode if tokenizer is not None else None
    compared = [
        (one, compare(prompt, _side(one.tokens, tokenizer), encode))
        for one in {id(s): s for s in (*likely, *similar)}.values()
    ]
    return max(compared, key=lambda pair: (pair[1].would_match, pair[1].shared))


def _side(tokens: Ids, tokenizer: Tokens | None) -> Side:
    listed = tokens.tolist()
    return Side(tuple(listed), None) if tokenizer is None else tokenizer.side(listed)


def _with_name(store: Store, use: NamespaceUse, stored: Stored) -> Nearest:
    """The sequence, with the name of a prefix of it."""
    names: dict[str, NameRecord] = store.names()
    for name, record in names.items():
        known = np.frombuffer(record.tokens, "<u4")
        if record.root == use.record.root and shared_tokens(known, stored.tokens) == len(known):
            return Nearest(stored.key, len(stored.tokens), stored.idle_s, name, record.created)
    return Nearest(stored.key, len(stored.tokens), stored.idle_s, None, None)


def ago(seconds: float) -> str:
    """A duration for people."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def moment(wall: int) -> str:
    """A moment of the wall clock for people."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall))
