"""What is not saved or not moved is told, block for block, with its reason; and `flush` does not call it written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from known_kv import PLAIN, Speaker, save

from kvstore.errors import BusyError, StorageError
from kvstore.events import Event, Moved, Skipped, SkipReason
from kvstore.host import boottime_ns
from kvstore.identity import Tokens, as_tokens, chain
from kvstore.kv import Gathering, HostKV, Run
from kvstore.records import block_names
from kvstore.store import Store
from kvstore.tiers.ledger import Placement
from kvstore.tiers.slotted import SlottedTier

Reopen = Callable[..., Store]
ME = Speaker(PLAIN, "a")
LONG: Tokens = as_tokens(range(100 * 16))
SLOT = 12288


class Told:
    """Blocks skipped, by reason: on the way into `ram`, and on the way to `nvme`."""

    def __init__(self, store: Store) -> None:
        self.saving: Counter[str] = Counter()
        self.moving: Counter[str] = Counter()
        self.moved = 0
        store.events.subscribe(self)

    def __call__(self, event: Event) -> None:
        match event:
            case Skipped(tier, reason, blocks):
                (self.moving if tier == "nvme" else self.saving)[reason] += blocks
            case Moved("ram", "nvme", blocks):
                self.moved += blocks


def write_elsewhere(store: Store, tier: SlottedTier, blocks: slice) -> list[Placement]:
    """Slots taken as another writer takes them."""
    space = store.namespace(PLAIN, salt="a")
    names = block_names(chain(space.root, as_tokens(range(400 * 16)), 16), next(iter(PLAIN.parts())))[blocks]
    return tier.reserve(names, tier.space(space.record), SLOT, store._core.purge.epoch(), now=boottime_ns()).placed


def longer_than_ram(store: Store, patch: pytest.MonkeyPatch) -> None:
    assert store.settings.ram < len(LONG) // 16 * SLOT + (1 << 20), "with its index of a mebibyte"


def beyond_a_quota(store: Store, patch: pytest.MonkeyPatch) -> None:
    store.set_quota("a", ram=30 * SLOT)


def written_elsewhere(store: Store, patch: pytest.MonkeyPatch) -> None:
    write_elsewhere(store, store._core.ram, slice(3, 10))


def purged_meanwhile(store: Store, patch: pytest.MonkeyPatch) -> None:
    gathering = HostKV.gathering

    def evicting(self: HostKV, start: int, run: Run) -> Gathering:
        store.evict(salt="a")
        return gathering(self, start, run)

    patch.setattr(HostKV, "gathering", evicting)


def locked_at_last(store: Store, patch: pytest.MonkeyPatch) -> None:
    """After some was left to another writer, and the first batch is in `ram`."""
    write_elsewhere(store, store._core.ram, slice(3, 10))
    publish, calls = store._core.ram.publish, []

    def busy(*given: Any, **more: Any) -> list[Placement]:
        calls.append(given)
        if len(calls) > 1:
            raise BusyError("the index is locked", "try again")
        return publish(*given, **more)

    patch.setattr(store._core.ram, "publish", busy)


def without_an_index(store: Store, patch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise StorageError("the index cannot be read", "see the system's log")

    patch.setattr(store._core.purge, "epoch", broken)


@pytest.mark.parametrize(
    ("prepare", "ram", "reasons"),
    [
        (longer_than_ram, "2MiB", {SkipReason.FULL}),
        (beyond_a_quota, "4MiB", {SkipReason.QUOTA}),
        (written_elsewhere, "4MiB", {SkipReason.WRITING}),
        (purged_meanwhile, "4MiB", {SkipReason.PURGED}),
        (locked_at_last, "4MiB", {SkipReason.WRITING, SkipReason.BUSY}),
        (without_an_index, "4MiB", {SkipReason.FAULT}),
    ],
)
def test_what_a_save_skips_is_told_block_for_block(
    prepare: Callable[[Store, pytest.MonkeyPatch], None],
    ram: str,
    reasons: set[SkipReason],
    reopen: Reopen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = reopen(ram=ram)
    store.namespace(PLAIN, salt="a")
    told = Told(store)
    with monkeypatch.context() as patch:
        prepare(store, patch)
        done = save(store, ME, LONG.tolist())
    assert done.new_blocks + done.known_blocks + done.skipped_blocks == 100
    assert done.skipped_blocks > 0
    assert told.saving.total() == done.skipped_blocks
    assert set(told.saving) == reasons


def test_what_finds_no_staging_is_told_and_counted(reopen: Reopen) -> None:
    torch = pytest.importorskip("torch")
    from kvstore.tiers.devicekv import DeviceKV

    store = reopen(ram="4MiB", hbm=4 * SLOT, device="cpu")
    told = Told(store)
    kv = DeviceKV.stacked(PLAIN, torch.zeros(2, 2, 2, len(LONG), 16))
    done = store.save(store.namespace(PLAIN, salt="a"), LONG, kv)
    assert done.new_blocks + done.known_blocks + done.skipped_blocks == 100
    assert told.saving == {SkipReason.STAGING: done.skipped_blocks}


def evicted_meanwhile(store: Store) -> None:
    store.evict(everything=True)


def evicted_from_nvme_meanwhile(store: Store) -> None:
    store.evict(everything=True, tier="nvme")


def pushed_out_of_ram_meanwhile(store: Store) -> None:
    store.evict(everything=True, tier="ram")
    assert len(write_elsewhere(store, store._core.ram, slice(20, 400))) > 100, "all of its slots"


@pytest.mark.parametrize(
    ("meanwhile", "reason", "flushed"),
    [
        (evicted_meanwhile, SkipReason.PURGED, True),
        (evicted_from_nvme_meanwhile, SkipReason.PURGED, True),
        (pushed_out_of_ram_meanwhile, SkipReason.EVICTED_BEFORE, False),
    ],
)
def test_what_goes_while_it_is_moved_is_told_and_is_missed_unless_it_was_to_go(
    meanwhile: Callable[[Store], None],
    reason: SkipReason,
    flushed: bool,
    reopen: Reopen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = reopen(ram="4MiB", mover_batch_bytes="4MiB")
    told = Told(store)
    nvme = store._core.nvme
    assert nvme is not None
    write = nvme.write

    def evicting(*given: Any) -> None:
        monkeypatch.undo()
        write(*given)
        meanwhile(store)

    monkeypatch.setattr(nvme, "write", evicting)
    assert save(store, ME, LONG[: 20 * 16].tolist()).new_blocks == 20
    assert store.flush(60) is flushed
    assert told.moving == {reason: 20}
    assert store.flush(60) is True


def test_what_somebody_else_is_writing_to_nvme_is_told_and_left_to_him(reopen: Reopen) -> None:
    store = reopen(ram="4MiB")
    told = Told(store)
    nvme = store._core.nvme
    assert nvme is not None
    placed = write_elsewhere(store, nvme, slice(3, 10))
    assert save(store, ME, LONG[: 20 * 16].tolist()).new_blocks == 20
    assert store.flush(60) is True
    assert (told.moved, told.moving[SkipReason.WRITING]) == (13, 7)
    nvme.abandon(placed)


def test_what_waits_twice_is_moved_once_and_told_once(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for what was left behind may offer what waits already."""
    store = reopen(ram="4MiB", mover_batch_bytes="64KiB")
    told = Told(store)
    mover = store._core.mover
    assert mover is not None
    submit = mover.submit
    monkeypatch.setattr(mover, "submit", lambda moves: (submit(moves), submit(moves)))
    assert save(store, ME, LONG[: 20 * 16].tolist()).new_blocks == 20
    assert store.flush(60) is True
    assert (told.moved, told.moving) == (20, {})


