"""The store's face: open, match, load, save, prefetch, pin, evict, stats, verify, close.

Everything here is thin: it checks what the caller passed, asks the parts behind it, and tells observers. A request is
never failed for the store's sake: `load` and `save` report misses and skipped blocks as values.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from kvstore import superblock
from kvstore.core import Core, Wrap
from kvstore.errors import BudgetError, ClosedError, KVStoreError, LayoutError, NotFoundError
from kvstore.events import Cause, Events, Fault, Hit, Miss, Observer
from kvstore.eviction import Target
from kvstore.header import slot_bytes
from kvstore.host import boottime_ns
from kvstore.identity import Extra, Tokens, as_tokens, chain, salt_digest
from kvstore.kv import KVBuffer
from kvstore.layout import Layout, Part
from kvstore.listing import NamespaceUse, Prefix, namespace_uses, prefixes
from kvstore.match import Match, Namespace
from kvstore.match import match as match_chain
from kvstore.prefetch import Prefetch
from kvstore.records import NameRecord, NamespaceRecord
from kvstore.saving import SaveJob, Saving
from kvstore.settings import Settings
from kvstore.statistics import Stats
from kvstore.verification import Report, verify

Buffers = KVBuffer | Mapping[Part, KVBuffer]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did. tokens: verified tokens now in the buffer, from its start on. seconds: of the whole call."""

    tokens: int
    by_tier: Mapping[str, int]
    bytes: int
    seconds: float
    stop: Cause


