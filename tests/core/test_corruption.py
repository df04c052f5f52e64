"""Whatever is changed in what is stored, by a bit or by a file: a counted miss, and never a wrong byte."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from stores import BLOCK, LAYOUT, PART, SLOT, StoreBench, StoreMaker, tokens_of

from kvstore.errors import DamagedError, FormatError
from kvstore.events import Cause, Evicted, Fault, Miss, Notice
from kvstore.header import HEADER_BYTES
from kvstore.identity import chain
from kvstore.records import Entry, block_names
from kvstore.superblock import _FIELDS, MAGIC, read_store_id
from kvstore.tiers.medium import segment_path
from kvstore.tiers.opening import Superblock
from kvstore.tiers.ram import RamTier

HEADER_PLACES = [*range(96), *range(96, HEADER_BYTES - 8, 61), *range(HEADER_BYTES - 8, HEADER_BYTES)]
"""Every byte that says something, the digest, and a sample of the zeros; `test_header` flips all 4096."""
PAYLOAD = LAYOUT.payload_bytes()


def sequences(count: int) -> list[np.ndarray]:
    """Sequences of one block."""
    return [tokens_of(seed, BLOCK) for seed in range(count)]


def entry_of(bench: StoreBench, tier: str, tokens: np.ndarray, index: int = 0) -> Entry:
    """The entry of one block of a sequence."""
    linked = chain(bench.space().root, tokens, BLOCK)
    (entry,) = bench.tier(tier).find(block_names(linked, PART, index, index + 1))
    assert entry is not None
    return entry


def change(bench: StoreBench, tier: str, entry: Entry, how: Callable[[np.ndarray], None]) -> None:
    """Change a slot's image where it lies."""
    if isinstance(one := bench.tier(tier), RamTier):
        how(one.slot(entry.ref, SLOT))
        return
    with segment_path(one.directory, entry.ref.segment).open("r+b") as file:
        image = np.fromfile(file, np.uint8, SLOT, offset=entry.ref.slot * SLOT)
        how(image)
        file.seek(entry.ref.slot * SLOT)
        file.write(image.tobytes())
        file.flush()
        os.fsync(file.fileno())


def flip(at: int, mask: int) -> Callable[[np.ndarray], None]:
    """Turn bits of one byte over."""

    def how(image: np.ndarray) -> None:
        image[at] ^= mask

    return how


def fill(bench: StoreBench, tier: str, stored: list[np.ndarray]) -> None:
    """Save sequences; leave them in one tier only."""
    for tokens in stored:
        assert bench.save(tokens).new_blocks == 1
    bench.settle()
    if tier == "nvme":
        bench.drop("ram")


def alone(tier: str) -> dict[str, int]:
    """Settings of a store without the other tier: what `ram` holds would be written to `nvme` again."""
    return {"nvme": 0} if tier == "ram" else {}


def all_are_misses(bench: StoreBench, tier: str, stored: list[np.ndarray], causes: set[Cause]) -> None:
    """Loads all; each must miss, be counted, be thrown out, and be saved again as good as new."""
    bench.told.clear()
    for tokens in stored:
        loaded = bench.load(tokens)
        assert loaded.tokens == 0
        assert loaded.stop in causes
    bench.settle()
    misses = bench.of(Miss)
    assert {miss.cause for miss in misses} <= causes
    assert sum(miss.tokens for miss in misses) == BLOCK * len(stored)
    assert len(bench.of(Fault, tier=tier, what="verify")) == len(stored)
    assert sum(event.blocks for event in bench.of(Evicted, tier=tier, reason="corrupt")) == len(stored)
    for tokens in stored:
        assert bench.load(tokens).stop is Cause.ABSENT
        assert bench.save(tokens).new_blocks == 1
        assert bench.load(tokens).tokens == BLOCK
    bench.settle()
    assert bench.store.verify().problems == []


@pytest.mark.parametrize(("tier", "verify_share"), [("nvme", 64), ("ram", 1), ("ram", 1 << 30)])
def test_a_flip_in_any_byte_of_a_header_is_a_miss(make_store: StoreMaker, tier: str, verify_share: int) -> None:
    bench = make_store(verify_share=verify_share, **alone(tier))
    stored = sequences(len(HEADER_PLACES))
    fill(bench, tier, stored)
    for number, (tokens, at) in enumerate(zip(stored, HEADER_PLACES, strict=True)):
        change(bench, tier, entry_of(bench, tier, tokens), flip(at, 1 << number % 8))
    all_are_misses(bench, tier, stored, {Cause.HEADER})


