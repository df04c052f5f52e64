"""A ram budget in which a model could keep nothing is refused when the model comes, with the size that it needs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import BudgetError
from kvstore.kv import HostKV
from kvstore.layout import Layout

MIB = 1 << 20


def layout_of(payload: int) -> Layout:
    """Blocks of 16 tokens that take so many bytes."""
    return Layout.uniform(layers=2, heads=4, k_dim=payload // (2 * 2 * 4 * 16 * 4), block_tokens=16)


@pytest.mark.parametrize("payload", [MIB, 4 * MIB, 12 * MIB])
def test_the_size_that_is_named_is_enough_and_hardly_more(tmp_path: Path, memory: Path, payload: int) -> None:
    layout = layout_of(payload)
    assert layout.payload_bytes() == payload
    sizes = {"nvme": 0, "ram_directory": memory}
    with (
        kvstore.open(tmp_path / "small", ram=payload + 2 * MIB, **sizes) as store,
        pytest.raises(BudgetError, match=r"a block of this layout \(16 tokens\) takes .* MiB") as refused,
    ):
        store.namespace(layout)
    named = re.search(r"set ram to (\d+) MiB or more", str(refused.value))
    assert named is not None
    enough = int(named[1]) * MIB
    assert enough <= 2 * payload + 4 * MIB
    with kvstore.open(tmp_path / "enough", ram=enough, **sizes) as store:
        space = store.namespace(layout)
        tokens = np.arange(32, dtype=np.uint32)
        kv = HostKV.stacked(layout, np.zeros((2, 2, 4, 32, payload // (2 * 2 * 4 * 16 * 4)), np.float32))
        assert store.save(space, tokens, kv).new_blocks == 2
        assert store.match(space, tokens).tokens == 32


def test_segments_that_are_too_small_are_told_apart(tmp_path: Path, memory: Path) -> None:
    sizes = {"nvme": 0, "ram_directory": memory, "ram_segment_bytes": MIB}
    with (
        kvstore.open(tmp_path / "store", ram=64 * MIB, **sizes) as store,
        pytest.raises(BudgetError, match="set ram_segment_bytes to 4 MiB or more"),
    ):
        store.namespace(layout_of(MIB))


def test_a_budget_that_its_index_fills_is_refused_with_one_that_serves_a_model(tmp_path: Path, memory: Path) -> None:
    with pytest.raises(BudgetError, match="set ram to 64 MiB or more"):
        kvstore.open(tmp_path / "store", ram=MIB, nvme=0, ram_directory=memory)


def test_of_a_conversation_larger_than_ram_the_beginning_is_kept_and_the_rest_skipped(
    tmp_path: Path, memory: Path
) -> None:
    """As SIZING.md says it: later saves go no further while that beginning is in ram, and further once nvme alone has
    it."""
    layout = layout_of(MIB)
    with kvstore.open(tmp_path / "store", ram=16 * MIB, nvme=256 * MIB, ram_directory=memory) as store:
        space, tokens = store.namespace(layout), np.arange(16 * 32, dtype=np.uint32)

        def saved(ids: np.ndarray) -> tuple[int, int, int]:
            array = np.zeros((2, 2, 4, len(ids), MIB // (2 * 2 * 4 * 16 * 4)), np.float32)
            done = store.save(space, ids, HostKV.stacked(layout, array))
            assert store.flush(60)
            return done.new_blocks, done.known_blocks, done.skipped_blocks

        first, _, skipped = saved(tokens)
        assert 0 < first < 16
        assert skipped == 32 - first
        assert saved(tokens) == (0, first, skipped), "nvme has it all by now, and yet"
        assert store.match(space, tokens).by_tier == {"ram": 16 * first}
        assert {name for name in store.stats().counters if name.startswith("skip.")} == {"skip.ram.full.blocks"}
        saved(10_000 + np.arange(16 * first, dtype=np.uint32))
        assert saved(tokens)[0] > 0
        assert store.match(space, tokens).tokens > 16 * first
