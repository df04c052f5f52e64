"""``kvstore stats`` and ``kvstore ls``: what a store holds and has done. Must not change anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.identity import salt_digest
from kvstore.sizes import counted, format_size, parse_size
from kvstore.statistics import Stats, by_middle
from kvstore.tools import answers, remote, terminal
from kvstore.tools.catalogue import Catalogue, Selection
from kvstore.tools.naming import namespaces_for
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
    "writing": "somebody else was writing the same",
    "purged": "evicted by hand while it was being written",
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
    salt: Annotated[str | None, typer.Option(help="Only sequences under this salt.")] = None,
    tier: Annotated[str | None, typer.Option(help="Only those of which this tier has a block: ram or nvme.")] = None,
    unused: Annotated[float | None, typer.Option(help="Only those not used for so many seconds.", min=0)] = None,
    larger: Annotated[str | None, typer.Option(help="Only those whose KV takes more than this: 1GiB.")] = None,
    limit: Annotated[int, typer.Option(help="Sequences shown, the last used first; 0 for all.", min=0)] = 50,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """List namespaces; with one named, or with --salt, --tier, --unused or --larger, stored sequences.

    Of each sequence it tells the size of its KV, its blocks by tier, when it was last used, and its first tokens.

    Example:

        kvstore ls --path ./store

        kvstore ls first --larger 16KiB --unused 3600 --path ./store
    """
    chosen = {
        "namespace": namespace,
        "salt": salt,
        "tier": tier,
        "unused": unused,
        "larger": None if larger is None else parse_size(larger),
    }
    told = _listed(remote.at(url), path, chosen, limit)
    if as_json:
        terminal.print_json(told)
    elif "namespaces" in told:
        _show_namespaces(told["namespaces"])
    else:
        _show_prefixes(told)


def _listed(server: Remote | None, path: Path | None, chosen: dict[str, Any], limit: int) -> dict[str, Any]:
    """All namespaces, where nothing is chosen; else sequences, and the namespace that was named."""
    if server is not None:
        return _listed_there(server, chosen, limit)
    with standing_store(path) as store:
        if all(one is None for one in chosen.values()):
            return {"namespaces": [answers.namespace_told(use) for use in store.namespaces()]}
        use = None
        if chosen["namespace"] is not None:
            use = find_namespace(store, chosen["namespace"])
            chosen |= {"namespace": use.record.root.hex()}
        if chosen["salt"] is not None:
            namespaces_for(store, None, chosen["salt"])
            chosen |= {"salt": salt_digest(chosen["salt"]).hex()}
        with reading(store):
            page = Catalogue(store).page(Selection(**chosen), sort="hottest", offset=0, limit=limit or None)
        told = None if use is None else answers.namespace_told(use)
        return {"namespace": told, "total": page["total"], "prefixes": page["prefixes"]}


def _listed_there(server: Remote, chosen: dict[str, Any], limit: int) -> dict[str, Any]:
    """The same through a server."""
    if all(one is None for one in chosen.values()):
        return server.get("/v1/namespaces")
    use = None
    if chosen["namespace"] is not None:
        use = server.namespace(chosen["namespace"])
        chosen |= {"namespace": use["root"]}
    if chosen["salt"] is not None:
        chosen |= {"salt": server.salt(chosen["salt"])}
    listed, total = server.prefixes(limit, **chosen)
    return {"namespace": use, "total": total, "prefixes": listed}


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
            *([] if use else [one["label"] or one["namespace"][:ID_DIGITS]]),
            one["key"][:ID_DIGITS],
            f"{one['tokens']:,}",
            format_size(one["bytes"]),
            ", ".join(f"{tier} {count}" for tier, count in one["blocks"].items() if count),
            f"{one['idle_s']:,.0f} s ago",
            _first(one),
        )
        for one in shown
    ]
    columns = ("key", "tokens", "size", "blocks", "used", "first tokens")
    title, before = counted(total, "sequence"), () if use else ("namespace",)
    if use:
        title = f"{use['label'] or use['root'][:ID_DIGITS]}: {title}"
    right = [len(before) + at for at in (1, 2, 4)]
    terminal.console().print(terminal.table(title, (*before, *columns), rows, right=right))
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
