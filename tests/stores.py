"""Small stores and single tiers over real media, and KV whose every byte follows from its block's key.

Content that can be recomputed is what makes "never a wrong byte" testable without a copy of everything saved.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.core import Wrap
from kvstore.events import Event, Events
from kvstore.header import HEADER_BYTES, Header, inspect_slot, payload_checksum, slot_bytes
from kvstore.host import boottime_ns
from kvstore.identity import Chain, as_tokens, chain, salt_digest
from kvstore.kv import Bytes, HostKV
from kvstore.layout import Layout, Part
from kvstore.match import Namespace
from kvstore.policy import POLICIES
from kvstore.records import BlockName, Entry, NamespaceRecord, block_names
from kvstore.store import Loaded, Store
from kvstore.tiers import integrity, opening
from kvstore.tiers.ledger import Placement
from kvstore.tiers.medium import Medium, aligned_buffer
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.reservation import Reserved
from kvstore.tiers.slotted import SlottedTier, Space

PART = Part()
BLOCK = 16
LAYOUT = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=BLOCK)
"""8 KiB a payload, 12 KiB a slot."""
WIDE = Layout.uniform(layers=2, heads=4, k_dim=16, block_tokens=BLOCK)
"""16 KiB a payload, 20 KiB a slot."""
SLOT = slot_bytes(LAYOUT.payload_bytes())
SHM = Path("/dev/shm")
STORE_ID = b"a store for test"


@contextmanager
def shm_directory() -> Iterator[Path]:
    """A directory on tmpfs, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir=SHM))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def tokens_of(seed: int, count: int) -> npt.NDArray[np.uint32]:
    """``count`` token ids that differ from those of any other seed in the first of them."""
    ids = np.random.default_rng(seed).integers(0, 50_000, count, np.uint32)
    ids[:1] = 100_000 + seed
    return ids


def tree_bytes(directory: Path) -> int:
    """Bytes of all files below a directory, by their lengths."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


# -------------------------------------------------------------------- one tier


def content(key: bytes, size: int) -> Bytes:
    """The payload that belongs to a key."""
    return np.random.default_rng(np.frombuffer(key, np.uint64)).integers(0, 256, size, np.uint8)


def record_of(layout: Layout, salt: str = "") -> NamespaceRecord:
    """The record of a layout's namespace under a salt."""
    return NamespaceRecord(layout.root(salt), salt_digest(salt), 0, 0, "", layout.to_json())


