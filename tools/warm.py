"""``kvstore warm``: makes prompts resident before somebody asks, by prefilling what is missing with a real model.

A prompt is prefilled piece by piece, and each piece is saved before the next one begins, so an interrupted run goes on
where it ended. Must not know how the adapter loads and saves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import kvstore
from kvstore import superblock
from kvstore.errors import KVStoreError, MissingExtraError, NotFoundError, SettingsError, UnsupportedError
from kvstore.match import Namespace
from kvstore.settings import Settings
from kvstore.store import Store
from kvstore.tools import model as models
from kvstore.tools import terminal
from kvstore.tools.explain import TextOption
from kvstore.tools.prompts import Prompt, Tokens, read_prompt
from kvstore.tools.standing import standing_store

PIECE_TOKENS = 1024
FLUSH_S = 600.0
TIERS = ("ram", "nvme")


def warm(
    prompts: Annotated[list[str], typer.Argument(help="Files (text, JSONL chats, token ids), ids (1,2,3), or -.")],
    model: Annotated[
        str | None, typer.Option(help="A folder, or a name on the hub; else the demo's.", show_default=False)
    ] = None,
    salt: Annotated[str, typer.Option(help="The salt that requests will have.")] = "",
    label: Annotated[str | None, typer.Option(help="How listings name the model.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Name the prompt and pin it; for one prompt.")] = None,
    ttl: Annotated[int | None, typer.Option(help="Seconds after which the pin ends.", min=1)] = None,
    tier: Annotated[str, typer.Option(help="Where it has to be in the end: ram or nvme.")] = "ram",
    threads: Annotated[int | None, typer.Option(help="Threads of the model.", min=1, show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what is missing.")] = False,
    as_text: TextOption = False,
    path: terminal.PathOption = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """Prefill prompts with a model and store their KV, so that the first request finds them. May be interrupted.

    Of a chat only what stays whatever is said next is warmed. What is there already is not computed again.

    Example:

        kvstore warm "You are a careful assistant who answers in short sentences." --text --path ./store
    """
    if tier not in TIERS:
        raise SettingsError(f"there is no tier {tier!r} to warm", "use ram or nvme")
    if name is not None and len(prompts) != 1:
        raise SettingsError("--name is for one prompt", "warm the prompts one by one to name them")
    with terminal.progress() as step, contextlib.ExitStack() as stack:
        read = [_prompt(one, as_text) for one in prompts]
        chosen = model or str(models.obtain(step))
        loaded = _load(chosen, threads)
        tokens = Tokens(chosen)
        store = stack.enter_context(_store(path))
        attachment = stack.enter_context(_attached(loaded, store, salt, label))
        space = attachment.namespace()
        rows = []
        for prompt in read:
            ids = tokens.ids(prompt, settled=True)
            rows.append(_warm(store, attachment, space, prompt.source, ids, tier, dry_run, step))
        if name is not None and not dry_run:
            store.pin(name, space, tokens.ids(read[0], settled=True), ttl=ttl)
    _show(rows, chosen, as_json)


def _warm(
    store: Store,
    attachment: Any,
    space: Namespace,
    source: str,
    ids: Sequence[int],
    tier: str,
    dry_run: bool,
    step: terminal.Step,
) -> dict[str, Any]:
    """Make one prompt resident; returns what was there, what was computed, and what a first request saves."""
    if not ids:
        raise SettingsError(f"{source} has no tokens", "pass a prompt that is not empty")
    there = store.match(space, ids).tokens
    start = time.perf_counter()
    if not dry_run:
        stops = [*range(there + PIECE_TOKENS, len(ids), PIECE_TOKENS), len(ids)] if there < len(ids) else []
        for stop in stops:
            step(source, stop, len(ids))
            _prefill(attachment, ids[:stop])
            attachment.flush(FLUSH_S)
        seconds = time.perf_counter() - start
        _settle(store, space, ids, tier)
    else:
        seconds = 0.0
    found = store.match(space, ids)
    if found.tokens < len(ids) and not dry_run:
        raise KVStoreError(
            f"only {found.tokens} of the {len(ids)} tokens of {source} are stored", "raise the budgets of the store"
        )
    return {
        "prompt": source,
        "tokens": len(ids),
        "already_there": there,
        "prefilled": 0 if dry_run else len(ids) - there,
        "missing": len(ids) - found.tokens,
        "by_tier": found.by_tier,
        "prefill_s": seconds,
        "first_request_saves_tokens": max(0, found.tokens - 1),
    }


def _prefill(attachment: Any, ids: Sequence[int]) -> None:
    """One request of one new token; the adapter loads what is stored and saves the rest."""
    import torch

    row = torch.tensor([list(ids)], device=attachment.model.device)
    attachment.model.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    if attachment.last.refused:
        raise UnsupportedError(
            f"the prompt was run uncached ({attachment.last.refused})", "see the reasons in the README"
        )


def _settle(store: Store, space: Namespace, ids: Sequence[int], tier: str) -> None:
    """Wait until it is on disk and, where wanted, in memory."""
    store.flush(FLUSH_S)
    if tier == "ram":
        store.prefetch(store.match(space, ids)).wait(FLUSH_S)


def _prompt(argument: str, as_text: bool) -> Prompt:
    found = read_prompt(argument, as_text)
    if found is None:
        raise NotFoundError(f"there is no file {argument!r}", "check the path, or pass --text for the prompt itself")
    return found


def _load(name: str, threads: int | None) -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "torch is not installed, and warming runs a model", 'pip install "prefix-kvstore[transformers]"'
        ) from error
    if threads is not None:
        torch.set_num_threads(threads)
    return models.load(name)[0]


@contextlib.contextmanager
def _store(path: Path | None) -> Iterator[Store]:
    """The store that stands there, with its own budgets; else a new one, with those of the settings."""
    settings = Settings.resolve(path)
    if (settings.path / superblock.SUPERBLOCK).is_file():
        with standing_store(path) as store:
            yield store
        return
    with kvstore.open(path) as store:
        yield store


def _attached(model: Any, store: Store, salt: str, label: str | None) -> Any:
    """The model, attached. Raises UnsupportedError for one whose KV must not be reused, by its reason."""
    from kvstore.adapters.transformers import REASONS, attach

    attachment = attach(model, store, salt=salt, label=label, warm_tokens=0)
    reason = attachment.refusal()
    if reason is not None:
        attachment.detach()
        raise UnsupportedError(f"{type(model).__name__} cannot be warmed: {REASONS[reason]}", "it runs uncached")
    return attachment


def _show(rows: list[dict[str, Any]], model: str, as_json: bool) -> None:
    if as_json:
        totals = {key: sum(row[key] for row in rows) for key in ("tokens", "already_there", "prefilled", "prefill_s")}
        terminal.print_json({"model": model, **totals, "prompts": rows})
        return
    shown = [
        (
            row["prompt"],
            f"{row['tokens']:,}",
            f"{row['already_there']:,}",
            f"{row['prefilled']:,}",
            f"{row['prefill_s']:.1f} s",
            ", ".join(f"{tier} {count:,}" for tier, count in row["by_tier"].items()),
        )
        for row in rows
    ]
    columns = ("prompt", "tokens", "there already", "prefilled", "took", "now in")
    terminal.console().print(terminal.table(model, columns, shown, right=(1, 2, 3, 4)))
    saved = sum(row["first_request_saves_tokens"] for row in rows)
    terminal.console().print(escape(f"First requests will now find {saved:,} tokens that they need not compute."))
