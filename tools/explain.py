"""``kvstore explain``: why did this prompt miss? Reads prompts and shows the answer; finding it is `explaining`'s."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvstore.errors import NotFoundError, SettingsError, TokenError
from kvstore.listing import NamespaceUse
from kvstore.store import Store
from kvstore.tools import terminal
from kvstore.tools.differ import Cause, Difference, Side, compare
from kvstore.tools.explaining import Explanation, ago, moment
from kvstore.tools.explaining import explain as find_out
from kvstore.tools.naming import namespaces_for
from kvstore.tools.prompts import Prompt, Tokens, plain_text, read_prompt
from kvstore.tools.standing import standing_store

TokenizerOption = Annotated[
    str | None, typer.Option(help="The model's folder or name, for text and chats.", show_default=False)
]
TextOption = Annotated[bool, typer.Option("--text", help="The prompt is the text itself, not a file or a name.")]


def explain(
    prompt: Annotated[str, typer.Argument(help="A file (text, JSONL chat, token ids), ids (1,2,3), a name, or -.")],
    against: Annotated[str | None, typer.Option(help="Another prompt to compare with; no store is asked.")] = None,
    namespace: Annotated[str | None, typer.Option(help="A label, or the beginning of a root; else the best.")] = None,
    salt: Annotated[str | None, typer.Option(help="Only namespaces under this salt.")] = None,
    tokenizer: TokenizerOption = None,
    as_text: TextOption = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Why a prompt missed: how much of it is stored in which tier, the first token that differs, and the likely cause.

    With --against, two prompts are compared without a store. What is lost is counted in tokens, or in characters where
    there is no --tokenizer.

    Example:

        kvstore explain 40,100,101,7,8,9 --path ./store
    """
    tokens = Tokens(tokenizer) if tokenizer is not None else None
    if against is not None:
        found = compare(
            _side(_prompt(prompt, as_text), tokens),
            _side(_prompt(against, as_text), tokens),
            tokens.encode if tokens is not None else None,
        )
        if as_json:
            terminal.print_json(found.to_dict())
        else:
            _show_pair(found)
        return
    with standing_store(path) as store, terminal.progress() as step:
        asked = read_prompt(prompt, as_text)
        everything = store.namespaces()
        chosen = namespaces_for(store, namespace, salt)
        if asked is None:
            ids, chosen = _named(store, prompt, chosen)
        else:
            ids = _ids(asked, tokens)
        if not ids:
            raise TokenError("the prompt has no tokens", "pass a prompt that is not empty")
        answer = find_out(store, ids, chosen, everything, tokens, lambda done, total: step("read", done, total))
    if as_json:
        terminal.print_json(answer.to_dict())
    else:
        _show(answer)


def _prompt(argument: str, as_text: bool) -> Prompt:
    found = read_prompt(argument, as_text)
    if found is None:
        raise NotFoundError(f"there is no file {argument!r}", "check the path, or pass --text for the prompt itself")
    return found


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
    _show_difference(out, found)
    _show_causes(out, found.causes, found.unit)
    if found.would_match > found.shared:
        out.print(f"Without what was recognised, {found.would_match:,} {found.unit} would match.")


def _show(answer: Explanation) -> None:
    out = terminal.console()
    label = answer.use.record.label or answer.use.record.root.hex()[:12]
    tiers = ", ".join(f"{count:,} from {tier}" for tier, count in answer.by_tier.items()) or "none"
    out.print(escape(f"{answer.matched:,} of {answer.asked:,} tokens match in {label} ({tiers})."))
    if answer.matched == answer.asked:
        return
    if answer.nearest is not None:
        near = answer.nearest
        named = f", named {near.name!r} on {moment(near.named)}" if near.name and near.named else ""
        out.print(escape(f"Nearest stored: {near.tokens:,} tokens, last used {ago(near.idle_s)} ago{named}."))
    if answer.difference is not None:
        _show_difference(out, answer.difference)
    _show_causes(out, answer.causes, "tokens")
    if answer.would_match > answer.matched:
        out.print(f"Without what was recognised, {answer.would_match:,} tokens would match.")


def _show_difference(out: Console, found: Difference) -> None:
    if found.shared == found.prompt:
        return
    before, mine, other = found.around
    out.print(escape(f"  after   {before!r}"))
    out.print(escape(f"  prompt  {mine!r}"))
    out.print(escape(f"  stored  {other!r}"))


def _show_causes(out: Console, causes: tuple[Cause, ...], unit: str) -> None:
    for cause in causes:
        unit_one = unit.removesuffix("s")
        out.print(escape(f"{cause.code}: {cause.says}."), style="bold")
        out.print(escape(f"  At {unit_one} {cause.at:,}; {cause.lost:,} {unit} lie behind it. To do: {cause.advice}."))
