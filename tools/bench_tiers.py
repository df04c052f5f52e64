"""How close `ram` and `nvme` come to memory and disk: saves, loads, reads and writes beside the machine's own rates.

Ours and the limit alternate in one process over the same number of bytes, with the same threads. What the store does
besides moving bytes (keys, index, checksums, promotion) is in our time. Which pages of memory and which blocks of a
disk one happens to get makes a difference, so both sides have the same ones, and there are several stores, each made
anew. Must not know models.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore.errors import KVStoreError
from kvstore.events import Event, Moved
from kvstore.header import HEADER_BYTES, slot_bytes
from kvstore.kv import Bytes, HostKV
from kvstore.layout import Layout
from kvstore.records import block_names
from kvstore.settings import Settings
from kvstore.sizes import MIB
from kvstore.slots import SlotRef
from kvstore.tiers.medium import aligned_buffer, segment_path
from kvstore.tiers.slotted import SlottedTier
from kvstore.tools.media import Media
from kvstore.tools.ratios import Paired, Target, alternate, figure, paired
from kvstore.tools.scratch import scratch_store

LAYERS, HEADS, DIM = 30, 3, 64
"""SmolLM2-135M's: 46,080 bytes a token in float32."""
SHARE = Target(0.8)
CPU = Target(0.6, at_most=True)
MEMORY_TIMES = 5
"""So many more pairs of copies than of disk transfers: they are quick, and memory's speed wavers between them."""
FLUSH_S = 120.0
SETTLE_S = 3.0
"""Seconds in which a store's threads finish what was begun: the next segment made, pages joined for reads."""


@dataclass(slots=True)
class Moves:
    """An observer that notes when the mover's batches began."""

    begun: list[float] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Moved) and event.target == "nvme":
            self.begun.append(time.perf_counter() - event.seconds)


class Subject:
    """A store, KV of ``tokens`` tokens to save, and a buffer to load into that is used again and again."""

    def __init__(self, path: Path, tokens: int, nvme: bool) -> None:
        self.layout = Layout.uniform(layers=LAYERS, heads=HEADS, k_dim=DIM)
        self.tokens = tokens // self.layout.block_tokens * self.layout.block_tokens
        self.bytes = self.tokens * self.layout.token_bytes()
        budget = 3 * self.bytes + 256 * MIB
        self.settings = Settings.resolve(path, ram=budget, nvme=budget if nvme else 0, hbm=0)
        self.moves = Moves()
        self.store = kvstore.open(settings=self.settings, observers=(self.moves,))
        self.space = self.store.namespace(self.layout, label="bench")
        shape = (LAYERS, 2, HEADS, self.tokens, DIM)
        self._source, self._target = _tensor(shape), _tensor(shape)
        self._source[:] = np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)
        self._target[:] = 1
        self.source, self.target = HostKV.stacked(self.layout, self._source), HostKV.stacked(self.layout, self._target)
        self._saved = 0
        self.cpu: list[float] = []

    def ids(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Tokens of the last conversation that was saved."""
        ids = np.arange(self.tokens, dtype=np.uint32)
        ids[0] = self._saved
        return ids

    def save(self) -> float:
        """Seconds of a save of blocks that no tier has, into slots that were used before."""
        self.store.evict(everything=True)
        self._saved += 1
        ids = self.ids()
        start = time.perf_counter()
        saved = self.store.save(self.space, ids, self.source)
        seconds = time.perf_counter() - start
        self._expect(saved.new_blocks * self.layout.block_tokens, "saved")
        return seconds

    def load(self) -> float:
        """Seconds of match and load of the last conversation, from where it is."""
        ids = self.ids()
        used = _cpu_seconds()
        start = time.perf_counter()
        loaded = self.store.load(self.store.match(self.space, ids), self.target)
        seconds = time.perf_counter() - start
        self.cpu.append((_cpu_seconds() - used) / (self.bytes / 1e9))
        self._expect(loaded.tokens, "loaded")
        return seconds

    def read(self) -> float:
        """Seconds of match and load with nothing in `ram`."""
        self.store.evict(everything=True, tier="ram")
        return self.load()

    def write(self) -> float:
        """Seconds from the beginning of the mover's first batch until everything saved is durable on `nvme`."""
        self.moves.begun.clear()
        self.save()
        if not self.store.flush(FLUSH_S):
            raise KVStoreError(
                "not all of it came to nvme", "the disk is too slow or too full for this benchmark: use fewer --tokens"
            )
        return time.perf_counter() - min(self.moves.begun)

    def emptied(self, limit: Callable[[], float], tier: str | None = None) -> float:
        """``limit``, with nothing in a tier, or in any: it may use its slots."""
        self.store.evict(everything=True, tier=tier)
        return limit()

    def places(self, tier: SlottedTier) -> list[SlotRef]:
        """The slots of a tier in which the last conversation is."""
        chain, part = self.store.match(self.space, self.ids()).chain, next(iter(self.layout.parts()))
        found = [entry.ref for entry in tier.find(block_names(chain, part)) if entry is not None]
        self._expect(len(found) * self.layout.block_tokens, f"in {tier.name}")
        return found

    def images(self) -> list[Bytes]:
        """The memory of these slots in `ram`."""
        ram, size = self.store._core.ram, slot_bytes(self.layout.payload_bytes())
        return [ram.slot(ref, size) for ref in self.places(ram)]

    def memory(self) -> tuple[Bytes, Bytes, list[Bytes]]:
        """What a save copies from, what a load copies to, and the payloads' memory in `ram`."""
        end = HEADER_BYTES + self.layout.payload_bytes()
        payloads = [image[HEADER_BYTES:end] for image in self.images()]
        return self._source.reshape(-1).view(np.uint8), self._target.reshape(-1).view(np.uint8), payloads

    def disk(self) -> Path:
        """The segment of `nvme` in which it is, or begins."""
        nvme = self.store._core.nvme
        assert nvme is not None
        return segment_path(nvme.directory, self.places(nvme)[0].segment)

    def check(self) -> None:
        """Raises KVStoreError unless the last load gave the bytes that were saved."""
        if not np.array_equal(self._source, self._target):
            raise KVStoreError("a load gave other bytes than were saved", "this is a defect: report it")

    def _expect(self, tokens: int, what: str) -> None:
        if tokens != self.tokens:
            problem = f"only {tokens} of {self.tokens} tokens were {what}"
            raise KVStoreError(
                problem, "another process fills the disk or tmpfs: free some space, or use fewer --tokens"
            )


@dataclass(slots=True)
class Samples:
    """What was measured of all stores. pairs: seconds of ours and of the limit, by figure. alone: a limit's own."""

    pairs: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    alone: dict[str, list[float]] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)


