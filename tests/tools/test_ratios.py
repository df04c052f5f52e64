"""Paired measurements: the spread holds the median, and a verdict is only given where the spread allows one."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tools.ratios import PAIRS_MIN, Target, Verdict, alternate, figure, interval, paired

seconds = st.floats(1e-6, 1e3)
samples = st.lists(seconds, min_size=1, max_size=40)


@given(samples)
def test_interval_is_made_of_samples_and_holds_their_median(values: list[float]) -> None:
    low, high = interval(values)
    assert low in values
    assert high in values
    assert low <= median(values) <= high


@given(samples, st.randoms())
def test_interval_does_not_depend_on_order(values: list[float], shuffle: random.Random) -> None:
    mixed = list(values)
    shuffle.shuffle(mixed)
    assert interval(mixed) == interval(values)


def test_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(7)
    for count in (PAIRS_MIN, 8, 13):
        trials = 4000
        held = 0
        for _ in range(trials):
            low, high = interval([draw.lognormvariate(0, 1) for _ in range(count)])
            held += low <= 1 <= high
        assert held / trials > 0.88, count  # 0.9 less four standard errors of 4000 trials


@pytest.mark.parametrize(("count", "at"), [(1, 0), (4, 0), (5, 0), (7, 0), (8, 1), (11, 2), (20, 5)])
def test_interval_is_the_narrowest_that_the_binomial_allows(count: int, at: int) -> None:
    assert interval([float(n) for n in range(count)]) == (at, count - 1 - at)


@given(samples, st.floats(1e-6, 1e3), st.booleans())
def test_verdict_is_undecided_exactly_where_the_spread_reaches_over_the_target(
    values: list[float], value: float, at_most: bool
) -> None:
    made = figure(values, Target(value, at_most))
    on_the_right_side = {(v <= value if at_most else v >= value) for v in (made.low, made.high)}
    if on_the_right_side == {True}:
        assert made.verdict is Verdict.MET
    elif on_the_right_side == {False}:
        assert made.verdict is Verdict.MISSED
    else:
        assert made.verdict is Verdict.UNDECIDED


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20))
def test_paired_ratio_is_a_share_of_the_limit_or_a_multiple_of_it(pairs: list[tuple[float, float]]) -> None:
    ours, limit = [a for a, _ in pairs], [b for _, b in pairs]
    share, multiple = paired(ours, limit), paired(ours, limit, rate=False)
    for a, b, one, other in zip(ours, limit, share.ratio.samples, multiple.ratio.samples, strict=True):
        assert one == b / a
        assert other == a / b


def test_every_sample_reaches_the_json() -> None:
    made = paired([1.0, 2.0, 4.0], [1.0, 1.0, 1.0], Target(0.8)).to_dict()
    assert made["ours_s"] == [1.0, 2.0, 4.0]
    assert made["limit_s"] == [1.0, 1.0, 1.0]
    assert made["ratio"]["samples"] == [1.0, 0.5, 0.25]
    assert made["ratio"]["verdict"] == "undecided"
    assert made["ratio"]["target"] == ">= 0.8"


def test_alternating_measures_both_sides_in_turn_and_throws_the_first_pair_away() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    ours, limit = alternate(lambda: side("a"), lambda: side("b"), 3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert ours == [3, 6, 7]
    assert limit == [4, 5, 8]


def test_figure_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="samples"):
        figure([])
