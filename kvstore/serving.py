"""Serve one load: from a match to KV in the engine's buffers, and what is told of it; and whether a layout can be.

Holds what is loaded, stops at the first block that cannot be had, and counts: hits by tier and misses by cause add up
to the tokens asked for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.core import Core
from kvstore.errors import (
    CONTAINED,
    BudgetError,
    ClosedError,
    KVStoreError,
    LayoutError,
    SettingsError,
)
from kvstore.events import Cause, Fault, Hit, Miss
from kvstore.header import slot_bytes
from kvstore.host import boottime_ns
from kvstore.kv import KVBuffer
from kvstore.layout import Layout, Part
from kvstore.match import Match
from kvstore.sizes import MIB, format_size

Buffers = KVBuffer | Mapping[Part, KVBuffer]

LEASE_MAX_S = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did. tokens: verified tokens now in the buffer, from its start on, those that were not asked for
    since they were there already included. bytes, by_tier: what was copied. seconds: of the whole call."""

    tokens: int
    by_tier: Mapping[str, int]
    bytes: int
    seconds: float
    stop: Cause


class Lease:
    """Blocks of a match that no process evicts from `ram` until `release`, or until it runs out.

    tokens: how many of the match's, from its start on, are held. None is made longer: who needs more time takes another
    of the same match before this one runs out, and then releases this one.
    """

    def __init__(self, core: Core, keys: Sequence[bytes], tokens: int) -> None:
        self._core, self._keys = core, list(keys)
        self.tokens = tokens

    def release(self) -> None:
        """Let the blocks go; safe to call twice."""
        keys, self._keys = self._keys, []
        try:
            self._core.ram.release(keys)
        except ClosedError:
            return  # what an index still held at its end, the next process takes back

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def parts_of(layout: Layout, buffers: Buffers) -> dict[Part, KVBuffer]:
    """The buffer of each part. Raises LayoutError for parts that the layout has not, or has not been given."""
    wanted = list(layout.parts())
    if not isinstance(buffers, Mapping):
        if len(wanted) > 1:
            raise LayoutError(f"one buffer for {len(wanted)} parts", "pass a mapping of parts to buffers")
        buffers = {wanted[0]: buffers}
    elif not buffers or not set(buffers) <= set(wanted):
        raise LayoutError(f"buffers for {sorted(buffers)}, the layout has {wanted}", "pass one buffer a part")
    for part, buffer in buffers.items():
        if not buffer.fits(layout, part.group):
            raise LayoutError(
                f"the buffer of {part} has other layers, heads, dims or bytes an element than the namespace's layout",
                "make the buffer with the layout that the namespace was made with",
            )
    return {part: buffers[part] for part in wanted if part in buffers}


def require_room(core: Core, parts: Mapping[Part, KVBuffer], tokens: int, purpose: str, remedy: str) -> None:
    """Raises LayoutError for a buffer without room for ``tokens``, UnsupportedError for one that is out of reach."""
    for part, buffer in parts.items():
        core.require_reach(buffer)
        if buffer.capacity < tokens:
            raise LayoutError(f"the buffer of {part} has room for {buffer.capacity} tokens, {tokens} {purpose}", remedy)


def refuse_large_blocks(core: Core, layout: Layout) -> None:
    """Raises BudgetError when `ram` has no room for two of a layout's blocks: it could serve nothing."""
    size = max(slot_bytes(layout.payload_bytes(group)) for group in range(len(layout.groups)))
    whole, segment = core.ram.budget(), core.settings.ram_segment_bytes
    block = f"a block of this layout ({layout.block_tokens} tokens) takes {format_size(size)}"
    if 2 * size > segment:
        problem = f"{block}: two do not fit a segment of {format_size(segment)}"
        raise BudgetError(problem, f"set ram_segment_bytes to {_enough(2 * size)} or more")
    if 2 * size > whole - core.ram.index.size:
        asked = core.settings.ram
        capped = f", all that this host can give of {format_size(asked)}" if whole < asked else ""
        problem = f"{block}: two do not fit beside the index in a ram budget of {format_size(whole)}{capped}"
        enough = _enough(2 * size + core.ram.index.size)
        raise BudgetError(problem, f"set ram to {enough} or more, as KVSTORE_RAM or where you open it")


