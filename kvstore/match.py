"""The longest stored prefix of a token sequence: a walk over whole blocks, then the best child for the rest.

Index only: nothing is copied, leased or promoted, so a match may be repeated or forgotten at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.events import Cause
from kvstore.identity import Chain
from kvstore.layout import Layout, Part
from kvstore.records import BlockName, Entry, NamespaceRecord, block_names
from kvstore.states import State
from kvstore.tiers.slotted import SlottedTier

STEP_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Namespace:
    """A layout under a salt: the root of chains, and the record that the tiers keep of it."""

    layout: Layout
    root: bytes
    record: NamespaceRecord

    @property
    def label(self) -> str:
        """What people call it."""
        return self.record.label


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a match: where it is, and how many of its tokens are used."""

    name: BlockName
    entry: Entry
    tier: str
    start: int
    take: int


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored of the tokens asked for.

    asked: tokens in the request. limit: how many of them may be served. tokens: how many are stored, in all parts,
    exact to the token. stop: why it ends there.
    """

    space: Namespace
    chain: Chain
    asked: int
    limit: int
    tokens: int
    pieces: Mapping[Part, tuple[Piece, ...]]
    epoch: int
    stop: Cause

    @property
    def by_tier(self) -> dict[str, int]:
        """Matched tokens by the tier that would serve them; of the first part."""
        found: dict[str, int] = {}
        for piece in next(iter(self.pieces.values()), ()):
            found[piece.tier] = found.get(piece.tier, 0) + piece.take
        return found


def match(tiers: Sequence[SlottedTier], space: Namespace, chain: Chain, limit: int, epoch: int) -> Match:
    """Match a chain against tiers, the fastest first. limit: tokens that may be served at most."""
    found: dict[Part, tuple[Piece, ...]] = {}
    tokens = limit
    stop = Cause.LIMIT
    for part in space.layout.parts():
        pieces, cause = _walk(tiers, chain, part, tokens)
        reached = sum(piece.take for piece in pieces)
        if reached < tokens:
            tokens, stop = reached, cause
        found[part] = pieces
    cut = {part: _cut(pieces, tokens) for part, pieces in found.items()}
    return Match(space, chain, len(chain.tokens), limit, tokens, cut, epoch, stop)


def _walk(tiers: Sequence[SlottedTier], chain: Chain, part: Part, limit: int) -> tuple[tuple[Piece, ...], Cause]:
    """The pieces of one part, and why they end."""
    pieces: list[Piece] = []
    blocks = -(-limit // chain.block_tokens)
    cause = Cause.ABSENT
    for first in range(0, blocks, STEP_BLOCKS):
        names = block_names(chain, part, first, min(first + STEP_BLOCKS, blocks))
        for index, piece in enumerate(_whole(tiers, names, chain.block_tokens, limit), first):
            if isinstance(piece, Cause):
                cause = piece
                best = _child(tiers, chain, part, index, min(chain.block_tokens, limit - index * chain.block_tokens))
                if best is not None:
                    pieces.append(best)
                return tuple(pieces), cause
            pieces.append(piece)
    return tuple(pieces), Cause.LIMIT


def _whole(
    tiers: Sequence[SlottedTier], names: Sequence[BlockName], block_tokens: int, limit: int
) -> list[Piece | Cause]:
    """For every block the piece that serves it, up to the first that is nowhere."""
    answer: list[Piece | Cause] = [Cause.ABSENT] * len(names)
    wanted = list(range(len(names)))
    for tier in tiers:
        missing: list[int] = []
        for at, entry in zip(wanted, tier.find([names[at] for at in wanted]), strict=True):
            if entry is not None and entry.state is State.READY:
                start = names[at].depth * block_tokens
                answer[at] = Piece(names[at], entry, tier.name, start, min(entry.tokens, limit - start))
                continue
            if entry is not None:
                answer[at] = Cause.WRITING
            missing.append(at)
        wanted = missing
        if not wanted:
            break
    return answer[: wanted[0] + 1] if wanted else answer


def _child(tiers: Sequence[SlottedTier], chain: Chain, part: Part, index: int, tokens: int) -> Piece | None:
    """The stored child that shares the longest run of the next tokens, of the fastest tier that has it."""
    best: Piece | None = None
    for tier in tiers:
        near = tier.nearest(chain, part, index, tokens)
        if near is not None and near.shared > (best.take if best else 0):
            best = Piece(near.name, near.entry, tier.name, index * chain.block_tokens, near.shared)
    return best


def _cut(pieces: tuple[Piece, ...], tokens: int) -> tuple[Piece, ...]:
    """Pieces up to a number of tokens."""
    kept: list[Piece] = []
    for piece in pieces:
        if piece.start >= tokens:
            break
        take = min(piece.take, tokens - piece.start)
        kept.append(piece if take == piece.take else Piece(piece.name, piece.entry, piece.tier, piece.start, take))
    return tuple(kept)
