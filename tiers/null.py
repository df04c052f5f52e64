"""A medium without bytes: `NullMedium` swallows what is written and reads zeros.

A `SlottedTier` over it has a whole index, and slots that cost nothing: so an index is measured or tested with a
million entries on a machine that could never hold their payloads. There is no null *tier*: a tier that is off is one
that the store does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.kv import Bytes


class NullMedium:
    """Segments of any size that take no room. What is read is zero, and so never passes for a block."""

    def __init__(self, name: str = "null") -> None:
        self.name = name

    def allocate(self, segment: int, size: int) -> None:
        """Takes nothing, so never fails."""

    def prepare(self, segment: int, size: int) -> None:
        """There is nothing to prepare."""

    def join(self, segment: int) -> None:
        """There is nothing to join."""

    def remove(self, segment: int) -> None:
        """There is nothing to remove."""

    def length(self, segment: int) -> None:
        """As long as anybody asks."""

    def window(self, segment: int, size: int) -> None:
        """There is no memory to look into."""

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        """Fill buffers with zeros."""
        for part in into:
            part.fill(0)

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        """Forget the bytes."""

    def sync(self, segments: Iterable[int]) -> None:
        """There is nothing to flush."""

    def close(self) -> None:
        """There is nothing to close."""
