"""The life of a part in a tier: whatever affects it is in this file.

ABSENT → WRITING(owner) → READY → ABSENT. A part is ABSENT when the index has no entry for it; the other states are
stored. Who finds another state than it planned with gives up. Pure.
"""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """State of a part in one tier, as stored."""

    ABSENT = 0
    WRITING = 1
    READY = 2


class Step(IntEnum):
    """What can happen to a part."""

    RESERVE = 1
    """A writer takes a slot for it."""
    PUBLISH = 2
    """Its owner has written every byte."""
    ABANDON = 3
    """Its owner gives up."""
    TAKE_BACK = 4
    """Its owner is dead."""
    REMOVE = 5
    """Evicted, expired, corrupt or purged."""


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.ABSENT, Step.RESERVE): State.WRITING,
    (State.WRITING, Step.PUBLISH): State.READY,
    (State.WRITING, Step.ABANDON): State.ABSENT,
    (State.WRITING, Step.TAKE_BACK): State.ABSENT,
    (State.READY, Step.REMOVE): State.ABSENT,
}


def after(state: State, step: Step) -> State | None:
    """The state after ``step``, or None where the step is not allowed."""
    return TRANSITIONS.get((state, step))
