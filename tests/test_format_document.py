"""FORMAT.md says what the code does: its tables give every struct, database and meta key, and are enough to read by."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash

import kvstore
from kvstore import (
    assembly,
    days,
    eviction,
    identity,
    keeper,
    layout,
    pins,
    purge,
    quotas,
    records,
    scrubbing,
    slots,
    store,
)
from kvstore.header import HEADER_BYTES, MAGIC, VERSION, Header
from kvstore.kv import HostKV
from kvstore.states import State
from kvstore.superblock import ram_name, store_id
from kvstore.tiers import namespaces, opening, segments, slotted
from kvstore.transaction import Database

TREE = Path(__file__).resolve().parents[1]
TEXT = (TREE / "kvstore" / "FORMAT.md").read_text()
CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "bool": "?", "bytes": "s", "pad": "x"}
CAPTION = re.compile(r"^`(kvstore[\w.]+)`, (little|big)-endian, (\d+) bytes:$", re.MULTILINE)


@dataclass(frozen=True)
class Field:
    offset: int
    size: int
    code: str
    name: str


@dataclass(frozen=True)
class Table:
    name: str
    little: bool
    size: int
    fields: tuple[Field, ...]

    @property
    def format(self) -> str:
        return ("<" if self.little else ">") + "".join(field.code for field in self.fields)

    def read(self, raw: bytes) -> dict[str, Any]:
        """Every field by its documented place alone."""
        order = "<" if self.little else ">"
        named = [field for field in self.fields if field.name]
        return {field.name: struct.unpack_from(order + field.code, raw, field.offset)[0] for field in named}


def rows(text: str) -> list[list[str]]:
    """Cells of the first table in ``text``, without its head."""
    found: list[list[str]] = []
    for line in text.lstrip("\n").splitlines():
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found[2:]


def code(kind: str) -> str:
    name, _, count = kind.rstrip("]").partition("[")
    return count + CODES[name]


def tables() -> dict[str, Table]:
    found: dict[str, Table] = {}
    for caption in CAPTION.finditer(TEXT):
        fields = tuple(
            Field(int(offset), int(size), code(kind), name)
            for offset, size, kind, name, _ in rows(TEXT[caption.end() :])
        )
        assert caption[1] not in found
        found[caption[1]] = Table(caption[1], caption[2] == "little", int(caption[3]), fields)
    return found


TABLES = tables()


def chapter(title: str) -> str:
    begin = TEXT.index(f"\n{title}\n")
    level = title.partition(" ")[0]
    stop = re.compile(rf"^#{{2,{len(level)}}} ", re.MULTILINE).search(TEXT, begin + len(title) + 2)
    return TEXT[begin : stop.start() if stop else None]


def modules() -> Iterator[ModuleType]:
    """Modules that can hold a record: all of the core and the tiers that import no torch."""
    for folder, package in (("kvstore", "kvstore"), ("tiers", "kvstore.tiers")):
        for file in sorted((TREE / folder).glob("[!_]*.py")):
            if not re.search(r"^import torch$|^from torch ", file.read_text(), re.MULTILINE):
                yield importlib.import_module(f"{package}.{file.stem}")


def structs() -> dict[str, struct.Struct]:
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, struct.Struct)
    }


def test_every_struct_of_the_code_has_a_table_and_every_table_a_struct() -> None:
    assert set(TABLES) == set(structs())


@pytest.mark.parametrize("name", sorted(TABLES))
def test_table_has_the_types_offsets_and_size_of_its_struct(name: str) -> None:
    table, actual = TABLES[name], structs()[name]
    assert table.format == actual.format
    assert table.size == actual.size
    offset = 0
    for field in table.fields:
        assert (field.offset, field.size) == (offset, struct.calcsize("<" + field.code)), field
        offset += field.size
    assert offset == table.size


def test_constants_in_the_text_are_those_of_the_code() -> None:
    said = {
        f"| version | {VERSION} |": header_rows(),
        f"first {records.KEY_TOKENS} tokens": chapter("### `blocks`"),
        f"This is {24 + 4 * records.KEY_TOKENS + 8} bytes": chapter("### `blocks`"),
        f"LMDB takes {records.KEY_LIMIT}": chapter("### `blocks`"),
        f"multiple of {identity.ANCESTOR_BLOCKS} blocks": chapter("### `blocks`"),
        f"1/{opening.INDEX_SHARE} of the budget": chapter("## The index"),
        f"one slot per {segments.INDEX_BYTES_A_SLOT} bytes": chapter("## The index"),
        f"at most {purge.KEPT}, and no more than take 1/{purge.INDEX_SHARE} of": chapter("### `purge`"),
        f"up to {purge.KEYS_A_STONE} block keys": chapter("### `purge`"),
        f"`size // {slots.MIN_SLOT_BYTES}`": chapter("### Arrays: `<number>.slots`"),
        f"one record per {days.INDEX_SHARE * days.RECORD_BYTES >> 10} KiB of the index and {days.MOST:,}": chapter(
            "### `days`"
        ),
        f"1 to {pins.NAME_LIMIT} bytes": chapter("### `names`"),
        f"Zeros follow up to {opening.SUPERBLOCK_BYTES} bytes": chapter("### TIER"),
        f"the {HEADER_BYTES - 8} bytes before it; lies at byte {HEADER_BYTES - 8}": chapter("### Slot header"),
    }
    assert {text for text, where in said.items() if text not in where} == set()
    assert (opening.INDEX_MIN, opening.INDEX_MAX) == (1 << 20, 8 << 30)
    assert layout.LAYOUT_VERSION == opening.VERSION == 1


def header_rows() -> str:
    found = rows(chapter("### Slot header").partition("80 bytes:\n")[2])
    return "\n".join(f"| {name} | {meaning} |" for *_, name, meaning in found)


def test_every_database_has_a_chapter_and_no_other_has() -> None:
    named = re.findall(r"^### `(\w+)`$", chapter("## The index"), re.MULTILINE)
    assert sorted(named) == sorted(Database)


def meta_keys() -> list[str]:
    return [key for key, _, _ in rows(chapter("### `meta`").partition("`meta`\n")[2])]


def test_every_meta_key_of_the_code_is_documented() -> None:
    whole = [
        *(segments.ALLOCATED, segments.BUDGET, segments.ASKED, segments.WHY, segments.FIXED, segments.NEXT),
        *(slotted.STAMP_BASE, assembly.BOOT),
        *(eviction.APPLIED, purge.EPOCH, purge.FLOOR, pins.EPOCH, quotas.EPOCH, scrubbing.WIPE_EPOCH, namespaces.NEXT),
    ]
    prefixes = [quotas._PREFIX, keeper.COUNTER, scrubbing.WIPED, scrubbing._FILL]
    assert {re.findall("`([^`]+)`", key)[0] for key in meta_keys()} == {key.decode() for key in whole + prefixes}


SIZES: dict[str, Any] = {"ram": "8MiB", "nvme": "16MiB", "ram_segment_bytes": "1MiB", "nvme_segment_bytes": "2MiB"}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A `ram_directory`."""
    directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def full(tmp_path: Path, memory: Path) -> Iterator[store.Store]:
    """A store that has something in every database: both tiers, two parts, a pin, a quota, a tombstone, a lease."""
    shape = layout.Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=256)
    values = np.random.default_rng(1).standard_normal((2, 2, 2, 700, 16)).astype(np.float32)
    tokens = np.arange(700, dtype=np.uint32)
    with kvstore.open(tmp_path / "store", ram_directory=memory, **SIZES) as opened:
        space = opened.namespace(shape, salt="tenant", label="tiny", ttl=3600)
        opened.save(space, tokens, HostKV.stacked(shape, values))
        assert opened.flush(30)
        opened.pin("greeting", space, tokens[:256])
        opened.set_quota("tenant", ram=4 << 20)
        opened.save(space, tokens[::-1].copy(), HostKV.stacked(shape, values))
        opened.evict(prefix=opened.match(space, tokens[::-1].copy()))
        opened.lease(opened.match(space, tokens), seconds=60)
        opened._core.keeper.flush_counters()
        yield opened


