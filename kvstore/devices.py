"""Loads and saves of tensors on a device: what `ram` holds goes through `hbm`, and stays there while it is hot.

`hbm` is inclusive: every block in it came through `ram`, and using one refreshes its copies below, so that a match is
always a walk over the indexes that all processes share. Must not know streams or tensors.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.events import Cause, Events, Fault, Skipped, SkipReason
from kvstore.header import inspect_slot, slot_bytes
from kvstore.kv import KVBuffer
from kvstore.layout import Part
from kvstore.loading import Loader, PartLoad
from kvstore.match import Match, Piece
from kvstore.purge import PurgeLog
from kvstore.records import Entry
from kvstore.states import State
from kvstore.tiers.device import DeviceItem, DeviceTier, Transfer
from kvstore.tiers.ledger import Placement
from kvstore.tiers.ram import RamTier
from kvstore.tiers.slotted import SlottedTier

NAME = "hbm"


@dataclass(slots=True)
class _Plan:
    """What a load on a device copies: items in order, and the `ram` entry behind each that does not come from `hbm`."""

    items: list[DeviceItem]
    entries: list[Entry | None]


class DeviceLoader:
    """Loads into a device's tensors. loader: brings up to `ram` what is only below it. lower: tiers below `hbm`."""

    def __init__(
        self,
        hbm: DeviceTier,
        ram: RamTier,
        lower: Sequence[SlottedTier],
        loader: Loader,
        purge: PurgeLog,
        events: Events,
        *,
        verify_share: int,
    ) -> None:
        self._hbm, self._ram, self._lower, self._loader = hbm, ram, tuple(lower), loader
        self._purge, self._events, self._verify_share = purge, events, verify_share
        self._epoch = purge.epoch()
        self._count = itertools.count()

    def forget_purged(self) -> None:
        """Drop from `hbm` what was explicitly evicted, in any process, since this was last asked."""
        for stone in self._purge.newer(self._epoch):
            self._hbm.drop(keys=stone.keys, root=stone.root or None, everything=stone.everything)
            self._epoch = max(self._epoch, stone.epoch)

    def load(self, match: Match, part: Part, buffer: KVBuffer, now: int) -> PartLoad:
        """Load one part's pieces; see `Loader.load`. The outcome says which tier served each."""
        self.forget_purged()
        pieces = match.pieces[part]
        outcome = PartLoad([Cause.BUSY] * len(pieces), tiers=[piece.tier for piece in pieces])
        began = time.perf_counter()
        with self._hbm.acquire([piece.name.key for piece in pieces]) as held:
            for at in (at for at, found in enumerate(held.found) if found):
                outcome.tiers[at] = NAME
            self._promote(match, part, pieces, outcome, now)
            plan = self._plan(match, part, pieces, outcome)
            if plan.items:
                self._copy(match, part, plan, buffer, outcome)
        self._refresh([pieces[at] for at, tier in enumerate(outcome.tiers) if tier == NAME], now)
        for tier in set(outcome.tiers):
            outcome.seconds[tier] = time.perf_counter() - began
        return outcome

    def _promote(self, match: Match, part: Part, pieces: Sequence[Piece], outcome: PartLoad, now: int) -> None:
        """Bring up to `ram` what is neither in it nor on the device."""
        wanted = [at for at, tier in enumerate(outcome.tiers) if tier not in (NAME, self._ram.name)]
        if wanted:
            below = replace(match, pieces={part: tuple(pieces[at] for at in wanted)})
            done = self._loader.load(below, part, None, now)
            outcome.promoted += done.promoted
            for at, cause in zip(wanted, done.causes, strict=True):
                outcome.causes[at] = cause

    def _plan(self, match: Match, part: Part, pieces: Sequence[Piece], outcome: PartLoad) -> _Plan:
        """Items up to the first block that cannot be had."""
        size = slot_bytes(match.space.layout.payload_bytes(part.group))
        found = self._ram.find([piece.name for piece in pieces])
        plan = _Plan([], [])
        for piece, tier, entry in zip(pieces, outcome.tiers, found, strict=True):
            host = None
            if tier == NAME:
                entry = None
            elif entry is None or entry.state is not State.READY:
                break
            else:
                host = self._ram.run(entry.ref, 1, size, entry.tokens)
            tokens = piece.entry.tokens
            plan.items.append(DeviceItem(piece.name.key, match.space.root, piece.start, tokens, piece.take, host))
            plan.entries.append(entry)
        return plan

    def _copy(self, match: Match, part: Part, plan: _Plan, buffer: KVBuffer, outcome: PartLoad) -> None:
        """Copy, wait, and only then believe what came from slots that did not change meanwhile."""
        load = self._hbm.load(buffer, plan.items)
        if not load.wait():
            outcome.causes[: len(plan.items)] = [Cause.IO] * len(plan.items)
            return
        trusted: list[bytes] = []
        for at, (item, entry, taken) in enumerate(zip(plan.items, plan.entries, load.taken, strict=True)):
            cause: Cause | None = None if taken else Cause.BUSY
            if taken and entry is not None:
                cause = self._check(match, part, item, entry)
                if cause is None:
                    trusted.append(item.key)
            outcome.causes[at] = cause
        load.keep(trusted)

    def _check(self, match: Match, part: Part, item: DeviceItem, entry: Entry) -> Cause | None:
        """Whether a `ram` slot held its block throughout; one in ``verify_share`` is compared with its checksum."""
        cause: Cause | None = None
        if next(self._count) % self._verify_share == 0:
            layout = match.space.layout
            image = self._ram.slot(entry.ref, slot_bytes(layout.payload_bytes(part.group)))
            size = layout.payload_bytes(part.group, entry.tokens)
            cause = inspect_slot(image, item.key, entry.tokens, size, entry.checksum)
        return cause if self._ram.unchanged([entry])[0] else Cause.CHANGED

    def _refresh(self, pieces: Sequence[Piece], now: int) -> None:
        """What was used on the device is used in the tiers below too."""
        names = [piece.name for piece in pieces]
        for tier in self._lower if names else ():
            found = [(name, entry) for name, entry in zip(names, tier.find(names), strict=True) if entry is not None]
            tier.touch([entry.ref for _, entry in found], [name.depth for name, _ in found], now)


