"""A device that does its work as late and in as odd an order as its marks allow, for tests of code that uses lanes.

On the CPU everything happens at once, so a missing order between lanes could not be seen. Here work waits in its lane
and is done in random order, lane against lane, whenever somebody asks for the device: what is not ordered by a mark
will, for some seed, happen the wrong way round. Must not know who uses it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TypeAlias

import torch

from kvstore.tiers.lanes import Lane, Mark

_Step: TypeAlias = "Callable[[], object] | ShuffledMark"


class ShuffledMark:
    """A point in a lane; it passes when all before it was done."""

    def __init__(self, lanes: ShuffledLanes) -> None:
        self._lanes = lanes
        self.passed = False

    def done(self) -> bool:
        """Whether it has passed; the device may get on a little for being asked."""
        self._lanes.advance()
        return self.passed

    def wait(self) -> None:
        """Have the device work, in random order, until it has passed."""
        self._lanes.work_until(lambda: self.passed)


class ShuffledLanes:
    """`kvstore.tiers.lanes.Lanes` for CPU tensors.

    seed: of the order. needs_pinned: whether host memory counts as out of the device's reach unless page-locked.
    eagerness: how many steps the device makes, on average, whenever it is used.
    """

    def __init__(self, seed: int, *, needs_pinned: bool = False, eagerness: float = 1.0) -> None:
        self.needs_pinned = needs_pinned
        self._random = Random(seed)
        self._eagerness = eagerness
        self._lock = threading.RLock()
        self._queues: dict[str, deque[tuple[str, _Step]]] = {}
        self._current = threading.local()

    @property
    def inbound(self) -> Lane:
        """The lane of copies from the host."""
        return "inbound"

    @property
    def outbound(self) -> Lane:
        """The lane of copies to the host."""
        return "outbound"

    def current(self) -> Lane:
        """The thread's own lane: ``engine``, unless `use` said otherwise."""
        return getattr(self._current, "lane", "engine")

    def use(self, lane: str) -> None:
        """Make ``lane`` the calling thread's own."""
        self._current.lane = lane

    def submit(self, lane: Lane, work: Callable[[], object]) -> None:
        """Put work into a lane, to be done some time."""
        self._put(lane, "work", work)
        self.advance()

    def mark(self, lane: Lane) -> Mark:
        """A mark behind what the lane has."""
        mark = ShuffledMark(self)
        self._put(lane, "mark", mark)
        return mark

    def follow(self, lane: Lane, mark: Mark) -> None:
        """Stop the lane there until the mark has passed."""
        if isinstance(mark, ShuffledMark):
            self._put(lane, "follow", mark)

    def settle(self) -> None:
        """Have the device do everything."""
        self.work_until(lambda: not any(self._queues.values()))

    def advance(self) -> None:
        """Let the device make a random number of steps, often none."""
        with self._lock:
            while self._random.random() < self._eagerness / (1 + self._eagerness) and self._step():
                pass

    def work_until(self, reached: Callable[[], bool]) -> None:
        """Have the device work until ``reached``. Raises RuntimeError when nothing can be done any more."""
        with self._lock:
            while not reached():
                if not self._step():
                    raise RuntimeError(f"the lanes wait for each other: {self._queues}")

    def _put(self, lane: Lane, kind: str, step: _Step) -> None:
        with self._lock:
            self._queues.setdefault(lane, deque()).append((kind, step))

    def _step(self) -> bool:
        """Do the first thing of a random lane that can go on; whether there was one."""
        ready = [queue for queue in self._queues.values() if queue and _may_run(*queue[0])]
        if not ready:
            return False
        kind, step = self._random.choice(ready).popleft()
        if not isinstance(step, ShuffledMark):
            with torch.inference_mode():
                step()
        elif kind == "mark":
            step.passed = True
        return True


def _may_run(kind: str, step: _Step) -> bool:
    return kind != "follow" or (isinstance(step, ShuffledMark) and step.passed)
