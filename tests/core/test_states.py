"""The table of a block's life is complete, and nothing becomes readable but by being published."""

from __future__ import annotations

from itertools import product

from kvstore.states import TRANSITIONS, State, Step, after


def test_the_table_is_the_whole_life() -> None:
    allowed = {pair for pair in product(State, Step) if after(*pair) is not None}
    assert allowed == set(TRANSITIONS)


def test_only_publishing_makes_a_block_readable() -> None:
    assert [pair for pair, state in TRANSITIONS.items() if state is State.READY] == [(State.WRITING, Step.PUBLISH)]


def test_every_state_can_be_left_and_every_step_is_of_use() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert {step for _, step in TRANSITIONS} == set(Step)


def test_what_is_being_written_is_never_evicted() -> None:
    assert after(State.WRITING, Step.REMOVE) is None


def test_stored_numbers_of_states_never_change() -> None:
    assert {state.name: int(state) for state in State} == {"ABSENT": 0, "WRITING": 1, "READY": 2}
