"""A small store that stands: two namespaces and a few sequences, all of it on `nvme` too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvstore
from kvstore.kv import HostKV
from kvstore.layout import Layout

LAYOUT = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
SEQUENCES = {"first": (40, 7), "second": (64, 9)}
"""Label → lengths of the namespace's sequences; each begins with its own length."""


def sequence(length: int) -> list[int]:
    """Token ids of the sequence of a length."""
    return [length, *range(100, 100 + length - 1)]


@dataclass(frozen=True)
class Made:
    """A closed store, everything of it on ``nvme`` too; the sequence of 40 tokens is pinned as ``greeting``.

    lengths: of the sequences, by their namespace's label.
    """

    path: Path
    layout: Layout
    lengths: dict[str, tuple[int, ...]]

    def tokens(self, length: int) -> list[int]:
        """Token ids of the sequence of a length."""
        return sequence(length)

    def held(self, label: str, length: int) -> dict[str, int]:
        """Tokens of a sequence that are stored, by the tier that would serve them."""
        with kvstore.open(self.path, ram="8MiB", nvme="16MiB") as store:
            return store.match(store.namespace(self.layout, salt=label), self.tokens(length)).by_tier


def filled(path: Path) -> Made:
    """A new store in a directory."""
    with kvstore.open(path, ram="8MiB", nvme="16MiB") as store:
        for label, lengths in SEQUENCES.items():
            space = store.namespace(LAYOUT, salt=label, label=label)
            for length in lengths:
                kv = np.random.default_rng(length).integers(0, 2**32, (2, 2, 2, length, 16), dtype=np.uint32)
                store.save(space, sequence(length), HostKV.stacked(LAYOUT, kv))
        store.pin("greeting", store.namespace(LAYOUT, salt="first", label="first"), sequence(40))
        assert store.flush(30)
    return Made(path, LAYOUT, SEQUENCES)
