"""KV whose every byte follows from its tokens, its salt and its layout, and small stores to keep it in.

Whatever a store returns can be checked without remembering what was saved: position i depends on tokens 0 … i, as a
model's KV does. Imports no torch, so that child processes start quickly.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.kv import HostKV
from kvstore.layout import LayerShape, Layout, Part
from kvstore.store import Store

PLAIN = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
"""512 bytes a token, slots of 12 KiB."""
NARROW = Layout.uniform(layers=3, heads=1, k_dim=24, v_dim=8, dtype="bfloat16", block_tokens=64)
"""K and V of different dims; slots of 16 KiB."""
PARTED = Layout("float16", ((LayerShape(1, 8, 8),) * 2, (LayerShape(2, 4, 4),)), 16, (), 2)
"""Two groups and two shards: four parts a block."""

SMALL: dict[str, Any] = {
    "ram": "2MiB",
    "nvme": "3MiB",
    "ram_segment_bytes": 256 << 10,
    "nvme_segment_bytes": 512 << 10,
    "verify_share": 1,
    "mover_batch_bytes": 128 << 10,
    "mover_queue_bytes": 8 << 20,
    "dead_owner_grace_s": 0.0,
    "lock_timeout_s": 30.0,
}
"""About 80 slots in `ram` and 160 in `nvme`; a request waits longer than any test, so that nothing is timed."""

Array = npt.NDArray[Any]
Buffers = dict[Part, HostKV]


def open_small(path: Path, ram_directory: Path, **over: Any) -> Store:
    """The small store at a path, with its `ram` part in a directory of its own."""
    given = {**SMALL, "ram_directory": ram_directory, **over}
    return kvstore.open(path, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Speaker:
    """A layout under a salt."""

    layout: Layout
    salt: str = ""

    def made(self, tokens: Sequence[int]) -> Buffers:
        """Buffers that hold the KV of ``tokens``."""
        return {part: HostKV.layered(self.layout, self._layers(tokens, part), part.group) for part in self._parts()}

    def blank(self, tokens: int) -> Blank:
        """Buffers with room for so many tokens, filled with a pattern that no KV has."""
        return Blank(self, tokens)

    def _parts(self) -> list[Part]:
        return list(self.layout.parts())

    def _layers(self, tokens: Sequence[int], part: Part) -> list[tuple[Array, Array]]:
        shapes = self.layout.groups[part.group]
        flat = self._values(tokens, part, sum(shape.elements for shape in shapes))
        layers: list[tuple[Array, Array]] = []
        base = 0
        for shape in shapes:
            pair: list[Array] = []
            for dim in (shape.k_dim, shape.v_dim):
                plane = flat[:, base : base + shape.heads * dim].reshape(len(tokens), shape.heads, dim)
                pair.append(np.ascontiguousarray(plane.transpose(1, 0, 2)))
                base += shape.heads * dim
            layers.append((pair[0], pair[1]))
        return layers

    def _values(self, tokens: Sequence[int], part: Part, elements: int) -> Array:
        """``[token, element]``: a mix of a running sum over the tokens with what names the speaker and the part."""
        name = f"{self.layout.fingerprint.hex()} {self.salt} {part}".encode()
        seed, odd = np.frombuffer(hashlib.sha256(name).digest()[:16], np.uint64)
        ids = np.asarray(tokens, np.uint64) + np.uint64(1)
        powers = np.cumprod(np.full(len(ids), 0x9E3779B97F4A7C15, np.uint64))
        running = np.cumsum(ids * powers) ^ seed
        steps = (np.arange(elements, dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * (odd | np.uint64(1))
        mixed = running[:, None] * steps[None, :]
        mixed ^= mixed >> np.uint64(31)
        kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32}
        return (mixed >> np.uint64(16)).astype(kinds[self.layout.itemsize])


SPEAKERS = (Speaker(PLAIN), Speaker(PLAIN, "a"), Speaker(PLAIN, "b"), Speaker(NARROW, "a"), Speaker(PARTED))
"""Three layouts and three salts."""


class Blank:
    """Destination buffers that can say how much of them is right."""

    def __init__(self, speaker: Speaker, tokens: int) -> None:
        self._speaker = speaker
        self._layers: dict[Part, list[tuple[Array, Array]]] = {}
        self.buffers: Buffers = {}
        for part in speaker.layout.parts():
            layers = speaker._layers([0xFFFFFFF0] * tokens, part)
            self._layers[part] = layers
            self.buffers[part] = HostKV.layered(speaker.layout, layers, part.group)

    def wrong(self, tokens: Sequence[int], loaded: int) -> int:
        """How many of the first ``loaded`` positions do not hold the KV of ``tokens``."""
        bad = np.zeros(loaded, np.bool_)
        for part, layers in self._layers.items():
            for pair, right in zip(layers, self._speaker._layers(tokens[:loaded], part), strict=True):
                for mine, wanted in zip(pair, right, strict=True):
                    bad |= (mine[:, :loaded] != wanted).any(axis=(0, 2))
        return int(bad.sum())


def save(store: Store, speaker: Speaker, tokens: Sequence[int]) -> Any:
    """Save the KV of ``tokens``."""
    space = store.namespace(speaker.layout, salt=speaker.salt)
    return store.save(space, list(tokens), speaker.made(tokens))


def load(store: Store, speaker: Speaker, tokens: Sequence[int], limit: int | None = None) -> tuple[Any, int]:
    """Match and load; (what `Store.load` returned, how many positions were wrong)."""
    space = store.namespace(speaker.layout, salt=speaker.salt)
    match = store.match(space, list(tokens), limit=limit)
    return load_match(store, speaker, tokens, match)


def load_match(store: Store, speaker: Speaker, tokens: Sequence[int], match: Any) -> tuple[Any, int]:
    """Load a match made earlier; (what `Store.load` returned, how many positions were wrong)."""
    blank = speaker.blank(max(match.tokens, 1))
    loaded = store.load(match, blank.buffers)
    return loaded, blank.wrong(tokens, loaded.tokens)


def slots_of(store: Store) -> dict[str, int]:
    """How many blocks each tier says it holds."""
    return {tier.name: tier.blocks for tier in store.stats().tiers}


def shm() -> Path:
    """Where temporary `ram` directories are made."""
    return Path(os.environ.get("KVSTORE_TEST_SHM", "/dev/shm"))
