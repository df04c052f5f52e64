"""A budget that the host has capped is shared: a process that comes later, to a fuller host, may still join."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import BudgetError
from kvstore.events import Events
from kvstore.tiers.opening import open_index
from kvstore.tiers.segments import BUDGET, get_number

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
