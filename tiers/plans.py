"""Which block of a call uses which slot: decisions over the arena's books, before any copy.

Pure, apart from the books they change: the tier calls them under its lock, and the carrier makes the copies they ask
for. Must not know torch or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.header import slot_bytes
from kvstore.layout import Layout
from kvstore.tiers.arena import Arena, Entry
from kvstore.tiers.device import DeviceItem


@dataclass(frozen=True, slots=True)
class Cut:
    """How the arena is cut: for the payloads of one group of layers. stride: bytes from slot to slot.

    The stride is that of slots in host memory, header included: a run of consecutive host slots then comes over by one
    copy, whose headers fall into the gaps between payloads on the device.
    """

    stride: int
    group: int
    token_bytes: int
    block_tokens: int

    @classmethod
    def of(cls, layout: Layout, group: int) -> Cut:
        """The cut for a layout's group."""
        return cls(slot_bytes(layout.payload_bytes(group)), group, layout.token_bytes(group), layout.block_tokens)


@dataclass(slots=True)
class Plan:
    """What a call does with each of its items.

    entries: the slot it uses, if any. incoming: whether its bytes come from the host. taken: whether its copies were
    queued; set by the carrier. used: entries of which one use is the call's. promised: entries of which one more use
    is the handle's, which may make them resident. limit: blocks that one operation moves at most. passing: whether
    slots are used again within the call.
    """

    items: Sequence[DeviceItem]
    cut: Cut
    limit: int
    entries: list[Entry | None] = field(init=False)
    incoming: list[bool] = field(init=False)
    taken: list[bool] = field(init=False)
    used: list[Entry] = field(default_factory=list)
    promised: list[Entry] = field(default_factory=list)
    evicted: int = 0
    passing: bool = False

    def __post_init__(self) -> None:
        self.entries = [None] * len(self.items)
        self.incoming = [False] * len(self.items)
        self.taken = [False] * len(self.items)

    def went(self) -> list[Entry]:
        """The entries of items whose copies were queued."""
        return [entry for entry, taken in zip(self.entries, self.taken, strict=True) if entry is not None and taken]


def plan_load(arena: Arena | None, plan: Plan) -> int:
    """Resident blocks from their slots, others into new ones. Returns how many of these will not stay.

    arena: None when it is cut for another layout; then no item gets a slot.
    """
    wanted = []
    for at, item in enumerate(plan.items):
        entry = arena.find(item.key) if arena is not None else None
        if entry is not None and entry.tokens == item.tokens:
            plan.entries[at] = entry
            plan.used.append(entry)
        elif item.host is not None:
            plan.incoming[at] = True
            wanted.append(at)
    if arena is None:
        return len(wanted)
    arena.hold(plan.used)
    arena.touch(plan.used)
    staged = _stage(arena, plan, wanted)
    kept = len(staged)
    if kept < len(wanted):
        # what goes through the last slots does not stay: they are used over and over
        kept = max(0, kept - 2 * plan.limit)
        plan.passing = bool(staged)
        for entry in staged[kept:]:
            entry.key, entry.doomed = b"", True
    for place, at in enumerate(wanted if staged else ()):
        plan.entries[at] = staged[place if place < kept else kept + (place - kept) % (len(staged) - kept)]
    plan.promised = staged[:kept]
    arena.hold(plan.promised)
    return len(wanted) - kept


def plan_save(arena: Arena | None, plan: Plan) -> None:
    """New slots for as many items as there are slots for, from the front."""
    if arena is not None:
        staged = _stage(arena, plan, range(len(plan.items)))
        plan.entries[: len(staged)] = staged


def plan_copy_out(arena: Arena, plan: Plan) -> None:
    """The slots of those items that are resident and have a place to go to."""
    for at, item in enumerate(plan.items):
        entry = arena.find(item.key)
        if entry is not None and item.host is not None and entry.tokens == item.tokens:
            plan.entries[at] = entry
            plan.used.append(entry)
    arena.hold(plan.used)


def _stage(arena: Arena, plan: Plan, wanted: Sequence[int]) -> list[Entry]:
    items = [plan.items[at] for at in wanted]
    staged, evicted = arena.stage([(item.key, item.root, item.tokens) for item in items])
    plan.used += staged
    plan.evicted = len(evicted)
    return staged
