"""Events reach every observer, a faulty one is dropped, and counters add up."""

from __future__ import annotations

import dataclasses
import re
import warnings
from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import (
    Cause,
    Counters,
    Decided,
    Event,
    Events,
    Evicted,
    EvictReason,
    Fault,
    Hit,
    Matched,
    Miss,
    Moved,
    Notice,
    Prefilled,
    Refusal,
    Saved,
    Skipped,
    SkipReason,
)
from kvstore.gate import Why

TIERS = st.sampled_from(["hbm", "ram", "nvme"])
COUNTS = st.integers(0, 10**6)
SECONDS = st.floats(0, 10)
WORDS = st.sampled_from(["lru", "full", "known", "busy"])
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Hit, TIERS, COUNTS, COUNTS, SECONDS),
    st.builds(Miss, st.sampled_from(Cause), COUNTS),
    st.builds(Prefilled, st.just("transformers"), COUNTS, COUNTS, SECONDS, st.booleans()),
    st.builds(Matched, COUNTS, COUNTS, SECONDS),
    st.builds(Decided, st.just("vllm"), st.sampled_from(Why)),
    st.builds(Saved, TIERS, COUNTS, COUNTS, SECONDS),
    st.builds(Skipped, TIERS, st.sampled_from(SkipReason), COUNTS),
    st.builds(Moved, TIERS, TIERS, COUNTS, COUNTS, SECONDS),
    st.builds(Evicted, TIERS, st.sampled_from(EvictReason), COUNTS),
    st.builds(Fault, TIERS, WORDS, st.text(max_size=5)),
    st.builds(Notice, WORDS, st.text(max_size=5)),
    st.builds(Refusal, st.just("transformers"), WORDS),
)


@given(st.lists(EVENTS))
def test_asked_tokens_are_the_sum_of_hits_by_tier_and_misses_by_cause(happened: list[Event]) -> None:
    counters = Counters()
    events = Events([counters])
    for event in happened:
        events.emit(event)
    total = counters.snapshot()
    hits = sum(total.get(f"hit.{tier}.tokens", 0) for tier in ("hbm", "ram", "nvme"))
    misses = sum(total.get(f"miss.{cause.value}.tokens", 0) for cause in Cause)
    assert total.get("asked.tokens", 0) == hits + misses
    assert hits == sum(event.tokens for event in happened if isinstance(event, Hit))
    assert misses == sum(event.tokens for event in happened if isinstance(event, Miss))


@given(EVENTS)
def test_every_kind_of_event_is_counted(event: Event) -> None:
    counters = Counters()
    counters(event)
    names = counters.snapshot()
    assert names
    assert all(name == name.lower() for name in names)
    assert all(isinstance(amount, int) and amount >= 0 for amount in names.values())


ONE_OF_EACH: list[Event] = [
    Hit("<tier>", 1, 1, 1.0),
    *(Miss(cause, 1) for cause in Cause),
    Matched(1, 1, 1.0),
    Prefilled("<adapter>", 1, 1, 1.0, True),
    Decided("<adapter>", "<reason>"),
    Saved("<tier>", 1, 1, 1.0),
    Skipped("<tier>", "<reason>", 1),
    Moved("<source>", "<target>", 1, 1, 1.0),
    Evicted("<tier>", "<reason>", 1),
    Fault("<tier>", "<what>", ""),
    Notice("<subject>", ""),
    Refusal("<adapter>", "<reason>"),
]


def listed(text: str) -> set[str]:
    """Names of counters, with what stands in braces set in."""
    names: set[str] = set()
    for name in re.findall(r"^(?: {8}|\| `)([a-z]+\.[^ `]+)", text, re.MULTILINE):
        head, _, inner = name.partition("{")
        names.update(head + one for one in inner.rstrip("}").split(","))
    return names


def test_every_counter_is_listed_where_a_reader_of_stats_looks() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(get_args(Event))
    counters = Counters()
    for event in ONE_OF_EACH:
        counters(event)
    causes = "|".join(cause.value for cause in Cause)
    named = {re.sub(rf"^miss\.({causes})\.", "miss.<cause>.", name) for name in counters.snapshot()}
    named = {re.sub(r"^load\.<tier>\.\d+\.", "load.<tier>.<bound>.", name) for name in named}
    assert listed(Counters.__doc__ or "") == named
    page = (Path(__file__).parents[1] / "kvstore" / "OPERATING.md").read_text()
    assert listed(page[page.index("## Counters") : page.index("## When something fails")]) == named


@given(st.lists(st.one_of(EVENTS, st.sampled_from(["take", "take and fail"]))))
def test_what_is_taken_and_what_is_left_is_all_that_was_counted(steps: list[Event | str]) -> None:
    counters, stored = Counters(), dict[str, int]()
    for step in steps:
        if not isinstance(step, str):
            counters(step)
            continue
        taken = counters.take()
        if step == "take":
            stored = {name: stored.get(name, 0) + taken.get(name, 0) for name in stored | taken}
        else:
            counters.put_back(taken)
    rest = counters.take()
    together = {name: stored.get(name, 0) + rest.get(name, 0) for name in stored | rest}
    assert together == counters.snapshot()
    assert counters.take() == {}


@given(EVENTS)
def test_events_cannot_be_changed_by_an_observer(event: Event) -> None:
    name = dataclasses.fields(event)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, name, None)


@pytest.mark.parametrize("reasons", [SkipReason, EvictReason])
def test_every_documented_reason_is_emitted_and_no_other(reasons: type[StrEnum]) -> None:
    """That none is told by a bare word is what types are checked for; this is for code that casts."""
    tree = Path(__file__).resolve().parents[1]
    files = [file for part in ("kvstore", "adapters", "tiers", "tools") for file in (tree / part).rglob("*.py")]
    code = "\n".join(file.read_text() for file in files)
    assert set(re.findall(rf"\b{reasons.__name__}\.([A-Z_]+)", code)) == set(reasons.__members__)
    assert not re.findall(r"\b(?:Skipped|Evicted)\([^\n]*, f?[\"']", code)


def test_where_warnings_are_errors_a_faulty_observer_still_reaches_nobody_but_the_others() -> None:
    """The mover, for one, would end of it, and `flush` wait for ever."""
    heard: list[Event] = []

    def faulty(event: Event) -> None:
        raise ValueError("the log's disk is full")

    events = Events([faulty, heard.append])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events.emit(Skipped("ram", "full", 1))
        events.emit(Skipped("ram", "full", 2))
    assert [event for event in heard if isinstance(event, Skipped)] == [Skipped("ram", "full", n) for n in (1, 2)]
    (notice,) = (event for event in heard if isinstance(event, Notice))
    assert "the log's disk is full" in notice.detail


def test_an_observer_that_raises_is_reported_once_and_dropped_and_the_others_hear_on() -> None:
    first, last = list[Event](), list[Event]()

    def faulty(event: Event) -> None:
        raise OSError("the log's disk is full")

    events = Events([first.append, faulty, last.append])
    with pytest.warns(RuntimeWarning, match="the log's disk is full"):
        events.emit(Miss(Cause.ABSENT, 1))
    events.emit(Miss(Cause.ABSENT, 2))  # a second warning would be an error here
    assert first == last == [Miss(Cause.ABSENT, 1), Miss(Cause.ABSENT, 2)]


def test_an_observer_hears_nothing_after_it_was_taken_off() -> None:
    heard = list[Event]()
    events = Events()
    leave = events.subscribe(heard.append)
    events.emit(Notice("ram", "capped"))
    leave()
    leave()
    events.emit(Notice("ram", "again"))
    assert heard == [Notice("ram", "capped")]