class TierBench:
    """One tier with everything around it that it needs: index, medium, budget, and a clock that tests turn."""

    def __init__(
        self,
        kind: type[SlottedTier],
        directory: Path,
        medium: Medium,
        *,
        budget: int,
        segment_bytes: int,
        index_bytes: int = 1 << 20,
        policy: str = "lru",
        owner: bytes = b"the only process",
        keeps_bytes: bool = True,
    ) -> None:
        self.told: list[Event] = []
        self.events = Events([self.told.append])
        self.directory, self.keeps_bytes = directory, keeps_bytes
        self.pinned: set[bytes] = set()
        self.quotas: dict[bytes, int] = {}
        self.clock = boottime_ns()
        self.index, block = opening.open_index(
            medium.name,
            directory,
            store=STORE_ID,
            budget=budget,
            segment_bytes=segment_bytes,
            index_bytes=index_bytes,
            durable=kind is not RamTier,
            alone=True,
            events=self.events,
        )
        self.tier = kind(
            medium.name,
            directory,
            self.index,
            medium,
            owner=owner,
            segment_bytes=block.segment_bytes,
            policy=POLICIES[policy],
            events=self.events,
            pins=lambda: frozenset(self.pinned),
            quota=self.quotas.get,
            respects_leases=True,
        )

    def now(self) -> int:
        """A later moment, by a second."""
        self.clock += 1_000_000_000
        return self.clock

    def space(self, layout: Layout = LAYOUT, salt: str = "") -> Space:
        """The tier's namespace."""
        return self.tier.space(record_of(layout, salt))

    def chain(self, seed: int, blocks: int, layout: Layout = LAYOUT, salt: str = "", tail: int = 0) -> Chain:
        """A chain of full blocks, and a partial one of ``tail`` tokens."""
        tokens = tokens_of(seed, blocks * layout.block_tokens + tail)
        return chain(layout.root(salt), tokens, layout.block_tokens)

    def names(self, seed: int, blocks: int, layout: Layout = LAYOUT, salt: str = "", tail: int = 0) -> list[BlockName]:
        """Names of such a chain's blocks."""
        return block_names(self.chain(seed, blocks, layout, salt, tail), PART)

    def reserve(self, names: Sequence[BlockName], layout: Layout = LAYOUT, salt: str = "", epoch: int = 0) -> Reserved:
        """Reserve slots for blocks of a layout."""
        size = slot_bytes(layout.payload_bytes())
        return self.tier.reserve(names, self.space(layout, salt), size, epoch, 10.0, now=self.now())

    def fill(self, placed: Sequence[Placement], layout: Layout = LAYOUT) -> list[tuple[Placement, bytes]]:
        """Write each placement's content; returns what `publish` takes."""
        size = slot_bytes(layout.payload_bytes())
        images: list[Bytes] = []
        done: list[tuple[Placement, bytes]] = []
        for placement in placed:
            name = placement.name
            payload = content(name.key, layout.payload_bytes(tokens=name.tokens))
            checksum = payload_checksum(payload)
            image = aligned_buffer(size)
            header = Header(name.key, name.part.group, name.part.shard, name.tokens, len(payload), checksum)
            image[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
            image[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
            images.append(image)
            done.append((placement, checksum))
        if isinstance(self.tier, RamTier):
            for placement, image in zip(placed, images, strict=True):
                np.copyto(self.tier.slot(placement.ref, size), image)
        elif isinstance(self.tier, NvmeTier):
            self.tier.write([placement.ref for placement in placed], size, images)
            self.tier.sync([placement.ref for placement in placed])
        return done

    def save(self, names: Sequence[BlockName], layout: Layout = LAYOUT, salt: str = "") -> Reserved:
        """Reserve, write and publish; returns what was reserved."""
        reserved = self.reserve(names, layout, salt)
        self.tier.publish(self.fill(reserved.placed, layout), now=self.now())
        self.settle()
        return reserved

    def present(self, names: Sequence[BlockName]) -> list[bool]:
        """Whether each block is READY."""
        return [entry is not None and entry.state.name == "READY" for entry in self.tier.find(names)]

    def read(self, entry: Entry, layout: Layout = LAYOUT) -> Bytes | None:
        """A block's payload as the tier has it; None when it is not the block, or changed meanwhile."""
        size = slot_bytes(layout.payload_bytes())
        payload = layout.payload_bytes(tokens=entry.tokens)
        image = aligned_buffer(size)
        if isinstance(self.tier, RamTier):
            np.copyto(image, self.tier.slot(entry.ref, size))
        elif isinstance(self.tier, NvmeTier):
            self.tier.read([entry.ref], size, [image])
        same = self.tier.unchanged([entry])[0]
        if not same or inspect_slot(image, entry.key, entry.tokens, payload, entry.checksum) is not None:
            return None
        return image[HEADER_BYTES : HEADER_BYTES + payload]

    def settle(self) -> None:
        """Wait until what was queued before is committed, and no segment is being made."""
        self.index.write(lambda txn: None)
        with self.tier._grower._under_way:
            pass

    def problems(self, layout: Layout = LAYOUT) -> list[str]:
        """What is wrong with books, files and, of blocks in slots of this layout's size, contents."""
        self.settle()
        found = integrity.check(self.tier, {self.tier.owner})
        if not self.keeps_bytes:
            return found
        from kvstore.transaction import Database

        with self.index.read() as txn:
            entries = [Entry.unpack(raw) for _, raw in txn.scan(Database.BLOCKS)]
        sizes = {segment.number: segment.slot_bytes for segment in self.tier.segment_list()}
        for entry in entries:
            if entry.state.name != "READY":
                continue
            for one in (LAYOUT, WIDE):
                if sizes[entry.ref.segment] == slot_bytes(one.payload_bytes()):
                    payload = self.read(entry, one)
                    if payload is None or not np.array_equal(payload, content(entry.key, len(payload))):
                        found.append(f"{entry.ref} does not hold its block's bytes")
        return found

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()


# -------------------------------------------------------------------- a store


def kv_of(tokens: Sequence[int] | npt.NDArray[np.uint32], layout: Layout = LAYOUT) -> npt.NDArray[np.float32]:
    """KV ``[layers, 2, heads, tokens, dim]`` in which each position's values follow from all tokens up to it."""
    shape = layout.groups[0][0]
    ids = as_tokens(tokens).astype(np.uint64)
    state = np.cumsum((ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
    state = state * (np.arange(len(ids), dtype=np.uint64) * np.uint64(2) + np.uint64(1))
    width = len(layout.groups[0]) * 2 * shape.heads * shape.k_dim
    lanes = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (state[None, :] ^ lanes[:, None]) * np.uint64(0x94D049BB133111EB)
    values = ((mixed >> np.uint64(40)).astype(np.float32)).reshape(
        len(layout.groups[0]), 2, shape.heads, shape.k_dim, len(ids)
    )
    return np.ascontiguousarray(np.moveaxis(values, 3, 4))


def came_to_rest(store: Store, seconds: float = 60) -> bool:
    """Whether the mover came to an end, be it by giving up blocks; `Store.flush` is False then."""
    store.flush(seconds)
    mover = store._core.mover
    return mover is None or mover.idle


class StoreBench:
    """A small store whose `ram` lies in a directory of its own; reopened at will, with every event kept."""

    def __init__(self, path: Path, shm: Path, **settings: Any) -> None:
        self.path, self.shm = path, shm
        self.told: list[Event] = []
        self.settings: dict[str, Any] = {
            "ram": "8MiB",
            "nvme": "16MiB",
            "ram_segment_bytes": "1MiB",
            "nvme_segment_bytes": "2MiB",
            "verify_share": 1,
            "copy_threads": 2,
            "lock_timeout_s": 10.0,
            **settings,
        }
        self.wrap: Wrap | None = None
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The open store, opened when it is not."""
        if self._store is None:
            self._store = kvstore.open(
                self.path, ram_directory=self.shm, observers=[self.told.append], wrap=self.wrap, **self.settings
            )
        return self._store

    def space(self, layout: Layout = LAYOUT, salt: str = "") -> Namespace:
        """A namespace of the store."""
        return self.store.namespace(layout, salt=salt)

    def save(self, tokens: npt.NDArray[np.uint32], layout: Layout = LAYOUT, salt: str = "") -> Any:
        """Save the KV of these tokens."""
        return self.store.save(self.space(layout, salt), tokens, HostKV.stacked(layout, kv_of(tokens, layout)))

    def load(self, tokens: npt.NDArray[np.uint32], layout: Layout = LAYOUT, salt: str = "") -> Loaded:
        """Load what is stored of these tokens; a wrong byte among what was served fails the test."""
        match = self.store.match(self.space(layout, salt), tokens)
        buffer = np.full_like(kv_of(tokens, layout), np.nan)
        loaded = self.store.load(match, HostKV.stacked(layout, buffer))
        expected = kv_of(tokens, layout)[..., : loaded.tokens, :]
        assert np.array_equal(buffer[..., : loaded.tokens, :], expected), "a wrong byte was served"
        assert sum(loaded.by_tier.values()) == loaded.tokens
        return loaded

    def of(self, kind: type, **fields: object) -> list[Any]:
        """Events of a kind whose fields have these values."""
        return [
            event
            for event in self.told
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def tier(self, name: str) -> SlottedTier:
        """One tier of the open store, to look at or to damage."""
        return next(tier for tier in self.store._core.tiers if tier.name == name)

    def settle(self) -> None:
        """Wait for the mover, and for what was queued for the indexes."""
        assert came_to_rest(self.store) or self.store.stats().mover_paused, "the mover did not come to an end"
        for tier in self.store._core.tiers:
            tier.index.write(lambda txn: None)

    def drop(self, tier: str) -> None:
        """Empty one tier."""
        self.store.evict(everything=True, tier=tier)

    def close(self) -> None:
        """Close the store, if it is open."""
        if self._store is not None:
            self._store.close()
            self._store = None


StoreMaker = Callable[..., StoreBench]
