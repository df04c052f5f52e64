"""``kvstore explain``: why did this prompt miss? Reads prompts and shows the answer; finding it is `explaining`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvstore.errors import NotFoundError, SettingsError, TokenError
from kvstore.listing import NamespaceUse
from kvstore.store import Store
from kvstore.tools import remote, terminal
from kvstore.tools.differ import Difference, Side, compare
from kvstore.tools.explaining import ago, moment
from kvstore.tools.explaining import explain as find_out
from kvstore.tools.naming import namespaces_for
from kvstore.tools.prompts import Prompt, Tokens, plain_text, read_prompt, require_prompt
from kvstore.tools.remote import Remote
from kvstore.tools.standing import standing_store

TokenizerOption = Annotated[
    str | None, typer.Option(help="The model's folder or name, for text and chats.", show_default=False)
]
TextOption = Annotated[bool, typer.Option("--text", help="The prompt is the text itself, not a file or a name.")]


def explain(
    prompt: Annotated[str, typer.Argument(help="A file (text, JSONL chat, token ids), ids (1,2,3), a name, or -.")],
    other: Annotated[str | None, typer.Argument(help="Another prompt to compare with, as --against.")] = None,
    against: Annotated[str | None, typer.Option(help="Another prompt to compare with; no store is asked.")] = None,
    namespace: Annotated[str | None, typer.Option(help="A label, or the beginning of a root; else the best.")] = None,
    salt: Annotated[str | None, typer.Option(help="Only namespaces under this salt.")] = None,
    tokenizer: TokenizerOption = None,
    as_text: TextOption = False,
    path: terminal.PathOption = None,
    url: terminal.UrlOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Why a prompt missed: how much of it is stored in which tier, the first token that differs, and the likely cause.

    Two prompts are compared with each other, without a store. What is lost is counted in tokens, or in characters where
    there is no --tokenizer.

    Example:

        kvstore explain 40,100,101,7,8,9 --path ./store
    """
    tokens = Tokens(tokenizer) if tokenizer is not None else None
    if other is not None and against is not None:
        raise SettingsError("three prompts were given", "pass two, or one with --against")
    against = against if other is None else other
    if against is not None:
        found = compare(
            _side(require_prompt(prompt, as_text), tokens),
            _side(require_prompt(against, as_text), tokens),
            tokens.encode if tokens is not None else None,
        )
        if as_json:
            terminal.print_json(found.to_dict())
        else:
            _show_pair(found)
        return
    told = _explained(remote.at(url), path, prompt, namespace, salt, tokens, as_text)
    if as_json:
        terminal.print_json(told)
    else:
        _show(told)


def _explained(
    server: Remote | None,
    path: Path | None,
    prompt: str,
    namespace: str | None,
    salt: str | None,
    tokens: Tokens | None,
    as_text: bool,
) -> dict[str, Any]:
    """The answer, of the store here or of a server; which knows tokens, and no tokenizer."""
    asked = read_prompt(prompt, as_text)
    if server is not None:
        said = {"name": prompt} if asked is None else {"tokens": list(_ids(asked, tokens))}
        return server.post("/v1/explain", {**said, "namespace": namespace, "salt": salt})
    with standing_store(path) as store, terminal.progress() as step:
        everything = store.namespaces()
        chosen = namespaces_for(store, namespace, salt)
        if asked is None:
            ids, chosen = _named(store, prompt, chosen)
        else:
            ids = _ids(asked, tokens)
        if not ids:
            raise TokenError("the prompt has no tokens", "pass a prompt that is not empty")
        answer = find_out(store, ids, chosen, everything, tokens, lambda done, total: step("read", done, total))
        return answer.to_dict()


def _side(prompt: Prompt, tokens: Tokens | None) -> Side:
    if tokens is None:
        return Side(prompt.ids, plain_text(prompt))
    return tokens.side(tokens.ids(prompt))


def _ids(prompt: Prompt, tokens: Tokens | None) -> tuple[int, ...]:
    if tokens is not None:
        return tokens.ids(prompt)
    if prompt.ids is None:
        raise SettingsError(f"{prompt.source} is text, and the store knows tokens", "pass --tokenizer, or token ids")
    return prompt.ids


def _named(store: Store, name: str, chosen: list[NamespaceUse]) -> tuple[tuple[int, ...], list[NamespaceUse]]:
    """Tokens and namespace of a named prefix."""
    record = store.names().get(name)
    if record is None:
        raise NotFoundError(
            f"{name!r} is neither a file nor the name of a prefix",
            "pass --text for the prompt itself; kvstore names lists the names",
        )
    ids = tuple(int.from_bytes(record.tokens[at : at + 4], "little") for at in range(0, len(record.tokens), 4))
    return ids, [use for use in chosen if use.record.root == record.root] or chosen


def _show_pair(found: Difference) -> None:
    out = terminal.console()
    out.print(f"{found.shared:,} of {found.prompt:,} {found.unit} agree; {found.lost:,} lie behind the difference.")
    told = found.to_dict()
    _show_difference(out, told)
    _show_causes(out, told["causes"], found.unit)
    if found.would_match > found.shared:
        out.print(f"Without what was recognised, {found.would_match:,} {found.unit} would match.")


def _show(told: dict[str, Any]) -> None:
    out = terminal.console()
    label = told["label"] or told["namespace"][:12]
    tiers = ", ".join(f"{count:,} from {tier}" for tier, count in told["by_tier"].items()) or "none"
    out.print(escape(f"{told['matched']:,} of {told['asked']:,} tokens match in {label} ({tiers})."))
    if told["matched"] == told["asked"]:
        return
    near = told["nearest"]
    if near is not None:
        named = f", named {near['name']!r} on {moment(near['named'])}" if near["name"] and near["named"] else ""
        out.print(escape(f"Nearest stored: {near['tokens']:,} tokens, last used {ago(near['idle_s'])} ago{named}."))
    if told["difference"] is not None:
        _show_difference(out, told["difference"])
    _show_causes(out, told["causes"], "tokens")
    if told["would_match"] > told["matched"]:
        out.print(f"Without what was recognised, {told['would_match']:,} tokens would match.")


def _show_difference(out: Console, told: dict[str, Any]) -> None:
    if told["shared"] == told["prompt"]:
        return
    out.print(escape(f"  after   {told['before']!r}"))
    out.print(escape(f"  prompt  {told['prompt_text']!r}"))
    out.print(escape(f"  stored  {told['stored_text']!r}"))


def _show_causes(out: Console, causes: list[dict[str, Any]], unit: str) -> None:
    one = unit.removesuffix("s")
    for cause in causes:
        out.print(escape(f"{cause['code']}: {cause['says']}."), style="bold")
        behind = f"{cause['lost']:,} {unit} lie behind it"
        out.print(escape(f"  At {one} {cause['at']:,}; {behind}. To do: {cause['advice']}."))
