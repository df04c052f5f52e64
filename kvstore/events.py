"""What happened, as values: every hit, miss, save, move, eviction and fault is one frozen dataclass.

Observers receive them on the thread on which they happen and must return quickly; an observer that raises is
reported once through ``warnings`` and dropped. Must not know who produces events or who reads them.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from threading import Condition, Lock, Thread, current_thread, main_thread
from typing import TypeAlias

Root: TypeAlias = bytes
"""A namespace's root."""


LOAD_BOUNDS_US = (250, 500, *(round(n * 10**e) for e in range(3, 7) for n in (1, 2.5, 5)))
"""Upper bounds, in microseconds, of the classes by which loads are counted; what is slower counts as ``more``."""


class Cause(StrEnum):
    """Why tokens that were asked for were not served."""

    ABSENT = "absent"
    """Never stored, or evicted since."""
    WRITING = "writing"
    """Being written at that moment."""
    HEADER = "header"
    """The slot's header is damaged or belongs to another block."""
    CHECKSUM = "checksum"
    """The payload does not have the checksum it was stored with."""
    CHANGED = "changed"
    """The slot was reused while it was read."""
    IO = "io"
    """The medium reported an error."""
    PURGED = "purged"
    """Explicitly evicted or expired between match and load."""
    BUSY = "busy"
    """A lock or a staging buffer could not be had in time."""
    LIMIT = "limit"
    """Left to the engine on purpose: the last token must be run again."""
    REFUSED = "refused"
    """The model or the mode is not on the adapter's allow-list."""


class SkipReason(StrEnum):
    """Why blocks were not saved to `ram` or not moved to `nvme`."""

    FULL = "full"
    """No room: everything else there is pinned, leased or newer."""
    QUOTA = "quota"
    """The salt may not hold more."""
    BUSY = "busy"
    """A lock could not be had in time, or too many saves wait."""
    WRITING = "writing"
    """Somebody else is writing the same block at that moment."""
    PURGED = "purged"
    """Explicitly evicted, or taken back, while they were being written."""
    EVICTED_BEFORE = "evicted before"
    """Gone from `ram` before they were on `nvme`."""
    QUEUE_FULL = "queue full"
    """Too much waits for `nvme`; offered again when nothing does."""
    CLOSING = "closing"
    """The store was closed before they were written."""
    FAULT = "fault"
    """A medium or an index reported an error."""
    STAGING = "staging"
    """`hbm` had no room to copy through."""
    MISMATCH = "mismatch"
    """The model's cache did not hold what was run."""
    CHANGED = "changed"
    """The model's weights changed meanwhile."""


class EvictReason(StrEnum):
    """Why blocks left a tier."""

    LRU = "lru"
    """The least recently used made room."""
    RECUT = "recut"
    """Their segment, or the whole of `hbm`, was cut anew for slots of another size."""
    QUOTA = "quota"
    """A quota was set below what its salt held."""
    SHRINK = "shrink"
    """The tier was opened with a smaller budget."""
    EVICT = "evict"
    """Explicitly, by `Store.evict`."""
    EXPIRED = "expired"
    """Not used for their namespace's TTL."""
    CORRUPT = "corrupt"
    """Damaged."""
    UNREADABLE = "unreadable"
    """The medium reported an error when they were read."""
    IMPORT = "import"
    """Dropped from `ram` by an import: on the disk already, or to be saved anew since they are not."""
    WIPE = "wipe"
    """Given up to make room for the wiping of a full segment."""
    DEAD_OWNER = "dead owner"
    """Left half written by a process that died."""


@dataclass(frozen=True, slots=True)
class Hit:
    """``tokens`` tokens were served from ``tier``. namespace: its root, here and below; empty where there is none."""

    tier: str
    tokens: int
    bytes: int
    seconds: float
    namespace: Root = b""


@dataclass(frozen=True, slots=True)
class Miss:
    """``tokens`` tokens that were asked for were not served."""

    cause: Cause
    tokens: int
    namespace: Root = b""


