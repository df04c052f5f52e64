"""A slot's header says what was written, or nothing."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import Cause
from kvstore.header import (
    HEADER_BYTES,
    MAGIC,
    Header,
    inspect_slot,
    parse_header,
    payload_checksum,
    payload_hash,
    slot_bytes,
)

headers = st.builds(
    Header,
    key=st.binary(min_size=32, max_size=32),
    group=st.integers(0, 2**16 - 1),
    shard=st.integers(0, 2**16 - 1),
    tokens=st.integers(0, 2**32 - 1),
    payload_bytes=st.integers(0, 2**64 - 1),
    checksum=st.binary(min_size=16, max_size=16),
)
EXAMPLE = Header(b"k" * 32, 1, 2, 16, 8192, b"c" * 16)


@given(headers)
def test_a_header_survives_packing(header: Header) -> None:
    raw = header.pack()
    assert len(raw) == HEADER_BYTES
    assert parse_header(raw) == header


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flip_in_any_byte_of_a_header_makes_it_nothing(mask: int) -> None:
    raw = bytearray(EXAMPLE.pack())
    for at in range(HEADER_BYTES):
        raw[at] ^= mask
        assert parse_header(bytes(raw)) is None, f"byte {at}"
        raw[at] ^= mask
    assert parse_header(bytes(raw)) == EXAMPLE


@given(st.binary(max_size=64) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(raw: bytes) -> None:
    assert parse_header(raw) is None


def test_a_header_of_another_length_is_none() -> None:
    raw = EXAMPLE.pack()
    assert parse_header(raw[:-1]) is None
    assert parse_header(raw + b"\0") is None
    assert parse_header(b"") is None


@pytest.mark.parametrize(("at", "value"), [(0, b"KVSLOT\r\r"), (8, struct.pack("<H", 2)), (10, struct.pack("<H", 1))])
def test_another_magic_version_or_codec_is_none_though_its_digest_is_right(at: int, value: bytes) -> None:
    body = bytearray(EXAMPLE.pack()[:-8])
    assert body[:8] == MAGIC
    body[at : at + len(value)] = value
    assert parse_header(bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))) is None


@given(st.lists(st.binary(max_size=400)))
def test_a_checksum_taken_in_pieces_is_that_of_the_whole(pieces: list[bytes]) -> None:
    taken = payload_hash()
    for piece in pieces:
        taken.update(memoryview(piece))
    assert taken.digest() == payload_checksum(np.frombuffer(b"".join(pieces), np.uint8))


def image_of(payload: np.ndarray, header: Header | None = None) -> np.ndarray:
    """A slot's image."""
    checksum = payload_checksum(payload)
    header = header or Header(b"k" * 32, 0, 0, 16, len(payload), checksum)
    return np.concatenate([np.frombuffer(header.pack(), np.uint8), payload])


def test_an_image_is_its_block_only_if_everything_agrees() -> None:
    payload = np.random.default_rng(1).integers(0, 256, 8192, np.uint8)
    image, key = image_of(payload), b"k" * 32
    assert inspect_slot(image, key, 16, 8192) is None
    assert inspect_slot(image, key, 16, 8192, payload_checksum(payload)) is None
    assert inspect_slot(image, b"x" * 32, 16, 8192) is Cause.HEADER
    assert inspect_slot(image, key, 15, 8192) is Cause.HEADER
    assert inspect_slot(image, key, 16, 8191) is Cause.HEADER
    assert inspect_slot(image, key, 16, 8192, b"x" * 16) is Cause.CHECKSUM
    assert inspect_slot(image[:-1], key, 16, 8192) is Cause.CHECKSUM
    assert inspect_slot(image[: HEADER_BYTES - 1], key, 16, 8192) is Cause.HEADER


@given(at=st.integers(0, 8191), mask=st.integers(1, 255))
def test_a_flip_anywhere_in_a_payload_is_found(at: int, mask: int) -> None:
    payload = np.random.default_rng(1).integers(0, 256, 8192, np.uint8)
    image = image_of(payload)
    image[HEADER_BYTES + at] ^= mask
    assert inspect_slot(image, b"k" * 32, 16, 8192) is Cause.CHECKSUM


@given(st.integers(0, 1 << 30))
def test_a_slot_holds_header_and_payload_in_whole_pages(payload: int) -> None:
    size = slot_bytes(payload)
    assert size % HEADER_BYTES == 0
    assert HEADER_BYTES + payload <= size < 2 * HEADER_BYTES + payload