class Lease:
    """Blocks of a match that no process evicts from `ram` until `release`, or until it runs out."""

    def __init__(self, core: Core, key: bytes, tokens: int) -> None:
        self._core, self._key = core, key
        self.tokens = tokens

    def release(self) -> None:
        """Let the blocks go; safe to call twice."""
        if self._key and not self._core.closed:
            self._core.ram.release([self._key])
        self._key = b""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Store:
    """A handle on a store. Safe for any thread; use `kvstore.open` to get one."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._open = True

    # ---------------------------------------------------------------- namespaces and matching

    def namespace(self, layout: Layout, *, salt: bytes | str = b"", label: str = "", ttl: int = 0) -> Namespace:
        """The namespace of a layout under a salt.

        label: what people call it. ttl: seconds after which unused blocks expire, 0 for never. Raises BudgetError when
        not even two of its blocks fit the `ram` budget.
        """
        core = self._require()
        for group in range(len(layout.groups)):
            size = slot_bytes(layout.payload_bytes(group))
            if 2 * size > min(core.ram.budget() - core.ram.index.size, core.settings.ram_segment_bytes):
                raise BudgetError(
                    f"a block of this layout takes {size} bytes, too large for a ram budget of {core.ram.budget()}",
                    "raise the ram budget, or choose fewer tokens a block",
                )
        record = NamespaceRecord(layout.root(salt), salt_digest(salt), int(time.time()), ttl, label, layout.to_json())
        return Namespace(layout, record.root, record)

    def match(
        self,
        space: Namespace,
        tokens: Iterable[int] | Tokens,
        *,
        limit: int | None = None,
        extras: Sequence[Extra] = (),
    ) -> Match:
        """The longest stored prefix of ``tokens``, exact to the token; nothing is copied.

        limit: tokens that may be served at most (an engine must run at least one). extras: what the ids do not show.
        Raises TokenError.
        """
        core = self._require()
        ids = as_tokens(tokens)
        linked = chain(space.root, ids, space.layout.block_tokens, extras)
        most = len(ids) if limit is None else max(0, min(limit, len(ids)))
        try:
            return match_chain(core.tiers, space, linked, most, core.purge.epoch())
        except KVStoreError as error:
            core.events.emit(Fault("store", "match", error.problem))
            empty = dict.fromkeys(space.layout.parts(), ())
            return Match(space, linked, len(ids), most, 0, empty, 0, Cause.IO)

    def lease(self, match: Match, seconds: float | None = None) -> Lease:
        """Keep a match's `ram` blocks from eviction. ``lease.tokens``: how many of its tokens are held in `ram`."""
        core = self._require()
        held = match.tokens
        key = b""
        for pieces in match.pieces.values():
            mine = []
            for piece in pieces:
                if piece.tier != core.ram.name:
                    break
                mine.append(piece)
            blocks = [(piece.name, piece.entry) for piece in mine]
            key, count = core.ram.lease(blocks, seconds or core.settings.lease_s, core.settings.lock_timeout_s)
            held = min(held, sum(piece.take for piece in mine[:count]))
        return Lease(core, key, held)

    # ---------------------------------------------------------------- moving KV

    def load(self, match: Match, buffers: Buffers) -> Loaded:
        """Copy a match's tokens into ``buffers[0 : tokens]``, verified; what was only on `nvme` is promoted.

        Never raises for a block that cannot be had: the prefix ends there. To be called for an empty match too, so
        that misses are counted. Raises LayoutError when the buffer has no room.
        """
        self._require()
        began = time.perf_counter()
        parts = _parts(match.space.layout, buffers)
        for part, buffer in parts.items():
            if buffer.capacity < match.tokens:
                raise LayoutError(
                    f"the buffer of {part} has room for {buffer.capacity} tokens, {match.tokens} are stored",
                    "make a larger buffer, or match with a limit",
                )
        loaded, stop, seconds = self._load(match, parts)
        by_tier = _served(match, loaded)
        self._count(match, by_tier, loaded, stop, seconds)
        size = sum(match.space.layout.payload_bytes(part.group, loaded) for part in parts)
        return Loaded(loaded, by_tier, size, time.perf_counter() - began, stop)

    def save(
        self,
        space: Namespace,
        tokens: Iterable[int] | Tokens,
        buffers: Buffers,
        *,
        extras: Sequence[Extra] = (),
    ) -> Saving:
        """Save the KV of ``tokens``, which lies in ``buffers[0 : len(tokens)]``; gathered before the call returns.

        Blocks that the store has are left as they are. The last, partial block is saved too. Raises TokenError,
        LayoutError.
        """
        core = self._require()
        ids = as_tokens(tokens)
        linked = chain(space.root, ids, space.layout.block_tokens, extras)
        parts = _parts(space.layout, buffers)
        for part, buffer in parts.items():
            if buffer.capacity < len(ids):
                raise LayoutError(
                    f"the buffer of {part} has {buffer.capacity} tokens, {len(ids)} are to be saved",
                    "save only tokens whose KV is there",
                )
        try:
            epoch = core.purge.epoch()
        except KVStoreError as error:
            core.events.emit(Fault("store", "save", error.problem))
            return Saving(0, 0, len(linked) * len(parts), 0, 0.0)
        now = boottime_ns()
        done = [core.saver.save(SaveJob(space, linked, part, buffer, epoch, now)) for part, buffer in parts.items()]
        return Saving(
            sum(one.new_blocks for one in done),
            sum(one.known_blocks for one in done),
            sum(one.skipped_blocks for one in done),
            sum(one.bytes for one in done),
            sum(one.seconds for one in done),
        )

    def prefetch(self, match: Match) -> Prefetch:
        """Bring a match's blocks up to `ram`, in the background."""
        core = self._require()
        return core.prefetches.start(match)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was saved is on `nvme`; False when that took longer than ``timeout`` seconds."""
        core = self._require()
        return core.mover is None or core.mover.flush(timeout)

    # ---------------------------------------------------------------- names, pins, quotas

    def pin(
        self, name: str, space: Namespace, tokens: Iterable[int] | Tokens, *, priority: int = 0, ttl: int | None = None
    ) -> NameRecord:
        """Name a prefix and keep its blocks from eviction, in every tier and process, across restarts.

        ttl: seconds after which the pin ends. Raises NotFoundError when nothing of it is stored, BudgetError when pins
        would take more than half of the smallest tier.
        """
        core = self._require()
        found = self.match(space, tokens)
        if not found.tokens:
            raise NotFoundError("nothing of this prefix is stored", "save or warm it first")
        keys = tuple(piece.name.key for pieces in found.pieces.values() for piece in pieces)
        size = max(slot_bytes(space.layout.payload_bytes(group)) for group in range(len(space.layout.groups)))
        now = int(time.time())
        raw = found.chain.tokens[: found.tokens].astype("<u4").tobytes()
        record = NameRecord(space.root, keys, raw, True, priority, now + ttl if ttl else 0, now, size)
        core.pins.put(name, record, min(tier.budget() for tier in core.tiers))
        return record

    def unpin(self, name: str) -> None:
        """Forget a name and its pin. Raises NotFoundError."""
        self._require().pins.drop(name)

    def names(self) -> dict[str, NameRecord]:
        """All named prefixes."""
        return self._require().pins.listing()

    def set_quota(self, salt: bytes | str, *, ram: int | None = None, nvme: int | None = None) -> None:
        """Bytes that all namespaces under a salt may hold in a tier; None takes a quota off."""
        core = self._require()
        for tier, limit in (("ram", ram), ("nvme", nvme)):
            core.quotas.set(tier, salt_digest(salt), limit)

    # ---------------------------------------------------------------- administration

    def evict(
        self,
        *,
        everything: bool = False,
        namespace: bytes | None = None,
        salt: bytes | str | None = None,
        prefix: Match | None = None,
        unused_s: float | None = None,
        tier: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """Evict what exactly one of these names, in every process; returns how many blocks by tier.

        namespace: a root. prefix: goes with all that continues it and with heads that nothing else uses. unused_s:
        what was not used for so many seconds. tier: drop only the copies in one tier. dry_run: only count. Raises
        SettingsError, NotFoundError.
        """
        digest = None if salt is None else salt_digest(salt)
        target = Target(everything, namespace, digest, prefix, unused_s)
        return self._require().evict(target, tier, dry_run=dry_run)

    def namespaces(self) -> list[NamespaceUse]:
        """All namespaces, with what they hold in each tier."""
        return namespace_uses(self._require().tiers)

    def prefixes(self, root: bytes) -> list[Prefix]:
        """The stored sequences of a namespace, each with its first tokens; those that go on in another are left out."""
        return prefixes(self._require().tiers, root)

    def stats(self) -> Stats:
        """What tiers hold and what all processes have counted."""
        return self._require().stats()

    def verify(
        self, *, payloads: bool = True, repair: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> Report:
        """Check books, slots and counters of every tier and, with ``payloads``, every checksum.

        repair: what is wrong is removed. progress: called with blocks checked and blocks in all.
        """
        core = self._require()
        return verify(core.tiers, core.living(), payloads=payloads, mend=repair, progress=progress)

    @property
    def events(self) -> Events:
        """Where to subscribe to events."""
        return self._core.events

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._core.settings

    def close(self) -> None:
        """Write what waits and let go; the last handle of a process closes the store. Safe to call twice."""
        if self._open:
            self._open = False
            _release(self._core)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    def _require(self) -> Core:
        if not self._open:
            raise ClosedError("this handle is closed", "open the store again")
        self._core.require_open()
        return self._core

    def _load(self, match: Match, parts: Mapping[Part, KVBuffer]) -> tuple[int, Cause, dict[str, float]]:
        core = self._core
        loaded, stop = match.tokens, match.stop
        seconds: dict[str, float] = {}
        if not loaded:
            return 0, stop, seconds
        if core.purged(match):
            return 0, Cause.PURGED, seconds
        lease = self._try_lease(match)
        now = boottime_ns()
        try:
            for part, buffer in parts.items():
                outcome = core.loader.load(match, part, buffer, now)
                for piece, cause in zip(match.pieces[part], outcome.causes, strict=True):
                    if cause is not None and piece.start < loaded:
                        loaded, stop = piece.start, cause
                for tier, spent in outcome.seconds.items():
                    seconds[tier] = seconds.get(tier, 0.0) + spent
        finally:
            if lease is not None:
                lease.release()
        return loaded, stop, seconds

    def _try_lease(self, match: Match) -> Lease | None:
        """Hold the `ram` blocks while others are read from a disk; a load from memory alone does without."""
        if len(match.by_tier) < 2:
            return None
        try:
            return self.lease(match)
        except KVStoreError as error:
            self._core.events.emit(Fault(self._core.ram.name, "lease", error.problem))
            return None

    def _count(
        self, match: Match, by_tier: Mapping[str, int], loaded: int, stop: Cause, seconds: Mapping[str, float]
    ) -> None:
        """Hits by tier and misses by cause add up to the tokens asked for."""
        size = match.space.layout
        for tier, tokens in by_tier.items():
            stored = sum(size.payload_bytes(part.group, tokens) for part in match.pieces)
            self._core.events.emit(Hit(tier, tokens, stored, seconds.get(tier, 0.0)))
        served = min(match.limit, match.asked)
        if loaded < served:
            self._core.events.emit(Miss(stop if stop is not Cause.LIMIT else Cause.ABSENT, served - loaded))
        if served < match.asked:
            self._core.events.emit(Miss(Cause.LIMIT, match.asked - served))


def _parts(layout: Layout, buffers: Buffers) -> dict[Part, KVBuffer]:
    wanted = list(layout.parts())
    given = dict(buffers) if isinstance(buffers, Mapping) else {wanted[0]: buffers}
    if sorted(given) != sorted(wanted):
        raise LayoutError(f"buffers for {len(given)} parts, the layout has {len(wanted)}", "pass one buffer a part")
    return given


def _served(match: Match, loaded: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece in next(iter(match.pieces.values()), ()):
        take = min(piece.take, loaded - piece.start)
        if take > 0:
            found[piece.tier] = found.get(piece.tier, 0) + take
    return found


_registry: dict[tuple[int, int], Core] = {}
_registry_lock = threading.Lock()


def open_store(settings: Settings, *, wrap: Wrap, observers: Sequence[Observer]) -> Store:
    """A handle on the store of ``settings.path``; handles of one process share one core.

    Raises a KVStoreError of its own for each thing that can be wrong with the path, the medium or a budget.
    """
    with _registry_lock:
        superblock.prepare_directory(settings.path)
        stat = settings.path.stat()
        key = (stat.st_dev, stat.st_ino)
        core = _registry.get(key)
        if core is None or core.closed:
            core = Core(settings, wrap, tuple(observers))
            _registry[key] = core
        else:
            for observer in observers:
                core.events.subscribe(observer)
        core.handles += 1
        return Store(core)


def _release(core: Core) -> None:
    with _registry_lock:
        core.handles -= 1
        if core.handles:
            return
        for key, known in list(_registry.items()):
            if known is core:
                del _registry[key]
    core.close()


def _after_fork() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()
    for core in _registry.values():
        core.disown()
    _registry.clear()


os.register_at_fork(after_in_child=_after_fork)