def test_a_real_store_has_only_documented_meta_keys(full: store.Store) -> None:
    known = [re.findall("`([^`]+)`", key)[0] for key in meta_keys()]
    for tier in full._core.tiers:
        with tier.index.read() as txn:
            found = [key for key, _ in txn.scan(Database.META)]
        assert found
        assert [key for key in found if not any(names(name.encode(), key) for name in known)] == []


def names(documented: bytes, key: bytes) -> bool:
    """A name that ends in a colon stands for all keys that begin with it."""
    return key.startswith(documented) if documented.endswith(b":") else key == documented


def test_a_real_store_has_only_documented_files(full: store.Store) -> None:
    patterns = [r"STORE", r"LOCK", r"owners/[0-9a-f]{32}"]
    in_tier = [r"TIER", r"index/(data|lock)\.mdb", r"[0-9a-f]{8}\.(seg|slots)"]
    path = full.settings.path
    memory = full.settings.ram_directory / ram_name(path, store_id(path))
    wanted = re.compile("|".join([*patterns, *(f"nvme/{one}" for one in in_tier)]))
    assert [file for file in files(path) if not wanted.fullmatch(file)] == []
    assert [file for file in files(memory) if not re.fullmatch("|".join(["HOME", *in_tier]), file)] == []


@pytest.mark.parametrize("top", [None, 0o700, 0o755, 0o750])
def test_files_are_0600_and_directories_0700_but_one_that_was_there_keeps_its_mode(
    tmp_path: Path, memory: Path, top: int | None
) -> None:
    path, umask = tmp_path / "store", os.umask(0)
    try:
        if top is not None:
            path.mkdir(mode=top)
            (path / "nvme").mkdir(mode=top)
        for _ in range(2):
            with kvstore.open(path, ram_directory=memory, **SIZES) as opened:
                shape = layout.Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
                opened.save(
                    opened.namespace(shape), range(64), HostKV.stacked(shape, np.ones((2, 2, 2, 64, 16), "<f4"))
                )
                assert opened.flush(30)
                tops = [path, memory / ram_name(path, store_id(path))]
                found = [(one, one.stat().st_mode & 0o777) for each in tops for one in (each, *each.rglob("*"))]
            assert {mode for one, mode in found if one.is_file()} == {0o600}
            assert {mode for one, mode in found if one.is_dir() and one not in (path, path / "nvme")} == {0o700}
            assert {mode for one, mode in found if one in (path, path / "nvme")} == {top or 0o700}
    finally:
        os.umask(umask)


