"""What prompts cost the engine: how long its steps take, and what of a prompt ran in them, loaded or not.

A step is timed from its orders, or the outcome before it, to its own outcome: on a device nothing else tells when a
forward is over. Must not know the store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.adapters.vllm.tracked import Tracked

MOSTLY = 0.75
"""Share of a step's tokens that must be of prompts, for the step to tell how fast prompts run."""
Ran: TypeAlias = tuple[Tracked, int, bool]
"""A request in a step, tokens of it that run, and whether its prompt ends there."""


@dataclass(frozen=True, slots=True)
class _Step:
    began: float
    tokens: int
    ran: Sequence[Ran]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step. tokens, seconds: a measurement of prefill, zeros where it was none. over: whose prompts ended."""

    tokens: int = 0
    seconds: float = 0.0
    over: Sequence[Tracked] = ()


class Prefills:
    """Steps that were ordered and are not settled."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._settled = 0.0

    def ordered(self, step: int, tokens: int, ran: Sequence[Ran]) -> None:
        """A step begins, in which ``tokens`` run in all."""
        if tokens:
            self._steps[step] = _Step(time.perf_counter(), tokens, ran)

    def settled(self, step: int, loading_s: float, failed: frozenset[str]) -> Outcome:
        """A step is over. loading_s: what of it were loads. failed: requests whose tokens in it do not count."""
        now = time.perf_counter()
        known = self._steps.get(step)
        self._steps = {later: kept for later, kept in self._steps.items() if later > step}
        began, self._settled = self._settled, now
        if known is None:
            return Outcome()
        seconds = max(0.0, now - max(known.began, began) - loading_s)
        over: list[Tracked] = []
        for tracked, count, last in known.ran:
            if tracked.request.request_id in failed:
                continue
            tracked.ran += count
            tracked.ran_s += seconds * count / known.tokens
            if last:
                over.append(tracked)
        prompts = sum(count for _, count, _ in known.ran)
        if prompts < MOSTLY * known.tokens:
            return Outcome(over=over)
        return Outcome(known.tokens, seconds, over)