@dataclass(frozen=True, slots=True)
class Matched:
    """Of ``asked`` tokens that may be served, ``tokens`` are stored; looking took ``seconds``."""

    asked: int
    tokens: int
    seconds: float
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """An engine ran the part of a prompt that it did not find.

    rerun: tokens that were served, and run again all the same. computed: tokens that it ran, these among them.
    seconds: what that took; 0 where it was not measured. whole: nothing of the prompt was reused.
    """

    adapter: str
    rerun: int
    computed: int
    seconds: float
    whole: bool
    namespace: Root = b""


@dataclass(frozen=True, slots=True)
class Decided:
    """A gate chose between loading a prefix and running it again. reason: one of `kvstore.gate.Why`."""

    adapter: str
    reason: str


@dataclass(frozen=True, slots=True)
class Saved:
    """``blocks`` new blocks became readable in ``tier``."""

    tier: str
    blocks: int
    bytes: int
    seconds: float
    namespace: Root = b""


@dataclass(frozen=True, slots=True)
class Skipped:
    """``blocks`` blocks were not saved or moved to ``tier``."""

    tier: str
    reason: SkipReason
    blocks: int


@dataclass(frozen=True, slots=True)
class Moved:
    """``blocks`` blocks were copied from one tier to another: a promotion upward, a demotion downward."""

    source: str
    target: str
    blocks: int
    bytes: int
    seconds: float
    namespace: Root = b""


@dataclass(frozen=True, slots=True)
class Evicted:
    """``blocks`` blocks left ``tier``."""

    tier: str
    reason: EvictReason
    blocks: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Something failed and was contained. ``what`` is the operation, ``detail`` the cause in words."""

    tier: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an operator should know: a capped budget, a fallback, a tier that went read-only."""

    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """An adapter left a request uncached, and why."""

    adapter: str
    reason: str


Event: TypeAlias = (
    Hit | Miss | Matched | Prefilled | Decided | Saved | Skipped | Moved | Evicted | Fault | Notice | Refusal
)
Observer: TypeAlias = Callable[[Event], None]


