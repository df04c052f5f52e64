"""A process that dies at a certain step, at every step there is: the next one opens, misses, and leaks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import KILLED, Nursery
from known_kv import SPEAKERS, load, save

from kvstore.store import Store

SLOTTED = "kvstore.tiers.slotted:SlottedTier"
RESERVATION = "kvstore.tiers.reservation"
GROWTH = "kvstore.tiers.growth:Grower"
SEGMENTS = "kvstore.tiers.segments"
MEDIA = ("kvstore.tiers.medium:MappedMedium", "kvstore.tiers.medium:DirectMedium")
TIMES = ("before", "after")
OPENING = "kvstore.tiers.opening"

POINTS: list[tuple[str, str, str | None, int]] = [
    # opening a new store, and closing it
    ("kvstore.superblock:store_id", "after", None, 1),
    ("kvstore.owners:pid_namespace", "after", None, 1),
    ("kvstore.owners:Owner.__init__", "after", None, 1),
    ("kvstore.index:Index._preallocate", "before", "nvme", 1),
    ("kvstore.index:Index._preallocate", "before", "ram", 1),
    (f"{OPENING}:_account", "before", None, 1),
    (f"{OPENING}:_write_superblock", "before", None, 1),
    (f"{OPENING}:_write_superblock", "after", None, 1),
    (f"{OPENING}:_write_superblock", "before", None, 2),
    ("kvstore.mover:Mover.close", "before", None, 1),
    ("kvstore.owners:Owner.close", "before", None, 1),
    # a slot's way, in both tiers: in the transaction, committed, bumped, written, published
    *[(f"{SLOTTED}._plan", "before", tier, nth) for tier in ("ram", "nvme") for nth in (1, 6)],
    *[(f"{SLOTTED}._begin", "before", tier, nth) for tier in ("ram", "nvme") for nth in (2, 9)],
    *[(f"{SLOTTED}._begin", "after", tier, nth) for tier in ("ram", "nvme") for nth in (2, 9)],
    *[(f"{SLOTTED}.publish", "before", tier, nth) for tier in ("ram", "nvme") for nth in (1, 9)],
    *[(f"{SLOTTED}.publish", "after", tier, nth) for tier in ("ram", "nvme") for nth in (1, 9)],
    (f"{RESERVATION}:publish", "before", None, 3),
    (f"{RESERVATION}:publish", "after", None, 3),
    (f"{RESERVATION}:reserve", "after", None, 5),
    # the mover's own steps
    (f"{MEDIA[1]}.write", "after", "nvme", 20),
    (f"{SLOTTED}.flag", "before", "ram", 2),
    ("kvstore.tiers.nvme:NvmeTier.write", "after", "nvme", 3),
    ("kvstore.tiers.nvme:NvmeTier.sync", "before", "nvme", 3),
    ("kvstore.tiers.nvme:NvmeTier.sync", "after", "nvme", 3),
    # growth and recutting: claimed, allocated, prepared, in the transaction that hands out
    *[(f"{GROWTH}.make", "before", None, nth) for nth in (1, 2, 4, 6)],
    *[(f"{GROWTH}.make", "after", None, nth) for nth in (1, 2, 4, 6)],
    *[(f"{medium}.{step}", when, None, 1) for medium in MEDIA for step in ("allocate", "prepare") for when in TIMES],
    ("kvstore.tiers.arrays:ArrayFiles.allocate", "before", "ram", 2),
    ("kvstore.tiers.arrays:ArrayFiles.allocate", "after", "nvme", 1),
    (f"{SEGMENTS}:plan_growth", "after", None, 2),
    (f"{SEGMENTS}:finish_growth", "before", None, 2),
    (f"{SEGMENTS}:finish_growth", "after", None, 3),
    (f"{SEGMENTS}:_empty", "after", None, 1),
    # promotion
    ("kvstore.loading:_Promotion.start", "before", None, 1),
    ("kvstore.loading:_Promotion.finish", "before", None, 1),
    ("kvstore.loading:_Promotion.finish", "after", None, 1),
    # explicit eviction, pins, namespaces
    ("kvstore.purge:PurgeLog.add", "before", None, 1),
    ("kvstore.purge:PurgeLog.add", "after", None, 1),
    (f"{SLOTTED}.remove", "after", "ram", 1),
    (f"{SLOTTED}.remove", "before", "nvme", 1),
    (f"{SLOTTED}._forget", "before", "ram", 1),
    ("kvstore.pins:Pins.put", "after", None, 1),
    (f"{SLOTTED}.space", "after", "nvme", 1),
]


def named(point: tuple[str, str, str | None, int]) -> str:
    target, when, tier, nth = point
    return f"{when} {target.split(':')[1]}{f' of {tier}' if tier else ''} {nth}"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.mark.parametrize("point", POINTS, ids=named)
def test_a_death_at_this_step_costs_no_byte_and_no_slot(
    point: tuple[str, str, str | None, int],
    reopen: Callable[..., Store],
    tmp_path: Path,
    memory: Path,
    nursery: Nursery,
) -> None:
    assert nursery.death(tmp_path / "kv", memory, point) == KILLED, "the process never came by"
    store = reopen()
    assert store.stats().processes == 1
    assert len(list((tmp_path / "kv" / "owners").iterdir())) == 1
    assert store.verify().problems == []
    assert_files_are_known(store)
    for first in range(0, 10_000, 1000):
        assert load(store, SPEAKERS[0], list(range(first, first + 180)))[1] == 0
        assert load(store, SPEAKERS[3], list(range(20_000 + first, 20_700 + first)))[1] == 0
    assert save(store, SPEAKERS[0], range(50_000, 50_180)).new_blocks > 0
    assert save(store, SPEAKERS[3], range(60_000, 60_180)).new_blocks > 0
    assert store.flush(60)
    assert store.verify().problems == []


def assert_files_are_known(store: Store) -> None:
    """Every segment's file has a record, every record its files, and all of them fit the budget."""
    for tier in store._core.tiers:
        known = {f"{one.number:08x}{end}" for one in tier.segment_list() for end in (".seg", ".slots")}
        assert {file.name for file in tier.directory.iterdir() if file.suffix in (".seg", ".slots")} == known
        held = sum(file.stat().st_size for file in tier.directory.rglob("*") if file.is_file())
        assert held <= tier.budget()
