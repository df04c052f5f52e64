"""kvstore: a tiered, persistent KV cache for LLM inference.

``kvstore.open(path)`` gives a `Store`; engines' adapters are in ``kvstore.adapters``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.assembly import Wrap
    from kvstore.days import Days
    from kvstore.errors import KVStoreError
    from kvstore.events import Event, Events, Observer
    from kvstore.eviction import Selection
    from kvstore.identity import Extra, Tokens
    from kvstore.kv import HostKV, KVBuffer
    from kvstore.layout import LayerShape, Layout, Part
    from kvstore.listing import NamespaceUse, Prefix
    from kvstore.match import Match, Namespace
    from kvstore.prefetch import Prefetch
    from kvstore.records import NameRecord, NamespaceRecord
    from kvstore.saving import Saving
    from kvstore.serving import Buffers, Lease, Loaded
    from kvstore.settings import Settings
    from kvstore.statistics import Stats
    from kvstore.store import Store
    from kvstore.tenants import QuotaUse
    from kvstore.tiers.medium import Medium
    from kvstore.verification import Report
    from kvstore.wiping import Step, Wiped

__version__ = "0.1.0"
__all__ = [
    "Buffers",
    "Days",
    "Event",
    "Events",
    "Extra",
    "HostKV",
    "KVBuffer",
    "KVStoreError",
    "LayerShape",
    "Layout",
    "Lease",
    "Loaded",
    "Match",
    "Medium",
    "NameRecord",
    "Namespace",
    "NamespaceRecord",
    "NamespaceUse",
    "Observer",
    "Part",
    "Prefetch",
    "Prefix",
    "QuotaUse",
    "Report",
    "Saving",
    "Selection",
    "Settings",
    "Stats",
    "Step",
    "Store",
    "Tokens",
    "Wiped",
    "Wrap",
    "__version__",
    "open",
]
_HOMES = {
    "kvstore.assembly": ("Wrap",),
    "kvstore.days": ("Days",),
    "kvstore.errors": ("KVStoreError",),
    "kvstore.events": ("Event", "Events", "Observer"),
    "kvstore.eviction": ("Selection",),
    "kvstore.identity": ("Extra", "Tokens"),
    "kvstore.kv": ("HostKV", "KVBuffer"),
    "kvstore.layout": ("LayerShape", "Layout", "Part"),
    "kvstore.listing": ("NamespaceUse", "Prefix"),
    "kvstore.match": ("Match", "Namespace"),
    "kvstore.prefetch": ("Prefetch",),
    "kvstore.records": ("NameRecord", "NamespaceRecord"),
    "kvstore.saving": ("Saving",),
    "kvstore.serving": ("Buffers", "Lease", "Loaded"),
    "kvstore.settings": ("Settings",),
    "kvstore.statistics": ("Stats",),
    "kvstore.store": ("Store",),
    "kvstore.tenants": ("QuotaUse",),
    "kvstore.tiers.medium": ("Medium",),
    "kvstore.verification": ("Report",),
    "kvstore.wiping": ("Step", "Wiped"),
}
"""Imported when asked for: numpy takes a tenth of a second, in which the console script has to stand already."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(home), name)
    return globals()[name]


def open(
    path: str | os.PathLike[str] | None = None,
    *,
    settings: Settings | None = None,
    observers: Sequence[Observer] = (),
    wrap: Wrap | None = None,
    **arguments: object,
) -> Store:
    """Open the store in a directory, which is made when it does not exist.

    path, arguments: as `Settings.resolve` takes them, e.g. ``kvstore.open("kv", ram="4GiB", nvme="100GiB")``; settings:
    instead of these. observers: called with every `kvstore.events.Event`. wrap: puts a medium of one's own around each
    tier's.

    A directory that this process has open already is shared, with the settings in force: further handles need its path
    alone. What is passed all the same, by arguments, settings or wrap, must be what is in force; but for ``hbm=0``,
    which shares one that is on. ``KVSTORE_*`` and TOML are read for the first handle, and not compared. Raises a
    `KVStoreError` that says what to do.
    """
    from kvstore.errors import SettingsError
    from kvstore.settings import Settings
    from kvstore.store import open_store

    given = [name for name, value in {"path": path, **arguments}.items() if value is not None]
    if settings is not None and given:
        raise SettingsError(
            f"settings were given, and {', '.join(given)} beside them",
            "leave one of both out; dataclasses.replace(settings, ram=…) makes other settings",
        )
    chosen = settings if settings is not None else Settings.resolve(path, environ=None, **arguments)
    return open_store(chosen, given if settings is None else chosen.to_dict(), wrap=wrap, observers=observers)