def files(top: Path) -> list[str]:
    return sorted(str(file.relative_to(top)) for file in top.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", ["ram", "nvme"])
def test_every_block_can_be_found_and_checked_by_the_document_alone(full: store.Store, name: str) -> None:
    (tier,) = (one for one in full._core.tiers if one.name == name)
    prefix, block = TABLES["kvstore.records._PREFIX"], TABLES["kvstore.records._BLOCK"]
    segment_table, header_table = TABLES["kvstore.records._SEGMENT"], TABLES["kvstore.header._FIELDS"]
    checked = 0
    with tier.index.read() as txn:
        cut = {int.from_bytes(key, "big"): segment_table.read(raw) for key, raw in txn.scan(Database.SEGMENTS)}
        blocks = list(txn.scan(Database.BLOCKS))
        places = dict(txn.scan(Database.SLOTS))
    for key, raw in blocks:
        entry, place = block.read(raw), prefix.read(key)
        if entry["state"] == State.WRITING:  # the mover may still be busy with what was evicted
            continue
        where = entry["segment"].to_bytes(4, "big") + entry["slot"].to_bytes(4, "big")
        assert places[where] == key
        size = cut[entry["segment"]]["slot_bytes"]
        image = (tier.directory / f"{entry['segment']:08x}.seg").read_bytes()[entry["slot"] * size :][:size]
        assert struct.unpack_from("<Q", image, 4088)[0] == xxhash.xxh3_64_intdigest(image[:4088])
        header = header_table.read(image)
        same = ("key", "tokens", "checksum", "codec")
        assert [header[field] for field in same] == [entry[field] for field in same]
        assert (header["magic"], header["group"], header["shard"]) == (MAGIC, place["group"], place["shard"])
        payload = image[4096 : 4096 + header["payload_bytes"]]
        assert xxhash.xxh3_128_digest(payload) == header["checksum"]
        tokens = np.frombuffer(key[24:-8] + raw[block.size :], ">u4")
        assert len(tokens) == entry["tokens"] == len(payload) // (2 * 2 * 2 * 16 * 4)
        assert key[-8:] == entry["key"][:8]
        generations = np.fromfile(tier.directory / f"{entry['segment']:08x}.slots", "<u8")
        assert generations[entry["slot"]] == entry["generation"]
        checked += 1
    assert checked >= 3


def test_header_fields_lie_where_the_document_says() -> None:
    header = Header(bytes(range(32)), 3, 5, 77, 123_456, bytes(range(100, 116)))
    found = TABLES["kvstore.header._FIELDS"].read(header.pack())
    for field in ("key", "group", "shard", "tokens", "payload_bytes", "checksum", "codec"):
        assert found[field] == getattr(header, field)
