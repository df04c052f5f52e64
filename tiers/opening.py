"""Making and opening a tier's directory: its superblock, its index, its budget.

The superblock is written last, so a directory without one was never finished and may be made anew. Only the process
that holds the store's opening lock comes here.
"""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from kvstore.errors import BudgetError, DamagedError, FormatError, PathError
from kvstore.events import Events, Evicted, EvictReason, Notice
from kvstore.host import free_bytes
from kvstore.index import Index
from kvstore.records import Segment
from kvstore.sizes import MIB, format_size
from kvstore.tiers import integrity, segments
from kvstore.tiers.slotted import SlottedTier
from kvstore.transaction import Database, Transaction, get_number, put_number

SUPERBLOCK = "TIER"
SUPERBLOCK_BYTES = 4096
KEPT = "HOME"
"""A file of the store's own in the directory on tmpfs."""
MAGIC = b"KVTIER\r\n"
VERSION = 1
_FIELDS = struct.Struct("<8sII16sQQ")
_DIGEST = struct.Struct("<Q")

INDEX_SHARE = 128
"""One part in this many of a budget is its index: enough for slots of 0.75 MiB and more."""
INDEX_MIN, INDEX_MAX = 1 << 20, 8 << 30
SMALLEST_SEGMENT = 64 << 10
USEFUL = 64 << 20
"""The least budget that serves any model: two blocks, of 1 to 10 MiB each, have to fit beside the index."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a tier's directory was made with. Sizes in bytes."""

    store: bytes
    index_bytes: int
    segment_bytes: int
    version: int = VERSION

    def pack(self) -> bytes:
        """The file's 4096 bytes."""
        body = _FIELDS.pack(MAGIC, self.version, 0, self.store, self.index_bytes, self.segment_bytes)
        return (body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))).ljust(SUPERBLOCK_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes, where: Path) -> Superblock:
        """From the file. Raises DamagedError, or FormatError for a version this package does not know."""
        size = _FIELDS.size
        if len(raw) != SUPERBLOCK_BYTES or _DIGEST.unpack_from(raw, size)[0] != xxhash.xxh3_64_intdigest(raw[:size]):
            raise DamagedError(
                f"{where} is damaged", f"remove {where.parent}: its cached blocks are lost, nothing else"
            )
        magic, version, _, store, index_bytes, segment_bytes = _FIELDS.unpack_from(raw)
        if magic != MAGIC:
            raise FormatError(f"{where} is not a tier of a store", "choose another path")
        if version > VERSION:
            raise FormatError(f"{where} has format {version}, this kvstore knows {VERSION}", "upgrade kvstore")
        return cls(store, index_bytes, segment_bytes, version)