@pytest.mark.parametrize("tier", ["nvme", "ram"])
def test_a_flip_anywhere_in_a_payload_is_a_miss(make_store: StoreMaker, tier: str) -> None:
    bench = make_store(**alone(tier))
    random = np.random.default_rng(5)
    places = [0, 1, PAYLOAD - 1, *random.integers(0, PAYLOAD, 60).tolist()]
    stored = sequences(len(places))
    fill(bench, tier, stored)
    for tokens, at in zip(stored, places, strict=True):
        change(bench, tier, entry_of(bench, tier, tokens), flip(HEADER_BYTES + at, int(random.integers(1, 256))))
    all_are_misses(bench, tier, stored, {Cause.CHECKSUM})


@pytest.mark.parametrize("tier", ["nvme", "ram"])
def test_slots_that_changed_places_are_misses(make_store: StoreMaker, tier: str) -> None:
    bench = make_store(**alone(tier))
    stored = sequences(12)
    fill(bench, tier, stored)
    images: list[np.ndarray] = []
    entries = [entry_of(bench, tier, tokens) for tokens in stored]
    for entry in entries:
        change(bench, tier, entry, lambda image: images.append(image.copy()))
    for at, entry in enumerate(entries):
        change(bench, tier, entry, lambda image, at=at: np.copyto(image, images[at - 1]))
    all_are_misses(bench, tier, stored, {Cause.HEADER})


@pytest.mark.parametrize("tier", ["nvme", "ram"])
def test_zeros_in_place_of_a_slot_are_a_miss(make_store: StoreMaker, tier: str) -> None:
    bench = make_store(**alone(tier))
    stored = sequences(3)
    fill(bench, tier, stored)
    for tokens in stored:
        change(bench, tier, entry_of(bench, tier, tokens), lambda image: image.fill(0))
    all_are_misses(bench, tier, stored, {Cause.HEADER})


@pytest.mark.parametrize("tier", ["nvme", "ram"])
def test_a_damaged_block_ends_the_prefix_and_what_is_before_it_is_served(make_store: StoreMaker, tier: str) -> None:
    bench = make_store(**alone(tier))
    tokens = tokens_of(1, 10 * BLOCK + 5)
    bench.save(tokens)
    bench.settle()
    if tier == "nvme":
        bench.drop("ram")
    change(bench, tier, entry_of(bench, tier, tokens, 6), flip(HEADER_BYTES + 77, 4))
    loaded = bench.load(tokens)
    assert (loaded.tokens, loaded.stop, loaded.by_tier) == (6 * BLOCK, Cause.CHECKSUM, {tier: 6 * BLOCK})
    bench.settle()
    assert bench.load(tokens).tokens == 6 * BLOCK
    assert bench.save(tokens).new_blocks == 1, "only what was lost is stored again"
    assert bench.load(tokens).tokens == len(tokens)


def test_a_block_damaged_in_ram_is_served_from_nvme_once_it_was_thrown_out(make_store: StoreMaker) -> None:
    bench = make_store()
    (tokens,) = sequences(1)
    bench.save(tokens)
    bench.settle()
    change(bench, "ram", entry_of(bench, "ram", tokens), flip(HEADER_BYTES, 1))
    assert bench.load(tokens).tokens == 0
    bench.settle()
    assert bench.load(tokens).by_tier == {"nvme": BLOCK}


def test_verify_finds_damage_in_both_tiers_and_repair_removes_it(make_store: StoreMaker) -> None:
    bench = make_store()
    stored = sequences(8)
    for tokens in stored:
        bench.save(tokens)
    bench.settle()
    for tier, tokens in zip(("ram", "nvme", "ram"), stored, strict=False):
        change(bench, tier, entry_of(bench, tier, tokens), flip(HEADER_BYTES + 9, 2))
    report = bench.store.verify()
    assert len(report.problems) == 3
    assert report.checked == 16
    assert bench.store.verify(repair=True).repaired == 3
    assert bench.store.verify().ok
    assert bench.load(stored[3]).tokens == BLOCK


def test_a_segment_truncated_under_an_open_store_costs_its_blocks_and_nothing_else(make_store: StoreMaker) -> None:
    bench = make_store()
    stored = sequences(20)
    fill(bench, "nvme", stored)
    nvme = bench.tier("nvme")
    segment = entry_of(bench, "nvme", stored[0]).ref.segment
    kept = [entry_of(bench, "nvme", tokens).ref.slot < 5 for tokens in stored]
    os.truncate(segment_path(nvme.directory, segment), 5 * SLOT)
    for tokens, good in zip(stored, kept, strict=True):
        loaded = bench.load(tokens)
        assert (loaded.tokens, loaded.stop) == ((BLOCK, Cause.LIMIT) if good else (0, Cause.IO))
    bench.settle()
    assert sum(kept) == 5
    assert sum(event.blocks for event in bench.of(Evicted, reason="unreadable")) == 15
    for tokens, good in zip(stored, kept, strict=True):
        assert bench.save(tokens).new_blocks == (0 if good else 1)
        assert bench.load(tokens).tokens == BLOCK


