"""Load or recompute: what is slower is not done, short prefixes are left alone, and every decision has a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.gate import PROBE_EVERY, Gate, Why

MIB = 1 << 20


def measured(load_bytes_a_second: float, prefill_tokens_a_second: float, tier: str = "ram") -> Gate:
    gate = Gate()
    gate.loaded({tier: 1000}, 64 * MIB, 64 * MIB / load_bytes_a_second)
    gate.computed(1000, 1000 / prefill_tokens_a_second)
    return gate


def test_without_measurements_it_loads() -> None:
    decision = Gate().decide({"ram": 100}, MIB)
    assert (decision.load, decision.why) == (True, Why.UNMEASURED)


def test_a_prefix_below_the_floor_is_not_loaded_even_when_the_gate_is_off() -> None:
    for gate in (Gate(floor=50), Gate(on=False, floor=50)):
        assert gate.decide({"ram": 49}, MIB).why is Why.SHORT
        assert gate.decide({"ram": 50}, MIB).load


def test_a_slow_medium_loses_and_a_fast_one_wins() -> None:
    assert measured(1e9, 100).decide({"ram": 1000}, 100 * MIB).why is Why.FASTER
    decision = measured(1e6, 1e5).decide({"ram": 1000}, 100 * MIB)
    assert (decision.load, decision.why) == (False, Why.SLOWER)
    assert decision.load_s > decision.prefill_s


def test_off_loads_what_would_lose() -> None:
    gate = Gate(on=False)
    gate.loaded({"ram": 1000}, 64 * MIB, 100.0)
    gate.computed(1000, 0.1)
    assert gate.decide({"ram": 1000}, 64 * MIB).why is Why.OFF


def test_each_tier_has_its_own_speed() -> None:
    gate = measured(1e10, 1e4)
    gate.loaded({"nvme": 1000}, 64 * MIB, 64.0)
    assert gate.decide({"ram": 1000}, 100 * MIB).load
    assert not gate.decide({"nvme": 1000}, 100 * MIB).load
    assert not gate.decide({"ram": 500, "nvme": 500}, 100 * MIB).load


def test_a_medium_that_loses_is_tried_again_now_and_then() -> None:
    gate = measured(1e6, 1e5)
    answers = [gate.decide({"ram": 1000}, 100 * MIB).load for _ in range(PROBE_EVERY)]
    assert answers == [False] * (PROBE_EVERY - 1) + [True]
    assert gate.counts() == {"slower": PROBE_EVERY, "probe": 1}


def test_a_medium_that_recovered_wins_again() -> None:
    gate = measured(1e6, 1e3)
    for _ in range(40):
        gate.loaded({"ram": 1000}, 64 * MIB, 64 * MIB / 1e10)
    assert gate.decide({"ram": 1000}, 100 * MIB).load


def test_start_up_costs_are_not_taken_for_speeds() -> None:
    gate = Gate()
    gate.loaded({"ram": 1}, 4096, 1.0)
    gate.computed(1, 1.0)
    assert gate.decide({"ram": 1000}, 100 * MIB).why is Why.UNMEASURED


@given(
    st.floats(1e6, 1e11), st.floats(1.0, 1e6), st.integers(16, 100_000), st.integers(MIB, 1 << 34), st.floats(1.01, 10)
)
def test_a_faster_medium_never_turns_a_load_into_a_recomputation(
    bandwidth: float, prefill: float, tokens: int, size: int, factor: float
) -> None:
    slow, fast = measured(bandwidth, prefill), measured(bandwidth * factor, prefill)
    if slow.decide({"ram": tokens}, size).load:
        assert fast.decide({"ram": tokens}, size).load


def test_a_decision_says_its_figures() -> None:
    assert str(measured(1e9, 100).decide({"ram": 1000}, 10 * MIB)) == "faster: load 0.0105 s, prefill 10.0000 s"


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_impossible_measurements_are_left_out(seconds: float) -> None:
    gate = Gate()
    gate.loaded({"ram": 1000}, 64 * MIB, seconds)
    gate.computed(1000, seconds)
    assert gate.decide({"ram": 1000}, MIB).why is Why.UNMEASURED
