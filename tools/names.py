"""``kvstore pin``, ``unpin``, ``names`` and ``show``: prefixes by name, and what is there of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvstore.sizes import counted, format_size
from kvstore.tools import answers, remote, terminal
from kvstore.tools.explain import TextOption, TokenizerOption
from kvstore.tools.explaining import ago, moment
from kvstore.tools.naming import find_tokens, ids_of_argument, namespaces_for
from kvstore.tools.prompts import Tokens
from kvstore.tools.standing import reading, standing_store

SHOWN_CHARACTERS = 400
PROMPT_HELP = "A file (text, JSONL chat, token ids), ids (1,2,3), a name, or the beginning of a key."

NamespaceOption = Annotated[str | None, typer.Option(help="A label, or the beginning of a root.", show_default=False)]
SaltOption = Annotated[str | None, typer.Option(help="Only namespaces under this salt.", show_default=False)]


def pin(
    prompt: Annotated[str, typer.Argument(help=PROMPT_HELP)],
    name: Annotated[str, typer.Option(help="What to call it; an older pin of that name is replaced.")],
    namespace: NamespaceOption = None,
    salt: SaltOption = None,
    priority: Annotated[int, typer.Option(help="Where pins have no room, those of a lower one let go.")] = 0,
    ttl: Annotated[int | None, typer.Option(help="Seconds after which the pin ends.", min=1)] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Pin what is there, even if it is not all.")] = False,
    tokenizer: TokenizerOption = None,
    as_text: TextOption = False,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Name a stored prefix, and keep its blocks from eviction in every tier and process, across restarts.

    Of a chat only what stays whatever is said next is pinned. Pins take at most half of the smallest tier.

    Example:

        kvstore pin 40,100,101 --name rules --path ./store
    """
    tokens = Tokens(tokenizer) if tokenizer is not None else None
    server = remote.at(url)
    if server is not None:
        asked = _asked(prompt, namespace, salt, tokens, as_text, settled=True)
        told = server.post("/v1/pin", {**asked, "pin_as": name, "priority": priority, "ttl": ttl, "partial": partial})
    else:
        with standing_store(path) as store:
            uses = namespaces_for(store, namespace, salt)
            with reading(store):
                space, ids = find_tokens(store, prompt, uses, tokens, as_text, settled=True)
            told = answers.pin(store, name, space, ids, priority=priority, ttl=ttl, partial=partial)
    if as_json:
        terminal.print_json(told)
    else:
        until = f"until {moment(told['expires'])}" if told["expires"] else "for good"
        size = format_size(told["pinned_bytes"])
        tokens_told = counted(told["tokens"], "token")
        terminal.console().print(escape(f"Pinned {tokens_told} as {name!r} {until}: {size} of each tier."))


def unpin(
    name: Annotated[str, typer.Argument(help="The name of a prefix.")],
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Forget a name and its pin; the blocks stay, and may be evicted like any others.

    Example:

        kvstore unpin greeting --path ./store
    """
    server = remote.at(url)
    if server is not None:
        told = server.post("/v1/unpin", {"name": name})
    else:
        with standing_store(path) as store:
            told = answers.unpin(store, name)
    if as_json:
        terminal.print_json(told)
    else:
        size = counted(told["tokens"], "token")
        terminal.console().print(escape(f"Forgot {name!r}: its {size} may be evicted again."))


def names(
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """List named prefixes: how much of each is still stored, and until when it is pinned.

    Example:

        kvstore names --path ./store
    """
    server = remote.at(url)
    if server is not None:
        told = server.get("/v1/names")
    else:
        with standing_store(path) as store:
            told = answers.names(store)
    if as_json:
        terminal.print_json(told)
        return
    rows = [
        (one["name"], one["label"], f"{one['tokens']:,}", f"{one['stored']:,}", _pinned(one), one["priority"])
        for one in told["names"]
    ]
    columns = ("name", "namespace", "tokens", "stored", "pinned", "priority")
    terminal.console().print(terminal.table("Named prefixes", columns, rows, right=(2, 3, 5)))


def show(
    prompt: Annotated[str, typer.Argument(help=PROMPT_HELP)],
    namespace: NamespaceOption = None,
    salt: SaltOption = None,
    tokenizer: TokenizerOption = None,
    as_text: TextOption = False,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """One prefix: how many of its tokens are stored in which tier, its blocks and bytes, its names, and its text.

    Example:

        kvstore show greeting --path ./store
    """
    tokens = Tokens(tokenizer) if tokenizer is not None else None
    server = remote.at(url)
    ids: Sequence[int]
    if server is not None:
        told = server.post("/v1/show", _asked(prompt, namespace, salt, tokens, as_text, settled=False))
        ids = told["first_tokens"]
    else:
        with standing_store(path) as store:
            uses = namespaces_for(store, namespace, salt)
            with reading(store):
                space, found = find_tokens(store, prompt, uses, tokens, as_text, settled=False)
            told, ids = answers.show(store, space, found), found.tolist()
    if tokens is not None:
        tokens.check(ids)
        told["text"] = tokens.decode(ids)
    if as_json:
        terminal.print_json(told)
    else:
        _show_prefix(prompt, told)


def _asked(
    prompt: str, namespace: str | None, salt: str | None, tokens: Tokens | None, as_text: bool, settled: bool
) -> dict[str, Any]:
    """How a server is asked for a prefix: files and texts are read here, names and keys there."""
    ids = ids_of_argument(prompt, tokens, as_text, settled)
    return {"namespace": namespace, "salt": salt, **({"name": prompt} if ids is None else {"tokens": list(ids)})}


def _show_prefix(title: str, told: dict[str, Any]) -> None:
    rows = [
        ("namespace", f"{told['label']} {told['namespace'][:12]}"),
        ("tokens", f"{told['stored']:,} of {told['tokens']:,} are stored"),
        *(
            (f"from {tier}", f"{counted(count, 'token')}, {counted(told['blocks'][tier], 'block')}")
            for tier, count in told["by_tier"].items()
        ),
        ("KV", format_size(told["bytes"])),
        *((f"named {one['name']!r}", _pinned(one) or "not pinned") for one in told["names"]),
        ("begins", ", ".join(map(str, told["first_tokens"][:16]))),
        *(() if told["text"] is None else (("text", told["text"][:SHOWN_CHARACTERS]),)),
    ]
    terminal.console().print(terminal.table(title, ("", ""), rows))


def _pinned(one: dict[str, Any]) -> str:
    if not one["pinned"]:
        return "expired" if one["expires"] and one["expires"] <= time.time() else "let go for others"
    return f"for {ago(one['expires'] - time.time())} more" if one["expires"] else "for good"
