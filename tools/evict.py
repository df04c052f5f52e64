"""``kvstore evict``: removes blocks by hand, after asking. Must not know how tiers do it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.errors import SettingsError
from kvstore.sizes import counted, format_size
from kvstore.tools import answers, remote, terminal
from kvstore.tools.remote import Remote
from kvstore.tools.standing import reading, standing_store
from kvstore.wiping import Wiped

NOTHING: dict[str, Any] = {"blocks": {}, "names": [], "forgotten": []}


def evict(
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    tier: Annotated[str | None, typer.Option(help="Only the copies in this tier: ram or nvme.")] = None,
    namespace: Annotated[str | None, typer.Option(help="A label, or the beginning of a root.")] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="In a namespace: first tokens (1,2,3), or the beginning of a key as ls shows it."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="A named prefix; its name and pin go with it.")] = None,
    salt: Annotated[str | None, typer.Option(help="All namespaces under this salt.")] = None,
    unused: Annotated[float | None, typer.Option(help="What was not used for so many seconds.", min=0)] = None,
    larger: Annotated[
        str | None,
        typer.Option(help="Sequences that take more than this (1GiB), but for what others share and what is pinned."),
    ] = None,
    wipe: Annotated[
        bool, typer.Option("--wipe", help="Leave no readable byte of it, nor of what was evicted before.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Evict everything, a namespace, a salt, a prefix or name with all that continues it, what is long unused or large.

    Without --tier, blocks go from every tier and every process, and cannot come back from another one. Asks first. With
    --wipe, zeros go over them; alone, over what was evicted before.

    Example:

        kvstore evict --tier ram --yes --path ./store

        kvstore evict --larger 1GiB --dry-run --path ./store
    """
    named: dict[str, Any] = {"everything": everything, "namespace": namespace, "prefix": prefix, "name": name}
    named |= {"salt": salt, "unused": unused, "larger": larger}
    server = remote.at(url)
    if server is not None:
        if wipe:
            raise SettingsError("--wipe is not done through a server", "run it on the store's own host, with --path")
        _evict_there(server, {**named, "tier": tier}, dry_run, yes, as_json)
        return
    with standing_store(path) as store:
        if wipe and tier is not None:
            raise SettingsError("--wipe goes through every tier", "leave --tier out")
        only_wipe = wipe and all(one is None or one is False for one in named.values())
        with reading(store):
            target = None if only_wipe else answers.eviction_target(store, **named, tier=tier)
            would = answers.eviction_counted(store, target, tier, wipe) if target is not None else NOTHING
        wiped: Wiped | None = None
        if dry_run:
            done, told = False, would
            if wipe and not as_json:
                terminal.say("A wipe would follow, of that and of what was evicted before.")
        else:
            question = f"Evict {_words(would)}?" if target is not None else "Wipe what was evicted before?"
            done = terminal.confirmed(question, yes)
            told = _nothing_of(would)
            if done and target is not None:
                with reading(store):
                    told = {**would, "blocks": answers.evict(store, target, tier, wipe)}
            if done and wipe:
                with terminal.progress() as step:
                    wiped = store.wipe(step)
    more = {} if wiped is None else {"wiped": asdict(wiped)}
    _tell(dry_run, done, told if target is not None else None, {**told, **more}, as_json)
    if wiped is not None and not as_json:
        _show_wiped(wiped)
    if not done and not dry_run:
        raise typer.Exit(1)


def _nothing_of(would: dict[str, Any]) -> dict[str, Any]:
    return {"blocks": dict.fromkeys(would["blocks"], 0), "names": [], "forgotten": []}


def _tell(dry_run: bool, done: bool, told: dict[str, Any] | None, more: dict[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.print_json({"dry_run": dry_run, "evicted": done, **more})
    elif told is not None and (dry_run or done):
        terminal.console().print(escape(f"{'Would evict' if dry_run else 'Evicted'} {_words(told)}."))


def _evict_there(server: Remote, asked: dict[str, Any], dry_run: bool, yes: bool, as_json: bool) -> None:
    """The same through a server: counted, asked, then done as it was counted."""
    ask = server.counted("/v1/evict", asked)
    would = ask(True)
    done = not dry_run and terminal.confirmed(f"Evict {_words(would)}?", yes)
    told = would if dry_run else _nothing_of(would)
    if done:
        told = ask(False)
    told = {key: told[key] for key in NOTHING}
    _tell(dry_run, done, told, told, as_json)
    if not done and not dry_run:
        raise typer.Exit(1)


def _show_wiped(wiped: Wiped) -> None:
    size = " and ".join(f"{format_size(size)} of {tier}" for tier, size in wiped.slots.items())
    terminal.console().print(f"Wiped {size}, and what the indexes held.")
    if wiped.unconfirmed:
        terminal.say(f"{counted(wiped.unconfirmed, 'process')} did not answer: end them, then wipe again.")
    if wiped.left:
        terminal.say(f"Still being written: {counted(wiped.left, 'slot')}. Wipe again.")


def _words(told: dict[str, Any]) -> str:
    """Blocks, and the names that go with them or lose what they name."""
    text = evicted_words(told["blocks"])
    left = [name for name in told["names"] if name not in told["forgotten"]]
    if told["forgotten"]:
        text += f", with the {_plural(told['forgotten'])} {', '.join(told['forgotten'])}"
    if left:
        text += f", of what is pinned or named too (the {_plural(left)} will have less to keep: {', '.join(left)})"
    return text


def _plural(names: list[str]) -> str:
    return "names" if len(names) > 1 else "name"


def evicted_words(counts: dict[str, int]) -> str:
    return " and ".join(f"{counted(count, 'block')} from {tier}" for tier, count in counts.items())
