"""``kvstore quota`` and ``kvstore namespace``: what a salt may hold, how long blocks live, and what is empty."""

from __future__ import annotations

from types import EllipsisType
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.errors import NotFoundError, SettingsError
from kvstore.identity import salt_digest
from kvstore.sizes import counted, format_size, parse_size
from kvstore.store import Store
from kvstore.tools import terminal
from kvstore.tools.answers import namespace_told
from kvstore.tools.evict import evicted_words
from kvstore.tools.standing import ID_DIGITS, find_namespace, standing_store

OFF = "off"


def quota(
    salt: Annotated[str | None, typer.Argument(help="The salt; without one, all quotas are listed.")] = None,
    ram: Annotated[
        str | None, typer.Option(help="What it may hold in ram: a size, or off.", show_default=False)
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(help="What it may hold in nvme: a size, or off.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would have to go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, neither to evict nor about a new salt.")] = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Set, list, or take off what the namespaces under a salt may hold. Lowering a quota evicts down to it.

    The store knows salts by their digests alone, which listings show. One under which nothing is stored is asked about.

    Example:

        kvstore quota first --nvme 1GiB --path ./store
    """
    if salt is None and (ram, nvme) != (None, None):
        raise SettingsError("a quota is a salt's", "name the salt")
    in_ram, in_nvme = _limit(ram), _limit(nvme)
    changes = (ram, nvme) != (None, None)
    evicted: dict[str, int] = {}
    with standing_store(path) as store:
        done = False
        if salt is not None and changes:
            would = store.set_quota(salt, ram=in_ram, nvme=in_nvme, dry_run=True)
            doubts = _doubts(store, salt, would, (in_ram, in_nvme))
            done = not dry_run and (not doubts or terminal.confirmed(doubts, yes))
            evicted = store.set_quota(salt, ram=in_ram, nvme=in_nvme) if done else would if dry_run else {}
        listed = quotas_told(store, salt, known=not changes)
    if as_json:
        terminal.print_json({"quotas": listed, "changed": done, "dry_run": dry_run, "evicted": evicted})
    else:
        rows = [(one["salt"], one["labels"], one["tier"], *_sizes(one)) for one in listed]
        columns = ("salt (digest)", "namespaces", "tier", "may hold", "holds", "")
        terminal.console().print(terminal.table("Quotas", columns, rows, right=(3, 4, 5)))
        if sum(evicted.values()):
            terminal.console().print(f"{'Would evict' if dry_run else 'Evicted'} {evicted_words(evicted)}.")
    if changes and not done and not dry_run:
        raise typer.Exit(1)


def namespace(
    name: Annotated[str | None, typer.Argument(help="A label, or the beginning of a root.")] = None,
    ttl: Annotated[
        int | None, typer.Option(help="Seconds without use after which blocks expire.", min=1, show_default=False)
    ] = None,
    no_ttl: Annotated[bool, typer.Option("--no-ttl", help="Blocks do not expire any more.")] = False,
    drop_empty: Annotated[
        bool, typer.Option("--drop-empty", help="Forget all namespaces without blocks and names.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be dropped.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Set or take off a namespace's TTL, or forget namespaces that hold nothing.

    Example:

        kvstore namespace second --no-ttl --path ./store
    """
    if drop_empty == (name is not None) or (ttl is not None and no_ttl):
        raise SettingsError(
            "name a namespace with --ttl or --no-ttl, or pass --drop-empty alone", "kvstore ls lists the namespaces"
        )
    with standing_store(path) as store:
        if name is None:
            _drop(store, dry_run, yes, as_json)
            return
        root = find_namespace(store, name).record.root
        if ttl is not None or no_ttl:
            store.set_ttl(root, ttl or 0)
        use = next(use for use in store.namespaces() if use.record.root == root)
    if as_json:
        terminal.print_json(namespace_told(use))
    else:
        lasts = f"expire {use.record.ttl:,} seconds after their last use" if use.record.ttl else "do not expire"
        label = use.record.label or root.hex()[:ID_DIGITS]
        terminal.console().print(escape(f"{label}: blocks {lasts}."))


def _drop(store: Store, dry_run: bool, yes: bool, as_json: bool) -> None:
    empty = store.drop_empty(dry_run=True)
    done = bool(empty) and not dry_run and terminal.confirmed(f"Forget {counted(len(empty), 'namespace')}?", yes)
    gone = store.drop_empty() if done else empty if dry_run else []
    if as_json:
        listed = [{"root": one.root.hex(), "label": one.label, "salt": one.salt.hex()} for one in gone]
        terminal.print_json({"dropped": done, "dry_run": dry_run, "namespaces": listed})
    else:
        terminal.console().print(f"{'Would forget' if dry_run else 'Forgot'} {counted(len(gone), 'namespace')}.")
    if empty and not done and not dry_run:
        raise typer.Exit(1)


def _doubts(
    store: Store, salt: str, would: dict[str, int], limits: tuple[int | EllipsisType | None, int | EllipsisType | None]
) -> str:
    """What to ask before a quota is set; empty for nothing."""
    if sum(would.values()):
        return f"Evict {evicted_words(would)}?"
    known = {use.record.salt for use in store.namespaces()} | {use.salt for use in store.quotas()}
    if salt_digest(salt) not in known and any(isinstance(one, int) for one in limits):
        return f"Nothing is stored under the salt {salt!r}. Set a quota for it all the same?"
    return ""


def _limit(text: str | None) -> int | EllipsisType | None:
    """A size, None for off, an ellipsis for what stays. Raises SettingsError."""
    if text is None:
        return ...
    return None if text.lower() == OFF else parse_size(text)


def quotas_told(store: Store, salt: str | None, *, known: bool = True) -> list[dict[str, Any]]:
    """Quotas with what is held of each, all or those of one salt. known: raises NotFoundError where it has nothing."""
    labels: dict[bytes, list[str]] = {}
    for use in store.namespaces():
        labels.setdefault(use.record.salt, []).append(use.record.label or use.record.root.hex()[:ID_DIGITS])
    wanted = salt_digest(salt) if salt is not None else None
    if known and wanted is not None and wanted not in labels and not any(use.salt == wanted for use in store.quotas()):
        raise NotFoundError(f"nothing is stored under the salt {salt!r}, and it has no quota", "check the salt")
    return [
        {
            "salt": use.salt.hex(),
            "labels": ", ".join(labels.get(use.salt, [])),
            "tier": use.tier,
            "limit_bytes": use.limit,
            "used_bytes": use.used,
        }
        for use in store.quotas()
        if wanted in (None, use.salt)
    ]


def _sizes(one: dict[str, Any]) -> tuple[str, str, str]:
    limit, used = one["limit_bytes"], one["used_bytes"]
    return format_size(limit), format_size(used), f"{used / limit:.0%}" if limit else ""
