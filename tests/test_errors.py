"""Every error says what is wrong and what to do, and can be told apart by a program."""

from __future__ import annotations

import copy

import pytest

from kvstore import errors
from kvstore.errors import KVStoreError

CLASSES = sorted(
    (thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, KVStoreError)),
    key=lambda kind: kind.exit_code,
)


def test_exit_codes_tell_the_errors_apart_and_stay_clear_of_signals() -> None:
    codes = [kind.exit_code for kind in CLASSES]
    assert len(CLASSES) > 10
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 126 for code in codes)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_tells_problem_and_remedy(kind: type[KVStoreError]) -> None:
    error = kind("the disk is full", "free some space")
    assert (error.problem, error.remedy) == ("the disk is full", "free some space")
    assert str(error).splitlines() == ["the disk is full", "  free some space"]
    assert str(kind("alone", "")) == "alone"
    assert kind.__doc__


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_crosses_process_boundaries_whole(kind: type[KVStoreError]) -> None:
    # A copy is made by the same protocol by which process pools hand errors over.
    arrived = copy.copy(kind("what", "how"))
    assert type(arrived) is kind
    assert (arrived.problem, arrived.remedy, str(arrived)) == ("what", "how", "what\n  how")
