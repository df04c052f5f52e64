"""``kvstore top``: a store while it works. What the figures mean is `watching`'s; must not change anything."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape

from kvstore.listing import Prefix
from kvstore.sizes import format_size
from kvstore.statistics import Stats
from kvstore.store import Store
from kvstore.tools import terminal
from kvstore.tools.standing import ID_DIGITS, standing_store
from kvstore.tools.watching import Interval, between, pressure

SHOWN = 5
LISTED_BLOCKS = 50_000
"""Blocks up to which sequences are listed anew each time."""


def top(
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    count: Annotated[int, typer.Option(help="Looks to take; 0 until Ctrl-C.", min=0)] = 0,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Watch a store: tiers, hits by tier, misses by cause, bandwidth, biggest and coldest sequences, pressure in words.

    With --json, one look: an object of what happened in one interval.

    Example:

        kvstore top --every 0.2 --count 2 --path ./store
    """
    with standing_store(path) as store:
        if as_json:
            before, last = _wait(store, store.stats(), every)
            terminal.print_json(_told(before, last, _listed(store, before)))
            return
        screen = terminal.console()
        now = store.stats()
        with Live(console=screen, auto_refresh=False, transient=False) as live:
            taken = 0
            while not count or taken < count:
                now, last = _wait(store, now, every)
                live.update(_view(now, last, _listed(store, now)), refresh=True)
                taken += 1


def _wait(store: Store, before: Stats, every: float) -> tuple[Stats, Interval]:
    start = time.perf_counter()
    time.sleep(every)
    now = store.stats()
    return now, between(before, now, time.perf_counter() - start)


def _listed(store: Store, now: Stats) -> list[tuple[str, Prefix]]:
    """All sequences with their namespace's label; none where listing them would take long."""
    if sum(tier.blocks for tier in now.tiers) > LISTED_BLOCKS:
        return []
    found: list[tuple[str, Prefix]] = []
    for use in store.namespaces():
        label = use.record.label or use.record.root.hex()[:ID_DIGITS]
        found += [(label, prefix) for prefix in store.prefixes(use.record.root)]
    return found


def _biggest(listed: list[tuple[str, Prefix]]) -> list[tuple[str, Prefix]]:
    return sorted(listed, key=lambda one: -one[1].tokens)[:SHOWN]


def _coldest(listed: list[tuple[str, Prefix]]) -> list[tuple[str, Prefix]]:
    return sorted(listed, key=lambda one: -one[1].idle_s)[:SHOWN]


def _told(now: Stats, last: Interval, listed: list[tuple[str, Prefix]]) -> dict[str, Any]:
    return {
        "stats": now.to_dict(),
        "interval": last.to_dict(),
        "pressure": pressure(now, last),
        "biggest": [_prefix(*one) for one in _biggest(listed)],
        "coldest": [_prefix(*one) for one in _coldest(listed)],
    }


def _prefix(label: str, prefix: Prefix) -> dict[str, Any]:
    return {"label": label, "key": prefix.key.hex(), "tokens": prefix.tokens, "idle_s": prefix.idle_s}


def _view(now: Stats, last: Interval, listed: list[tuple[str, Prefix]]) -> Group:
    tiers = [
        (
            tier.name,
            f"{tier.blocks:,}",
            f"{format_size(tier.allocated_bytes)} of {format_size(tier.budget_bytes)}",
            f"{last.hits.get(tier.name, 0):,}",
            format_size(round(last.rates.get(f"load from {tier.name}", 0))) + "/s",
            format_size(round(last.rates.get(f"save to {tier.name}", 0))) + "/s",
        )
        for tier in now.tiers
    ]
    columns = ("tier", "blocks", "allocated", "hit tokens", "loads", "saves")
    misses = [(cause, f"{tokens:,}") for cause, tokens in sorted(last.misses.items(), key=lambda one: -one[1])]
    sequences = [
        (kind, label, prefix.key.hex()[:ID_DIGITS], f"{prefix.tokens:,}", f"{prefix.idle_s:,.0f} s ago")
        for kind, chosen in (("biggest", _biggest(listed)), ("coldest", _coldest(listed)))
        for label, prefix in chosen
    ]
    title = f"{now.path}: {now.processes} processes, {last.asked:,} tokens asked in {last.seconds:.1f} s"
    parts: list[Any] = [terminal.table(title, columns, tiers, right=range(1, 6))]
    if misses:
        parts.append(terminal.table("Missed", ("cause", "tokens"), misses, right=(1,)))
    if sequences:
        parts.append(terminal.table("Sequences", ("", "namespace", "key", "tokens", "used"), sequences, right=(3, 4)))
    return Group(*parts, *(escape(line) for line in pressure(now, last)))
