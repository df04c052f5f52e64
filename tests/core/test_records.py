"""Every record of the index survives packing; what is cut or lengthened is damage, never something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DamagedError
from kvstore.identity import chain
from kvstore.layout import Part
from kvstore.records import (
    KEY_LIMIT,
    KEY_TOKENS,
    Entry,
    NameRecord,
    NamespaceRecord,
    Segment,
    Usage,
    block_names,
    family_key,
    key_depth,
    key_part,
    key_tokens,
    pack_lease,
    parse_slot_key,
    ready_record,
    slot_counts,
    slot_key,
    unpack_lease,
)
from kvstore.slots import FreeMap, SlotRef, SlotRun
from kvstore.states import State
from kvstore.tombstone import Tombstone

u16, u32, u64 = (st.integers(0, 2**width - 1) for width in (16, 32, 64))
digest = st.binary(min_size=32, max_size=32)
owner = st.binary(min_size=16, max_size=16)
parts = st.builds(Part, u16, u16)
refs = st.builds(SlotRef, u32, u32)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    tokens = draw(st.integers(0, KEY_TOKENS + 200))
    rest = draw(st.binary(min_size=4 * max(0, tokens - KEY_TOKENS), max_size=4 * max(0, tokens - KEY_TOKENS)))
    return Entry(
        draw(digest),
        draw(st.sampled_from([State.WRITING, State.READY])),
        tokens,
        draw(refs),
        draw(u64),
        draw(u32),
        draw(u64),
        draw(owner),
        draw(owner),
        draw(u16),
        rest,
    )


@st.composite
def segment_records(draw: st.DrawFn) -> Segment:
    slots, slot_bytes = draw(st.integers(0, 70)), draw(st.integers(1, 2**24))
    bitmap = draw(st.binary(min_size=-(-slots // 8), max_size=-(-slots // 8)))
    return Segment(draw(u32), slots * slot_bytes + draw(st.integers(0, 4096)), slot_bytes, slots, draw(owner), bitmap)


salts = st.just(b"") | owner.filter(any)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
namespace_records = st.builds(NamespaceRecord, digest, salts, u64, u64, labels, labels)
runs = st.builds(SlotRun, u32, u32, u32)
names = st.builds(
    NameRecord,
    digest,
    st.lists(digest, max_size=4).map(tuple),
    st.binary(max_size=64).map(lambda raw: raw[: len(raw) // 4 * 4]),
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    u64,
    u64,
    u32,
)


def _raw_tokens(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "big") for token in tokens)


tombstones = st.one_of(
    st.builds(Tombstone, u64, st.just(True)),
    st.builds(Tombstone, u64, st.just(False), digest),
    st.builds(Tombstone, u64, st.just(False), st.just(b""), st.frozensets(digest, max_size=4)),
    st.builds(Tombstone, u64, parent=digest, tokens=st.lists(u32, min_size=1, max_size=4).map(_raw_tokens)),
    st.builds(Tombstone, u64, salt=st.just(b"") | st.binary(min_size=16, max_size=16)),
)


@given(entries())
def test_a_block_survives(entry: Entry) -> None:
    assert Entry.unpack(entry.pack()) == entry


@given(entries(), owner)
def test_a_published_block_is_the_same_block_without_an_owner(entry: Entry, checksum: bytes) -> None:
    ready = Entry.unpack(ready_record(entry.pack(), checksum))
    assert (ready.state, ready.owner, ready.checksum) == (State.READY, bytes(16), checksum)
    same = ("key", "tokens", "ref", "generation", "namespace", "epoch", "codec", "rest")
    assert all(getattr(ready, name) == getattr(entry, name) for name in same)


@given(st.lists(segment_records()))
def test_slots_are_counted_as_if_every_segment_was_unpacked(found: list[Segment]) -> None:
    free = sum(FreeMap.unpack(segment.bitmap, segment.slots).free for segment in found)
    wanted = (len(found), sum(segment.slots for segment in found), free)
    assert slot_counts(segment.pack() for segment in found) == wanted


@given(segment_records())
def test_a_segment_survives(segment: Segment) -> None:
    assert Segment.unpack(segment.number.to_bytes(4, "big"), segment.pack()) == segment


@given(namespace_records)
def test_a_namespace_survives(record: NamespaceRecord) -> None:
    assert NamespaceRecord.unpack(record.pack()) == record


@pytest.mark.parametrize("label", ["é" * 400, "a" + "é" * 400, "x" * 5000, "🦊" * 200, "broken \ud800 text"])
def test_a_label_too_long_or_not_text_is_cut_where_it_still_is_text(label: str) -> None:
    record = NamespaceRecord(b"r" * 32, b"", 0, 0, label, "{}")
    stored = NamespaceRecord.unpack(record.pack())
    assert len(stored.label.encode()) <= 512
    assert stored.layout == "{}"
    assert NamespaceRecord.unpack(stored.pack()) == stored, "written once more, it does not change any more"
    assert "\ufffd" not in stored.label


@given(st.integers(0, 2**64 - 1), st.lists(runs, max_size=5))
def test_a_lease_survives(deadline: int, given_runs: list[SlotRun]) -> None:
    assert unpack_lease(pack_lease(deadline, given_runs)) == (deadline, given_runs)


@given(names)
def test_a_name_survives(record: NameRecord) -> None:
    assert NameRecord.unpack(record.pack()) == record


@given(tombstones)
def test_a_tombstone_survives(stone: Tombstone) -> None:
    assert Tombstone.unpack(stone.pack()) == stone


@given(u64, u64)
def test_usage_survives_and_nothing_stored_is_nothing_used(blocks: int, size: int) -> None:
    assert Usage.unpack(Usage(blocks, size).pack()) == Usage(blocks, size)
    assert Usage.unpack(None) == Usage()


@given(refs, refs)
def test_slot_keys_survive_and_sort_as_slots_do(one: SlotRef, other: SlotRef) -> None:
    assert parse_slot_key(slot_key(one)) == one
    assert (slot_key(one) < slot_key(other)) == (one < other)


EXAMPLES: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "block": (
        Entry(b"k" * 32, State.READY, KEY_TOKENS + 3, SlotRef(1, 2), 3, 4, 5, rest=b"r" * 12).pack(),
        Entry.unpack,
    ),
    "segment": (
        Segment(1, 1 << 20, 8192, 9, b"o" * 16, b"ab").pack(),
        lambda raw: Segment.unpack(b"\0\0\0\1", raw),
    ),
    "namespace": (NamespaceRecord(b"r" * 32, b"s" * 16, 1, 2, "label", "{}").pack(), NamespaceRecord.unpack),
    "lease": (pack_lease(9, [SlotRun(1, 2, 3)]), unpack_lease),
    "usage": (Usage(1, 2).pack(), Usage.unpack),
    "tombstone": (Tombstone(1, keys=frozenset([b"k" * 32])).pack(), Tombstone.unpack),
    "tombstone of a prefix": (Tombstone(1, parent=b"k" * 32, tokens=b"t" * 8).pack(), Tombstone.unpack),
    "tombstone of a salt": (Tombstone(1, salt=b"s" * 16).pack(), Tombstone.unpack),
    "slot key": (slot_key(SlotRef(1, 2)), parse_slot_key),
}


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_a_record_of_any_other_length_is_damage(kind: str) -> None:
    raw, unpack = EXAMPLES[kind]
    unpack(raw)
    for size in range(len(raw)):
        if kind == "lease" and size == 8:
            continue  # a lease of nothing is one
        with pytest.raises(DamagedError):
            unpack(raw[:size])
    with pytest.raises(DamagedError):
        unpack(raw + b"\0")


def test_a_name_cut_before_its_last_key_is_damage() -> None:
    raw = NameRecord(b"r" * 32, (b"k" * 32, b"l" * 32), b"", True).pack()
    for size in range(len(raw)):
        with pytest.raises(DamagedError):
            NameRecord.unpack(raw[:size])


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
@given(data=st.data())
def test_arbitrary_bytes_are_a_record_or_damage_and_nothing_else(kind: str, data: st.DataObject) -> None:
    raw, unpack = EXAMPLES[kind]
    mutated = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack(bytes(mutated))
    except DamagedError:
        return
    try:
        unpack(data.draw(st.binary(max_size=200)))
    except DamagedError:
        return


def test_a_state_that_is_not_stored_is_damage() -> None:
    raw = bytearray(EXAMPLES["block"][0])
    for state in (0, 3, 255):
        raw[32] = state
        with pytest.raises(DamagedError):
            Entry.unpack(bytes(raw))


# -------------------------------------------------------------------- index keys


@given(seed=u32, block_tokens=st.sampled_from([16, 64, 256]), length=st.integers(1, 1200), part=parts)
def test_names_of_blocks_give_back_depth_part_and_tokens(seed: int, block_tokens: int, length: int, part: Part) -> None:
    tokens = np.random.default_rng(seed).integers(0, 2**32 - 1, length, np.uint32)
    linked = chain(seed.to_bytes(32, "little"), tokens, block_tokens)
    found = block_names(linked, part)
    assert len(found) == len(linked)
    for depth, name in enumerate(found):
        assert len(name.index_key) <= KEY_LIMIT
        assert (name.depth, key_depth(name.index_key), key_part(name.index_key)) == (depth, depth, part)
        entry = Entry(name.key, State.READY, name.tokens, SlotRef(0, 0), 0, 0, 0, rest=name.rest)
        assert key_tokens(name.index_key, entry) == linked.block(depth).astype(">u4").tobytes()
        assert name.index_key.startswith(family_key(linked.ancestor(depth), depth, linked.parent(depth), part))
    middle = len(found) // 2
    assert block_names(linked, part, middle, len(found)) == found[middle:]


@given(st.lists(st.lists(st.integers(0, 2**32 - 2), min_size=16, max_size=16), min_size=2, max_size=8))
def test_siblings_sort_by_their_tokens(siblings: list[list[int]]) -> None:
    keys = {}
    for tokens in siblings:
        (name,) = block_names(chain(b"r" * 32, np.array(tokens, np.uint32), 16), Part())
        keys[name.index_key] = tokens
    assert [keys[key] for key in sorted(keys)] == sorted(keys.values())
