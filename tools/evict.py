"""``kvstore evict``: removes blocks by hand, after asking. Must not know how tiers do it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import answers, terminal
from kvstore.tools.standing import standing_store


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
        target = answers.eviction_target(
            store,
            everything=everything,
            tier=tier,
            namespace=namespace,
            prefix=prefix,
            name=name,
            salt=salt,
            unused=unused,
        )
        would = store.evict(**target, tier=tier, dry_run=True)
        if dry_run:
            done, counts = False, would
        else:
            done = terminal.confirmed(f"Evict {_words(would)}?", yes)
            counts = answers.evict(store, target, tier) if done else dict.fromkeys(would, 0)
    if as_json:
        terminal.print_json({"dry_run": dry_run, "evicted": done, "blocks": counts})
    elif dry_run:
        terminal.console().print(f"Would evict {_words(counts)}.")
    elif done:
        terminal.console().print(f"Evicted {_words(counts)}.")
    if not done and not dry_run:
        raise typer.Exit(1)


def _words(counts: dict[str, int]) -> str:
    return " and ".join(f"{count:,} blocks from {tier}" for tier, count in counts.items())
