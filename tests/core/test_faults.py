"""A disk that is full, broken or lying costs speed: requests go on, everything is counted, nothing wrong is served."""

from __future__ import annotations

import time

import numpy as np
import pytest
from stores import BLOCK, StoreBench, StoreMaker, tokens_of

from kvstore.events import Cause, Evicted, Fault, Miss, Moved, Notice, Skipped
from kvstore.mover import Mover
from kvstore.tiers.fault import Effect, FaultMedium, FaultRule, Operation
from kvstore.tiers.growth import FULL_PAUSE_S
from kvstore.tiers.medium import Medium


class Faulty:
    """A small store whose media fail as told."""

    def __init__(self, make_store: StoreMaker, **settings: object) -> None:
        self.media: dict[str, FaultMedium] = {}
        self.bench: StoreBench = make_store(**settings)
        self.bench.wrap = self._wrap
        assert self.bench.store

    def _wrap(self, medium: Medium) -> Medium:
        self.media[medium.name] = FaultMedium(medium, seed=7)
        return self.media[medium.name]

    def inject(self, *rules: FaultRule, tier: str = "nvme") -> None:
        """Let one tier's medium follow rules; none: be well again."""
        self.media[tier].inject(rules)

    def offer_again(self) -> None:
        """What housekeeping does when the mover has nothing to do."""
        self.bench.store._core._rescan()
        self.bench.settle()

    def clean(self) -> None:
        """The medium is well, and everything agrees."""
        for medium in self.media.values():
            medium.inject()
        self.bench.settle()
        assert self.bench.store.verify().problems == []


@pytest.fixture
def faulty(make_store: StoreMaker) -> Faulty:
    return Faulty(make_store)


WRITING = [
    (Operation.WRITE, Effect.ENOSPC),
    (Operation.WRITE, Effect.EIO),
    (Operation.WRITE, Effect.SHORT),
    (Operation.SYNC, Effect.EIO),
]


@pytest.mark.parametrize(("operation", "effect"), WRITING)
def test_a_move_that_fails_is_counted_and_made_up_for(faulty: Faulty, operation: Operation, effect: Effect) -> None:
    bench, tokens = faulty.bench, tokens_of(1, 5 * BLOCK)
    faulty.inject(FaultRule(operation, effect, times=1))
    assert bench.save(tokens).new_blocks == 5
    bench.settle()
    assert faulty.media["nvme"].injected(operation) == 1
    assert len(bench.of(Fault, tier="nvme", what="move")) == 1
    assert sum(event.blocks for event in bench.of(Skipped, tier="nvme", reason="fault")) == 5
    assert bench.load(tokens).by_tier == {"ram": len(tokens)}
    assert bench.tier("nvme").usage().get(bench.space().root) is None or not bench.of(Moved)
    faulty.offer_again()
    bench.drop("ram")
    assert bench.load(tokens).by_tier == {"nvme": len(tokens)}
    faulty.clean()


@pytest.mark.parametrize("effect", [Effect.ENOSPC, Effect.EIO])
def test_a_disk_that_keeps_failing_makes_nvme_read_only_and_the_store_runs_on(faulty: Faulty, effect: Effect) -> None:
    bench = faulty.bench
    before = tokens_of(99, 3 * BLOCK)
    bench.save(before)
    bench.settle()
    faulty.inject(FaultRule(Operation.WRITE, effect))
    for seed in range(6):
        assert bench.save(tokens_of(seed, 2 * BLOCK)).new_blocks == 2
        bench.settle()
    assert [event.subject for event in bench.of(Notice)] == ["nvme read-only"]
    assert bench.store.stats().mover_paused
    assert len(bench.of(Fault, tier="nvme", what="move")) == 3, "then it is left alone"
    assert all(bench.load(tokens_of(seed, 2 * BLOCK)).tokens == 2 * BLOCK for seed in range(6))
    bench.drop("ram")
    assert bench.load(before).by_tier == {"nvme": len(before)}, "what was written before is still read"
    faulty.clean()


@pytest.mark.parametrize("tier", ["ram", "nvme"])
@pytest.mark.parametrize(
    ("operation", "effect"),
    [(Operation.ALLOCATE, Effect.ENOSPC), (Operation.ALLOCATE, Effect.EIO), (Operation.PREPARE, Effect.EIO)],
)
def test_growth_that_fails_returns_its_budget_and_is_tried_again(
    faulty: Faulty, tier: str, operation: Operation, effect: Effect
) -> None:
    bench, tokens = faulty.bench, tokens_of(1, 4 * BLOCK)
    fixed = bench.tier(tier).allocated()
    faulty.inject(FaultRule(operation, effect), tier=tier)
    assert bench.save(tokens).new_blocks == (0 if tier == "ram" else 4)
    bench.settle()
    assert bench.of(Fault, tier=tier, what="grow")
    assert sum(event.blocks for event in bench.of(Skipped, tier=tier, reason="full")) == 4
    assert bench.tier(tier).allocated() == fixed
    assert not list(bench.tier(tier).directory.glob("*.seg"))
    faulty.inject(tier=tier)
    time.sleep(FULL_PAUSE_S)
    fresh = tokens_of(2, 4 * BLOCK)
    assert bench.save(fresh).new_blocks == 4
    bench.settle()
    bench.drop("nvme" if tier == "ram" else "ram")
    assert bench.load(fresh).by_tier == {tier: len(fresh)}
    faulty.clean()


