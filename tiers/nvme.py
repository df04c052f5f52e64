"""The `nvme` tier: slots in preallocated segment files, read and written whole, past the page cache.

A slot's image is the same as in `ram`, so what is read or written is the memory of `ram` slots itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.kv import Bytes
from kvstore.slots import SlotRef, join_runs
from kvstore.tiers.slotted import SlottedTier

IO_SLOTS = 64
"""Slots moved by one system call at most."""


class NvmeTier(SlottedTier):
    """A slotted tier whose medium is a disk."""

    def read(self, refs: Sequence[SlotRef], slot_bytes: int, into: Sequence[Bytes]) -> None:
        """Read slots into page-aligned buffers of ``slot_bytes`` or, where a slot is alone in its run, less.

        Consecutive slots are read by one call. Raises StorageError.
        """
        for begin, run in join_runs(refs, IO_SLOTS):
            self.medium.read(run.segment, run.first * slot_bytes, into[begin : begin + run.count])

    def write(self, refs: Sequence[SlotRef], slot_bytes: int, images: Sequence[Bytes]) -> None:
        """Write slots from page-aligned buffers of ``slot_bytes``. Raises StorageError or NoSpaceError."""
        for begin, run in join_runs(refs, IO_SLOTS):
            self.medium.write(run.segment, run.first * slot_bytes, images[begin : begin + run.count])

    def sync(self, refs: Sequence[SlotRef]) -> None:
        """Return when what was written to these slots is durable. Raises StorageError."""
        self.medium.sync({ref.segment for ref in refs})