# -------------------------------------------------------------------- files of a tier's directory


def superblock(version: int, bench: StoreBench) -> bytes:
    """The superblock of the store's nvme tier, as another version would have written it."""
    path = bench.path / "nvme" / "TIER"
    now = Superblock.unpack(path.read_bytes(), path)
    return Superblock(now.store, now.index_bytes, now.segment_bytes, version).pack()


def closed_store(make_store: StoreMaker) -> StoreBench:
    """A store with one block on nvme, closed; its memory is gone."""
    bench = make_store()
    bench.save(tokens_of(1, BLOCK))
    bench.settle()
    bench.drop("ram")
    bench.close()
    return bench


def test_a_tier_of_a_later_version_is_refused_and_left_alone(make_store: StoreMaker) -> None:
    bench = closed_store(make_store)
    path = bench.path / "nvme" / "TIER"
    good = path.read_bytes()
    path.write_bytes(superblock(2, bench))
    with pytest.raises(FormatError, match="format 2"):
        bench.store  # noqa: B018
    path.write_bytes(good)
    assert bench.load(tokens_of(1, BLOCK)).tokens == BLOCK


def test_a_tier_of_an_earlier_version_is_emptied_and_says_so(make_store: StoreMaker) -> None:
    bench = closed_store(make_store)
    (bench.path / "nvme" / "TIER").write_bytes(superblock(0, bench))
    assert bench.load(tokens_of(1, BLOCK)).tokens == 0
    assert [event.subject for event in bench.of(Notice)].count("emptied") == 1
    assert bench.save(tokens_of(1, BLOCK)).new_blocks == 1
    bench.settle()
    assert bench.store.verify().ok


def test_a_tier_directory_with_files_of_somebody_else_is_not_emptied(make_store: StoreMaker) -> None:
    bench = closed_store(make_store)
    (bench.path / "nvme" / "TIER").write_bytes(superblock(0, bench))
    thesis = bench.path / "nvme" / "thesis.txt"
    thesis.write_text("the only copy")
    with pytest.raises(FormatError, match=r"thesis\.txt"):
        bench.store  # noqa: B018
    assert thesis.read_text() == "the only copy"
    thesis.unlink()
    assert bench.save(tokens_of(2, BLOCK)).new_blocks == 1


@pytest.mark.parametrize("keep", [0, 5000, 300_000])
def test_a_truncated_index_is_an_error_that_says_what_to_do(make_store: StoreMaker, keep: int) -> None:
    bench = closed_store(make_store)
    os.truncate(bench.path / "nvme" / "index" / "data.mdb", keep)
    with pytest.raises(DamagedError) as told:
        bench.store  # noqa: B018
    assert str(bench.path / "nvme") in str(told.value)


def test_every_byte_of_a_tiers_superblock_counts(make_store: StoreMaker) -> None:
    bench = closed_store(make_store)
    path = bench.path / "nvme" / "TIER"
    good = path.read_bytes()
    for at in range(56):
        raw = bytearray(good)
        raw[at] ^= 1
        with pytest.raises(DamagedError):
            Superblock.unpack(bytes(raw), path)
    assert Superblock.unpack(good, path).version == 1


def test_every_byte_of_a_stores_superblock_counts(make_store: StoreMaker) -> None:
    bench = closed_store(make_store)
    path = bench.path / "STORE"
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(FormatError if at < len(MAGIC) else DamagedError):
            read_store_id(bench.path)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(DamagedError):
            read_store_id(bench.path)
    path.write_bytes(good)
    assert read_store_id(bench.path) in good


def test_a_store_of_another_version_is_refused_and_left_alone(make_store: StoreMaker) -> None:
    bench = closed_store(make_store)
    path = bench.path / "STORE"
    good = path.read_bytes()
    body = _FIELDS.pack(MAGIC, 2, read_store_id(bench.path))
    later = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    path.write_bytes(later)
    with pytest.raises(FormatError, match="format 2"):
        bench.store  # noqa: B018
    assert path.read_bytes() == later
    path.write_bytes(good)
    assert bench.load(tokens_of(1, BLOCK)).tokens == BLOCK