@pytest.mark.parametrize("effect", [Effect.EIO, Effect.SHORT])
def test_a_block_that_cannot_be_read_ends_the_prefix_and_is_not_tried_for_ever(faulty: Faulty, effect: Effect) -> None:
    bench, tokens = faulty.bench, tokens_of(1, 6 * BLOCK)
    bench.save(tokens)
    bench.settle()
    bench.drop("ram")
    faulty.inject(
        FaultRule(Operation.READ, effect, first=1, times=1), FaultRule(Operation.READ, effect, first=4, times=1)
    )
    bench.told.clear()
    loaded = bench.load(tokens)
    assert (loaded.tokens, loaded.stop) == (3 * BLOCK, Cause.IO), "the run failed, then its fourth block alone"
    assert bench.of(Miss) == [Miss(Cause.IO, 3 * BLOCK, bench.space().root)]
    assert len(bench.of(Fault, tier="nvme", what="load")) == 1
    bench.settle()
    assert bench.of(Evicted, reason="unreadable") == [Evicted("nvme", "unreadable", 1)]
    assert bench.save(tokens).new_blocks == 1
    assert bench.load(tokens).tokens == len(tokens)
    faulty.clean()


@pytest.mark.parametrize("effect", [Effect.FLIP, Effect.TORN, Effect.STALE])
@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_a_disk_that_lies_is_found_out(faulty: Faulty, operation: Operation, effect: Effect) -> None:
    bench = faulty.bench
    sequences = [tokens_of(seed, 3 * BLOCK) for seed in range(5)]
    if operation is Operation.WRITE:
        faulty.inject(FaultRule(operation, effect))
    for tokens in sequences:
        bench.save(tokens)
        bench.settle()
    bench.drop("ram")
    for seed in range(100, 105):
        bench.save(tokens_of(seed, 3 * BLOCK))  # or the slots still hold what is read into them
    bench.settle()
    bench.drop("ram")
    if operation is Operation.READ:
        faulty.inject(FaultRule(operation, effect))
    bench.told.clear()
    served = sum(bench.load(tokens).tokens for tokens in sequences)
    assert served < 15 * BLOCK
    causes = {event.cause for event in bench.of(Miss)}
    assert causes <= {Cause.HEADER, Cause.CHECKSUM}
    assert sum(event.tokens for event in bench.of(Miss)) == 15 * BLOCK - served
    bench.settle()
    assert sum(event.blocks for event in bench.of(Evicted, tier="nvme", reason="corrupt")) >= 5
    faulty.inject()
    bench.store.verify(repair=True)
    for tokens in sequences:
        bench.save(tokens)
        assert bench.load(tokens).tokens == len(tokens)
    faulty.clean()


def end_pause(mover: Mover | None) -> None:
    """Have `nvme` written to again; the mover sleeps until a pause that was longer ends."""
    assert mover is not None
    with mover._changed:
        mover._paused_until = 0.0
        mover._changed.notify_all()


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_faults_never_serves_a_wrong_byte_and_leaves_nothing_behind(
    make_store: StoreMaker, seed: int
) -> None:
    faulty = Faulty(make_store, ram="3MiB", nvme="4MiB")
    bench, random = faulty.bench, np.random.default_rng(seed)
    rules = [
        FaultRule(operation, effect, probability=0.06)
        for operation, effect in [
            (Operation.WRITE, Effect.EIO),
            (Operation.WRITE, Effect.FLIP),
            (Operation.WRITE, Effect.TORN),
            (Operation.WRITE, Effect.STALE),
            (Operation.READ, Effect.EIO),
            (Operation.READ, Effect.FLIP),
            (Operation.READ, Effect.STALE),
            (Operation.READ, Effect.TORN),
            (Operation.SYNC, Effect.EIO),
            (Operation.ALLOCATE, Effect.ENOSPC),
        ]
    ]
    faulty.inject(*rules)
    faulty.inject(FaultRule(Operation.ALLOCATE, Effect.ENOSPC, probability=0.2), tier="ram")
    served = 0
    for _ in range(120):
        tokens = tokens_of(int(random.integers(0, 12)), int(random.integers(1, 12 * BLOCK)))
        choice = random.random()
        if choice < 0.5:
            bench.save(tokens)
        elif choice < 0.9:
            served += bench.load(tokens).tokens
        elif choice < 0.95:
            bench.drop("ram")
        else:
            bench.settle()
            end_pause(bench.store._core.mover)
    assert served > 0
    for medium in faulty.media.values():
        medium.inject()
    bench.settle()
    bench.store.verify(repair=True)
    faulty.clean()
