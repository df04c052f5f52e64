"""``kvstore stats`` and ``kvstore ls``: what a store holds and has done. Must not change anything."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.listing import NamespaceUse, Prefix
from kvstore.records import Usage
from kvstore.sizes import format_size
from kvstore.statistics import Stats, by_middle
from kvstore.tools import answers, terminal
from kvstore.tools.standing import ID_DIGITS, find_namespace, standing_store

SHOWN_TOKENS = 8
CAUSES = {
    "absent": "never stored, or pushed out since: kvstore explain tells which",
    "writing": "it was just being written",
    "header": "damaged, and removed: kvstore verify looks for more",
    "checksum": "damaged, and removed: kvstore verify looks for more",
    "changed": "pushed out while it was read: a larger budget helps",
    "io": "the disk reported an error: see the system's log",
    "purged": "evicted by hand, or expired, in between",
    "busy": "a lock could not be had in time, or staging was full",
    "limit": "left to the engine: it runs the last token in any case",
    "refused": "the model or the mode may not be cached: see its warning",
}
"""Why tokens missed, by `kvstore.events.Cause`."""
SKIPS = {
    "full": "no room: everything else is pinned, leased or newer",
    "quota": "the salt has a quota",
    "busy": "a lock could not be had in time, or too much waited",
    "queue full": "nvme is slower than what is saved; offered again when it is idle",
    "closing": "the process ended before it was written",
    "evicted before": "pushed out of ram before it was written",
    "fault": "the medium reported an error",
    "staging": "hbm had no room to copy through: raise its budget",
    "mismatch": "the cache did not hold what was run",
    "changed": "the model's weights changed meanwhile",
}
"""Why blocks were not saved, by the reason of `kvstore.events.Skipped`."""
ELLIPSIS = "…"


def stats(path: terminal.PathOption = None, as_json: terminal.JsonOption = False) -> None:
    """What each tier holds, and what all processes together were asked, served, and missed.

    Example:

        kvstore stats --path ./store
    """
    with standing_store(path) as store:
        found = store.stats()
    if as_json:
        terminal.print_json(found.to_dict())
    else:
        _show_stats(found)


def ls(
    namespace: Annotated[str | None, typer.Argument(help="A label, or the beginning of a root.")] = None,
    limit: Annotated[int, typer.Option(help="Sequences shown, the last used first; 0 for all.", min=0)] = 50,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """List namespaces; with one named, its stored sequences with their first tokens.

    Example:

        kvstore ls --path ./store
    """
    with standing_store(path) as store:
        if namespace is None:
            uses = store.namespaces()
        else:
            use = find_namespace(store, namespace)
            found = store.prefixes(use.record.root)
            shown = found[: limit or len(found)]
    if namespace is None:
        _show_namespaces(uses, as_json)
    else:
        _show_prefixes(use, shown, len(found), as_json)


def _show_stats(found: Stats) -> None:
    out = terminal.console()
    rows = [
        (
            tier.name,
            f"{tier.blocks:,}",
            format_size(tier.used_bytes),
            format_size(tier.allocated_bytes),
            format_size(tier.budget_bytes),
            f"{tier.slots - tier.free_slots:,} of {tier.slots:,}",
            f"{format_size(tier.index_used_bytes)} of {format_size(tier.index_bytes)}",
        )
        for tier in found.tiers
    ]
    columns = ("tier", "blocks", "in blocks", "allocated", "budget", "slots", "index")
    out.print(terminal.table(found.path, columns, rows, right=range(1, 7)))
    asked = found.asked_tokens
    served = [
        (f"served from {tier}", f"{tokens:,}", _share(tokens, asked), "") for tier, tokens in found.hit_tokens.items()
    ]
    served += [
        (f"missed: {cause}", f"{tokens:,}", _share(tokens, asked), CAUSES.get(cause, ""))
        for cause, tokens in sorted(found.miss_tokens.items(), key=lambda one: -one[1])
    ]
    out.print(terminal.table(f"{asked:,} tokens asked for", ("", "tokens", "share", "why"), served, right=(1, 2)))
    left = [(name, f"{blocks:,}", SKIPS.get(name.partition(".")[2], "")) for name, blocks in _skipped(found)]
    if left:
        out.print(terminal.table("Not saved", ("where, and why", "blocks", ""), left, right=(1,)))
    paused = ", paused after faults of the disk" if found.mover_paused else ""
    out.print(f"{found.processes} processes, {found.namespaces} namespaces, {found.names} names")
    out.print(f"Waiting to be written to nvme: {found.mover_blocks} blocks, {format_size(found.mover_bytes)}{paused}")


def _skipped(found: Stats) -> list[tuple[str, int]]:
    return sorted(by_middle(found.counters, "skip", "blocks").items(), key=lambda one: -one[1])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _show_namespaces(uses: list[NamespaceUse], as_json: bool) -> None:
    if as_json:
        terminal.print_json({"namespaces": [answers.namespace_told(use) for use in uses]})
        return
    tiers = sorted({tier for use in uses for tier in use.by_tier}, reverse=True)
    rows = [
        (
            use.record.root.hex()[:ID_DIGITS],
            use.record.label,
            "salted" if use.record.salt else "",
            *(_used(use.by_tier.get(tier, Usage())) for tier in tiers),
        )
        for use in uses
    ]
    columns = ("root", "label", "", *tiers)
    terminal.console().print(terminal.table("Namespaces", columns, rows, right=range(3, len(columns))))


def _used(usage: Usage) -> str:
    return f"{usage.blocks:,} blocks, {format_size(usage.size)}"


def _show_prefixes(use: NamespaceUse, shown: list[Prefix], total: int, as_json: bool) -> None:
    if as_json:
        terminal.print_json(answers.prefixes_told(use, shown, total))
        return
    rows = [
        (
            prefix.key.hex()[:ID_DIGITS],
            f"{prefix.tokens:,}",
            ", ".join(f"{tier} {count}" for tier, count in prefix.by_tier.items()),
            f"{prefix.idle_s:,.0f} s ago",
            _first(prefix),
        )
        for prefix in shown
    ]
    columns = ("key", "tokens", "blocks", "used", "first tokens")
    title = f"{use.record.label or use.record.root.hex()[:ID_DIGITS]}: {total} sequences"
    terminal.console().print(terminal.table(title, columns, rows, right=(1, 3)))
    if total > len(shown):
        terminal.say(f"{total - len(shown)} more: --limit 0 shows all")


def _first(prefix: Prefix) -> str:
    if not prefix.first_tokens:
        return "(its beginning was evicted)"
    listed = ",".join(map(str, prefix.first_tokens[:SHOWN_TOKENS]))
    return listed + (f",{ELLIPSIS}" if prefix.tokens > SHOWN_TOKENS else "")
