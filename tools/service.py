"""What stands behind the API's routes: the store, its catalogue, its jobs, what it did lately, and who watches.

Looks at the store once a second; every stream and every page gets the same look. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from kvstore.errors import BusyError, KVStoreError, NotFoundError
from kvstore.rescan import unwritten
from kvstore.statistics import Stats
from kvstore.store import Store
from kvstore.tools.catalogue import Catalogue
from kvstore.tools.jobs import Jobs
from kvstore.tools.metrics import store_registry
from kvstore.tools.standins import stand_ins
from kvstore.tools.watching import Interval, between, pressure

P = ParamSpec("P")
R = TypeVar("R")

EVERY_S = 1.0
KEPT = 600
"""Looks that are remembered: ten minutes."""
PRESSURE_S = 10.0
UNWRITTEN_EVERY = 4
THREADS = 8
"""Calls of the store at once."""
WATCHERS = 16
WAITING = 8
"""Looks that may wait for one watcher; who is further behind is dropped."""
CONFIRM_S = 120.0
CONFIRMS = 256


class TooManyWatchers(BusyError):
    """As many streams as there may be are open."""


@dataclass(frozen=True)
class Look:
    """A store at a moment, what it did since the look before, and where it is under pressure.

    unwritten: blocks that are not on `nvme` yet, counted every few looks.
    """

    at: float
    stats: Stats
    last: Interval
    sentences: list[str]
    unwritten: int

    def point(self) -> dict[str, Any]:
        """What a chart needs of it."""
        return {
            "at": round(self.at, 3),
            **self.last.to_dict(),
            "tiers": {
                tier.name: {"used_bytes": tier.used_bytes, "allocated_bytes": tier.allocated_bytes}
                for tier in self.stats.tiers
            },
        }

    def told(self) -> dict[str, Any]:
        """All of it."""
        return {
            "stats": self.stats.to_dict(),
            "interval": self.point(),
            "pressure": self.sentences,
            "unwritten_blocks": self.unwritten,
        }


@dataclass(eq=False)
class Watcher:
    """One who gets every look. dropped: it was too slow."""

    waiting: asyncio.Queue[str] = field(default_factory=lambda: asyncio.Queue(WAITING))
    dropped: bool = False


class Service:
    """One server's. every: seconds between two looks."""

    def __init__(self, store: Store, *, read_only: bool, every: float = EVERY_S) -> None:
        self.store = store
        self.read_only = read_only
        self.stand_ins = stand_ins(store)
        self.catalogue = Catalogue(store)
        self.metrics = store_registry(store)
        self.jobs = Jobs({"verify": 1, "prefetch": 4})
        self.began = time.time()
        self.every_s = every
        self._limiter = anyio.CapacityLimiter(THREADS)
        self._looks: deque[Look] = deque(maxlen=KEPT)
        self._latest: deque[tuple[float, Stats]] = deque()
        self._watchers: set[Watcher] = set()
        self._unwritten = 0
        self._confirms: dict[str, tuple[float, str]] = {}
        self.trouble: str | None = "no look at the store yet"

    async def run(self, work: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        """Call the store in a thread; who stops waiting leaves it to its end."""
        return await anyio.to_thread.run_sync(
            partial(work, *args, **named), abandon_on_cancel=True, limiter=self._limiter
        )

    # ---------------------------------------------------------------- looking

    async def keep_looking(self) -> None:
        """Look until cancelled."""
        for number in itertools.count():
            began = time.monotonic()
            try:
                if self._watchers and number % UNWRITTEN_EVERY == 0:
                    self._unwritten = await self.run(self._count_unwritten)
                self._note(await self.run(self.store.stats))
                self.trouble = None
            except KVStoreError as error:
                self.trouble = str(error)
            await asyncio.sleep(max(self.every_s - (time.monotonic() - began), self.every_s / 4))

    def _note(self, now: Stats) -> None:
        clock = time.monotonic()
        latest = self._latest
        if latest:
            seconds = clock - latest[-1][0]
            last = between(latest[-1][1], now, seconds)
            while len(latest) > 1 and clock - latest[1][0] > PRESSURE_S:
                latest.popleft()
            recent = between(latest[0][1], now, clock - latest[0][0])
            look = Look(time.time(), now, last, pressure(now, recent), self._unwritten)
            self._looks.append(look)
            self._hand_out("look", look.told())
        latest.append((clock, now))

    def _count_unwritten(self) -> int:
        core = self.store._core
        return unwritten(core.ram) if core.nvme is not None else 0

    def looks(self) -> list[Look]:
        """What is remembered, the oldest first."""
        return list(self._looks)

    @property
    def streams(self) -> int:
        """How many watch."""
        return len(self._watchers)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watcher]:
        """A watcher, as long as it watches. Raises TooManyWatchers past `WATCHERS`."""
        if len(self._watchers) >= WATCHERS:
            raise TooManyWatchers(f"{WATCHERS} streams are open", "close one, or ask GET /v1/history now and then")
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def _hand_out(self, event: str, told: dict[str, Any]) -> None:
        if not self._watchers:
            return
        text = f"event: {event}\ndata: {json.dumps(told, separators=(',', ':'))}\n\n"
        for watcher in self._watchers:
            try:
                watcher.waiting.put_nowait(text)
            except asyncio.QueueFull:
                watcher.dropped = True

    # ---------------------------------------------------------------- changes, twice said

    def promise(self, target: str) -> str:
        """A word that `redeem` takes once, soon, for the same target."""
        now = time.monotonic()
        self._confirms = {word: one for word, one in self._confirms.items() if one[0] > now}
        while len(self._confirms) >= CONFIRMS:
            self._confirms.pop(next(iter(self._confirms)))
        word = secrets.token_urlsafe(16)
        self._confirms[word] = (now + CONFIRM_S, target)
        return word

    def redeem(self, word: str, target: str) -> None:
        """Raises NotFoundError for a word that was not given for this target, or too long ago."""
        until, promised = self._confirms.pop(word, (0.0, ""))
        if until < time.monotonic() or promised != target:
            raise NotFoundError(
                "there was no dry run of exactly this change within the last two minutes",
                "ask with dry_run first, then send the same with the confirm that it answers",
            )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Looks until the end of the block, which ends jobs too."""
        looking = asyncio.create_task(self.keep_looking())
        try:
            yield
        finally:
            looking.cancel()
            await self.jobs.close()
