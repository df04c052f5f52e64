"""What each namespace was asked, served and saved, by day: in the lowest tier's index, so it survives restarts.

`DayBook` is an observer: it adds up in memory, on the thread on which something happens; the keeper writes what came
together every few seconds, and no request waits for it. Must not know what a day is good for.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from kvstore.events import Event, Hit, Miss, Moved, Prefilled, Saved
from kvstore.index import Index
from kvstore.records import damaged
from kvstore.transaction import Database, Transaction

DAY_S = 86_400
OTHERS = bytes(32)
"""Stands for namespaces that are not known, and for those of an old day that were added up to save room."""
RECORD_BYTES = 512
"""Room that a record is counted with, of an index of which days take one part in `INDEX_SHARE`."""
INDEX_SHARE = 32
MOST = 65_536
"""Records that are kept at most, however large the index."""

_DAY = struct.Struct("<QQQQQQQQQQQQQ")
_KEY = struct.Struct(">I32s")


@dataclass(frozen=True, slots=True)
class Day:
    """What was counted. Tokens: asked; served from each tier; rerun (served, and run again all the same); cold
    (computed where nothing of the prompt was found). Bytes of payload: loaded, saved to `ram`, moved to `nvme`. The
    rest is microseconds."""

    asked: int = 0
    hbm: int = 0
    ram: int = 0
    nvme: int = 0
    rerun: int = 0
    loaded_bytes: int = 0
    load_us: int = 0
    saved_bytes: int = 0
    save_us: int = 0
    moved_bytes: int = 0
    move_us: int = 0
    cold: int = 0
    cold_us: int = 0

    @property
    def served(self) -> int:
        """Tokens served, from whatever tier."""
        return self.hbm + self.ram + self.nvme

    def __add__(self, other: Day) -> Day:
        return Day(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def pack(self) -> bytes:
        """The stored value."""
        return _DAY.pack(*(min(getattr(self, name), 2**64 - 1) for name in self.__slots__))

    @classmethod
    def unpack(cls, raw: bytes) -> Day:
        """From the stored value. Raises DamagedError."""
        if len(raw) != _DAY.size:
            raise damaged("a day's record")
        return cls(*_DAY.unpack(raw))


Days = dict[tuple[int, bytes], Day]
"""By day (since 1970, UTC) and root."""


class DayBook:
    """The observer, and the book that it is written to. clock: seconds, as `time.time`."""

    def __init__(self, index: Index, clock: Callable[[], float] = time.time) -> None:
        self._index, self._clock = index, clock
        self._fresh: Days = {}
        self._lock = Lock()
        self.most = max(16, min(MOST, index.size // INDEX_SHARE // RECORD_BYTES))

    def __call__(self, event: Event) -> None:
        found = _counted(event)
        if found is None:
            return
        root, change = found
        key = int(self._clock()) // DAY_S, root or OTHERS
        with self._lock:
            self._fresh[key] = self._fresh.get(key, Day()) + change

    def flush(self) -> None:
        """Write what came together. Raises what a busy or a full index raises; then it is kept for the next time."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
        if not fresh:
            return
        try:
            self._index.write(lambda txn: _add(txn, fresh, self.most), timeout=1.0)
        except BaseException:
            with self._lock:
                for key, day in fresh.items():
                    self._fresh[key] = self._fresh.get(key, Day()) + day
            raise

    def listing(self) -> Days:
        """All days, what this process has not written yet included."""
        with self._lock:
            found = dict(self._fresh)
        with self._index.read() as txn:
            for raw_key, raw in txn.scan(Database.DAYS):
                key = _key(raw_key)
                found[key] = found.get(key, Day()) + Day.unpack(raw)
        return dict(sorted(found.items()))


def _counted(event: Event) -> tuple[bytes, Day] | None:
    """The namespace that an event belongs to, and what it adds to its day."""
    match event:
        case Hit(tier, tokens, size, seconds, root) if tier in ("hbm", "ram", "nvme"):
            return root, Day(asked=tokens, loaded_bytes=size, load_us=_us(seconds), **{tier: tokens})
        case Miss(_, tokens, root):
            return root, Day(asked=tokens)
        case Prefilled(_, rerun, computed, seconds, whole, root):
            measured = whole and seconds > 0
            return root, Day(rerun=rerun, cold=computed if measured else 0, cold_us=_us(seconds) if measured else 0)
        case Saved(_, _, size, seconds, root):
            return root, Day(saved_bytes=size, save_us=_us(seconds))
        case Moved("ram", "nvme", _, size, seconds, root):
            return root, Day(moved_bytes=size, move_us=_us(seconds))
    return None


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _key(raw: bytes) -> tuple[int, bytes]:
    if len(raw) != _KEY.size:
        raise damaged("a day's key")
    day, root = _KEY.unpack(raw)
    return int(day), bytes(root)


def _add(txn: Transaction, fresh: Days, most: int) -> None:
    for (day, root), change in fresh.items():
        _put(txn, day, root, change)
    while txn.count(Database.DAYS) > most:
        _shorten(txn)


def _put(txn: Transaction, day: int, root: bytes, change: Day) -> None:
    key = _KEY.pack(day, root)
    known = txn.get(Database.DAYS, key)
    txn.put(Database.DAYS, key, ((Day.unpack(known) if known is not None else Day()) + change).pack())


def _shorten(txn: Transaction) -> None:
    """Add up the namespaces of the oldest day that has several; where each has one, drop the oldest day."""
    oldest: bytes | None = None
    group: list[bytes] = []
    for key, _ in txn.scan(Database.DAYS):
        oldest = oldest or key
        if group and key[:4] != group[0][:4]:
            if len(group) > 1:
                break
            group = []
        group.append(key)
    if len(group) > 1:
        total = Day()
        for key in group:
            total += Day.unpack(txn.pop(Database.DAYS, key) or Day().pack())
        _put(txn, _key(group[0])[0], OTHERS, total)
    elif oldest is not None:
        txn.delete(Database.DAYS, oldest)