def default_index_bytes(budget: int) -> int:
    """Size of the index of a tier with this budget."""
    return min(max(budget // INDEX_SHARE, INDEX_MIN), INDEX_MAX) // 4096 * 4096


def open_index(
    name: str,
    directory: Path,
    *,
    store: bytes,
    budget: int,
    segment_bytes: int,
    index_bytes: int | None,
    durable: bool,
    alone: bool,
    events: Events,
    asked: int | None = None,
    why: str = "",
) -> tuple[Index, Superblock]:
    """The tier's index, its directory made when it is new, its budget in force.

    asked: the budget before the host had its say, where that is another; why: what it said. alone: no other process has
    the store open; only then may a budget shrink, or a tier be made anew. Raises BudgetError, FormatError,
    DamagedError, NoSpaceError.
    """
    superblock = _existing(directory, store, alone, name, events)
    if superblock is None:
        wanted = index_bytes or default_index_bytes(budget)
        superblock = Superblock(store, wanted, segment_bytes)
        if budget < wanted + SUPERBLOCK_BYTES + SMALLEST_SEGMENT:
            problem = f"the {name} budget of {format_size(budget)} is too small: its index takes {format_size(wanted)}"
            raise BudgetError(problem, _enough(name, wanted))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif alone and index_bytes is None:
        superblock = _widened(directory, superblock, default_index_bytes(budget), name, events)
    fresh = not (directory / SUPERBLOCK).exists()
    try:
        index = Index(directory / "index", superblock.index_bytes, durable=durable, name=name)
    except BaseException:
        if fresh:
            shutil.rmtree(directory / "index", ignore_errors=True)
        raise
    try:
        fixed = index.allocated + SUPERBLOCK_BYTES + (4096 if (directory / KEPT).exists() else 0)
        index.write(lambda txn: _account(txn, fixed, budget, (asked or budget, why), alone, name))
        if fresh:
            index.sync()
            _write_superblock(directory, superblock)
    except BaseException:
        index.close()
        raise
    return index, superblock


def _widened(directory: Path, superblock: Superblock, wanted: int, name: str, events: Events) -> Superblock:
    """The superblock after the index got what a larger budget gives it; as it was where the medium has no room.

    The file grows before the superblock says so: a crash in between leaves a file longer than it need be.
    """
    if wanted <= superblock.index_bytes:
        return superblock
    try:
        fd = os.open(directory / "index" / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return superblock
    try:
        os.posix_fallocate(fd, 0, wanted)
    except OSError as error:
        events.emit(Notice("index not grown", f"{name}: {format_size(wanted)}: {error.strerror}"))
        return superblock
    finally:
        os.close(fd)
    grown = replace(superblock, index_bytes=wanted)
    _write_superblock(directory, grown)
    return grown


def _existing(directory: Path, store: bytes, alone: bool, name: str, events: Events) -> Superblock | None:
    """The superblock of a finished directory; None after what is left of an unfinished or foreign one is gone."""
    path = directory / SUPERBLOCK
    finished = path.exists()
    why = "it was never finished"
    if finished:
        superblock = Superblock.unpack(path.read_bytes(), path)
        if superblock.version == VERSION and superblock.store == store:
            return superblock
        why = "it is of an older format" if superblock.version != VERSION else "it belonged to another store"
    elif not directory.exists() or all(entry.name == KEPT for entry in directory.iterdir()):
        return None
    strange = [entry.name for entry in directory.iterdir() if not _ours(entry)]
    if strange:
        raise FormatError(
            f"{directory} holds files that are not of a {name} tier ({', '.join(sorted(strange)[:3])})",
            "choose another path, or move these files away",
        )
    if not alone:
        raise FormatError(
            f"{directory} would be made anew ({why}), but another process has the store open",
            "close the store in all other processes first",
        )
    if finished:
        events.emit(Notice("emptied", f"{directory} is made anew: {why}"))
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != KEPT:
            entry.unlink()
    return None


def _ours(entry: Path) -> bool:
    return entry.name in ("index", SUPERBLOCK, f"{SUPERBLOCK}.new", KEPT) or entry.suffix in (".seg", ".slots")


def _write_superblock(directory: Path, superblock: Superblock) -> None:
    fresh = directory / f"{SUPERBLOCK}.new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, superblock.pack())
        os.fsync(fd)
    finally:
        os.close(fd)
    fresh.rename(directory / SUPERBLOCK)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _account(txn: Transaction, fixed: int, budget: int, wish: tuple[int, str], alone: bool, name: str) -> None:
    """Put the budget in force, and count the files that do not belong to a segment.

    What others were given stays theirs: a host that has less to give now does not keep this process from joining them.
    wish: what was asked for, and why it is not given. Who opens a store as it stands has no wish of its own.
    """
    asked, why = wish
    allocated = get_number(txn, segments.ALLOCATED) - get_number(txn, segments.FIXED) + fixed
    before = get_number(txn, segments.BUDGET)
    if before and asked < before and not alone:
        raise BudgetError(
            f"the {name} budget cannot shrink from {format_size(before)} to {format_size(asked)} while others use it",
            f"close the other processes first, or open with {name}={format_size(before)}",
        )
    budget = budget if alone else max(before, budget)
    if budget < fixed + SMALLEST_SEGMENT:
        raise BudgetError(
            f"the {name} budget of {format_size(budget)} is too small: its index takes {format_size(fixed)}",
            f"{_enough(name, fixed)}; or remove the tier's directory, since an index never shrinks",
        )
    put_number(txn, segments.FIXED, fixed)
    put_number(txn, segments.ALLOCATED, allocated)
    put_number(txn, segments.BUDGET, budget)
    if asked != before:
        put_number(txn, segments.ASKED, asked)
    if (asked, budget) != (before, before):
        txn.put(Database.META, segments.WHY, why.encode() if budget < asked else b"")


def _enough(name: str, fixed: int) -> str:
    need = format_size(max(USEFUL, -(-fixed // MIB) * MIB + USEFUL // 2))
    return f"set {name} to {need} or more: two blocks of a model, of 1 to 10 MiB each, have to fit beside the index"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tier's index has on record, in bytes. why: the host could not give what was asked for."""

    budget: int
    asked: int
    why: str


def on_record(directory: Path, *, durable: bool) -> Budget | None:
    """The budget in force of a tier that this process does not have open; None where there is none. Writes nothing.

    Raises PathError, DamagedError, FormatError.
    """
    block = directory / SUPERBLOCK
    if not block.is_file():
        return None
    try:
        size = Superblock.unpack(block.read_bytes(), block).index_bytes
    except OSError as error:
        raise PathError(f"{block} cannot be read: {error.strerror}", "run as the user the store belongs to") from error
    index = Index(directory / "index", size, durable=durable, name=directory.name)
    try:
        with index.read() as txn:
            budget, asked = (get_number(txn, name) for name in (segments.BUDGET, segments.ASKED))
            why = (txn.get(Database.META, segments.WHY) or b"").decode()
            return Budget(budget, asked, why) if budget else None
    finally:
        index.close()


def medium_room(directory: Path) -> tuple[int, int]:
    """Bytes that a tier in ``directory`` has taken on its medium, and bytes that are free there."""
    taken = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) if directory.exists() else 0
    return taken, free_bytes(directory)


def refuse_larger_than_medium(name: str, budget: int, directory: Path) -> None:
    """Raises BudgetError when a budget exceeds what the medium has free, what the tier has taken already included.

    A budget that is in force is a ceiling that others fill the disk below: it does not keep a store from being opened.
    """
    room = sum(medium_room(directory))
    if budget <= room or ((known := on_record(directory, durable=True)) is not None and budget <= known.budget):
        return
    most = room // 10 * 9 // MIB * MIB
    less = f"open with {name}={format_size(most)} or less" if most >= 2 * INDEX_MIN else "choose another path"
    raise BudgetError(
        f"the {name} budget of {format_size(budget)} is larger than the {format_size(room)} its medium has",
        f"free some space, or {less}",
    )


def _warmth(tier: SlottedTier, segment: Segment) -> float:
    """The mean stamp of a segment's blocks: one young block among old ones does not keep them all; 0 without any."""
    stamps = tier.arrays.stamps(segment)
    return float(stamps[stamps > 0].mean()) if stamps.any() else 0.0


def shrink(tier: SlottedTier) -> int:
    """Give the coldest segments back until the tier fits its budget; returns how many blocks went."""
    gone = 0
    while tier.allocated() > tier.budget():
        known = [segment for segment in tier.segment_list() if not segment.allocating]
        if not known:
            break
        coldest = min(known, key=lambda segment: _warmth(tier, segment))
        gone += integrity.drop_segments(tier, {coldest.number})
    if gone:
        tier.events.emit(Evicted(tier.name, EvictReason.SHRINK, gone))
    return gone
