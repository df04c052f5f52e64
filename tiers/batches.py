"""How blocks become few copies: which blocks move by one operation, and which payloads by one copy.

Two joins, of different reach. Blocks that follow each other in the engine's tensors form a *batch*, whatever slots
they lie in. Payloads of a batch that lie at equal distances in host memory and in the arena form one *span*. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.errors import LayoutError
from kvstore.identity import KEY_BYTES
from kvstore.kv import Bytes
from kvstore.tiers.arena import Entry
from kvstore.tiers.device import DeviceItem

BATCH_BYTES = 32 << 20
"""Payload of a batch at most: copies of one overlap the scatter of the one before."""


@dataclass(slots=True)
class Batch:
    """Blocks that are gathered or scattered by one operation a plane.

    indices: their places among the items of the call. incoming: whether their bytes come from the host.
    """

    indices: list[int]
    items: list[DeviceItem]
    entries: list[Entry]
    incoming: bool

    @property
    def slots(self) -> list[int]:
        """The slots, in the order of the items."""
        return [entry.slot for entry in self.entries]


@dataclass(slots=True)
class Span:
    """``length`` bytes at byte ``at`` of the arena and at byte ``offset`` of host memory."""

    at: int
    memory: Bytes
    offset: int
    length: int

    def host(self) -> Bytes:
        """The bytes in host memory."""
        return self.memory[self.offset : self.offset + self.length]


def batches(
    items: Sequence[DeviceItem], entries: Sequence[Entry | None], incoming: Sequence[bool], limit: int
) -> Iterable[Batch]:
    """Items with an entry, joined while they are alike and follow each other, up to ``limit`` blocks.

    A slot is in a batch at most once, since slots of passing blocks are used again within a call.
    """
    batch: Batch | None = None
    slots: set[int] = set()
    for index, (item, entry, arriving) in enumerate(zip(items, entries, incoming, strict=True)):
        if entry is None:
            continue
        if batch is not None and (
            len(batch.items) == limit
            or batch.incoming != arriving
            or entry.slot in slots
            or not _follows(batch.items[-1], item)
        ):
            yield batch
            batch = None
        if batch is None:
            batch, slots = Batch([], [], [], arriving), set()
        batch.indices.append(index)
        batch.items.append(item)
        batch.entries.append(entry)
        slots.add(entry.slot)
    if batch is not None:
        yield batch


def spans(batch: Batch, stride: int, token_bytes: int, *, over_gaps: bool) -> list[Span]:
    """The copies between a batch's slots and its host payloads; items without host memory are left out.

    over_gaps: also copy what lies between payloads. Allowed toward the arena, whose gaps mean nothing; toward the host
    it would overwrite headers.
    """
    found: list[Span] = []
    for item, entry in zip(batch.items, batch.entries, strict=True):
        if item.host is None:
            continue
        at, size = entry.slot * stride, item.tokens * token_bytes
        last = found[-1] if found else None
        if last is not None and last.memory is item.host.memory:
            step = at - last.at
            adjacent = last.length <= step <= last.length + (stride if over_gaps else 0)
            if adjacent and item.host.offset - last.offset == step:
                last.length = step + size
                continue
        found.append(Span(at, item.host.memory, item.host.offset, size))
    return found


def check_items(items: Sequence[DeviceItem], token_bytes: int, block_tokens: int, capacity: int | None = None) -> None:
    """Raises LayoutError for an item that is impossible, or does not fit a buffer of ``capacity`` tokens."""
    for item in items:
        problem = None
        if len(item.key) != KEY_BYTES:
            problem = f"a key of {len(item.key)} bytes"
        elif not 1 <= item.take <= item.tokens <= block_tokens:
            problem = f"{item.take} of {item.tokens} tokens in a block of {block_tokens}"
        elif capacity is not None and not 0 <= item.start <= capacity - item.take:
            problem = f"tokens {item.start}…{item.start + item.take} of a buffer for {capacity}"
        elif item.host is not None:
            run = item.host
            room = len(run.memory) - run.offset
            if run.count != 1 or run.tokens != item.tokens or run.offset < 0 or room < item.tokens * token_bytes:
                problem = f"a payload of {item.tokens} tokens in {run.count} × {run.tokens} tokens, {room} bytes"
        if problem is not None:
            raise LayoutError(f"an item has {problem}", "make items from the chain and the runs of one match")


def _follows(before: DeviceItem, after: DeviceItem) -> bool:
    """Whether one operation can move both: whole payloads of one size, next to each other in the buffer."""
    whole = before.take == before.tokens == after.tokens == after.take
    return whole and after.start == before.start + before.take
