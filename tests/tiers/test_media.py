"""Media move the bytes they are given; those that ship to fail, to be slow or to hold nothing do exactly that."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DamagedError, NoSpaceError, SettingsError, StorageError
from kvstore.host import supports_o_direct
from kvstore.kv import Bytes
from kvstore.tiers.fault import POSSIBLE, Effect, FaultMedium, FaultRule, Operation
from kvstore.tiers.medium import ALIGNMENT, DirectMedium, MappedMedium, Medium, aligned_buffer, segment_path
from kvstore.tiers.null import NullMedium
from kvstore.tiers.throttle import ThrottleMedium

SIZE = 16 * ALIGNMENT
Kind = Callable[[Path], Medium]
KINDS: dict[str, Kind] = {
    "mapped": MappedMedium,
    "direct": lambda path: DirectMedium(path, direct=True),
    "buffered": lambda path: DirectMedium(path, direct=False),
    "faults": lambda path: FaultMedium(DirectMedium(path, direct=False)),
    "throttle": lambda path: ThrottleMedium(MappedMedium(path)),
}


def pages(seed: int, count: int) -> Bytes:
    """Page-aligned random bytes."""
    buffer = aligned_buffer(count * ALIGNMENT)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, len(buffer), np.uint8)
    return buffer


def whole(medium: Medium, segment: int = 0) -> Bytes:
    """All bytes of a segment."""
    buffer = aligned_buffer(SIZE)
    medium.read(segment, 0, [buffer])
    return buffer


def faulty(tmp_path: Path, *rules: FaultRule, seed: int = 0) -> FaultMedium:
    """A faulty medium with one segment of zeros; its rules begin when that is there."""
    medium = FaultMedium(DirectMedium(tmp_path, direct=False), seed=seed)
    medium.allocate(0, SIZE)
    medium.inject(rules)
    return medium


@pytest.fixture(params=sorted(KINDS))
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    if request.param == "direct" and not supports_o_direct(tmp_path):
        pytest.skip(f"{tmp_path} has no O_DIRECT")
    return KINDS[request.param](tmp_path)


def test_what_is_written_in_pieces_is_read_in_other_pieces(medium: Medium) -> None:
    medium.allocate(3, SIZE)
    medium.prepare(3, SIZE)
    assert not whole(medium, 3).any()
    parts = [pages(1, 2), pages(2, 3)]
    medium.write(3, 4 * ALIGNMENT, parts)
    medium.sync([3, 3])
    into = [aligned_buffer(size * ALIGNMENT) for size in (1, 4)]
    medium.read(3, 4 * ALIGNMENT, into)
    assert np.array_equal(np.concatenate(into), np.concatenate(parts))
    assert int(np.count_nonzero(whole(medium, 3)[9 * ALIGNMENT :])) == 0
    medium.close()


def test_a_segment_has_its_length_until_it_is_removed(medium: Medium) -> None:
    assert medium.length(0) == -1
    medium.allocate(0, SIZE)
    assert medium.length(0) == SIZE
    medium.remove(0)
    medium.remove(0)
    assert medium.length(0) == -1
    medium.close()


def test_reading_or_writing_past_a_segment_is_an_error_and_not_a_signal(medium: Medium, tmp_path: Path) -> None:
    medium.allocate(0, SIZE)
    with pytest.raises((StorageError, DamagedError)):
        medium.read(0, SIZE, [aligned_buffer(ALIGNMENT)])
    with pytest.raises((StorageError, DamagedError)):
        medium.read(7, 0, [aligned_buffer(ALIGNMENT)])
    medium.close()


@pytest.mark.parametrize("kind", ["mapped", "buffered"])
def test_an_allocation_that_does_not_fit_leaves_nothing_behind(kind: str, shm: Path) -> None:
    medium = KINDS[kind](shm)
    with pytest.raises(NoSpaceError):
        medium.allocate(0, 1 << 46)
    assert not segment_path(shm, 0).exists()


def test_a_truncated_segment_is_told_before_it_is_mapped(shm: Path) -> None:
    medium = MappedMedium(shm)
    medium.allocate(0, SIZE)
    with segment_path(shm, 0).open("r+b") as file:
        file.truncate(SIZE - 1)
    with pytest.raises(DamagedError):
        medium.window(0, SIZE)


# -------------------------------------------------------------------- faults


@pytest.mark.parametrize(("operation", "effect"), [(op, effect) for op in Operation for effect in Effect])
def test_only_what_can_happen_can_be_asked_for(operation: Operation, effect: Effect) -> None:
    if effect in POSSIBLE[operation]:
        assert FaultRule(operation, effect).effect is effect
    else:
        with pytest.raises(SettingsError):
            FaultRule(operation, effect)


@pytest.mark.parametrize("wrong", [{"first": 0}, {"times": 0}, {"probability": 0.0}, {"probability": 1.5}])
def test_rules_that_could_never_fire_or_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        FaultRule(Operation.READ, Effect.EIO, **wrong)  # type: ignore[arg-type]


def test_the_third_write_fails_twice_and_no_other(tmp_path: Path) -> None:
    medium = faulty(tmp_path, FaultRule(Operation.WRITE, Effect.ENOSPC, first=3, times=2))
    told = []
    for at in range(6):
        try:
            medium.write(0, at * ALIGNMENT, [pages(at, 1)])
            told.append(True)
        except NoSpaceError:
            told.append(False)
    assert told == [True, True, False, False, True, True]
    assert medium.injected() == medium.injected(Operation.WRITE) == 2
    assert not whole(medium)[2 * ALIGNMENT : 4 * ALIGNMENT].any(), "a refused write moves nothing"


def test_a_rule_for_one_segment_leaves_others_alone(tmp_path: Path) -> None:
    medium = faulty(
        tmp_path, FaultRule(Operation.READ, Effect.EIO, segment=1), FaultRule(Operation.SYNC, Effect.EIO, segment=1)
    )
    medium.allocate(1, SIZE)
    whole(medium, 0)
    medium.sync([0])
    with pytest.raises(StorageError):
        whole(medium, 1)
    with pytest.raises(StorageError):
        medium.sync([0, 1])


def test_short_and_torn_writes_move_half_and_tell_or_keep_quiet(tmp_path: Path) -> None:
    medium = faulty(
        tmp_path, FaultRule(Operation.WRITE, Effect.SHORT, times=1), FaultRule(Operation.WRITE, Effect.TORN, times=1)
    )
    data = [pages(1, 1), pages(2, 3)]
    with pytest.raises(StorageError):
        medium.write(0, 0, data)
    medium.write(0, 8 * ALIGNMENT, data)
    for start in (0, 8):
        found = whole(medium)[start * ALIGNMENT : (start + 4) * ALIGNMENT]
        assert np.array_equal(found[: 2 * ALIGNMENT], np.concatenate(data)[: 2 * ALIGNMENT])
        assert not found[2 * ALIGNMENT :].any()


def test_short_and_torn_reads_fill_half(tmp_path: Path) -> None:
    medium = faulty(tmp_path)
    data = pages(1, 16)
    medium.write(0, 0, [data])
    medium.inject([FaultRule(Operation.READ, Effect.SHORT, times=1), FaultRule(Operation.READ, Effect.TORN, times=1)])
    with pytest.raises(StorageError):
        whole(medium)
    torn = whole(medium)
    assert np.array_equal(torn[: SIZE // 2], data[: SIZE // 2])
    assert not torn[SIZE // 2 :].any()


@given(seed=st.integers(0, 2**32 - 1), operation=st.sampled_from([Operation.READ, Operation.WRITE]))
def test_a_flip_turns_over_one_bit_and_never_the_callers_own(seed: int, operation: Operation) -> None:
    medium = FaultMedium(_Memory(), [FaultRule(operation, Effect.FLIP, times=1)], seed=seed)
    data = [pages(1, 1), pages(2, 2)]
    medium.write(0, 0, data)
    into = [aligned_buffer(2 * ALIGNMENT), aligned_buffer(ALIGNMENT)]
    medium.read(0, 0, into)
    differs = np.concatenate(into) ^ np.concatenate([pages(1, 1), pages(2, 2)])
    assert int(np.unpackbits(differs).sum()) == 1
    assert np.array_equal(data[0], pages(1, 1))
    assert np.array_equal(data[1], pages(2, 2))


def test_a_stale_write_is_lost_and_a_stale_read_leaves_the_buffer_as_it_was(tmp_path: Path) -> None:
    medium = faulty(tmp_path)
    medium.write(0, 0, [pages(1, 1)])
    medium.inject([FaultRule(Operation.WRITE, Effect.STALE), FaultRule(Operation.READ, Effect.STALE, first=2)])
    medium.write(0, 0, [pages(2, 1)])
    into = pages(3, 1)
    medium.read(0, 0, [into])
    assert np.array_equal(into, pages(1, 1))
    other = pages(4, 1)
    medium.read(0, 0, [other])
    assert np.array_equal(other, pages(4, 1))


def test_allocations_and_preparations_fail_as_told_and_leave_nothing(tmp_path: Path) -> None:
    rules = [FaultRule(Operation.ALLOCATE, Effect.ENOSPC, times=1), FaultRule(Operation.PREPARE, Effect.EIO, times=1)]
    medium = faulty(tmp_path, *rules)
    with pytest.raises(NoSpaceError):
        medium.allocate(1, SIZE)
    assert medium.length(1) == -1
    medium.allocate(1, SIZE)
    with pytest.raises(StorageError):
        medium.prepare(1, SIZE)
    medium.prepare(1, SIZE)


def test_the_same_seed_makes_the_same_faults(tmp_path: Path) -> None:
    def told(seed: int) -> list[bool]:
        rule = FaultRule(Operation.SYNC, Effect.EIO, probability=0.5)
        medium = FaultMedium(NullMedium(), [rule], seed=seed)
        answers = []
        for _ in range(64):
            try:
                medium.sync([0])
                answers.append(True)
            except StorageError:
                answers.append(False)
        return answers

    assert told(1) == told(1)
    assert told(1) != told(2)
    assert 10 < sum(told(1)) < 54


# -------------------------------------------------------------------- throttle


class _Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class _Memory(NullMedium):
    """One segment in a dictionary of pages."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.bytes = np.zeros(SIZE, np.uint8)

    def read(self, segment: int, offset: int, into: object) -> None:
        for part in into:  # type: ignore[attr-defined]
            part[:] = self.bytes[offset : offset + len(part)]
            offset += len(part)

    def write(self, segment: int, offset: int, data: object) -> None:
        for part in data:  # type: ignore[attr-defined]
            self.bytes[offset : offset + len(part)] = part
            offset += len(part)


