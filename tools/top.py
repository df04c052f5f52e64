"""``kvstore top``: a store while it works. What the figures mean is `watching`'s; must not change anything."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape

from kvstore.listing import Prefix
from kvstore.sizes import counted, format_size
from kvstore.statistics import Stats
from kvstore.store import Store
from kvstore.tools import remote, terminal
from kvstore.tools.remote import Remote
from kvstore.tools.standing import ID_DIGITS, standing_store
from kvstore.tools.watching import Interval, between, pressure

SHOWN = 5
LISTED_BLOCKS = 50_000
"""Blocks up to which sequences are listed anew each time."""
FIELDS = ("key", "tokens", "idle_s")
Sequences: TypeAlias = dict[str, list[dict[str, Any]]]
"""By what they are known for: biggest, coldest."""


def top(
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    count: Annotated[int, typer.Option(help="Looks to take; 0 until Ctrl-C.", min=0)] = 0,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Watch a store: tiers, hits by tier, misses by cause, bandwidth, biggest and coldest sequences, pressure in words.

    With --json, one look: an object of what happened in one interval.

    Example:

        kvstore top --every 0.2 --count 2 --path ./store
    """
    with _looked_at(remote.at(url), path) as source:
        if as_json:
            before, last = _wait(source, source.stats(), every)
            terminal.print_json(_told(before, last, source.sequences(before)))
            return
        screen = terminal.console()
        now = source.stats()
        with ExitStack() as stack:
            show: Callable[[Group], None] = screen.print  # a pipe or a file gets one view after the other
            if screen.is_terminal:
                live = stack.enter_context(Live(console=screen, auto_refresh=False, transient=False))
                show = partial(live.update, refresh=True)
                show(_view(now, between(now, now, every), source.sequences(now)))  # this needs no interval to be seen
            for _ in range(count) if count else itertools.count():
                now, last = _wait(source, now, every)
                show(_view(now, last, source.sequences(now)))
                screen.file.flush()


class _Source(Protocol):
    """What is watched."""

    def stats(self) -> Stats:
        """The store now."""

    def sequences(self, now: Stats) -> Sequences:
        """The biggest and the coldest sequences; none where listing them would take long."""


class _Here:
    """The store itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def stats(self) -> Stats:
        """The store now."""
        return self._store.stats()

    def sequences(self, now: Stats) -> Sequences:
        """Of all namespaces, listed anew."""
        found: list[tuple[str, Prefix]] = []
        for use in self._store.namespaces() if sum(tier.blocks for tier in now.tiers) <= LISTED_BLOCKS else ():
            label = use.record.label or use.record.root.hex()[:ID_DIGITS]
            found += [(label, prefix) for prefix in self._store.prefixes(use.record.root)]
        orders = {"biggest": lambda one: -one[1].tokens, "coldest": lambda one: -one[1].idle_s}
        return {kind: [_prefix(*one) for one in sorted(found, key=key)[:SHOWN]] for kind, key in orders.items()}


class _There:
    """A store behind a server, which keeps its own listing."""

    def __init__(self, server: Remote) -> None:
        self._server = server

    def stats(self) -> Stats:
        """The store now."""
        return remote.stats_of(self._server.get("/v1/stats"))

    def sequences(self, now: Stats) -> Sequences:
        """As the server has listed them."""
        return {
            kind: [
                {"label": one["label"] or one["namespace"][:ID_DIGITS]} | {name: one[name] for name in FIELDS}
                for one in self._server.get("/v1/prefixes", sort=kind, limit=SHOWN)["prefixes"]
            ]
            for kind in ("biggest", "coldest")
        }


@contextmanager
def _looked_at(server: Remote | None, path: Path | None) -> Iterator[_Source]:
    if server is not None:
        yield _There(server)
        return
    with standing_store(path) as store:
        yield _Here(store)


def _wait(source: _Source, before: Stats, every: float) -> tuple[Stats, Interval]:
    start = time.perf_counter()
    time.sleep(every)
    now = source.stats()
    return now, between(before, now, time.perf_counter() - start)


def _told(now: Stats, last: Interval, listed: Sequences) -> dict[str, Any]:
    return {"stats": now.to_dict(), "interval": last.to_dict(), "pressure": pressure(now, last), **listed}


def _prefix(label: str, prefix: Prefix) -> dict[str, Any]:
    return {"label": label, "key": prefix.key.hex(), "tokens": prefix.tokens, "idle_s": prefix.idle_s}


def _view(now: Stats, last: Interval, listed: Sequences) -> Group:
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
        (kind, one["label"], one["key"][:ID_DIGITS], f"{one['tokens']:,}", f"{one['idle_s']:,.0f} s ago")
        for kind, chosen in listed.items()
        for one in chosen
    ]
    asked = f"{counted(last.asked, 'token')} asked in {last.seconds:.1f} s"
    title = f"{now.path}: {counted(now.processes, 'process')}, {asked}"
    parts: list[Any] = [terminal.table(title, columns, tiers, right=range(1, 6))]
    if misses:
        parts.append(terminal.table("Missed", ("cause", "tokens"), misses, right=(1,)))
    if sequences:
        parts.append(terminal.table("Sequences", ("", "namespace", "key", "tokens", "used"), sequences, right=(3, 4)))
    return Group(*parts, *(escape(line) for line in pressure(now, last)))
