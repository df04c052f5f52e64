"""Keys and values of the index, byte by byte; `FORMAT.md` is their document.

Everything is parsed with ``struct`` and length-checked. Pure: never opens a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import DamagedError
from kvstore.identity import KEY_BYTES, Chain
from kvstore.layout import Part
from kvstore.slots import SlotRef, SlotRun
from kvstore.states import State

KEY_LIMIT = 511
"""Longest key LMDB takes, in bytes."""

_PREFIX = struct.Struct(">8sI8sHH")
_SHORT = 8
KEY_TOKENS = (KEY_LIMIT - _PREFIX.size - _SHORT) // 4
"""Tokens that fit a block's key; the rest is in its value."""

_BLOCK = struct.Struct("<32sBBHIIIIQQ16s16s")
_SLOT = struct.Struct(">II")
_SEGMENT = struct.Struct("<BBHIIQ16s")
_SLOTS_AT = slice(8, 12)
_USAGE = struct.Struct("<QQ")
_NAMESPACE = struct.Struct("<32s16sQQHI")
_LEASE = struct.Struct("<Q")
_RUN = struct.Struct("<III")
_NAME = struct.Struct("<32siQQIHI")

LABEL_LIMIT = 512
"""Bytes of a namespace's label that are kept, cut at a character's end."""

NO_OWNER = bytes(16)
_NO_CHECKSUM = bytes(16)
_NAMESPACE_AT = 48
_STATE_AT, _READY = 32, bytes([State.READY])


def damaged(what: str) -> DamagedError:
    """The error for a record that cannot be parsed."""
    return DamagedError(f"{what} in the index is damaged", "run `kvstore verify --repair`")


def family_key(ancestor: bytes, depth: int, parent: bytes, part: Part) -> bytes:
    """What the index keys of all children of ``parent`` at ``depth``, in one part, begin with."""
    return _PREFIX.pack(ancestor[:_SHORT], depth, parent[:_SHORT], part.group, part.shard)


class BlockName(NamedTuple):
    """What identifies a block part in the index: its index key, the tokens past the key's cut, its full key.

    rest: tokens past `KEY_TOKENS`, as big-endian u32. tokens: how many there are in all.
    """

    index_key: bytes
    rest: bytes
    key: bytes
    tokens: int
    part: Part

    @property
    def depth(self) -> int:
        """How many blocks come before it."""
        return int.from_bytes(self.index_key[8:12], "big")


