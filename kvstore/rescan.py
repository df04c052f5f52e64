"""Blocks that `ram` has and `nvme` has not: found again, so that they are written before they are evicted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.header import slot_bytes
from kvstore.layout import Layout
from kvstore.mover import Move
from kvstore.policy import CLEAN, REFUSED
from kvstore.records import BlockName, Entry, NamespaceRecord, key_depth, key_part, slot_key
from kvstore.slots import FreeMap, SlotRef
from kvstore.states import State
from kvstore.tiers import namespaces
from kvstore.tiers.ram import RamTier
from kvstore.transaction import Database


def dirty_moves(ram: RamTier, most: int) -> list[Move]:
    """Moves for up to ``most`` of the coldest READY blocks that are not in `nvme` yet.

    A slot whose block is not READY is passed over, and the next one looked at: it must not keep others from their turn.
    """
    dirty = sorted(_slots(ram, 0))
    if not dirty:
        return []
    moves: list[Move] = []
    with ram.index.read() as txn:
        records = dict(namespaces.listing(txn))
        for stamp, ref in dirty:
            if len(moves) == most:
                break
            index_key = txn.get(Database.SLOTS, slot_key(ref))
            raw = txn.get(Database.BLOCKS, index_key) if index_key is not None else None
            if index_key is None or raw is None:
                continue
            entry = Entry.unpack(raw)
            record = records.get(entry.namespace)
            if entry.state is State.READY and entry.ref == ref and record is not None:
                used = stamp - ram.stamp_base + key_depth(index_key)
                moves.append(_move(index_key, entry, record, max(0, used)))
    return moves


def unwritten(ram: RamTier) -> int:
    """How many blocks are to be written to `nvme`, whichever process saved them; a hint, like the stamps."""
    return sum(int(np.count_nonzero(stamps)) for _, stamps in _stamps(ram, 0))


def offer_again(ram: RamTier, most: int | None = None) -> None:
    """Have blocks that `nvme` had no room for moved after all, or refused again; most: so many of the hottest."""
    refused = sorted(_slots(ram, REFUSED), reverse=True)[:most]
    ram.flag([ref for _, ref in refused], 0)


def _slots(ram: RamTier, flags: int) -> list[tuple[int, SlotRef]]:
    """Slots in use with these flags, and their stamps."""
    return [
        (int(stamps[slot]), SlotRef(number, slot))
        for number, stamps in _stamps(ram, flags)
        for slot in np.flatnonzero(stamps).tolist()
    ]


def _stamps(ram: RamTier, flags: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Segments with the stamps of their slots in use, 0 for those with other flags.

    A free slot may have a stamp: who died while publishing, or gave up, had set it before.
    """
    for segment in ram.cut_segments():
        stamps = ram.arrays.stamps(segment)
        stamps[np.frombuffer(FreeMap.unpack(segment.bitmap, segment.slots).bits, np.uint8) == ord("1")] = 0
        stamps[(ram.arrays.of(segment.number).flags[: segment.slots] & (CLEAN | REFUSED)) != flags] = 0
        yield segment.number, stamps


def _move(index_key: bytes, entry: Entry, record: NamespaceRecord, now: int) -> Move:
    part = key_part(index_key)
    layout = Layout.from_json(record.layout)
    name = BlockName(index_key, entry.rest, entry.key, entry.tokens, part)
    size = slot_bytes(layout.payload_bytes(part.group))
    return Move(name, entry, record, size, layout.payload_bytes(part.group, entry.tokens), now)
