"""The limits of memory and disk beside a store: the same bytes, block sizes and threads as the store's own copies.

Memory as the store uses it: a mapping on tmpfs on one side, anonymous memory that was used before on the other. Must
not know models.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from kvstore import superblock
from kvstore.header import slot_bytes
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
        self._shared = limits.Memory(self.size, settings.ram_directory)
        self._private = limits.Memory(self.size)
        self._pieces: limits.Pieces | None = None
        self._raw = limits.RawFile(settings.path.parent, self.size)
        self._pool = ThreadPoolExecutor(max(settings.copy_threads, settings.io_threads))

    @property
    def direct(self) -> bool:
        """Whether the disk is read and written past the page cache."""
        return self._raw.direct

    def use_slots(self) -> None:
        """From now on the disk is read into, and written from, the store's own `ram` segments.

        How fast a disk reaches memory depends on how scattered its pages are, so only the same pages compare well. What
        the segments hold is overwritten: `ram` must be empty at every `raw_read`.
        """
        path = self.settings.path
        folder = self.settings.ram_directory / superblock.ram_name(path, superblock.read_store_id(path))
        pieces = limits.Pieces(sorted(folder.glob("*.seg")))
        if pieces.size >= self.size:
            self._pieces = pieces

    def copy_out(self) -> float:
        """Seconds to copy the bytes out of shared memory, with the store's copy threads."""
        return limits.memcpy(self._private, self._shared, self._pool, self.settings.copy_threads)

    def copy_in(self) -> float:
        """Seconds to copy the bytes into shared memory, with the store's copy threads."""
        return limits.memcpy(self._shared, self._private, self._pool, self.settings.copy_threads)

    def raw_read(self) -> float:
        """Seconds to read the bytes from the disk with the store's I/O threads; into private memory by default."""
        return self._raw.read(self._pieces or self._private, self.read_block, self._pool, self.settings.io_threads)

    def raw_write(self) -> float:
        """Seconds to write the bytes with one thread, as the mover does, flushed batch by batch."""
        return self._raw.write(self._pieces or self._private, self.write_batch, self._pool, 1, self.write_batch)

    def close(self) -> None:
        """Delete the file, free the memory."""
        self._raw.close()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
