"""The fixed header in front of every slot's payload: 4 KiB, checksummed as a whole.

A slot's image (header and payload) is the same in every tier that has slots, so it is copied from tier to tier as it
is. Pure: parses and builds bytes, never does I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstore.events import Cause
from kvstore.kv import Bytes

HEADER_BYTES = 4096
"""Also the alignment of payloads: what O_DIRECT wants."""

MAGIC = b"KVSLOT\r\n"
VERSION = 1
CODEC_RAW = 0

_FIELDS = struct.Struct("<8sHHHHIIQ32s16s")
_DIGEST = struct.Struct("<Q")
_DIGEST_AT = HEADER_BYTES - _DIGEST.size
_REST = bytes(_DIGEST_AT - _FIELDS.size)


@dataclass(frozen=True, slots=True)
class Header:
    """What a slot says of itself.

    tokens: tokens in the payload. payload_bytes: stored length. checksum: xxh3-128 of the stored payload.
    """

    key: bytes
    group: int
    shard: int
    tokens: int
    payload_bytes: int
    checksum: bytes
    codec: int = CODEC_RAW

    def pack(self) -> bytes:
        """The header's 4096 bytes."""
        return pack_header(
            self.key, self.group, self.shard, self.tokens, self.payload_bytes, self.checksum, codec=self.codec
        )


def pack_header(
    key: bytes, group: int, shard: int, tokens: int, payload_bytes: int, checksum: bytes, *, codec: int = CODEC_RAW
) -> bytes:
    """A `Header`'s 4096 bytes; the last eight are the xxh3-64 of those before."""
    fields = _FIELDS.pack(MAGIC, VERSION, codec, group, shard, tokens, 0, payload_bytes, key, checksum)
    body = fields + _REST
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def parse_header(raw: bytes | memoryview) -> Header | None:
    """The header, or None when any of its bytes is not as it was written."""
    if len(raw) != HEADER_BYTES:
        return None
    view = memoryview(raw)
    if _DIGEST.unpack(view[_DIGEST_AT:])[0] != xxhash.xxh3_64_intdigest(view[:_DIGEST_AT]):
        return None
    magic, version, codec, group, shard, tokens, _, size, key, checksum = _FIELDS.unpack_from(view)
    if magic != MAGIC or version != VERSION or codec != CODEC_RAW:
        return None
    return Header(key, group, shard, tokens, size, checksum, codec)


def payload_checksum(payload: Bytes) -> bytes:
    """xxh3-128 of a payload, 16 bytes. Releases the GIL."""
    return xxhash.xxh3_128_digest(payload.data)


def payload_hash() -> xxhash.xxh3_128:
    """The same, to be taken while a payload is written: ``update`` with all of it, front to back, then ``digest``."""
    return xxhash.xxh3_128()


def inspect_slot(
    image: Bytes, key: bytes, tokens: int, payload_bytes: int, checksum: bytes | None = None
) -> Cause | None:
    """Whether a slot's image is the block it should be: None, or the cause of the miss.

    image: the slot's bytes from its header on. checksum: what the index says it is, where the index knows.
    """
    cause = inspect_header(image, key, tokens, payload_bytes, checksum)
    if cause is not None:
        return cause
    header = parse_header(image[:HEADER_BYTES].data)
    found = payload_checksum(image[HEADER_BYTES : HEADER_BYTES + payload_bytes])
    return None if header is not None and found == header.checksum else Cause.CHECKSUM


def inspect_header(
    image: Bytes, key: bytes, tokens: int, payload_bytes: int, checksum: bytes | None = None
) -> Cause | None:
    """Whether a slot says that it is the block it should be; its payload is not looked at."""
    header = parse_header(image[:HEADER_BYTES].data)
    if header is None or header.key != key or header.tokens != tokens or header.payload_bytes != payload_bytes:
        return Cause.HEADER
    return Cause.CHECKSUM if checksum is not None and header.checksum != checksum else None


def slot_bytes(payload_bytes: int) -> int:
    """Bytes of a slot for payloads of up to ``payload_bytes``: header, payload, rounded up to 4 KiB."""
    return HEADER_BYTES + -(-payload_bytes // HEADER_BYTES) * HEADER_BYTES
