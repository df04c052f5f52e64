"""The contract of a tier on a device, as the store sees it: items, transfers, statistics, and how to open one.

A device tier is a cache of verified blocks in device memory, and the way by which every device copy goes. It never
blocks on a full arena, never evicts a slot that a copy uses, and never serves a block that was not verified. Knows
neither torch nor any medium, so that the store can import it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvstore.errors import MissingExtraError
from kvstore.events import Events
from kvstore.kv import KVBuffer, Run

if TYPE_CHECKING:
    from kvstore.tiers.pagelock import PageLock


@dataclass(frozen=True, slots=True)
class DeviceItem:
    """One block to load, save or copy out.

    key: the block's 32 bytes. root: the root of its chain, by which `DeviceTier.drop` finds it. start: the token of
    the buffer at which the block begins. tokens: tokens in the stored payload. take: tokens wanted of it, from its
    front. host: this block's payload in host memory, a run of count 1; None where there is none. Items whose payloads
    lie at one distance in the same memory are copied together.
    """

    key: bytes
    root: bytes
    start: int
    tokens: int
    take: int
    host: Run | None = None


Demote: TypeAlias = Callable[[Sequence[bytes]], None]
"""Told the keys of blocks that are next in line for eviction and still resident, once each, on the thread that needed
room and without any lock held. It must return at once: a store passes them to its mover, which asks the lower tiers
which of them they lack, reserves room for those alone, and fetches them by `DeviceTier.copy_out`."""


class Transfer(Protocol):
    """Copies under way. Safe for any thread; `wait` may be called more than once, and from several threads."""

    @property
    def taken(self) -> tuple[bool, ...]:
        """For each item, whether it is part of the transfer; the others were left alone. Known at once."""

    @property
    def size(self) -> int:
        """Payload bytes that cross between host and device."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""

    def wait(self) -> bool:
        """Return when host memory is no longer read or written by this transfer; False when the device failed.

        After True a save's payloads are complete in host memory. After it, and not before, a load's host slots may be
        checked against their generations and released. After False nothing that the transfer wrote may be believed.
        """


class Load(Transfer, Protocol):
    """A load under way. What the engine's lane is given after `DeviceTier.load` returned sees the loaded tokens."""

    def keep(self, keys: Collection[bytes] | None = None) -> int:
        """Make blocks that came from the host resident: those of ``keys``, all of them when left out. Returns how many.

        Call it after `wait`, with the keys whose host slots were found unchanged and whose bytes are trusted; before it
        nobody else can see them, and what it does not name is forgotten. A block that was dropped meanwhile stays
        dropped. Without the call, nothing becomes resident; later calls do nothing.
        """


class Held(Protocol):
    """Resident blocks that stay until `release`. A context manager."""

    @property
    def found(self) -> tuple[bool, ...]:
        """For each key, whether its block is resident, and now held."""

    def release(self) -> None:
        """Let go of them; calling it again does nothing."""

    def __enter__(self) -> Held:
        """Itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """The tier's state and what it did since it was opened. Sizes in bytes, the rest counts of blocks.

    staged: slots of blocks that are not, or no longer, resident, while a transfer uses them. passed_through: loaded
    blocks that found no slot to stay in. direct: those of them that found no slot at all and went through torch's own
    memory. not_taken: blocks that a save or copy_out had to leave. offered: told to ``demote``.
    """

    device: str
    budget: int
    slot_bytes: int
    slots: int
    free: int
    staged: int
    resident: int
    in_use: int
    transfers: int
    loaded: int
    promoted: int
    saved: int
    copied_out: int
    passed_through: int
    direct: int
    not_taken: int
    evicted: int
    offered: int
    dropped: int
    recuts: int

    def to_dict(self) -> dict[str, int | str]:
        """Every field by name."""
        return asdict(self)


class DeviceTier(Protocol):
    """Blocks on a device. Every method may be called from any thread; none but `close` waits for the device."""

    @property
    def device(self) -> str:
        """Where the tier lives, with an index where there are several: ``cuda:0``, ``cpu``."""

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether its block is resident at this moment; it may be gone the next: see `acquire`."""

    def acquire(self, keys: Sequence[bytes]) -> Held:
        """Keep resident blocks of ``keys`` from eviction, and mark them as used just now.

        Explicit `drop` still takes them out of sight, but their bytes stay in place until they are released.
        """

    def load(self, buffer: KVBuffer, items: Sequence[DeviceItem]) -> Load:
        """Put blocks into the engine's tensors.

        buffer: a `DeviceKV` of this device. Items that are resident come from the device, whatever their ``host``;
        others come from their host payload, which must stay in place until `Load.wait` has returned. An item that is
        neither is not taken. Where ``buffer.lane`` or the calling thread's current stream has work queued on the
        tensors, the load happens after it; what they are given later happens after the load. Host payloads that
        `PageLock` does not cover are copied into its ring by the calling thread.
        Raises LayoutError for items that do not fit the buffer, UnsupportedError for a buffer of another device,
        ClosedError. A failure of the device is an event; the items concerned are not taken.
        """

    def save(self, buffer: KVBuffer, items: Sequence[DeviceItem]) -> Transfer:
        """Take blocks out of the engine's tensors: they become resident at once, and are copied to ``host`` if given.

        The gather is queued before this returns, after what ``buffer.lane`` and the calling thread's current stream
        have queued, and before what they are given later: the engine may reuse its memory at once. Blocks for which
        there is no slot are not taken. ``take`` must equal ``tokens``. Raises as `load` does.
        """

    def copy_out(self, items: Sequence[DeviceItem]) -> Transfer:
        """Copy resident blocks to their ``host`` payloads; ``start`` is not used. What is not resident is not taken."""

    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget blocks that turned out to be wrong. Returns how many were resident."""

    def drop(self, keys: Collection[bytes] | None = None, root: bytes | None = None, everything: bool = False) -> int:
        """Forget blocks by key, by root, or all; also those that a load has staged. Returns how many were resident."""

    def stats(self) -> DeviceStats:
        """State and counters."""

    def check_integrity(self) -> list[str]:
        """What is wrong with the books: every slot is free, staged or resident exactly once; index and LRU agree."""

    def close(self) -> None:
        """Wait for copies under way and give the memory back. Later calls of other methods raise ClosedError."""


def open_device_tier(
    budget: int,
    device: str,
    *,
    events: Events | None = None,
    pagelock: PageLock | None = None,
    demote: Demote | None = None,
) -> DeviceTier:
    """An `hbm` tier of ``budget`` bytes on a device such as ``cuda``, ``cuda:1`` or ``cpu``.

    Raises MissingExtraError without torch, UnsupportedError for a device that is not there, BudgetError when the
    device has less memory free than the budget.
    """
    try:
        from kvstore.tiers.hbm import HbmTier
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "the hbm tier needs torch", "pip install 'prefix-kvstore[transformers]', or leave hbm at 0"
        ) from error
    tier: Any = HbmTier(budget, device, events=events, pagelock=pagelock, demote=demote)
    checked: DeviceTier = tier
    return checked
