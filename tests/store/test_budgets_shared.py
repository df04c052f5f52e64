"""A budget that the host has capped is shared: a process that comes later, to a fuller host, may still join."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import BudgetError
from kvstore.events import Events
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.store import Store
from kvstore.tiers.opening import open_index
from kvstore.tiers.segments import BUDGET
from kvstore.transaction import get_number

MIB = 1 << 20


def budget_after(directory: Path, budget: int, asked: int, *, alone: bool) -> int:
    index, _ = open_index(
        "ram",
        directory,
        store=bytes(16),
        budget=budget,
        asked=asked,
        segment_bytes=MIB,
        index_bytes=None,
        durable=False,
        alone=alone,
        events=Events(),
    )
    try:
        with index.read() as txn:
            return get_number(txn, BUDGET)
    finally:
        index.close()


def test_a_fuller_host_keeps_nobody_from_joining(tmp_path: Path) -> None:
    assert budget_after(tmp_path / "ram", 16 * MIB, 64 * MIB, alone=True) == 16 * MIB
    assert budget_after(tmp_path / "ram", 12 * MIB, 64 * MIB, alone=False) == 16 * MIB


def test_an_emptier_host_lets_the_budget_grow_for_all(tmp_path: Path) -> None:
    assert budget_after(tmp_path / "ram", 16 * MIB, 64 * MIB, alone=True) == 16 * MIB
    assert budget_after(tmp_path / "ram", 20 * MIB, 64 * MIB, alone=False) == 20 * MIB


def test_asking_for_less_than_others_have_is_refused_until_one_is_alone(tmp_path: Path) -> None:
    assert budget_after(tmp_path / "ram", 16 * MIB, 16 * MIB, alone=True) == 16 * MIB
    with pytest.raises(BudgetError, match="cannot shrink from 16 MiB to 12 MiB"):
        budget_after(tmp_path / "ram", 12 * MIB, 12 * MIB, alone=False)
    assert budget_after(tmp_path / "ram", 12 * MIB, 12 * MIB, alone=True) == 12 * MIB


def test_an_index_grows_with_its_budget_when_nobody_else_uses_it(tmp_path: Path, memory: Path) -> None:
    layout = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
    tokens = np.arange(1600)
    kv = np.random.default_rng(0).standard_normal((2, 2, 2, 1600, 16)).astype(np.float32)

    def reopened(ram: str, nvme: str) -> Store:
        return kvstore.open(tmp_path / "kv", ram=ram, nvme=nvme, ram_directory=memory)

    with reopened("16MiB", "32MiB") as store:
        assert store.save(store.namespace(layout), tokens, HostKV.stacked(layout, kv)).new_blocks == 100
        small = {tier.name: tier.index_bytes for tier in store.stats().tiers}
    with reopened("256MiB", "512MiB") as store:
        large = {tier.name: tier.index_bytes for tier in store.stats().tiers}
        assert large == {"ram": 2 * MIB, "nvme": 4 * MIB}
        assert all(large[name] > small[name] for name in small)
        target = np.zeros_like(kv)
        assert store.load(store.match(store.namespace(layout), tokens), HostKV.stacked(layout, target)).tokens == 1600
        np.testing.assert_array_equal(target, kv)
        assert store.verify().ok
    with reopened("16MiB", "32MiB") as store:
        assert store.match(store.namespace(layout), tokens).tokens == 1600, "an index never shrinks"
        assert store.verify().ok
