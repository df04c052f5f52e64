"""Tombstones: what explicit evictions named, byte by byte, as `FORMAT.md` has it. Pure: never opens a file."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.identity import KEY_BYTES
from kvstore.records import damaged

_PURGE = struct.Struct("<BQI")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What an explicit eviction named: everything, a namespace by its root, keys, what begins with a prefix, or a salt.

    parent, tokens: key of the block before the prefix's last, and the tokens of that last one, as big-endian u32. salt:
    its digest. These two are for chains under way, whose blocks nobody could name yet (`kvstore.purge.reaching`).
    """

    epoch: int
    everything: bool = False
    root: bytes = b""
    keys: frozenset[bytes] = frozenset()
    parent: bytes = b""
    tokens: bytes = b""
    salt: bytes | None = None

    def names(self, root: bytes, key: bytes) -> bool:
        """Whether it names a block by its root or key."""
        return self.everything or (bool(self.root) and self.root == root) or key in self.keys

    def pack(self) -> bytes:
        """The stored value."""
        kind, body = 2, b"".join(sorted(self.keys))
        if self.everything:
            kind = 0
        elif self.root:
            kind, body = 1, self.root
        elif self.parent:
            kind, body = 3, self.parent + self.tokens
        elif self.salt is not None:
            kind, body = 4, self.salt
        return _PURGE.pack(kind, self.epoch, len(body)) + body

    @classmethod
    def unpack(cls, raw: bytes) -> Tombstone:
        """From the stored value. Raises DamagedError."""
        if len(raw) < _PURGE.size:
            raise damaged("a tombstone")
        kind, epoch, size = _PURGE.unpack_from(raw)
        body = raw[_PURGE.size :]
        sizes = {0: size == 0, 1: size == KEY_BYTES, 2: size % KEY_BYTES == 0, 3: size > KEY_BYTES and size % 4 == 0}
        if len(body) != size or not (sizes | {4: size in (0, 16)}).get(kind, False):
            raise damaged("a tombstone")
        if kind == 0:
            return cls(epoch, everything=True)
        if kind == 1:
            return cls(epoch, root=body)
        if kind == 3:
            return cls(epoch, parent=body[:KEY_BYTES], tokens=body[KEY_BYTES:])
        if kind == 4:
            return cls(epoch, salt=body)
        return cls(epoch, keys=frozenset(body[i : i + KEY_BYTES] for i in range(0, size, KEY_BYTES)))
