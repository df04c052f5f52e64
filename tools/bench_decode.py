"""The time to the next token of a text: with no cache, with the cache live in the process, and after a resume.

One prefill of the longest text is stored; shorter ones are its beginnings. Each figure is the median of a few runs, of
which there are fewer where one takes long. Also what a token's KV takes, by the configuration and as stored. Must not
know how results are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

import kvstore
from kvstore.adapters.transformers import load as load_cache
from kvstore.adapters.transformers import save as save_cache
from kvstore.adapters.transformers.layout import ModelLayout, cache_argument
from kvstore.errors import KVStoreError, SettingsError
from kvstore.sizes import MIB
from kvstore.store import Store
from kvstore.tools.demo_text import document
from kvstore.tools.geometry import geometry
from kvstore.tools.model import load
from kvstore.tools.scratch import scratch_store

SHORTEST = 128
UNTIMED_TOKENS = 1024
"""Up to this length each figure has one run more, not timed: it pays for fresh memory."""
LONG_S = 20.0
"""A figure of which all runs together took so long is not measured again."""
BUDGET_MIN = 512 * MIB
FLUSH_S = 300.0
KINDS = ("no_cache", "live", "ram", "nvme")


@dataclass(frozen=True, slots=True)
class Plan:
    """model: folder or name. tokens: of the longest text. repeats: runs of each figure at most."""

    model: str
    folder: Path
    tokens: int
    repeats: int
    threads: int


def lengths(tokens: int) -> list[int]:
    """Powers of two from 128 on, and the longest."""
    found = []
    length = SHORTEST
    while length < tokens:
        found.append(length)
        length *= 2
    return [*found, tokens]


def measure(plan: Plan, step: Callable[[str, int, int | None], None]) -> dict[str, Any]:
    """All figures. Raises SettingsError for a text that is longer than the model's context."""
    torch.set_num_threads(plan.threads)
    step("load the model", 0, None)
    model, tokenizer = load(plan.model)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and plan.tokens > context:
        raise SettingsError(f"the model has a context of {context} tokens", f"use --tokens {context} or fewer")
    step("load the model", 1, 1)
    ids = torch.tensor([document(tokenizer, plan.tokens)])
    layout = ModelLayout(model).current().layout
    budget = max(BUDGET_MIN, 4 * plan.tokens * layout.token_bytes())
    with (
        scratch_store(plan.folder) as path,
        kvstore.open(path, ram=budget, nvme=budget, hbm=0) as store,
        torch.inference_mode(),
    ):
        step("prefill", 0, None)
        bench = _Bench(model, store, ids)
        stored = bench.prefill()
        step("prefill", 1, 1)
        points = []
        for done, length in enumerate(wanted := lengths(plan.tokens)):
            step("next token", done, len(wanted))
            points.append(_point(bench, length, plan.repeats))
        step("next token", len(wanted), len(wanted))
    return {
        "model": plan.model,
        "threads": plan.threads,
        "kv_bytes_a_token": geometry(model.config.to_dict(), layout.dtype).token_bytes,
        "kv_bytes_a_token_stored": stored / (plan.tokens - 1),
        "points": points,
    }


def _point(bench: _Bench, length: int, repeats: int) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    runs: dict[str, int] = {}
    answers: set[int] = set()
    for kind in KINDS:
        timed: list[float] = []
        if length <= UNTIMED_TOKENS:
            bench.next_token(kind, length)
        while len(timed) < repeats and sum(timed) < LONG_S:
            spent, token = bench.next_token(kind, length)
            timed.append(spent)
            answers.add(token)
        seconds[kind], runs[kind] = median(timed), len(timed)
    return {
        "tokens": length,
        **{f"{kind}_s": seconds[kind] for kind in KINDS},
        **{f"no_cache_over_{kind}": seconds["no_cache"] / seconds[kind] for kind in KINDS[1:]},
        "runs": runs,
        "identical": len(answers) == 1,
    }


class _Bench:
    """A model, a store, and one text ``ids`` ``[1, tokens]`` of which all but the last token are stored."""

    def __init__(self, model: Any, store: Store, ids: torch.Tensor) -> None:
        self._model, self._store, self._ids = model, store, ids
        self._argument = cache_argument(model)
        self._live: tuple[int, Any] = (0, None)

    def prefill(self) -> int:
        """Run the text once and store it; returns bytes of KV stored."""
        self._forward(self._ids[:, : min(64, self._ids.shape[1])], None)
        ids = self._ids[:, :-1]
        cache = DynamicCache()
        self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._argument: cache})
        (saved,) = save_cache(self._store, self._model, ids, cache)
        if saved.skipped_blocks or not self._store.flush(FLUSH_S):
            raise KVStoreError("the text could not be stored", "the machine is too busy: try again later")
        return saved.bytes

    def next_token(self, kind: str, length: int) -> tuple[float, int]:
        """Seconds until the token after ``length`` tokens is known, and the token."""
        ids = self._ids[:, :length]
        if kind == "live":
            cache = self._live_cache(ids)
        elif kind == "nvme":
            self._store.evict(everything=True, tier="ram")
        start = time.perf_counter()
        if kind == "no_cache":
            token = self._forward(ids, None)
        elif kind == "live":
            token = self._forward(ids, cache)
        else:
            token = self._forward(ids, self._resumed(ids))
        spent = time.perf_counter() - start
        if kind == "live":
            cache.crop(-1)
        return spent, token

    def _live_cache(self, ids: torch.Tensor) -> Any:
        length, cache = self._live
        if length != ids.shape[1]:
            cache = self._resumed(ids)
            self._live = ids.shape[1], cache
            self._forward(ids, cache)
            cache.crop(-1)
        return cache

    def _resumed(self, ids: torch.Tensor) -> Any:
        loading = load_cache(self._store, self._model, ids)
        if loading.columns != ids.shape[1] - 1:
            raise KVStoreError(
                f"only {loading.columns} of {ids.shape[1] - 1} tokens were found", "try again on a quieter machine"
            )
        return loading.cache

    def _forward(self, ids: torch.Tensor, cache: Any) -> int:
        """The next token; with a cache that holds all tokens but the last, only that one is run."""
        if cache is None:
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        else:
            mask = torch.ones_like(ids)
            given = {self._argument: cache, "attention_mask": mask, "use_cache": True, "logits_to_keep": 1}
            logits = self._model(input_ids=ids[:, -1:], **given).logits
        return int(logits[0, -1].argmax())
