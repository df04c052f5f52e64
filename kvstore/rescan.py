"""Blocks that `ram` has and `nvme` has not: found again, so that they are written before they are evicted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.header import slot_bytes
from kvstore.host import boottime_ns
from kvstore.layout import Layout
from kvstore.mover import Move
from kvstore.policy import CLEAN, REFUSED
from kvstore.records import BlockName, Entry, NamespaceRecord, key_part, slot_key
from kvstore.slots import SlotRef
from kvstore.states import State
from kvstore.tiers import namespaces
from kvstore.tiers.ram import RamTier
from kvstore.transaction import Database


def dirty_moves(ram: RamTier, most: int) -> list[Move]:
    """Moves for up to ``most`` of the coldest READY blocks that are not in `nvme` yet."""
    refs = _dirty(ram, most)
    if not refs:
        return []
    moves: list[Move] = []
    with ram.index.read() as txn:
        records = dict(namespaces.listing(txn))
        for ref in refs:
            index_key = txn.get(Database.SLOTS, slot_key(ref))
            raw = txn.get(Database.BLOCKS, index_key) if index_key is not None else None
            if index_key is None or raw is None:
                continue
            entry = Entry.unpack(raw)
            record = records.get(entry.namespace)
            if entry.state is State.READY and entry.ref == ref and record is not None:
                moves.append(_move(index_key, entry, record))
    return moves


def unwritten(ram: RamTier) -> int:
    """How many blocks are to be written to `nvme`, whichever process saved them; a hint, like the stamps."""
    return sum(int(np.count_nonzero(dirty)) for _, _, dirty in _slots(ram))


def _dirty(ram: RamTier, most: int) -> list[SlotRef]:
    found: list[tuple[int, SlotRef]] = []
    for number, stamps, dirty in _slots(ram):
        for slot in np.flatnonzero(dirty).tolist():
            found.append((int(stamps[slot]), SlotRef(number, slot)))
    return [ref for _, ref in sorted(found)[:most]]


def _slots(ram: RamTier) -> Iterator[tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.bool_]]]:
    """Segments with the stamps of their slots, and which of them `nvme` has not and did not refuse."""
    for segment in ram.segment_list():
        if not segment.slots:
            continue  # not cut yet: its files may still be in the making
        stamps = ram.arrays.stamps(segment)
        flags = ram.arrays.of(segment.number).flags[: segment.slots]
        yield segment.number, stamps, (stamps > 0) & ((flags & (CLEAN | REFUSED)) == 0)


def _move(index_key: bytes, entry: Entry, record: NamespaceRecord) -> Move:
    part = key_part(index_key)
    layout = Layout.from_json(record.layout)
    name = BlockName(index_key, entry.rest, entry.key, entry.tokens, part)
    size = slot_bytes(layout.payload_bytes(part.group))
    return Move(name, entry, record, size, layout.payload_bytes(part.group, entry.tokens), boottime_ns())