def test_what_left_ram_before_its_turn_pushes_nothing_out_of_nvme(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopen(ram="4MiB")
    store.set_quota("a", nvme=20 * SLOT)
    assert save(store, ME, LONG[: 20 * 16].tolist()).new_blocks == 20
    assert store.flush(60) is True
    nvme, told = store._core.nvme, Told(store)
    assert nvme is not None
    space = nvme.space

    def late(record: Any) -> Any:
        pushed_out_of_ram_meanwhile(store)
        return space(record)

    monkeypatch.setattr(nvme, "space", late)
    assert save(store, ME, LONG[40 * 16 : 60 * 16].tolist()).new_blocks == 20
    assert store.flush(60) is False
    assert told.moving == {SkipReason.EVICTED_BEFORE: 20}
    assert store.match(store.namespace(PLAIN, salt="a"), LONG).by_tier == {"nvme": 20 * 16}


def test_what_is_on_nvme_is_not_missed_when_it_left_ram_and_is_offered_again(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for what was left behind may run between a block's publication and its flag."""
    store, moves = reopen(ram="4MiB"), list[Any]()
    told, mover = Told(store), store._core.mover
    assert mover is not None
    submit = mover.submit
    monkeypatch.setattr(mover, "submit", lambda some: (moves.extend(some), submit(some)))
    assert save(store, ME, LONG[: 20 * 16].tolist()).new_blocks == 20
    assert store.flush(60) is True
    pushed_out_of_ram_meanwhile(store)
    submit(moves)
    assert store.flush(60) is True
    assert (told.moved, told.moving) == (20, {})
