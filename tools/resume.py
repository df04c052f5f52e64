"""A real model with a store attached, and timed requests to it: cold, hot, and resumed from a tier.

What a request reused is counted where it matters: by the tokens that the model itself still had to run, not by what
the store says it served. Used by the demo's processes and by ``kvstore bench resume``. Must not know how results are
shown.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import kvstore
from kvstore.adapters.transformers import Attachment, attach
from kvstore.adapters.transformers import load as load_cache
from kvstore.adapters.transformers.layout import ModelLayout, cache_argument
from kvstore.errors import KVStoreError, SettingsError
from kvstore.settings import Settings
from kvstore.sizes import MIB
from kvstore.store import Store
from kvstore.tools.demo_text import ANSWER_TOKENS, Conversation, conversation
from kvstore.tools.model import load

BLOCK_ROOM = 4
"""Budgets hold the conversation this many times: its tails, and headroom below every eviction mark."""
BUDGET_MIN = 512 * MIB
WARM_TOKENS = 64
BEGIN_TRIES = 3
ROOM = 512
"""Tokens that a cache is made larger than the conversation."""
SETTLE_S = 120.0
REST_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: its duration, the answer's tokens, and how many of the prompt's tokens were not run again."""

    seconds: float
    tokens: tuple[int, ...]
    reused: int


class Bench:
    """A loaded model, its conversation, and one open store."""

    def __init__(self, model: str, path: Path, tokens: int, new_tokens: int, threads: int) -> None:
        """model: a folder or a name. path: the store's directory. threads: torch's; the store has its own.

        Raises SettingsError when the conversation is longer than the model's context.
        """
        torch.set_num_threads(threads)
        self.tokens = tokens
        self.model, self.tokenizer = load(model)
        self.talk: Conversation = conversation(self.tokenizer, tokens, new_tokens)
        context = getattr(self.model.config, "max_position_embeddings", None)
        needed = tokens + new_tokens + ANSWER_TOKENS
        if context is not None and needed > context:
            problem = f"--tokens {tokens} needs a context of {needed} tokens, the model has {context}"
            raise SettingsError(problem, f"use --tokens {context - needed + tokens} or fewer, or another model")
        self.layout = ModelLayout(self.model).current().layout
        budget = max(BUDGET_MIN, BLOCK_ROOM * self.kv_bytes)
        self.settings = Settings.resolve(path, ram=budget, nvme=budget, hbm=0)
        self._store: Store | None = None
        self._attached: Attachment | None = None
        self._run = 0
        end = self.model.generation_config.eos_token_id
        self._end = end[0] if isinstance(end, list) else end  # never generated, since min_new_tokens forbids it
        embeddings: torch.nn.Module = self.model.get_input_embeddings()
        embeddings.register_forward_pre_hook(self._count)
        self._cache_name = cache_argument(self.model)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the stored conversation's KV."""
        return self.tokens * self.layout.token_bytes()

    @property
    def store(self) -> Store:
        """The open store."""
        if self._store is None:
            raise RuntimeError("attach first")
        return self._store

    @property
    def attached(self) -> bool:
        """Whether requests go through the store."""
        return self._attached is not None

    def attach(self) -> None:
        """Open the store, if it is not open, and attach the model to it."""
        if self._store is None:
            self._store = kvstore.open(settings=self.settings)
        self._attached = attach(self.model, self._store, warm_tokens=self.tokens + ROOM)

    def detach(self) -> None:
        """The plain model again; nothing saved waits for its medium any more, and the store stays open."""
        if self._attached is not None:
            self._attached.detach()
            self._attached = None
            self.store.flush(SETTLE_S)

    def close(self) -> None:
        """Detach, and close the store."""
        self.detach()
        if self._store is not None:
            self._store.close()
            self._store = None

    def request(self, ids: Sequence[int], new: int = 1, cache: Any = None) -> Answer:
        """``generate`` of exactly ``new`` tokens, greedy. cache: a live one, else none is passed."""
        tokens = torch.tensor([list(ids)])
        extra = {} if cache is None else {self._cache_name: cache}
        self._run = 0
        generate: Any = self.model.generate
        start = time.perf_counter()
        with torch.no_grad():
            made = generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=self._end,
                **extra,
            )
        seconds = time.perf_counter() - start
        return Answer(seconds, tuple(made[0, len(ids) :].tolist()), len(ids) + new - 1 - self._run)

    def begin(self) -> list[int]:
        """The first request and its answer: the history that is stored but for its last token.

        A save that could not have the index in time is left out, so what was stored is looked at. Raises KVStoreError.
        """
        for _ in range(BEGIN_TRIES):
            history = [*self.talk.prompt, *self.request(self.talk.prompt, ANSWER_TOKENS).tokens]
            self.settle()
            if self.store.match(self.store.namespace(self.layout), history).tokens >= self.tokens:
                return history
        raise KVStoreError("the conversation could not be stored", "the machine is too busy: try again later")

    def warm(self) -> float:
        """A short request of tokens that no other begins with; returns its seconds."""
        return self.request(self.talk.spare[-WARM_TOKENS:][::-1]).seconds

    def live(self, ids: Sequence[int]) -> Any:
        """A cache, of our layers, that holds the stored conversation that ``ids`` begin with."""
        return load_cache(self.store, self.model, torch.tensor([list(ids)]), room=ROOM).cache

    def forget(self, ids: Sequence[int]) -> None:
        """What is stored of these tokens beyond the conversation is evicted: the next such request finds no more."""
        self.settle()
        match = self.store.match(self.store.namespace(self.layout), ids)
        if match.tokens > self.tokens:
            self.store.evict(prefix=match)

    def hot(self, ids: Sequence[int], cache: Any, new: int = 1) -> float:
        """Seconds of the request with the conversation live in ``cache``, which is cut back to it first."""
        cache.crop(self.tokens - cache.get_seq_length())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the adapter says that it leaves a filled cache alone
            answer = self.request(ids, new, cache)
        if answer.reused != self.tokens:
            raise KVStoreError("the live cache was not used", "this is a defect of the benchmark: report it")
        return answer.seconds

    def settle(self) -> None:
        """Wait until nothing is being saved or moved."""
        if self._attached is not None:
            self._attached.flush(SETTLE_S)
        self.store.flush(SETTLE_S)

    def rest(self) -> None:
        """After a first load from `nvme`: until the pages of `ram` that disks read into have been joined."""
        self.settle()
        time.sleep(REST_S)

    def empty_ram(self) -> None:
        """What is in `ram` is dropped there, and stays on `nvme`."""
        self.settle()
        self.store.evict(everything=True, tier="ram")

    def _count(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        self._run += arguments[0].shape[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