def test_transfers_take_the_time_that_rate_and_latency_say() -> None:
    clock = _Clock()
    medium = ThrottleMedium(_Memory(), 4096.0, 0.25, clock=clock, sleep=clock.sleep)
    medium.write(0, 0, [pages(1, 2)])
    assert clock.now == pytest.approx(100 + 2 + 0.25)
    into = aligned_buffer(ALIGNMENT)
    medium.read(0, 0, [into])
    assert clock.now == pytest.approx(102.25 + 1 + 0.25)
    assert np.array_equal(into, pages(1, 2)[:ALIGNMENT])
    medium.sync([0])
    assert clock.now == pytest.approx(103.5 + 0.25)
    medium.prepare(0, 2 * ALIGNMENT)
    assert clock.now == pytest.approx(103.75 + 2.25)


def test_calls_at_the_same_moment_queue_up_for_the_device() -> None:
    clock = _Clock()
    slept: list[float] = []
    medium = ThrottleMedium(NullMedium(), 4096.0, 1.0, clock=clock, sleep=slept.append)
    for _ in range(3):
        medium.read(0, 0, [aligned_buffer(ALIGNMENT)])
    assert slept == pytest.approx([2.0, 3.0, 4.0]), "the clock stood still"


def test_what_the_inner_medium_takes_counts() -> None:
    clock = _Clock()

    class Slow(NullMedium):
        def read(self, segment: int, offset: int, into: object) -> None:
            clock.now += 5.0

    ThrottleMedium(Slow(), 4096.0, 1.0, clock=clock, sleep=clock.sleep).read(0, 0, [aligned_buffer(ALIGNMENT)])
    assert clock.slept == []


@pytest.mark.parametrize(
    "wrong", [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan)]
)
def test_impossible_rates_and_latencies_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(SettingsError):
        ThrottleMedium(NullMedium(), *wrong)


# -------------------------------------------------------------------- null


def test_a_null_medium_takes_everything_and_gives_zeros(tmp_path: Path) -> None:
    medium = NullMedium()
    medium.allocate(0, 1 << 50)
    medium.prepare(0, 1 << 50)
    medium.write(0, 1 << 49, [pages(1, 1)])
    into = pages(2, 1)
    medium.read(0, 1 << 49, [into])
    assert not into.any()
    assert medium.window(0, SIZE) is None
    assert medium.length(0) is None
    medium.sync([0])
    medium.remove(0)
    medium.close()
    assert list(tmp_path.iterdir()) == []
