"""``kvstore evict``: removes blocks by hand, after asking. Must not know how tiers do it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvstore.errors import SettingsError
from kvstore.store import Store
from kvstore.tools import terminal
from kvstore.tools.naming import find_named, namespaces_for
from kvstore.tools.standing import find_namespace, find_prefix, standing_store


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Evict everything, a namespace, a salt, a prefix or a name with all that continues it, or what was long unused.

    Without --tier, blocks go from every tier and every process, and cannot come back from another one. Asks first.

    Example:

        kvstore evict --tier ram --yes --path ./store
    """
    with standing_store(path) as store:
        target = _target(store, everything, tier, namespace, prefix, name, salt, unused)
        would = store.evict(**target, tier=tier, dry_run=True)
        if dry_run:
            done, counts = False, would
        else:
            done = terminal.confirmed(f"Evict {_words(would)}?", yes)
            counts = store.evict(**target, tier=tier) if done else dict.fromkeys(would, 0)
            if done and name is not None and tier is None:
                store.unpin(name)
    if as_json:
        terminal.print_json({"dry_run": dry_run, "evicted": done, "blocks": counts})
    elif dry_run:
        terminal.console().print(f"Would evict {_words(counts)}.")
    elif done:
        terminal.console().print(f"Evicted {_words(counts)}.")
    if not done and not dry_run:
        raise typer.Exit(1)


def _target(
    store: Store,
    everything: bool,
    tier: str | None,
    namespace: str | None,
    prefix: str | None,
    name: str | None,
    salt: str | None,
    unused: float | None,
) -> dict[str, Any]:
    """The arguments of `Store.evict` that the options name. Raises SettingsError for none, or for two things."""
    given = [everything, *(one is not None for one in (namespace, name, salt, unused))]
    if prefix is not None and namespace is None:
        raise SettingsError("--prefix needs the namespace it is in", "add --namespace; kvstore ls lists them")
    if sum(given) > 1:
        raise SettingsError(
            "--all, --namespace, --name, --salt and --unused exclude one another", "evict twice to combine them"
        )
    if namespace is not None:
        use = find_namespace(store, namespace)
        return {"prefix": find_prefix(store, use, prefix)} if prefix is not None else {"namespace": use.record.root}
    if name is not None:
        return {"name": find_named(store, name).name}
    if salt is not None:
        namespaces_for(store, None, salt)
        return {"salt": salt}
    if unused is not None:
        return {"unused_s": unused}
    if everything or tier is not None:
        return {"everything": True}
    raise SettingsError("nothing was named", "pass --all, --tier, --namespace, --prefix, --name, --salt or --unused")


def _words(counts: dict[str, int]) -> str:
    return " and ".join(f"{count:,} blocks from {tier}" for tier, count in counts.items())
