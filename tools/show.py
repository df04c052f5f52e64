"""``kvstore stats`` and ``kvstore ls``: what a store holds and has done. Must not change anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.sizes import counted, format_size
from kvstore.statistics import Stats, by_middle
from kvstore.tools import answers, remote, terminal
from kvstore.tools.remote import Remote
from kvstore.tools.standing import ID_DIGITS, find_namespace, reading, standing_store
from kvstore.tools.standins import MARK

SHOWN_TOKENS = 8
PROMPT_TOKENS = 4096
"""Of the prompt whose size tells what a namespace's budget comes to."""
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


def stats(
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """What each tier holds, and what all processes together were asked, served, and missed.

    Example:

        kvstore stats --path ./store
    """
    server = remote.at(url)
    if server is not None:
        found = remote.stats_of(server.get("/v1/stats"))
    else:
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
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """List namespaces; with one named, its stored sequences with their first tokens.

    Example:

        kvstore ls --path ./store
    """
    told = _listed(remote.at(url), path, namespace, limit)
    if as_json:
        terminal.print_json(told)
    elif namespace is None:
        _show_namespaces(told["namespaces"])
    else:
        _show_prefixes(told)


def _listed(server: Remote | None, path: Path | None, namespace: str | None, limit: int) -> dict[str, Any]:
    """All namespaces, or one with its sequences."""
    if server is None:
        with standing_store(path) as store:
            if namespace is None:
                return {"namespaces": [answers.namespace_told(use) for use in store.namespaces()]}
            use = find_namespace(store, namespace)
            with reading(store):
                found = store.prefixes(use.record.root)
            return answers.prefixes_told(use, found[: limit or len(found)], len(found))
    if namespace is None:
        return server.get("/v1/namespaces")
    chosen = server.namespace(namespace)
    listed, total = server.prefixes(chosen["root"], limit)
    return {"namespace": chosen, "total": total, "prefixes": listed}


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
    for tier in found.tiers:
        if tier.capped:
            out.print(escape(f"{tier.name} has less than was asked for: {tier.capped}."))
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
    parts = ((found.processes, "process"), (found.namespaces, "namespace"), (found.names, "name"))
    out.print(", ".join(counted(number, one) for number, one in parts))
    waiting = f"{counted(found.mover_blocks, 'block')}, {format_size(found.mover_bytes)}"
    out.print(f"Waiting to be written to nvme: {waiting}{paused}")


def _skipped(found: Stats) -> list[tuple[str, int]]:
    return sorted(by_middle(found.counters, "skip", "blocks").items(), key=lambda one: -one[1])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _show_namespaces(told: list[dict[str, Any]]) -> None:
    tiers = sorted({tier for one in told for tier in one["tiers"]}, reverse=True)
    rows = [
        (
            one["root"][:ID_DIGITS],
            one["label"],
            "salted" if one["salt"] else "",
            f"{one['ttl']:,} s unused" if one["ttl"] else "",
            format_size(one["token_bytes"] * PROMPT_TOKENS),
            *(_used(one["tiers"].get(tier, {"blocks": 0, "bytes": 0})) for tier in tiers),
        )
        for one in told
    ]
    columns = ("root", "label", "", "expires after", f"{PROMPT_TOKENS:,} tokens take", *tiers)
    terminal.console().print(terminal.table("Namespaces", columns, rows, right=range(4, len(columns))))


def _used(usage: dict[str, int]) -> str:
    return f"{counted(usage['blocks'], 'block')}, {format_size(usage['bytes'])}"


def _show_prefixes(told: dict[str, Any]) -> None:
    shown, total, use = told["prefixes"], told["total"], told["namespace"]
    rows = [
        (
            one["key"][:ID_DIGITS],
            f"{one['tokens']:,}",
            ", ".join(f"{tier} {count}" for tier, count in one["blocks"].items()),
            f"{one['idle_s']:,.0f} s ago",
            _first(one),
        )
        for one in shown
    ]
    columns = ("key", "tokens", "blocks", "used", "first tokens")
    title = f"{use['label'] or use['root'][:ID_DIGITS]}: {counted(total, 'sequence')}"
    terminal.console().print(terminal.table(title, columns, rows, right=(1, 3)))
    if any(one["key"].startswith(MARK) for one in shown):
        terminal.say(f"Keys are told only with the token: what begins with {MARK} stands in for them.")
    if total > len(shown):
        terminal.say(f"{total - len(shown)} more: --limit 0 shows all")


def _first(one: dict[str, Any]) -> str:
    if not one["whole"]:
        return "(its beginning was evicted)"
    if not one["first_tokens"]:
        return "(told only with the token)"
    listed = ",".join(map(str, one["first_tokens"][:SHOWN_TOKENS]))
    return listed + (f",{ELLIPSIS}" if one["tokens"] > SHOWN_TOKENS else "")
