"""The `ram` tier: slots in tmpfs segments that every process of the host maps, and the leases on them.

Blocks are read and written where they lie; `runs` gives consecutive ones to a KVBuffer as one piece.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from kvstore.errors import DamagedError
from kvstore.header import HEADER_BYTES
from kvstore.host import boottime_ns
from kvstore.kv import Bytes, Run
from kvstore.records import BlockName, Entry, pack_lease
from kvstore.slots import SlotRef, join_runs
from kvstore.states import State
from kvstore.tiers import lookup
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database, Transaction


class RamTier(SlottedTier):
    """A slotted tier whose medium is memory."""

    def slot(self, ref: SlotRef, slot_bytes: int) -> Bytes:
        """A slot's image, header and payload, where it lies. Raises DamagedError when its segment is truncated."""
        return self._room(ref, 1, slot_bytes)[ref.slot * slot_bytes : (ref.slot + 1) * slot_bytes]

    def run(self, first: SlotRef, count: int, slot_bytes: int, tokens: int, take: int | None = None) -> Run:
        """``count`` consecutive slots as one piece for a KVBuffer."""
        offset = first.slot * slot_bytes + HEADER_BYTES
        return Run(
            self._room(first, count, slot_bytes), offset, slot_bytes, count, tokens, tokens if take is None else take
        )

    def runs(self, refs: Sequence[SlotRef], slot_bytes: int, tokens: int, limit: int) -> list[tuple[int, Run]]:
        """Full blocks in order as few runs of up to ``limit``; each with the position of its first block."""
        return [
            (begin, self.run(SlotRef(run.segment, run.first), run.count, slot_bytes, tokens))
            for begin, run in join_runs(refs, limit)
        ]

    def expect_use(self, refs: Iterable[SlotRef]) -> None:
        """What was read once is read again, and its slots are written over when they come to be free: the pages of
        these segments are joined in the background."""
        for segment in {ref.segment for ref in refs}:
            self.medium.join(segment)

    def expect_reads(self, refs: Iterable[SlotRef]) -> None:
        """A disk reads into these slots, and into others next: pages are joined in the background, these first."""
        for segment in dict.fromkeys((*(ref.segment for ref in refs), *self._sizes)):
            self.medium.join(segment)

    def lease(
        self, blocks: Sequence[tuple[BlockName, Entry]], seconds: float, timeout: float | None = None
    ) -> tuple[bytes, int]:
        """Keep blocks from eviction for a while, in every process.

        Returns the lease's key for `release`, and how many blocks, from the first on, are still what they were and are
        held now. Raises BusyError.
        """
        key = self.owner + secrets.token_bytes(8)
        deadline = boottime_ns() + round(seconds * 1e9)

        def work(txn: Transaction) -> int:
            held = 0
            for (_, entry), now in zip(blocks, lookup.find(txn, [name for name, _ in blocks]), strict=True):
                if now is None or now.state is not State.READY or now.generation != entry.generation:
                    break
                held += 1
            runs = [run for _, run in join_runs([entry.ref for _, entry in blocks[:held]], 1 << 30)]
            if runs:
                txn.put(Database.LEASES, key, pack_lease(deadline, runs))
            return held

        return key, self.index.write(work, timeout, unheard=lambda held: self.release([key]))

    def release(self, leases: Iterable[bytes]) -> None:
        """End leases. Never waits."""
        keys = list(leases)
        if keys:
            self.index.submit(lambda txn: [txn.delete(Database.LEASES, key) for key in keys])

    def _room(self, first: SlotRef, count: int, slot_bytes: int) -> Bytes:
        """The memory of a segment that has these slots."""
        window = self.medium.window(first.segment, self.segment_bytes(first.segment))
        if window is None or (first.slot + count) * slot_bytes > len(window):
            raise DamagedError(f"{first} does not lie in its segment", "run `kvstore verify --repair`")
        return window
