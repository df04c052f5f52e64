"""Who sits in which slot of a device's arena: the books of the `hbm` tier, without the memory they describe.

Every slot is *free*, *resident* (its block can be found by key) or *staged* (a transfer uses it, and nobody can find
it: not yet published, dropped meanwhile, or only passing through). A slot is free again when nobody uses it and it is
not resident; that is the one rule that keeps memory from being overwritten under a copy. Pure and not thread-safe:
the tier calls it under its lock. Must not know torch, buffers or copies.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Ready(Protocol):
    """The moment from which a slot's bytes are those of its block (see `kvstore.tiers.lanes.Mark`)."""

    def done(self) -> bool:
        """Whether it has passed."""

    def wait(self) -> None:
        """Return when it has."""


@dataclass(slots=True, eq=False)
class Entry:
    """The occupant of a slot.

    uses: transfers and holders that count on the slot's bytes. doomed: dropped while staged, never to be published.
    offered: already told to the tier below as next in line for eviction.
    """

    slot: int
    key: bytes
    root: bytes
    tokens: int
    uses: int = 1
    resident: bool = False
    doomed: bool = False
    offered: bool = False
    ready: Ready | None = None


class Arena:
    """The books over ``slots`` slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))
        self._index: OrderedDict[bytes, Entry] = OrderedDict()  # oldest use first
        self._staged: dict[int, Entry] = {}

    @property
    def free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    @property
    def resident(self) -> int:
        """Blocks that can be found."""
        return len(self._index)

    @property
    def staged(self) -> int:
        """Slots in use by transfers alone."""
        return len(self._staged)

    @property
    def in_use(self) -> int:
        """Slots that must not be overwritten."""
        return len(self._staged) + sum(entry.uses > 0 for entry in self._index.values())

    @property
    def idle(self) -> bool:
        """Whether no slot is in use."""
        return not self._staged and not any(entry.uses for entry in self._index.values())

    def find(self, key: bytes) -> Entry | None:
        """The resident block of a key; no mark of use."""
        return self._index.get(key)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Mark as used just now; the first of them last, so that a prefix outlives its continuations."""
        for entry in reversed(entries):
            if entry.resident:
                entry.offered = False
                self._index.move_to_end(entry.key)

    def hold(self, entries: Iterable[Entry]) -> None:
        """One more use of each."""
        for entry in entries:
            entry.uses += 1

    def release(self, entries: Iterable[Entry]) -> None:
        """One use less of each; a slot that is neither used nor resident is free."""
        for entry in entries:
            entry.uses -= 1
            self._settle(entry)

    def stage(self, wanted: Sequence[tuple[bytes, bytes, int]]) -> tuple[list[Entry], list[bytes]]:
        """Slots for blocks (key, root, tokens), each with one use, in ascending order of slots.

        As many as can be had, from the front of ``wanted``; the coldest blocks that nobody uses make room. Returns the
        entries and the keys that were evicted.
        """
        evicted = self._evict(len(wanted) - len(self._free))
        count = min(len(wanted), len(self._free))
        slots = [heapq.heappop(self._free) for _ in range(count)]
        entries = [Entry(slot, key, root, tokens) for slot, (key, root, tokens) in zip(slots, wanted, strict=False)]
        self._staged.update((entry.slot, entry) for entry in entries)
        return entries, evicted

    def publish(self, entries: Sequence[Entry]) -> list[Entry]:
        """Make staged blocks resident, the first of them the most recently used. Returns those that became so.

        A block dropped while it was staged, or resident already under its key, stays staged.
        """
        published = []
        for entry in reversed(entries):
            if entry.doomed or entry.resident or entry.key in self._index:
                continue
            del self._staged[entry.slot]
            entry.resident = True
            self._index[entry.key] = entry
            published.append(entry)
        return published

    def drop(self, chosen: Callable[[Entry], bool]) -> int:
        """Forget every chosen block; slots in use become free when released. Returns how many were resident."""
        victims = [entry for entry in self._index.values() if chosen(entry)]
        self._forget(victims)
        for entry in self._staged.values():
            entry.doomed = entry.doomed or chosen(entry)
        return len(victims)

    def drop_keys(self, keys: Iterable[bytes]) -> int:
        """Forget the blocks of keys, as `drop` does, without looking at every resident block."""
        names = set(keys)
        victims = [entry for key in names if (entry := self._index.get(key)) is not None]
        self._forget(victims)
        for entry in self._staged.values():
            entry.doomed = entry.doomed or entry.key in names
        return len(victims)

    def coldest(self, share: int, limit: int) -> list[bytes]:
        """Keys of the ``1/share`` of slots next in line for eviction, up to ``limit``, each told once until it is used.

        None while at least as many slots are free.
        """
        count = min(limit, max(1, self.slots // share))
        if len(self._free) >= count:
            return []
        found = []
        for seen, entry in enumerate(self._index.values()):
            if seen == count:
                break
            if not entry.offered and not entry.uses:
                entry.offered = True
                found.append(entry.key)
        return found

    def problems(self) -> list[str]:
        """Contradictions in the books, in words."""
        found = []
        places = [*self._free, *self._staged, *(entry.slot for entry in self._index.values())]
        if sorted(places) != list(range(self.slots)):
            doubled = sorted({slot for slot in places if places.count(slot) > 1})
            lost = sorted(set(range(self.slots)) - set(places))
            found.append(f"slots counted twice: {doubled}, slots lost: {lost}, of {self.slots}")
        for key, entry in self._index.items():
            if entry.key != key or not entry.resident or entry.uses < 0:
                found.append(f"the index has {key.hex()[:16]} at slot {entry.slot}, which says {entry}")
        for slot, entry in self._staged.items():
            if entry.slot != slot or entry.resident or entry.uses < 1:
                found.append(f"slot {slot} is staged, but says {entry}")
        return found

    def _evict(self, count: int) -> list[bytes]:
        victims: list[Entry] = []
        for entry in self._index.values():
            if len(victims) >= count:
                break
            if not entry.uses:
                victims.append(entry)
        self._forget(victims)
        return [entry.key for entry in victims]

    def _forget(self, victims: Iterable[Entry]) -> None:
        for entry in victims:
            del self._index[entry.key]
            entry.resident = False
            entry.doomed = True
            self._staged[entry.slot] = entry
            self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        if not entry.uses and not entry.resident:
            del self._staged[entry.slot]
            heapq.heappush(self._free, entry.slot)
