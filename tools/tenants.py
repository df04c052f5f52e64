"""``kvstore quota`` and ``kvstore namespace``: what a salt may hold, how long blocks live, and what is empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.markup import escape

from kvstore.errors import SettingsError
from kvstore.sizes import counted, format_size
from kvstore.tools import answers, remote, terminal
from kvstore.tools.evict import evicted_words
from kvstore.tools.standing import ID_DIGITS, standing_store

Ask: TypeAlias = Callable[[bool], dict[str, Any]]
"""Called with True a change is counted, with False it is done."""


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
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Set, list, or take off what the namespaces under a salt may hold. Lowering a quota evicts down to it.

    The store knows salts by their digests alone, which listings show. One under which nothing is stored is asked about.

    Example:

        kvstore quota first --nvme 1GiB --path ./store
    """
    changes = (ram, nvme) != (None, None)
    if salt is None and changes:
        raise SettingsError("a quota is a salt's", "name the salt")
    if salt is None:
        told: dict[str, Any] = {"quotas": _all_quotas(path, url), "changed": False, "dry_run": dry_run, "evicted": {}}
    else:
        with _quota_of(salt, ram, nvme, path, url) as ask:
            told = ask(True)
            doubts = _doubts(salt, told, (ram, nvme))
            if changes and not dry_run and (not doubts or terminal.confirmed(doubts, yes)):
                told = ask(False)
            elif not dry_run:
                told = {**told, "dry_run": False, "evicted": {}}
    if as_json:
        terminal.print_json(told)
    else:
        rows = [(one["salt"], one["labels"], one["tier"], *_sizes(one)) for one in told["quotas"]]
        columns = ("salt (digest)", "namespaces", "tier", "may hold", "holds", "")
        terminal.console().print(terminal.table("Quotas", columns, rows, right=(3, 4, 5)))
        if sum(told["evicted"].values()):
            terminal.console().print(f"{'Would evict' if dry_run else 'Evicted'} {evicted_words(told['evicted'])}.")
    if changes and not told["changed"] and not dry_run:
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
    url: terminal.UrlOption = None,
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
    if name is None:
        with _emptied(path, url) as ask:
            _drop(ask, dry_run, yes, as_json)
        return
    wanted = 0 if no_ttl else ttl
    server = remote.at(url)
    if server is not None:
        told = server.post("/v1/namespace", {"namespace": name, "ttl": wanted})
    else:
        with standing_store(path) as store:
            told = answers.set_ttl(store, name, wanted)
    if as_json:
        terminal.print_json(told)
    else:
        lasts = f"expire {told['ttl']:,} seconds after their last use" if told["ttl"] else "do not expire"
        terminal.console().print(escape(f"{told['label'] or told['root'][:ID_DIGITS]}: blocks {lasts}."))


def _drop(ask: Ask, dry_run: bool, yes: bool, as_json: bool) -> None:
    told = ask(True)
    empty = len(told["namespaces"])
    if empty and not dry_run and terminal.confirmed(f"Forget {counted(empty, 'namespace')}?", yes):
        told = ask(False)
    elif not dry_run:
        told = {"dropped": False, "dry_run": False, "namespaces": []}
    if as_json:
        terminal.print_json(told)
    else:
        gone = len(told["namespaces"])
        terminal.console().print(f"{'Would forget' if dry_run else 'Forgot'} {counted(gone, 'namespace')}.")
    if empty and not told["dropped"] and not dry_run:
        raise typer.Exit(1)


def _doubts(salt: str, would: dict[str, Any], limits: tuple[str | None, str | None]) -> str:
    """What to ask before a quota is set; empty for nothing."""
    if sum(would["evicted"].values()):
        return f"Evict {evicted_words(would['evicted'])}?"
    if not would["known"] and any(one is not None and one.lower() != answers.OFF for one in limits):
        return f"Nothing is stored under the salt {salt!r}. Set a quota for it all the same?"
    return ""


def _all_quotas(path: Path | None, url: str | None) -> list[dict[str, Any]]:
    server = remote.at(url)
    if server is not None:
        listed: list[dict[str, Any]] = server.get("/v1/quotas")["quotas"]
        return listed
    with standing_store(path) as store:
        return answers.quotas_told(store, None)


@contextmanager
def _quota_of(salt: str, ram: str | None, nvme: str | None, path: Path | None, url: str | None) -> Iterator[Ask]:
    server = remote.at(url)
    if server is not None:
        yield server.counted("/v1/quota", {"salt": salt, "ram": ram, "nvme": nvme})
        return
    with standing_store(path) as store:
        yield partial(answers.set_quota, store, salt, ram, nvme)


@contextmanager
def _emptied(path: Path | None, url: str | None) -> Iterator[Ask]:
    server = remote.at(url)
    if server is not None:
        yield lambda dry_run: server.post("/v1/drop-empty", {"dry_run": dry_run})
        return
    with standing_store(path) as store:
        yield partial(answers.drop_empty, store)


def _sizes(one: dict[str, Any]) -> tuple[str, str, str]:
    limit, used = one["limit_bytes"], one["used_bytes"]
    return format_size(limit), format_size(used), f"{used / limit:.0%}" if limit else ""
