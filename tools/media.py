"""The limits of memory and disk beside a store: the same bytes, block sizes and threads as the store's own copies.

Memory as the store uses it: a mapping on tmpfs on one side, anonymous memory that was used before on the other. Must
not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.header import slot_bytes
from kvstore.kv import Bytes
from kvstore.layout import Layout
from kvstore.loading import READ_BYTES
from kvstore.settings import Settings
from kvstore.tools import limits


class Media:
    """A preallocated file beside the store, and memory, both for ``size`` bytes of a layout's blocks."""

    def __init__(self, settings: Settings, layout: Layout, size: int) -> None:
        """Raises PathError when the disk or tmpfs has no room."""
        slot = slot_bytes(layout.payload_bytes())
        self.size = -(-size // limits.PAGE) * limits.PAGE
        self.settings = settings
        self.read_block = max(1, READ_BYTES // slot) * slot
        self.write_batch = max(1, settings.mover_batch_bytes // slot) * slot
        self._shared: Sequence[Bytes] = [limits.Memory(self.size, settings.ram_directory).bytes]
        self._private = limits.Memory(self.size)
        self._source: Sequence[Bytes] = [self._private.bytes]
        self._target: Sequence[Bytes] = [self._private.bytes]
        self._slots: limits.Pieces | None = None
        self._segment: limits.RawFile | None = None
        self._raw = limits.RawFile(settings.path.parent, self.size)
        self._pool = ThreadPoolExecutor(max(settings.copy_threads, settings.io_threads))

    @property
    def direct(self) -> bool:
        """Whether the disk is read and written past the page cache."""
        return self._raw.direct

    def use_memory(self, source: Bytes, target: Bytes, payloads: Sequence[Bytes]) -> None:
        """From now on memory is copied from ``source`` into a store's slots, and from them into ``target``: the very
        memory that the store copies between.

        payloads: where the bytes are in `ram`. They are overwritten: `ram` must be empty at every `copy_in`.
        """
        edges = [0, *accumulate(map(len, payloads))]
        self._shared = payloads
        self._source = [source[a:b] for a, b in pairwise(edges)]
        self._target = [target[a:b] for a, b in pairwise(edges)]

    def use_slots(self, images: Sequence[Bytes], segment: Path) -> None:
        """From now on the disk is read into, and written from, slots of the store's `ram`, and itself is a segment of
        its `nvme`.

        How fast a disk reaches memory depends on how scattered its pages are, and a virtual disk is faster in one place
        than in another: only the same pages and the same blocks compare well. images: of all blocks, header and
        payload. What is in these slots and in the segment is overwritten: `ram` must be empty at every `raw_read`, and
        both tiers at every `raw_write`.
        """
        if segment.stat().st_size >= self.size:
            self._slots, self._segment = limits.Pieces(images), limits.RawFile.over(segment, self.size)

    def copy_out(self) -> float:
        """Seconds to copy the bytes out of shared memory, with the store's copy threads."""
        return limits.memcpy(self._target, self._shared, self._pool, self.settings.copy_threads)

    def copy_in(self) -> float:
        """Seconds to copy the bytes into shared memory, with the store's copy threads."""
        return limits.memcpy(self._shared, self._source, self._pool, self.settings.copy_threads)

    def raw_read(self) -> float:
        """Seconds to read the bytes from the disk with the store's I/O threads; into private memory by default."""
        raw, memory = self._segment or self._raw, self._slots or self._private
        return raw.read(memory, self.read_block, self._pool, self.settings.io_threads)

    def raw_write(self) -> float:
        """Seconds to write the bytes with one thread, as the mover does, flushed batch by batch."""
        raw, memory = self._segment or self._raw, self._slots or self._private
        return raw.write(memory, self.write_batch, self._pool, 1, self.write_batch)

    def close(self) -> None:
        """Delete the file, free the memory."""
        self._raw.close()
        if self._segment is not None:
            self._segment.close()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
