"""The store's face: open, match, load, save, prefetch, pin, evict, stats, verify, close.

Everything here is thin: it checks what the caller passed, asks the parts behind it, and tells observers. A request is
never failed for the store's sake: `load` and `save` report misses and skipped blocks as values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from types import EllipsisType, TracebackType
from typing import Unpack

import numpy as np

from kvstore import registry, serving, tenants
from kvstore.assembly import Wrap
from kvstore.core import Core
from kvstore.days import Days
from kvstore.errors import ClosedError, KVStoreError, NotFoundError, SettingsError
from kvstore.events import Cause, Events, Fault, Matched, Notice, Observer
from kvstore.eviction import Selection, Target, refuse_unless_one
from kvstore.header import slot_bytes
from kvstore.host import boottime_ns
from kvstore.identity import Extra, Tokens, as_tokens, chain, salt_digest
from kvstore.layout import Layout
from kvstore.listing import NamespaceUse, Prefix, namespace_uses, prefixes
from kvstore.match import Match, Namespace
from kvstore.match import match as match_chain
from kvstore.prefetch import Prefetch
from kvstore.records import NameRecord, NamespaceRecord
from kvstore.saving import SaveJob, Saving, together
from kvstore.serving import Buffers, Lease, Loaded, parts_of, require_room
from kvstore.settings import Settings
from kvstore.statistics import Stats
from kvstore.tenants import QuotaUse
from kvstore.verification import Report
from kvstore.wiping import Step, Wiped


class Store:
    """A handle on a store. Safe for any thread; use `kvstore.open` to get one."""

    def __init__(self, core: Core, observers: Sequence[Observer] = ()) -> None:
        self._core = core
        self._open = True
        self._unsubscribe = [core.events.subscribe(observer) for observer in observers]

    # ---------------------------------------------------------------- namespaces and matching

    def namespace(self, layout: Layout, *, salt: bytes | str = b"", label: str = "", ttl: int = 0) -> Namespace:
        """The namespace of a layout under a salt.

        label: what people call it. ttl: seconds after which unused blocks expire, 0 for never. Raises BudgetError when
        not even two of its blocks fit the `ram` budget, SettingsError for another ttl.
        """
        core = self._require()
        if not isinstance(ttl, int) or not 0 <= ttl < 1 << 63:
            raise SettingsError(f"a ttl of {ttl!r}", "give whole seconds, 0 for never")
        serving.refuse_large_blocks(core, layout)
        for tier in core.tiers:
            tier.grow_ahead(slot_bytes(layout.payload_bytes(0)))
        record = NamespaceRecord(layout.root(salt), salt_digest(salt), int(time.time()), ttl, label, layout.to_json())
        return Namespace(layout, record.root, record)

    def namespace_at(self, root: bytes) -> Namespace:
        """The namespace that some process registered under a root. Raises NotFoundError."""
        for use in namespace_uses(self._require().tiers):
            if use.record.root == root:
                return Namespace(use.layout, root, use.record)
        raise NotFoundError(f"no namespace has the root {root.hex()[:16]}…", "`kvstore ls` lists the namespaces")

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
        began = time.perf_counter()
        try:
            found = match_chain(core.tiers, space, linked, most, core.applied())
        except KVStoreError as error:
            core.events.emit(Fault("store", "match", error.problem))
            empty = dict.fromkeys(space.layout.parts(), ())
            return Match(space, linked, len(ids), most, 0, empty, 0, Cause.IO)
        core.events.emit(Matched(most, found.tokens, time.perf_counter() - began, space.root))
        return found

    def lease(self, match: Match, seconds: float | None = None) -> Lease:
        """Keep a match's `ram` blocks from eviction. ``lease.tokens``: how many of its tokens are held in `ram`."""
        return serving.lease(self._require(), match, seconds)

    # ---------------------------------------------------------------- moving KV

    def load(self, match: Match, buffers: Buffers, *, first: int = 0, counted: bool = True) -> Loaded:
        """Copy a match's tokens into ``buffers[first : tokens]``, verified; what was only on `nvme` is promoted.

        first: tokens that the buffer has already; the rest of a block that it cuts may be written again. A mapping of
        some of the layout's parts loads these alone: a rank passes its own shard. Never raises for a block that cannot
        be had: the prefix ends there. To be called for an empty match too, so that misses are counted. counted: False
        where nobody asked, as for `kvstore warm`: no hit and no miss is told. Raises LayoutError when the buffer has no
        room or is of another layout, UnsupportedError when it is on another device than `device`.
        """
        core = self._require()
        parts = parts_of(match.space.layout, buffers)
        require_room(core, parts, match.tokens, "are stored", "make a larger buffer, or match with a limit")
        with core.use():
            return serving.serve(core, match, parts, first, counted=counted)

    def save(
        self,
        space: Namespace,
        tokens: Iterable[int] | Tokens,
        buffers: Buffers,
        *,
        extras: Sequence[Extra] = (),
    ) -> Saving:
        """Save the KV of ``tokens``, which lies in ``buffers[0 : len(tokens)]``; gathered before the call returns.

        Blocks that the store has are left as they are. The last, partial block is saved too. A mapping of some of the
        layout's parts saves these alone. Raises TokenError, LayoutError, and UnsupportedError when a buffer is on
        another device than `device`.
        """
        core = self._require()
        ids = as_tokens(tokens)
        linked = chain(space.root, ids, space.layout.block_tokens, extras)
        parts = parts_of(space.layout, buffers)
        require_room(core, parts, len(ids), "are to be saved", "save only tokens whose KV is there")
        try:
            epoch = core.purge.epoch()
        except KVStoreError as error:
            core.saver.failed(error, len(linked) * len(parts))
            return Saving(0, 0, len(linked) * len(parts), 0, 0.0)
        now = boottime_ns()
        jobs = [SaveJob(space, linked, part, buffer, epoch, now) for part, buffer in parts.items()]
        with core.use():
            return together([core.saver.save(job) for job in jobs])

    @property
    def device(self) -> str | None:
        """Where the `hbm` tier lives, such as ``cuda:0``; KV on other devices is out of reach. None without a tier."""
        hbm = self._require().hbm
        return hbm.device if hbm is not None else None

    def prefetch(self, match: Match, *, deadline_s: float | None = None) -> Prefetch:
        """Bring a match's blocks up to `ram`, in the background; it stops ``deadline_s`` seconds from now.

        Where one of the same blocks is under way, that is returned, with its own deadline; `cancel` ends it for all.
        """
        return self._require().prefetches.start(match, deadline_s)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what this process saved is on `nvme`.

        False when that took longer than ``timeout`` seconds, at once while `nvme` is read-only after faults, and when
        blocks were given up since a flush last came to its end: `Skipped` events of `nvme` tell why. What was evicted
        on purpose does not count, nor what another process is writing. A later True says nothing of what was given up.
        """
        core = self._require()
        return core.mover is None or core.mover.flush(timeout)

    # ---------------------------------------------------------------- names, pins, quotas

    def pin(
        self, name: str, space: Namespace, tokens: Iterable[int] | Tokens, *, priority: int = 0, ttl: int | None = None
    ) -> NameRecord:
        """Name a prefix and keep its blocks from eviction, in every tier and process, across restarts.

        Where a part of it is stored, its first tokens are named and kept, without an error: the record's ``tokens`` has
        4 bytes for each. priority: pins take at most half of the smallest tier; past that, lower ones let go. ttl:
        seconds after which the pin ends. Raises NotFoundError when nothing of it is stored, BudgetError when pins of
        this priority and above leave no room, SettingsError for a priority or a ttl that cannot be kept.
        """
        core = self._require()
        _refuse_unless(-(1 << 31) <= priority < 1 << 31, f"a priority of {priority!r}", "give an integer of 32 bits")
        _refuse_unless(ttl is None or 0 < ttl < 1 << 40, f"a ttl of {ttl!r}", "give seconds above 0, None for good")
        found = self.match(space, tokens)
        if not found.tokens:
            raise NotFoundError("nothing of this prefix is stored", "save or warm it first")
        keys = tuple(dict.fromkeys(piece.name.key for pieces in found.pieces.values() for piece in pieces))
        size = sum(slot_bytes(space.layout.payload_bytes(part.group)) for part in space.layout.parts())
        now = int(time.time())
        raw = found.chain.tokens[: found.tokens].astype("<u4").tobytes()
        record = NameRecord(space.root, keys, raw, True, priority, now + ttl if ttl else 0, now, size)
        let_go = core.pins.put(name, record)
        if let_go:
            core.events.emit(Notice("pins", f"for {name!r} the pins of {', '.join(sorted(let_go))} let go"))
        return record

    def unpin(self, name: str) -> None:
        """Forget a name and its pin. Raises NotFoundError."""
        self._require().pins.drop(name)

    def names(self) -> dict[str, NameRecord]:
        """All named prefixes."""
        return self._require().pins.listing()

    def pinned(self) -> frozenset[str]:
        """Names whose pins keep their blocks now: not expired, and not let go for others of a higher priority."""
        return self._require().pins.holding()

    def set_quota(
        self,
        salt: bytes | str,
        *,
        ram: int | EllipsisType | None = ...,
        nvme: int | EllipsisType | None = ...,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """Bytes that all namespaces under a salt may hold in a tier; None takes a quota off, leaving it out keeps it.

        What a salt holds beyond is evicted at once, the least recently used first; returns how many blocks by tier.
        dry_run: only count these. Raises SettingsError for the empty salt, or a number that cannot be a quota.
        """
        core = self._require()
        if not salt:
            raise SettingsError("the empty salt cannot have a quota", "give what is to be limited a salt of its own")
        digest, wanted = salt_digest(salt), {"ram": ram, "nvme": nvme}
        chosen = {tier: limit for tier, limit in wanted.items() if not isinstance(limit, EllipsisType)}
        for name, limit in () if dry_run else chosen.items():
            core.quotas.set(name, digest, limit)
        core.quotas_changed()
        return {
            tier.name: tenants.trim(tier, digest, limit, dry_run=dry_run)
            for tier in core.tiers
            if (limit := chosen.get(tier.name)) is not None
        }

    def quotas(self) -> list[QuotaUse]:
        """All quotas, with what is held of each."""
        core = self._require()
        return tenants.quota_uses(core.tiers, core.quotas)

    def set_ttl(self, root: bytes, ttl: int) -> None:
        """Seconds after which a namespace's unused blocks expire; 0 takes a TTL off.

        An engine that asks for one sets it again when it next opens the namespace. Raises NotFoundError, SettingsError.
        """
        core = self._require()
        self.namespace_at(root)
        _refuse_unless(0 <= ttl < 1 << 63, f"a ttl of {ttl!r}", "give whole seconds, 0 for never")
        tenants.set_ttl(core.tiers, root, ttl)

    def drop_empty(self, *, dry_run: bool = False) -> list[NamespaceRecord]:
        """Forget namespaces without a block or a name; one that is used again is registered again. Returns them."""
        core = self._require()
        named = {record.root for record in core.pins.listing().values()}
        return list(tenants.drop_empty(core.tiers, named, dry_run=dry_run).values())

    # ---------------------------------------------------------------- administration

    def evict(
        self,
        *,
        tier: str | None = None,
        dry_run: bool = False,
        forget_names: bool = False,
        **selection: Unpack[Selection],
    ) -> dict[str, int]:
        """Evict what exactly one of these names, in every process; returns how many blocks by tier.

        selection: everything, namespace, salt, prefix, name, unused_s or larger, as `Selection` says. tier: drop only
        the copies in one tier. dry_run: only count. forget_names: also what people named of it, which holds its tokens;
        not with a tier. Raises SettingsError, NotFoundError; then nothing has changed.
        """
        _refuse_unless(
            tier is None or not forget_names,
            f"forget_names with the tier {tier!r}: a name is of what all tiers hold",
            "leave tier out, or forget_names",
        )
        return self._require().evict(self._target(selection), tier, dry_run=dry_run, names=forget_names)

    def losing(self, **selection: Unpack[Selection]) -> list[str]:
        """Names of prefixes of which `evict` of the same from all tiers would take blocks now."""
        return self._require().losing(self._target(selection))

    def _target(self, selection: Selection) -> Target:
        core = self._require()
        refuse_unless_one(selection)
        prefix, salt = selection.get("prefix"), selection.get("salt")
        if (name := selection.get("name")) is not None:
            record = core.pins.get(name)
            prefix = self.match(self.namespace_at(record.root), np.frombuffer(record.tokens, "<u4"))
            if prefix.tokens < prefix.asked:  # what is left of it belongs to others as well
                problem = f"only {prefix.tokens} of the {prefix.asked} tokens named {name!r} are stored"
                raise NotFoundError(problem, "unpin the name; evict what is left by its prefix")
        return Target(
            everything=selection.get("everything", False),
            root=selection.get("namespace"),
            salt=None if salt is None else salt_digest(salt),
            prefix=prefix,
            unused_s=selection.get("unused_s"),
            larger=selection.get("larger"),
        )

    def wipe(self, progress: Step = lambda what, done, total: None) -> Wiped:
        """Leave no readable byte, in any file of any tier, of what was evicted, by whatever means.

        Works beside engines; while an index is written anew nothing can be saved. Copies in an engine's own memory or
        on a device are out of reach. Raises BusyError, StorageError, NoSpaceError: then call it again; ClosedError when
        another thread closes the store, which waits until nothing is written over any more.
        """
        return self._require().wipe(progress)

    def namespaces(self) -> list[NamespaceUse]:
        """All namespaces, with what they hold in each tier."""
        return namespace_uses(self._require().tiers)

    def prefixes(self, root: bytes) -> list[Prefix]:
        """The stored sequences of a namespace, each with its first tokens; those that go on in another are left out."""
        return prefixes(self._require().tiers, root)

    def stats(self) -> Stats:
        """What tiers hold and what all processes have counted."""
        return self._require().stats()

    def days(self) -> Days:
        """What was counted, by day (since 1970, UTC) and root; of other processes what they wrote, at most ten seconds
        ago."""
        return self._require().days.listing()

    def verify(
        self, *, payloads: bool = True, repair: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> Report:
        """Check books, slots and counters of every tier and, with ``payloads``, every checksum.

        repair: what is wrong is removed. progress: called with blocks checked and blocks in all.
        """
        return self._require().verify(payloads=payloads, repair=repair, progress=progress)

    @property
    def events(self) -> Events:
        """Where to subscribe to events."""
        return self._core.events

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._core.settings

    def close(self) -> None:
        """Write what waits and let go; the last handle of a process closes the store. Safe to call twice.

        What `nvme` has not after 10 s, and a second for each 100 MB of ``mover_queue_bytes``, stays in `ram` alone.
        """
        if self._open:
            self._open = False
            for unsubscribe in self._unsubscribe if self._core.handles > 1 else ():
                unsubscribe()
            registry.release(self._core)

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


def _refuse_unless(fine: bool, problem: str, remedy: str) -> None:
    if not fine:
        raise SettingsError(problem, remedy)


def open_store(
    settings: Settings, given: Collection[str], *, wrap: Wrap | None, observers: Sequence[Observer]
) -> Store:
    """A handle on the store of ``settings.path``; handles of one process share one core, and its settings.

    given: settings that the caller named. Raises a KVStoreError of its own for each thing that can be wrong with the
    path, the medium or a budget, and SettingsError where the store is open with others.
    """
    core, fresh = registry.acquire(settings, given, wrap, observers)
    return Store(core, () if fresh else observers)