class DeviceSaver:
    """Takes blocks out of a device's tensors, into `ram` slots that were reserved for them."""

    def __init__(self, hbm: DeviceTier, ram: RamTier, events: Events) -> None:
        self._hbm, self._ram, self._events = hbm, ram, events

    def begin(
        self, placed: Sequence[Placement], buffer: KVBuffer, block_tokens: int, size: int
    ) -> tuple[Transfer, list[Placement], list[Placement]]:
        """Queue the copies: (transfer, blocks under way, blocks that found no staging).

        The source is gathered in device memory before anything queued later may write it.
        """
        items = [
            DeviceItem(
                one.name.key,
                one.root,
                one.name.depth * block_tokens,
                one.name.tokens,
                one.name.tokens,
                self._ram.run(one.ref, 1, size, one.name.tokens),
            )
            for one in placed
        ]
        transfer = self._hbm.save(buffer, items)
        taken = [one for one, ok in zip(placed, transfer.taken, strict=True) if ok]
        left = [one for one, ok in zip(placed, transfer.taken, strict=True) if not ok]
        if left:
            self._events.emit(Skipped(NAME, SkipReason.STAGING, len(left)))
        return transfer, taken, left

    def forget(self, placed: Sequence[Placement]) -> None:
        """Blocks that `ram` did not publish, since they were purged meanwhile, do not stay on the device either."""
        self._hbm.discard([one.name.key for one in placed])

    def failed(self, placed: Sequence[Placement]) -> None:
        """The copies did not arrive: nothing of them may stay on the device either."""
        self.forget(placed)
        self._events.emit(Fault(NAME, "save", "the device failed while a save was copied"))
