"""The `hbm` tier: verified blocks in the memory of one device, and the staging of every copy to and from it.

One tensor is the arena, cut into equal slots of one layout's payloads. Each call plans under the tier's lock (who gets
which slot), has the carrier queue the copies outside of it, and books the outcome under the lock again. A slot is
written again only once the host has seen every earlier use of it finish. Must not know streams, the shapes of tensors,
the index, or when a block is worth keeping.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvstore.errors import BudgetError, ClosedError, LayoutError, UnsupportedError
from kvstore.events import Event, Events, Evicted, EvictReason, Fault, Notice
from kvstore.kv import Bytes, KVBuffer
from kvstore.tiers.arena import Arena, Entry
from kvstore.tiers.batches import BATCH_BYTES, check_items
from kvstore.tiers.carrier import Carrier
from kvstore.tiers.device import Demote, DeviceItem, DeviceStats
from kvstore.tiers.devicekv import DeviceKV
from kvstore.tiers.flights import Flight, HeldBlocks, TransferHandle
from kvstore.tiers.lanes import Lanes, Mark, lanes_of, single_device
from kvstore.tiers.pagelock import PageLock
from kvstore.tiers.plans import Cut, Plan, plan_copy_out, plan_load, plan_save

NAME = "hbm"
ALIGNMENT = 4096
OFFER_SHARE, OFFER_LIMIT = 16, 64
"""Blocks told to ``demote`` ahead of their eviction: one sixteenth of the slots, at most this many a call."""

_UNCUT = Cut(ALIGNMENT, 0, 1, ALIGNMENT)


class HbmTier:
    """`kvstore.tiers.device.DeviceTier` over torch.

    budget: bytes of the arena, taken at once. lanes: the device's own when left out. batch_bytes: payload that one
    operation moves at most. Raises UnsupportedError for a device that is not there, BudgetError when it has less
    memory free.
    """

    def __init__(
        self,
        budget: int,
        device: str,
        *,
        events: Events | None = None,
        pagelock: PageLock | None = None,
        demote: Demote | None = None,
        lanes: Lanes | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        if budget < 2 * ALIGNMENT:
            raise BudgetError(f"hbm has a budget of {budget} bytes", "give it room for a few blocks, or 0 for none")
        self._device = single_device([device])
        self.budget = budget // ALIGNMENT * ALIGNMENT
        self._carrier = Carrier(self.budget, self._device, lanes or lanes_of(self._device), pagelock)
        self._events = events or Events()
        self._demote = demote
        self._batch_bytes = batch_bytes
        self._state = threading.Condition()
        self._arena = Arena(0)
        self._cut = _UNCUT
        self._flights: list[Flight] = []
        self.abandoned: deque[Flight] = deque()
        self._counts: Counter[str] = Counter()
        self._news: list[Event] = []
        self._calls: set[int] = set()
        self._closed = False

    @property
    def device(self) -> str:
        """Such as ``cuda:0`` or ``cpu``."""
        return str(self._device)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether its block is resident at this moment."""
        with self._state:
            self._refresh()
            return [self._arena.find(key) is not None for key in keys]

    def acquire(self, keys: Sequence[bytes]) -> HeldBlocks:
        """Keep resident blocks of ``keys`` from eviction until they are released."""
        with self._state:
            self._refresh()
            found = [self._arena.find(key) for key in keys]
            flight = Flight(promised=[entry for entry in found if entry is not None])
            self._arena.hold(flight.promised)
            self._arena.touch(flight.promised)
        return HeldBlocks(self, flight, [entry is not None for entry in found])

    def load(self, buffer: KVBuffer, items: Sequence[DeviceItem]) -> TransferHandle:
        """Put blocks into the engine's tensors; see `kvstore.tiers.device.DeviceTier.load`."""
        kv, plan = self._accept(buffer, items)
        with self._call(plan, lambda: self._plan_load(plan)) as flight:
            self._attempt("load", flight, lambda marks: self._carrier.load(kv, plan, marks))
            with self._state:
                lost = {id(entry) for entry in plan.promised} - {id(entry) for entry in plan.went()}
                for entry in plan.promised:
                    entry.doomed = entry.doomed or id(entry) in lost  # its bytes may not have come
                self._counts["loaded"] += sum(plan.taken)
                self._counts["direct"] += sum(e is None and t for e, t in zip(plan.entries, plan.taken, strict=True))
        return self._handle(plan, flight, plan.incoming)

    def save(self, buffer: KVBuffer, items: Sequence[DeviceItem]) -> TransferHandle:
        """Take blocks out of the engine's tensors; see `kvstore.tiers.device.DeviceTier.save`."""
        kv, plan = self._accept(buffer, items)
        if any(item.take != item.tokens for item in items):
            raise LayoutError("an item saves a part of its payload", "save whole payloads: take equals tokens")
        with self._call(plan, lambda: plan_save(self._cut_for(plan), plan)) as flight:
            self._attempt("save", flight, lambda marks: self._carrier.save(kv, plan, marks))
            with self._state:
                self._arena.publish(plan.went())
                self._arena.touch([e for entry in plan.went() if (e := self._arena.find(entry.key)) is not None])
                self._count_taken("saved", plan)
        return self._handle(plan, flight, [item.host is not None for item in items])

    def copy_out(self, items: Sequence[DeviceItem]) -> TransferHandle:
        """Copy resident blocks to their host payloads; see `kvstore.tiers.device.DeviceTier.copy_out`."""
        with self._state:
            plan = self._new_plan(self._cut, items)
        check_items(items, plan.cut.token_bytes, plan.cut.block_tokens)
        with self._call(plan, lambda: self._plan_copy_out(plan)) as flight:
            self._attempt("copy_out", flight, lambda marks: self._carrier.copy_out(plan, marks))
            with self._state:
                self._count_taken("copied_out", plan)
        return self._handle(plan, flight, [True] * len(items))

    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget blocks that turned out to be wrong. Returns how many were resident."""
        return self._drop(EvictReason.CORRUPT, lambda arena: arena.drop_keys(keys))

    def drop(self, keys: Collection[bytes] | None = None, root: bytes | None = None, everything: bool = False) -> int:
        """Forget blocks by key, by root, or all. Returns how many were resident."""

        def forget(arena: Arena) -> int:
            dropped = arena.drop_keys(keys) if keys else 0
            if everything or root is not None:
                dropped += arena.drop(lambda entry: everything or entry.root == root)
            return dropped

        return self._drop(EvictReason.EVICT, forget)

    def stats(self) -> DeviceStats:
        """State and counters."""
        with self._state:
            self._refresh()
            arena, counts = self._arena, self._counts
            return DeviceStats(
                device=str(self._device),
                budget=self.budget,
                slot_bytes=self._cut.stride if arena.slots else 0,
                slots=arena.slots,
                free=arena.free,
                staged=arena.staged,
                resident=arena.resident,
                in_use=arena.in_use,
                transfers=len(self._flights),
                loaded=counts["loaded"],
                promoted=counts["promoted"],
                saved=counts["saved"],
                copied_out=counts["copied_out"],
                passed_through=counts["passed_through"],
                direct=counts["direct"],
                not_taken=counts["not_taken"],
                evicted=counts["evicted"],
                offered=counts["offered"],
                dropped=counts["dropped"],
                recuts=counts["recuts"],
            )

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; an empty list when nothing is."""
        with self._state:
            self._refresh()
            found = self._arena.problems()
            if self._arena.slots * self._cut.stride > self.budget:
                found.append(f"{self._arena.slots} slots take more than the budget of {self.budget} bytes")
            return found

    def close(self) -> None:
        """Wait for copies under way and give the memory back."""
        with self._state:
            self._closed = True
            self._state.wait_for(lambda: not self._calls)
            self._arena, self._cut = Arena(0), _UNCUT
            self._flights.clear()
        self._carrier.close()

    # What handles need (`kvstore.tiers.flights.Landing`)

    def download(self, target: Bytes, source: torch.Tensor) -> None:
        """Copy from the arena to memory that is not page-locked. Raises RuntimeError when the device fails."""
        self._carrier.finish(target, source)

    def land(self, flight: Flight) -> None:
        """Release what a flight has held, once."""
        with self._state:
            self._land(flight)

    def failed(self, what: str, error: RuntimeError) -> None:
        """Report a failure of the device."""
        self._events.emit(Fault(NAME, what, str(error).splitlines()[0]))

    def settle(self, flight: Flight, chosen: Sequence[Entry]) -> int:
        """Make chosen promised blocks resident and release all of them. Returns how many became resident."""
        with self._state:
            promised, flight.promised = flight.promised, []
            if self._closed or not promised:
                return 0
            names = {id(entry) for entry in chosen}
            published = self._arena.publish([entry for entry in promised if id(entry) in names])
            self._arena.release(promised)
            self._counts["promoted"] += len(published)
            return len(published)

    # Inside

    def _accept(self, buffer: KVBuffer, items: Sequence[DeviceItem]) -> tuple[DeviceKV, Plan]:
        """The buffer and an empty plan. Raises UnsupportedError or LayoutError for what cannot be copied here."""
        if not isinstance(buffer, DeviceKV) or buffer.device != str(self._device):
            raise UnsupportedError(
                f"hbm is on {self._device}, the buffer is {type(buffer).__name__} on {buffer.device or 'the host'}",
                "wrap the engine's tensors in a DeviceKV, and open the store with device= the model's",
            )
        plan = self._new_plan(Cut.of(buffer.layout, buffer.group), items)
        check_items(items, plan.cut.token_bytes, plan.cut.block_tokens, buffer.capacity)
        return buffer, plan

    def _new_plan(self, cut: Cut, items: Sequence[DeviceItem]) -> Plan:
        return Plan(items, cut, max(1, self._batch_bytes // cut.stride))

    @contextmanager
    def _call(self, plan: Plan, decide: Callable[[], object]) -> Iterator[Flight]:
        """Plan under the lock, then the body; the flight is known to the tier from the beginning."""
        with self._state:
            self._refresh()
            decide()
            memory = {id(item.host.memory): item.host.memory for item in plan.items if item.host is not None}
            flight = Flight(entries=plan.used, promised=plan.promised, memory=list(memory.values()))
            self._flights.append(flight)
            self._calls.add(id(flight))
            if plan.evicted:
                self._counts["evicted"] += plan.evicted
                self._news.append(Evicted(NAME, EvictReason.LRU, plan.evicted))
        try:
            yield flight
        except BaseException:
            self.abandoned.append(flight)  # there will be no handle
            raise
        finally:
            try:
                self._ended(flight)
            except BaseException:  # Ctrl-C in there: `close` would wait for this call for ever
                self._ended(flight)
                raise
            self._tell()

    def _ended(self, flight: Flight) -> None:
        """Only now may it land: before, another thread would have freed slots that the call was about to publish."""
        with self._state:
            flight.marks = flight.queued or flight.marks
            self._calls.discard(id(flight))
            self._state.notify_all()

    def _attempt(
        self, what: str, flight: Flight, queue: Callable[[list[Mark]], list[tuple[Bytes, torch.Tensor]] | None]
    ) -> None:
        """Have the carrier queue copies; a failure of the device ends there, and is told."""
        marks: list[Mark] = []
        try:
            flight.deferred = queue(marks) or []
        except RuntimeError as error:
            self.failed(what, error)
        finally:
            flight.queued = marks

    def _handle(self, plan: Plan, flight: Flight, crossing: Sequence[bool]) -> TransferHandle:
        tokens = sum(item.tokens for item, ok, way in zip(plan.items, plan.taken, crossing, strict=True) if ok and way)
        return TransferHandle(self, flight, plan.taken, tokens * plan.cut.token_bytes)

    def _plan_load(self, plan: Plan) -> None:
        self._counts["passed_through"] += plan_load(self._cut_for(plan), plan)

    def _plan_copy_out(self, plan: Plan) -> None:
        if plan.cut == self._cut:
            plan_copy_out(self._arena, plan)

    def _count_taken(self, name: str, plan: Plan) -> None:
        self._counts[name] += sum(plan.taken)
        self._counts["not_taken"] += plan.taken.count(False)

    def _cut_for(self, plan: Plan) -> Arena | None:
        """The arena, cut for the plan's payloads: anew, if need be and nothing is in use; None where it cannot be."""
        cut = plan.cut
        if cut != self._cut:
            if not self._arena.idle:
                return None
            slots = self.budget // cut.stride
            if not slots:
                self._news.append(
                    Notice(NAME, f"a block takes {cut.stride} bytes, the budget is {self.budget}: raise it")
                )
            if self._arena.resident:
                self._news.append(Evicted(NAME, EvictReason.RECUT, self._arena.resident))
            self._counts["recuts"] += self._cut != _UNCUT
            self._arena, self._cut = Arena(slots), cut
        return self._arena

    def _refresh(self) -> None:
        """Take up what has happened since the last call. Raises ClosedError."""
        if self._closed:
            raise ClosedError("the hbm tier is closed", "open the store again")
        while self.abandoned:
            flight = self.abandoned.popleft()
            promised, flight.promised, flight.deferred = flight.promised, [], []
            self._arena.release(promised)
        for flight in [flight for flight in self._flights if flight.done()]:
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        entries, flight.entries, flight.memory = flight.entries, [], []
        if flight in self._flights:
            self._flights.remove(flight)
            self._arena.release(entries)

    def _drop(self, reason: EvictReason, forget: Callable[[Arena], int]) -> int:
        with self._state:
            self._refresh()
            dropped = forget(self._arena)
            self._counts["dropped"] += dropped
        if dropped:
            self._events.emit(Evicted(NAME, reason, dropped))
        return dropped

    def _tell(self) -> None:
        """Events and offers, without the lock: whoever hears them may call the tier."""
        with self._state:
            news, self._news = self._news, []
            cold = self._arena.coldest(OFFER_SHARE, OFFER_LIMIT) if self._demote is not None else []
            self._counts["offered"] += len(cold)
        for event in news:
            self._events.emit(event)
        if cold and self._demote is not None:
            try:
                self._demote(cold)
            except Exception as error:  # noqa: BLE001  the offer is a hint; its failure must not reach the request
                self._events.emit(Fault(NAME, "demote", repr(error)))