def block_names(chain: Chain, part: Part, first: int = 0, stop: int | None = None) -> list[BlockName]:
    """Names of the chain's blocks ``first`` … ``stop`` (default: all)."""
    raw = chain.tokens.astype(">u4").tobytes()
    step, cut = chain.block_tokens * 4, KEY_TOKENS * 4
    parent = chain.parent(first)
    names: list[BlockName] = []
    for index, key in enumerate(chain.keys[first:stop], first):
        tokens = raw[index * step : (index + 1) * step]
        head = family_key(chain.ancestor(index), index, parent, part)
        names.append(BlockName(head + tokens[:cut] + key[:_SHORT], tokens[cut:], key, len(tokens) // 4, part))
        parent = key
    return names


class Entry(NamedTuple):
    """A block part as a tier's index has it.

    namespace: the tier's own number of it. epoch: the purge epoch its writer knew. checksum: of the payload, zero
    while WRITING.
    """

    key: bytes
    state: State
    tokens: int
    ref: SlotRef
    generation: int
    namespace: int
    epoch: int
    owner: bytes = NO_OWNER
    checksum: bytes = bytes(16)
    codec: int = 0
    rest: bytes = b""

    def pack(self) -> bytes:
        """The stored value."""
        return (
            _BLOCK.pack(
                self.key,
                self.state,
                0,
                self.codec,
                self.tokens,
                self.ref.segment,
                self.ref.slot,
                self.namespace,
                self.generation,
                self.epoch,
                self.owner,
                self.checksum,
            )
            + self.rest
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Entry:
        """From the stored value. Raises DamagedError."""
        if len(raw) < _BLOCK.size:
            raise damaged("a block's record")
        key, state, _, codec, tokens, segment, slot, namespace, generation, epoch, owner, checksum = _BLOCK.unpack_from(
            raw
        )
        rest = raw[_BLOCK.size :]
        if state not in (State.WRITING, State.READY) or len(rest) != 4 * max(0, tokens - KEY_TOKENS):
            raise damaged("a block's record")
        ref = SlotRef(segment, slot)
        return cls(key, State(state), tokens, ref, generation, namespace, epoch, owner, checksum, codec, rest)


OUTLINE = (
    ("depth", ">u4"),
    ("parent", ">u8"),
    ("key", "V32"),
    ("tokens", "<u4"),
    ("segment", "<u4"),
    ("slot", "<u4"),
    ("namespace", "<u4"),
    ("first", ">u4", (8,)),
)
"""What `outline` gives of a block, as numpy reads it. first: of its tokens, as many as there are, then anything."""


def outline(index_key: bytes, raw: bytes) -> bytes | None:
    """The shape of a stored sequence's block, for listings of millions; None for one that is not READY, or of another
    part than the first."""
    if raw[_STATE_AT] != State.READY or index_key[20:24] != bytes(4):
        return None
    return index_key[8:20] + raw[:32] + raw[36:52] + index_key[24:56].ljust(32, b"\0")


def entry_key(raw: bytes) -> bytes:
    """The key in a block's value, where nothing else of it is wanted. Raises DamagedError."""
    if len(raw) < _BLOCK.size:
        raise damaged("a block's record")
    return raw[:KEY_BYTES]


def entry_namespace(raw: bytes) -> int:
    """The number of the namespace in a block's value, where nothing else of it is wanted."""
    return int.from_bytes(raw[_NAMESPACE_AT : _NAMESPACE_AT + 4], "little")


def writing_record(name: BlockName, ref: SlotRef, generation: int, namespace: int, epoch: int, owner: bytes) -> bytes:
    """The stored value of a block that ``owner`` is writing: `Entry.pack` without the entry."""
    segment, slot = ref
    fixed = _BLOCK.pack(
        name.key, State.WRITING, 0, 0, name.tokens, segment, slot, namespace, generation, epoch, owner, _NO_CHECKSUM
    )
    return fixed + name.rest


def ready_record(writing: bytes, checksum: bytes) -> bytes:
    """The stored value of a block once it is READY, from its value while it was WRITING."""
    state, owner = _STATE_AT, _BLOCK.size - 32
    return writing[:state] + _READY + writing[state + 1 : owner] + NO_OWNER + checksum + writing[_BLOCK.size :]


def key_tokens(index_key: bytes, entry: Entry | BlockName) -> bytes:
    """All tokens of a block, from its index key and its value, as big-endian u32."""
    return index_key[_PREFIX.size : len(index_key) - _SHORT] + entry.rest


def key_part(index_key: bytes) -> Part:
    """The part an index key names."""
    _, _, _, group, shard = _PREFIX.unpack_from(index_key)
    return Part(group, shard)


def key_depth(index_key: bytes) -> int:
    """How many blocks come before the one an index key names."""
    return int(_PREFIX.unpack_from(index_key)[1])


def slot_key(ref: SlotRef) -> bytes:
    """Key of the ``slots`` database: which block is in a slot."""
    return _SLOT.pack(ref.segment, ref.slot)


def parse_slot_key(raw: bytes) -> SlotRef:
    """The slot that a `slot_key` names."""
    if len(raw) != 8:
        raise damaged("a slot's key")
    return SlotRef(*_SLOT.unpack(raw))


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file of ``size`` bytes. slot_bytes 0: not cut yet. owner: who is allocating it, else zero."""

    number: int
    size: int
    slot_bytes: int
    slots: int
    owner: bytes = NO_OWNER
    bitmap: bytes = b""

    @property
    def allocating(self) -> bool:
        """Its file is not complete yet."""
        return self.owner != NO_OWNER

    def pack(self) -> bytes:
        """The stored value."""
        return (
            _SEGMENT.pack(1 if self.allocating else 2, 0, 0, self.slot_bytes, self.slots, self.size, self.owner)
            + self.bitmap
        )

    @classmethod
    def unpack(cls, key: bytes, raw: bytes) -> Segment:
        """From its key and stored value. Raises DamagedError."""
        if len(key) != 4 or len(raw) < _SEGMENT.size:
            raise damaged("a segment's record")
        _, _, _, slot_bytes, slots, size, owner = _SEGMENT.unpack_from(raw)
        bitmap = raw[_SEGMENT.size :]
        if len(bitmap) != -(-slots // 8) or slots * slot_bytes > size:
            raise damaged("a segment's record")
        return cls(int.from_bytes(key, "big"), size, slot_bytes, slots, owner, bitmap)


def slot_counts(raws: Iterable[bytes]) -> tuple[int, int, int]:
    """How many segments, slots and free slots stored values of segments have; a twentieth of what unpacking costs."""
    count = slots = free = 0
    for raw in raws:
        count += 1
        here = int.from_bytes(raw[_SLOTS_AT], "little")
        slots += here
        free += (int.from_bytes(raw[_SEGMENT.size :], "big") >> -here % 8).bit_count()
    return count, slots, free


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A layout under a salt. created: seconds, wall clock. ttl: seconds without use, by stamps; 0: none. salt: its
    digest, or empty."""

    root: bytes
    salt: bytes
    created: int
    ttl: int
    label: str
    layout: str

    def pack(self) -> bytes:
        """The stored value."""
        whole = self.label.encode(errors="replace")
        label, layout = whole[:LABEL_LIMIT].decode(errors="ignore").encode(), self.layout.encode()
        salt = self.salt.ljust(16, b"\0")
        return _NAMESPACE.pack(self.root, salt, self.created, self.ttl, len(label), len(layout)) + label + layout

    @classmethod
    def unpack(cls, raw: bytes) -> NamespaceRecord:
        """From the stored value. Raises DamagedError."""
        if len(raw) < _NAMESPACE.size:
            raise damaged("a namespace's record")
        root, salt, created, ttl, label_size, layout_size = _NAMESPACE.unpack_from(raw)
        text = raw[_NAMESPACE.size :]
        if len(text) != label_size + layout_size:
            raise damaged("a namespace's record")
        label = text[:label_size].decode(errors="replace")
        return cls(
            root, b"" if salt == bytes(16) else salt, created, ttl, label, text[label_size:].decode(errors="replace")
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a namespace holds in a tier: blocks, and the size in bytes of the slots they take."""

    blocks: int = 0
    size: int = 0

    def pack(self) -> bytes:
        """The stored value."""
        return _USAGE.pack(self.blocks, self.size)

    @classmethod
    def unpack(cls, raw: bytes | None) -> Usage:
        """From the stored value; nothing stored is nothing used. Raises DamagedError."""
        if raw is None:
            return cls()
        if len(raw) != _USAGE.size:
            raise damaged("a namespace's usage")
        return cls(*_USAGE.unpack(raw))


def pack_lease(deadline: int, runs: list[SlotRun]) -> bytes:
    """A lease: CLOCK_BOOTTIME deadline in ns, and the slots it holds."""
    return _LEASE.pack(deadline) + b"".join(_RUN.pack(run.segment, run.first, run.count) for run in runs)


def unpack_lease(raw: bytes) -> tuple[int, list[SlotRun]]:
    """Deadline and slots of a lease. Raises DamagedError."""
    if len(raw) < _LEASE.size or (len(raw) - _LEASE.size) % _RUN.size:
        raise damaged("a lease")
    return _LEASE.unpack_from(raw)[0], [SlotRun(*fields) for fields in _RUN.iter_unpack(raw[_LEASE.size :])]


@dataclass(frozen=True, slots=True)
class NameRecord:
    """A named prefix: its root, its chain's keys and tokens, whether it is pinned, and until when (0: for good)."""

    root: bytes
    keys: tuple[bytes, ...]
    tokens: bytes
    pinned: bool
    priority: int = 0
    expires: int = 0
    created: int = 0
    slot_bytes: int = 0

    def pack(self) -> bytes:
        """The stored value; tokens as little-endian u32."""
        head = _NAME.pack(
            self.root, self.priority, self.expires, self.created, self.slot_bytes, int(self.pinned), len(self.keys)
        )
        return head + b"".join(self.keys) + self.tokens

    @classmethod
    def unpack(cls, raw: bytes) -> NameRecord:
        """From the stored value. Raises DamagedError."""
        if len(raw) < _NAME.size:
            raise damaged("a name's record")
        root, priority, expires, created, slot_bytes, pinned, count = _NAME.unpack_from(raw)
        body = raw[_NAME.size :]
        if len(body) < count * KEY_BYTES:
            raise damaged("a name's record")
        keys = tuple(body[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(count))
        return cls(root, keys, body[count * KEY_BYTES :], bool(pinned), priority, expires, created, slot_bytes)
