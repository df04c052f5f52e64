"""One call of `generate`: from its prefill, which resumes what is stored, to what it leaves to be saved.

Lives in a context, never in the model, so that threads and nested calls do not meet. What the model's forward saw *is*
what the cache holds; on any mismatch the run stops saving. Must not know how it is wired to the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvstore.adapters.transformers import allow
from kvstore.adapters.transformers.growing import hold, install, stack_of
from kvstore.adapters.transformers.layout import ModelLayout, Present, Refused
from kvstore.adapters.transformers.pool import Pool
from kvstore.adapters.transformers.rows import ADAPTER, counts_from_zero, fill, left_pads, rows_of
from kvstore.adapters.transformers.saver import Saver
from kvstore.adapters.transformers.stack import Stack
from kvstore.events import Prefilled, Skipped, SkipReason
from kvstore.gate import Gate
from kvstore.identity import Tokens
from kvstore.layout import Layout

if TYPE_CHECKING:
    from kvstore.match import Namespace
    from kvstore.store import Store


ROOM = 512
"""Tokens of room beyond the prompt that are made at once; more comes by doubling."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What a run stands on; the same for all runs of an attachment while the model's weights stay.

    counted: whether runs are somebody's requests.
    """

    store: Store
    space: Namespace
    present: Present
    model_layout: ModelLayout
    pool: Pool
    saver: Saver
    gate: Gate
    counted: bool

    @property
    def layout(self) -> Layout:
        """The model's layout when the run began."""
        return self.present.layout


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a call of `generate` before it runs.

    prompt: the ids ``[batch, columns]`` as expanded, where they can be told. room: tokens it may add. visible: whether
    the user will see the cache. ends: ids after which a row holds padding.
    """

    prompt: torch.Tensor | None
    room: int
    visible: bool
    ends: frozenset[int]


@dataclass(slots=True)
class Run:
    """State of one call. `before` and `after` surround every forward of the model in this call's context."""

    ground: Ground
    plan: Plan
    cache: DynamicCache | None = None
    pads: list[int] = field(default_factory=list)
    loaded: int = 0
    columns: int = 0
    prompt_columns: int = 0
    saving: bool = True
    _seen: list[torch.Tensor] = field(default_factory=list)
    _staged: torch.Tensor | None = None
    _prompt_saved: bool = False
    _futures: list[Future[None]] = field(default_factory=list)
    _began: float | None = None
    _rerun: int = 0
    _served: int = 0

    def before(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """The forward's arguments as they should be; None where they may stay. Raises Refused at the prefill."""
        self._note_prefill()
        given = inputs.get(self.ground.model_layout.cache_name)
        if self.cache is None:
            return self._start(inputs, given)
        if given is self.cache:
            return self._step(inputs)
        return None

    def after(self, inputs: dict[str, Any]) -> None:
        """Note the tokens of a forward that returned."""
        ids, self._staged = self._staged, None
        given: DynamicCache | None = inputs.get(self.ground.model_layout.cache_name)
        if ids is None or given is None or given is not self.cache:
            return
        if given.get_seq_length() != self.columns + ids.shape[1]:
            self._stop(SkipReason.MISMATCH)
            return
        self._seen.append(ids)
        self.columns += ids.shape[1]
        if not self._prompt_saved and self.columns >= self.prompt_columns:
            self._prompt_saved = True
            if self.columns == self.prompt_columns:
                self._save(self._tokens(None))

    def finish(self, result: Any) -> None:
        """Save what the answer added. result: what `generate` returned; None where it raised."""
        self._note_prefill()
        sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
        if self._seen and (self.columns > self.prompt_columns or not self._prompt_saved):
            self._save(self._tokens(sequences))
        if self.plan.visible:
            wait_for(self._futures)
        self.cache = None
        self._seen.clear()

    def _start(self, inputs: dict[str, Any], given: Any) -> dict[str, Any]:
        reason = allow.refuse_inputs(inputs) or (allow.refuse_cache(given) if given is not None else None)
        if reason is None and torch.is_grad_enabled():
            reason = "gradients"
        if reason:
            raise Refused(reason)
        ids: torch.Tensor = inputs["input_ids"]
        pads = left_pads(ids, inputs.get("attention_mask"))
        if isinstance(pads, str):
            raise Refused(pads)
        if max(pads) >= ids.shape[1]:
            raise Refused("mask")
        positions = inputs.get("position_ids")
        by_mask = positions is None and allow.takes_positions_from_mask(self.ground.model_layout.model)
        if not by_mask and not counts_from_zero(positions, pads, ids.shape[1]):
            raise Refused("own-positions")
        prompt = self._whole_prompt(ids)
        ground = self.ground
        room = min(self.plan.room, max(ROOM, prompt.shape[1]))
        shapes, batch = ground.layout.groups[0], ids.shape[0]
        dtype, device = ground.present.dtype, ground.model_layout.device
        stack = Stack(shapes, dtype, device, batch, prompt.shape[1] + room, ground.pool)
        rows = rows_of(prompt, pads)
        loaded, self._rerun = fill(
            ground.store, ground.space, ground.layout, rows, stack, ground.gate, counted=ground.counted
        )
        self._served = self._rerun + sum(max(0, loaded - pad) for pad in pads)
        cache = DynamicCache() if given is None else given
        skip = min(loaded, ids.shape[1] - 1)
        changed = cut(inputs, skip) | {ground.model_layout.cache_name: cache}
        install(cache, stack, skip)
        self.cache, self.pads, self.loaded, self.prompt_columns = cache, pads, loaded, prompt.shape[1]
        self._staged = ids
        self._began = time.perf_counter()
        return changed

    def lost(self) -> None:
        """Tell that what was loaded is run again: the adapter failed after the load."""
        served, self._served = self._served, 0
        if served and self.ground.counted:
            root = self.ground.space.root
            self.ground.store.events.emit(Prefilled(ADAPTER, served, served, 0.0, False, root))

    def _note_prefill(self) -> None:
        """Tell what the prompt took, once it has run: at the next forward, since a device is late by nature."""
        if self._began is None or not self._prompt_saved:
            return
        seconds, self._began = time.perf_counter() - self._began, None
        reused = sum(max(0, self.loaded - pad) for pad in self.pads)
        computed = self.prompt_columns * len(self.pads) - sum(self.pads) - reused
        root = self.ground.space.root
        self.ground.gate.computed(computed, seconds)
        self.ground.store.events.emit(Prefilled(ADAPTER, self._rerun, computed, seconds, not reused, root))

    def _step(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """A later chunk of the prompt, or a token of the answer."""
        self._staged = ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            self._stop(SkipReason.MISMATCH)
            return None
        skip = min(self.loaded, self.columns + ids.shape[1] - 1) - self.columns
        if skip <= 0 or self.cache is None or self.cache.get_seq_length() != self.columns:
            return None
        hold(self.cache, self.columns + skip)
        return cut(inputs, skip)

    def _whole_prompt(self, ids: torch.Tensor) -> torch.Tensor:
        """The prompt of which ``ids`` may be the first chunk."""
        prompt = self.plan.prompt
        if prompt is None or prompt.shape[0] != ids.shape[0] or prompt.shape[1] <= ids.shape[1]:
            return ids
        prompt = prompt.to(ids.device)
        return prompt if torch.equal(prompt[:, : ids.shape[1]], ids) else ids

    def _tokens(self, sequences: torch.Tensor | None) -> list[Tokens]:
        """What of each row may be saved: forwarded, returned, and not padding after the row's end."""
        ids = torch.cat(self._seen, dim=1)
        shared = ids.shape[1]
        if sequences is not None:
            shared = min(shared, sequences.shape[1])
            if not torch.equal(sequences[:, :shared].to(ids.device), ids[:, :shared]):
                self._stop(SkipReason.MISMATCH)
                return []
        rows = rows_of(ids[:, :shared], self.pads)
        return [self._until_end(row, pad) for row, pad in zip(rows.tokens, rows.pads, strict=True)]

    def _until_end(self, row: Tokens, pad: int) -> Tokens:
        answer = row[self.prompt_columns - pad :]
        ends = np.flatnonzero(np.isin(answer, list(self.plan.ends)))
        return row[: self.prompt_columns - pad + int(ends[0]) + 1] if len(ends) else row

    def _save(self, tokens: Sequence[Tokens]) -> None:
        ground = self.ground
        stack = stack_of(self.cache) if self.cache is not None else None
        if not self.saving or not tokens:
            return
        if stack is None or not ground.model_layout.unchanged(ground.present.stamp):
            self._stop(SkipReason.CHANGED)
            return
        distinct = {row.tobytes(): (row, stack.row(ground.layout, i, self.pads[i])) for i, row in enumerate(tokens)}
        blocks = sum(-(-len(row) // ground.layout.block_tokens) for row, _ in distinct.values())

        def work() -> None:
            while distinct:  # let go of the memory before the work counts as done
                _, (row, buffer) = distinct.popitem()
                ground.store.save(ground.space, row, buffer)

        future = ground.saver.submit(work, blocks)
        if future is not None:
            self._futures.append(future)

    def _stop(self, reason: SkipReason) -> None:
        if self.saving:
            blocks = -(-max(self.columns, 1) // self.ground.layout.block_tokens)
            self.ground.store.events.emit(Skipped("ram", reason, blocks))
        self.saving = False


def cut(inputs: dict[str, Any], columns: int) -> dict[str, Any]:
    """A forward's arguments without the first ``columns`` tokens. The mask stays whole: it covers the cache too."""
    changed = dict(inputs)
    for name in ("input_ids", "position_ids", "cache_position"):
        if columns and changed.get(name) is not None:
            changed[name] = changed[name][..., columns:].contiguous()
    return changed