class Events:
    """Hands events to observers, in the order in which they subscribed.

    Observers are called without a lock held, and may call the store; but one that loads when it hears of a failed read
    occupies a read thread, of which there must be another (``io_threads``). What one raises goes no further: it is
    dropped, with a warning. Only a KeyboardInterrupt or SystemExit in the main thread is the program's own.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers: tuple[Observer, ...] = tuple(observers)
        self._lock = Lock()
        self._told = Condition(self._lock)
        self._waiting: deque[Event] = deque()
        self._telling = False

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Add an observer; call what is returned to take it off."""
        with self._lock:
            self._observers = (*self._observers, observer)
        return lambda: self._remove(observer)

    def emit(self, event: Event) -> None:
        """Tell every observer."""
        for observer in self._observers:
            try:
                observer(event)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit) and current_thread() is main_thread():
                    raise
                self._remove(observer)
                problem = f"kvstore observer {observer!r} raised {error!r} and was dropped"
                try:
                    warnings.warn(problem, RuntimeWarning, stacklevel=2)
                except RuntimeWarning:  # warnings are errors in this process: no thread of the store may end of one
                    self.emit(Notice("observer dropped", problem))

    def emit_elsewhere(self, event: Event) -> None:
        """Tell every observer, from a thread of its own: for who holds a lock, or writes an index. Keeps the order."""
        with self._lock:
            self._waiting.append(event)
            if self._telling:
                return
            self._telling = True
        try:
            Thread(target=self._tell, name="kvstore-events", daemon=True).start()
        except RuntimeError:  # the program is ending, or has too many threads: better from here than never
            self._tell()

    def settle(self, timeout: float) -> bool:
        """Wait until all was told; False when an observer took longer than ``timeout`` seconds."""
        with self._told:
            return self._told.wait_for(lambda: not self._telling, timeout)

    def _tell(self) -> None:
        while True:
            with self._told:
                if not self._waiting:
                    self._telling = False
                    self._told.notify_all()
                    return
                event = self._waiting.popleft()
            self.emit(event)

    def _remove(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(known for known in self._observers if known is not observer)


class Counters:
    """An observer that adds events up: one integer a counter. Names, of which OPERATING.md says more:

        asked.tokens                                          tokens asked for: hits and misses together
        hit.<tier>.{tokens,bytes,microseconds}                what a tier served, and how long that took
        load.<tier>.<bound>.times                             loads by `LOAD_BOUNDS_US`
        miss.<cause>.tokens                                   tokens not served, by `Cause`
        match.{times,microseconds}                            lookups
        prefill.<adapter>.{tokens,rerun.tokens,microseconds}  `Prefilled`
        gate.<adapter>.<reason>.decisions                     `Decided`
        save.<tier>.{blocks,bytes,microseconds}               `Saved`
        skip.<tier>.<reason>.blocks                           `Skipped`
        move.<source>.<target>.{blocks,bytes,microseconds}    `Moved`
        evict.<tier>.<reason>.blocks                          `Evicted`
        fault.<tier>.<what>                                   `Fault`; ``store`` and ``adapter`` are tiers here
        notice.<subject>                                      `Notice`
        refuse.<adapter>.<reason>                             `Refusal`

    ``take`` hands out what has been added since the last call, to be added to the counters that processes share.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._total: Counter[str] = Counter()
        self._fresh: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        changes = _changes(event)
        with self._lock:
            for name, amount in changes:
                self._total[name] += amount
                self._fresh[name] += amount

    def take(self) -> dict[str, int]:
        """What was added since the last call."""
        with self._lock:
            fresh, self._fresh = self._fresh, Counter()
        return dict(fresh)

    def put_back(self, taken: dict[str, int]) -> None:
        """Undo a `take` whose result could not be stored."""
        with self._lock:
            self._fresh.update(taken)

    def pending(self) -> dict[str, int]:
        """What the next `take` would hand out."""
        with self._lock:
            return dict(self._fresh)

    def snapshot(self) -> dict[str, int]:
        """Everything counted in this process."""
        with self._lock:
            return dict(self._total)


def _changes(event: Event) -> list[tuple[str, int]]:
    match event:
        case Hit(tier, tokens, size, seconds):
            return [
                (f"hit.{tier}.tokens", tokens),
                (f"hit.{tier}.bytes", size),
                (f"hit.{tier}.microseconds", round(seconds * 1e6)),
                (f"load.{tier}.{_load_class(seconds)}.times", 1),
                ("asked.tokens", tokens),
            ]
        case Miss(cause, tokens):
            return [(f"miss.{cause.value}.tokens", tokens), ("asked.tokens", tokens)]
        case Matched(_, _, seconds):
            return [("match.times", 1), ("match.microseconds", round(seconds * 1e6))]
        case Prefilled(adapter, rerun, computed, seconds):
            return [
                (f"prefill.{adapter}.rerun.tokens", rerun),
                (f"prefill.{adapter}.tokens", computed),
                (f"prefill.{adapter}.microseconds", round(seconds * 1e6)),
            ]
        case Decided(adapter, reason):
            return [(f"gate.{adapter}.{reason}.decisions", 1)]
        case Saved(tier, blocks, size, seconds):
            return [
                (f"save.{tier}.blocks", blocks),
                (f"save.{tier}.bytes", size),
                (f"save.{tier}.microseconds", round(seconds * 1e6)),
            ]
        case Skipped(tier, reason, blocks):
            return [(f"skip.{tier}.{reason}.blocks", blocks)]
        case Moved(source, target, blocks, size, seconds):
            name = f"move.{source}.{target}"
            return [(f"{name}.blocks", blocks), (f"{name}.bytes", size), (f"{name}.microseconds", round(seconds * 1e6))]
        case Evicted(tier, reason, blocks):
            return [(f"evict.{tier}.{reason}.blocks", blocks)]
        case Fault(tier, what, _):
            return [(f"fault.{tier}.{what}", 1)]
        case Notice(subject, _):
            return [(f"notice.{subject}", 1)]
        case Refusal(adapter, reason):
            return [(f"refuse.{adapter}.{reason}", 1)]


def _load_class(seconds: float) -> str:
    at = bisect_left(LOAD_BOUNDS_US, seconds * 1e6)
    return str(LOAD_BOUNDS_US[at]) if at < len(LOAD_BOUNDS_US) else "more"
