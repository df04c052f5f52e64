"""``kvstore pin``, ``unpin``, ``names`` and ``show``: prefixes by name, and what is there of them."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.markup import escape

from kvstore.errors import NotFoundError
from kvstore.match import Match
from kvstore.sizes import format_size
from kvstore.tools import terminal
from kvstore.tools.explain import TextOption, TokenizerOption
from kvstore.tools.explaining import ago, moment
from kvstore.tools.naming import Named, find_named, find_tokens, named, namespaces_for
from kvstore.tools.prompts import Tokens
from kvstore.tools.standing import standing_store

SHOWN_CHARACTERS = 400
PROMPT_HELP = "A file (text, JSONL chat, token ids), ids (1,2,3), a name, or the beginning of a key."

NamespaceOption = Annotated[str | None, typer.Option(help="A label, or the beginning of a root.", show_default=False)]
SaltOption = Annotated[str | None, typer.Option(help="Only namespaces under this salt.", show_default=False)]


def pin(
    prompt: Annotated[str, typer.Argument(help=PROMPT_HELP)],
    name: Annotated[str, typer.Option(help="What to call it; an older pin of that name is replaced.")],
    namespace: NamespaceOption = None,
    salt: SaltOption = None,
    priority: Annotated[int, typer.Option(help="Kept with the name, for whoever warms by priority.")] = 0,
    ttl: Annotated[int | None, typer.Option(help="Seconds after which the pin ends.", min=1)] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Pin what is there, even if it is not all.")] = False,
    tokenizer: TokenizerOption = None,
    as_text: TextOption = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Name a stored prefix, and keep its blocks from eviction in every tier and process, across restarts.

    Of a chat only what stays whatever is said next is pinned. Pins take at most half of the smallest tier.

    Example:

        kvstore pin 40,100,101 --name rules --path ./store
    """
    tokens = Tokens(tokenizer) if tokenizer is not None else None
    with standing_store(path) as store:
        uses = namespaces_for(store, namespace, salt)
        space, ids = find_tokens(store, prompt, uses, tokens, as_text, settled=True)
        found = store.match(space, ids)
        if found.tokens < len(ids) and not partial:
            problem = f"only {found.tokens} of {len(ids)} tokens are stored"
            raise NotFoundError(problem, "ask kvstore explain why, or pin what is there with --partial")
        store.pin(name, space, ids, priority=priority, ttl=ttl)
        done = find_named(store, name)
    if as_json:
        terminal.print_json({**done.to_dict(), "asked": len(ids)})
    else:
        until = f"until {moment(done.record.expires)}" if done.record.expires else "for good"
        size = format_size(len(done.record.keys) * done.record.slot_bytes)
        terminal.console().print(escape(f"Pinned {done.tokens:,} tokens as {name!r} {until}: {size} of each tier."))


def unpin(
    name: Annotated[str, typer.Argument(help="The name of a prefix.")],
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Forget a name and its pin; the blocks stay, and may be evicted like any others.

    Example:

        kvstore unpin greeting --path ./store
    """
    with standing_store(path) as store:
        was = find_named(store, name)
        store.unpin(name)
    if as_json:
        terminal.print_json({"name": name, "unpinned": was.pinned, "tokens": was.tokens})
    else:
        terminal.console().print(escape(f"Forgot {name!r}: its {was.tokens:,} tokens may be evicted again."))


def names(path: terminal.PathOption = None, as_json: terminal.JsonOption = False) -> None:
    """List named prefixes: how much of each is still stored, and until when it is pinned.

    Example:

        kvstore names --path ./store
    """
    with standing_store(path) as store:
        found = named(store)
    if as_json:
        terminal.print_json({"names": [one.to_dict() for one in found]})
        return
    rows = [
        (one.name, one.label, f"{one.tokens:,}", f"{one.stored:,}", _pinned(one), one.record.priority) for one in found
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
    as_json: terminal.JsonOption = False,
) -> None:
    """One prefix: how many of its tokens are stored in which tier, its blocks and bytes, its names, and its text.

    Example:

        kvstore show greeting --path ./store
    """
    tokens = Tokens(tokenizer) if tokenizer is not None else None
    with standing_store(path) as store:
        uses = namespaces_for(store, namespace, salt)
        space, ids = find_tokens(store, prompt, uses, tokens, as_text, settled=False)
        match = store.match(space, ids)
        own = [one for one in named(store) if one.record.root == space.root and _begins(one, match)]
        if tokens is not None:
            tokens.check(ids.tolist())
        text = None if tokens is None else tokens.decode(ids.tolist())
    blocks = _blocks(match)
    told = {
        "namespace": space.root.hex(),
        "label": space.label,
        "tokens": len(ids),
        "stored": match.tokens,
        "by_tier": match.by_tier,
        "blocks": blocks,
        "bytes": match.tokens * sum(space.layout.token_bytes(part.group) for part in match.pieces),
        "key": match.chain.keys[-1].hex() if match.chain.keys else None,
        "names": [one.to_dict() for one in own],
        "first_tokens": ids[:32].tolist(),
        "text": text,
    }
    if as_json:
        terminal.print_json(told)
        return
    rows = [
        ("namespace", f"{space.label} {space.root.hex()[:12]}"),
        ("tokens", f"{match.tokens:,} of {len(ids):,} are stored"),
        *((f"from {tier}", f"{count:,} tokens, {blocks[tier]:,} blocks") for tier, count in match.by_tier.items()),
        ("KV", format_size(int(str(told["bytes"])))),
        *((f"named {one.name!r}", _pinned(one) or "not pinned") for one in own),
        ("begins", ", ".join(map(str, ids[:16].tolist()))),
        *(() if text is None else (("text", text[:SHOWN_CHARACTERS]),)),
    ]
    terminal.console().print(terminal.table(prompt, ("", ""), rows))


def _pinned(one: Named) -> str:
    if not one.pinned:
        return "expired" if one.record.expires else ""
    return f"for {ago(one.record.expires - time.time())} more" if one.record.expires else "for good"


def _begins(one: Named, match: Match) -> bool:
    """Whether a named prefix is one of the matched tokens."""
    return match.chain.tokens[: one.tokens].astype("<u4").tobytes() == one.record.tokens


def _blocks(match: Match) -> dict[str, int]:
    """Matched blocks by the tier that would serve them, in all parts."""
    found: dict[str, int] = {}
    for pieces in match.pieces.values():
        for piece in pieces:
            found[piece.tier] = found.get(piece.tier, 0) + 1
    return found