def _enough(size: int) -> str:
    """A size and what goes with it (superblock, arrays), in whole MiB."""
    return format_size(-(-(size + size // 64 + MIB) // MIB) * MIB)


def lease(core: Core, match: Match, seconds: float | None = None, *, scattered: bool = False) -> Lease:
    """Keep the leading `ram` blocks of a match from eviction. Raises BusyError, SettingsError for no time to do so.

    scattered: those behind others, too.
    """
    if seconds is not None and not 0 < seconds <= LEASE_MAX_S:
        raise SettingsError(
            f"a lease of {seconds!r} seconds", "give more than 0 and at most a year; lease again before it ends"
        )
    held = match.tokens
    keys: list[bytes] = []
    try:
        for pieces in match.pieces.values():
            if scattered:
                mine = [piece for piece in pieces if piece.tier == core.ram.name]
            else:
                mine = list(itertools.takewhile(lambda piece: piece.tier == core.ram.name, pieces))
            blocks = [(piece.name, piece.entry) for piece in mine]
            key, count = core.ram.lease(blocks, seconds or core.settings.lease_s, core.settings.lock_timeout_s)
            keys.append(key)
            held = min(held, sum(piece.take for piece in mine[:count]))
    except BaseException:
        Lease(core, keys, 0).release()  # of earlier parts: nobody else could let them go
        raise
    return Lease(core, keys, held)


def serve(core: Core, match: Match, parts: Mapping[Part, KVBuffer], first: int = 0, *, counted: bool = True) -> Loaded:
    """Load a match into the buffers of its parts, from the block with token ``first`` on. counted: as a request.

    Raises only what a buffer raises.
    """
    began = time.perf_counter()
    seconds: dict[str, float] = {}
    wanted = {part: tuple(piece for piece in match.pieces[part] if piece.start + piece.take > first) for part in parts}
    match = replace(match, pieces=wanted)
    loaded, stop, tiers = _load(core, match, parts, seconds)
    by_tier = _served(match, tiers, loaded, first)
    if counted:
        _count(core, match, by_tier, loaded, stop, seconds, first)
    size = sum(match.space.layout.payload_bytes(part.group, max(0, loaded - first)) for part in parts)
    return Loaded(loaded, by_tier, size, time.perf_counter() - began, stop)


def _load(
    core: Core, match: Match, parts: Mapping[Part, KVBuffer], seconds: dict[str, float]
) -> tuple[int, Cause, list[str]]:
    """Tokens loaded in all parts, why they end there, and the tier of each piece; adds up seconds by tier."""
    loaded, stop = match.tokens, match.stop
    tiers: list[str] = []
    if not loaded:
        return 0, stop, tiers
    if core.purged(match):
        return 0, Cause.PURGED, tiers
    device = any(buffer.device is not None for buffer in parts.values())
    scattered = len(match.by_tier) > 1 or (
        len(parts) > 1 and len({piece.tier for part in parts for piece in match.pieces[part]}) > 1
    )
    held = _try_lease(core, match) if device or scattered else None
    now = boottime_ns()
    try:
        for part, buffer in parts.items():
            try:
                outcome = core.loader_for(buffer).load(match, part, buffer, now)
            except CONTAINED as error:
                core.events.emit(Fault("store", "load", error.problem))
                return 0, Cause.IO, tiers
            tiers = tiers or outcome.tiers
            for piece, cause in zip(match.pieces[part], outcome.causes, strict=True):
                if cause is not None and piece.start < loaded:
                    loaded, stop = piece.start, cause
            for tier, spent in outcome.seconds.items():
                seconds[tier] = seconds.get(tier, 0.0) + spent
    finally:
        if held is not None:
            held.release()
    return loaded, stop, tiers


def _try_lease(core: Core, match: Match) -> Lease | None:
    """Hold the `ram` blocks while others are read from a disk, or a device copies; else the load is over too soon."""
    try:
        return lease(core, match, scattered=True)
    except KVStoreError as error:
        core.events.emit(Fault(core.ram.name, "lease", error.problem))
        return None


def _count(
    core: Core,
    match: Match,
    by_tier: Mapping[str, int],
    loaded: int,
    stop: Cause,
    seconds: Mapping[str, float],
    first: int,
) -> None:
    root = match.space.root
    for tier, tokens in by_tier.items():
        size = sum(match.space.layout.payload_bytes(part.group, tokens) for part in match.pieces)
        core.events.emit(Hit(tier, tokens, size, seconds.get(tier, 0.0), root))
    served = min(match.limit, match.asked)
    loaded = max(loaded, first)
    if loaded < served:
        core.events.emit(Miss(stop if stop is not Cause.LIMIT else Cause.ABSENT, served - loaded, root))
    if served < match.asked:
        core.events.emit(Miss(Cause.LIMIT, match.asked - served, root))


def _served(match: Match, tiers: Sequence[str], loaded: int, first: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece, tier in zip(next(iter(match.pieces.values()), ()), tiers, strict=False):
        take = min(piece.start + piece.take, loaded) - max(piece.start, first)
        if take > 0:
            found[tier] = found.get(tier, 0) + take
    return found
