"""``kvstore warm``: makes prompts resident before somebody asks, by prefilling what is missing with a real model.

The model is loaded here, or a served engine runs it. A prompt is prefilled piece by piece, and each piece is saved
before the next one begins, so an interrupted run goes on where it ended. A piece loads the earlier ones, and none is
a request: nothing of it counts as asked for or served. Must not know how adapters save.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import kvstore
from kvstore import superblock
from kvstore.errors import KVStoreError, MissingExtraError, PathError, SettingsError, UnsupportedError
from kvstore.match import Namespace
from kvstore.settings import Settings
from kvstore.store import Store
from kvstore.tools import model as models
from kvstore.tools import terminal
from kvstore.tools.engine import Engine, Wanted, stored_for, warm_by
from kvstore.tools.explain import TextOption, TokenizerOption
from kvstore.tools.prompts import Prompt, Tokens, require_prompt
from kvstore.tools.standing import standing_store

PIECE_TOKENS = 1024
FLUSH_S = 600.0
TIERS = ("ram", "nvme")


def warm(
    prompts: Annotated[list[str], typer.Argument(help="Files (text, JSONL chats, token ids), ids (1,2,3), or -.")],
    model: Annotated[
        str | None,
        typer.Option(help="A folder, or a name on the hub or of an engine; else the demo's.", show_default=False),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Address of a server that runs kvstore's connector.", show_default=False)
    ] = None,
    tokenizer: TokenizerOption = None,
    namespace: Annotated[
        str | None, typer.Option(help="Of an engine: where it stores, if that is not clear.", show_default=False)
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the engine's API key.", show_default=False)
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

    Of a chat only what stays whatever is said next is warmed. What is there already is not computed again. With
    --engine, an OpenAI-compatible server prefills; what its connector stored is checked in the store.

    Example:

        kvstore warm "You are a careful assistant who answers in short sentences." --text --path ./store
    """
    if tier not in TIERS:
        raise SettingsError(f"there is no tier {tier!r} to warm", "use ram or nvme")
    if name is not None and len(prompts) != 1:
        raise SettingsError("--name is for one prompt", "warm the prompts one by one to name them")
    with terminal.progress() as step, contextlib.ExitStack() as stack:
        read = [require_prompt(one, as_text) for one in prompts]
        if engine is not None:
            if threads is not None or label is not None:
                raise SettingsError("--threads and --label are for a model that is loaded here", "leave them out")
            served = Engine(engine, model, _key(api_key_file))
            store = stack.enter_context(standing_store(path))
            spell = Tokens(tokenizer) if tokenizer is not None else None
            wanted = Wanted(salt, namespace)
            rows, space, ids = _by_engine(store, served, spell, read, wanted, tier, dry_run, step)
            chosen = served.model
        else:
            chosen = model or str(models.obtain(step))
            loaded = _load(chosen, threads)
            spell = Tokens(tokenizer or chosen)
            store = stack.enter_context(_store(path))
            attachment = stack.enter_context(_attached(loaded, store, salt, label))
            space = attachment.namespace()
            rows = []
            for prompt in read:
                ids = spell.ids(prompt, settled=True)
                rows.append(_warm(store, attachment, space, prompt.source, ids, tier, dry_run, step))
        if name is not None and not dry_run:
            store.pin(name, space, ids, ttl=ttl)
    _show(rows, chosen, as_json)


def _by_engine(
    store: Store,
    engine: Engine,
    tokens: Tokens | None,
    prompts: Sequence[Prompt],
    wanted: Wanted,
    tier: str,
    dry_run: bool,
    step: terminal.Step,
) -> tuple[list[dict[str, Any]], Any, Sequence[int]]:
    """A row a prompt; the namespace and the ids of the last one."""
    rows: list[dict[str, Any]] = []
    space: Namespace | None = None
    ids: Sequence[int] = ()
    for prompt in prompts:
        ids = tokens.ids(prompt, settled=True) if tokens is not None else engine.ids(prompt)
        _refuse_empty(prompt.source, ids)
        if dry_run:
            done = stored_for(store, ids, wanted)
        else:
            done = warm_by(engine, store, ids, wanted, partial(step, prompt.source))
        space = done.space
        if space is not None and not dry_run:
            _settle(store, space, ids, tier)
        found = store.match(space, ids) if space is not None else None
        held, by_tier = (found.tokens, found.by_tier) if found is not None else (0, {})
        rows.append(_row(prompt.source, len(ids), done.there, held, by_tier, done.seconds, dry_run))
    return rows, space, ids


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
    _refuse_empty(source, ids)
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
    return _row(source, len(ids), there, found.tokens, found.by_tier, seconds, dry_run)


def _row(
    source: str, tokens: int, there: int, held: int, by_tier: dict[str, int], seconds: float, dry_run: bool
) -> dict[str, Any]:
    return {
        "prompt": source,
        "tokens": tokens,
        "already_there": there,
        "prefilled": 0 if dry_run else tokens - there,
        "missing": tokens - held,
        "by_tier": by_tier,
        "prefill_s": seconds,
        "first_request_saves_tokens": max(0, min(held, tokens - 1)),
    }


def _refuse_empty(source: str, ids: Sequence[int]) -> None:
    if not ids:
        raise SettingsError(f"{source} has no tokens", "pass a prompt that is not empty")


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PathError(f"{file} cannot be read: {error}", "pass a file with the key alone") from error


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
    """Wait until it is on disk and, where wanted, in memory. Raises KVStoreError when ``tier`` does not get all."""
    if not store.flush(FLUSH_S) and tier == "nvme":
        raise KVStoreError("not all of it was written to nvme", "`kvstore stats` tells why, under Not saved")
    if tier == "ram":
        store.prefetch(store.match(space, ids)).wait(FLUSH_S)


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

    attachment = attach(model, store, salt=salt, label=label, warm_tokens=0, counted=False)
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
    held = sum(row["tokens"] - row["missing"] for row in rows)
    saved = sum(row["first_request_saves_tokens"] for row in rows)
    text = f"First requests will now find {saved:,} tokens that they need not compute"
    if held > saved:
        text += f", or all {held:,} where more follows: the last token of a request always runs"
    terminal.console().print(escape(f"{text}."))