def measure(
    tokens: int, pairs: int, stores: int, folder: Path, step: Callable[[str, int, int | None], None]
) -> dict[str, Any]:
    """All figures. pairs: of each store. folder: on the disk to be measured; nothing stays there."""
    samples = Samples()

    def compare(name: str, ours: Callable[[], float], limit: Callable[[], float], times: int = 1) -> None:
        ours_s, limit_s = samples.pairs.setdefault(name, ([], []))
        before, count = len(ours_s), times * pairs
        for side, more in zip(
            (ours_s, limit_s),
            alternate(ours, limit, count, lambda done: step(name, before + done, stores * count)),
            strict=True,
        ):
            side += more

    for _ in range(stores):
        with ExitStack() as stack:
            subject, media = _made(stack, folder, tokens, nvme=False)
            subject.save()  # where all others will be, now that the tier has grown
            media.use_memory(*subject.memory())
            compare("ram.save_over_memcpy", subject.save, lambda: subject.emptied(media.copy_in), MEMORY_TIMES)  # noqa: B023
            subject.save()
            compare("ram.load_over_memcpy", subject.load, media.copy_out, MEMORY_TIMES)
            subject.load()
            subject.check()
        with ExitStack() as stack:
            subject, media = _made(stack, folder, tokens, nvme=True)
            samples.alone.setdefault("raw_write_private", []).extend(media.raw_write() for _ in range(pairs))
            samples.alone.setdefault("raw_read_private", []).extend(media.raw_read() for _ in range(pairs))
            subject.write()
            subject.read()
            time.sleep(SETTLE_S)
            subject.write()  # where all others will be, now that the tiers have grown
            media.use_slots(subject.images(), subject.disk())
            compare("nvme.write_over_raw", subject.write, lambda: subject.emptied(media.raw_write))  # noqa: B023
            subject.write()
            subject.cpu.clear()
            compare("nvme.read_over_raw", subject.read, lambda: subject.emptied(media.raw_read, "ram"))  # noqa: B023
            samples.cpu += subject.cpu[1:]
            subject.read()
            subject.check()
            direct = media.direct
    return _figures(samples, subject, direct) | {"pairs": pairs, "stores": stores}


def _figures(samples: Samples, subject: Subject, direct: bool) -> dict[str, Any]:
    """For JSON. subject: any of them."""
    size, settings, cpu = subject.bytes, subject.settings, figure(samples.cpu, CPU)
    found: dict[str, Paired] = {name: paired(*both, SHARE) for name, both in samples.pairs.items()}
    figures = {name: both.to_dict() for name, both in found.items()} | {"nvme.cpu_s_per_gb_read": cpu.to_dict()}
    shares: dict[str, dict[str, float]] = {"ram": {}, "nvme": {}}
    for name, both in found.items():
        tier, key = name.split(".")
        shares[tier][key] = both.ratio.median
    shares["nvme"]["cpu_s_per_gb_read"] = cpu.median
    verdicts = {name: str(both.ratio.verdict) for name, both in found.items()}
    return {
        **shares,
        "verdicts": verdicts | {"nvme.cpu_s_per_gb_read": str(cpu.verdict)},
        "limits_gbps": {
            "memcpy_in": size / figure(found["ram.save_over_memcpy"].limit).median / 1e9,
            "memcpy_out": size / figure(found["ram.load_over_memcpy"].limit).median / 1e9,
            "raw_write": size / figure(found["nvme.write_over_raw"].limit).median / 1e9,
            "raw_read": size / figure(found["nvme.read_over_raw"].limit).median / 1e9,
            **{name: size / figure(seconds).median / 1e9 for name, seconds in samples.alone.items()},
        },
        "bytes": size,
        "o_direct": direct,
        "copy_threads": settings.copy_threads,
        "io_threads": settings.io_threads,
        "figures": figures,
    }


def _made(stack: ExitStack, folder: Path, tokens: int, nvme: bool) -> tuple[Subject, Media]:
    subject = Subject(stack.enter_context(scratch_store(folder)), tokens, nvme)
    stack.callback(subject.store.close)
    subject.save()
    subject.load()
    time.sleep(SETTLE_S)
    media = stack.enter_context(Media(subject.settings, subject.layout, subject.bytes))
    return subject, media


def _tensor(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Page-aligned memory in huge pages, as the adapter's cache buffers have it."""
    return aligned_buffer(4 * math.prod(shape)).view(np.uint32).reshape(shape)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
