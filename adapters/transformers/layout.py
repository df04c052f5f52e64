"""The layout of a model in its present state: what the bytes of its cache mean.

Shapes and dtype are those that a short forward leaves in a real cache, which also shows that the model is causal.
Must not know the store, tokens or `generate`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from inspect import signature as signature_of
from threading import Lock
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvstore.adapters.transformers import allow
from kvstore.adapters.transformers.digest import (
    Signature,
    Watch,
    adapters_digest,
    config_digest,
    modules_of,
    weights_digest,
)
from kvstore.errors import UnsupportedError
from kvstore.layout import DTYPE_BYTES, LayerShape, Layout, default_block_tokens

PROBE_TOKENS = 8
_KEPT = 8


class Refused(UnsupportedError):
    """The model must run uncached; ``reason`` is one of `allow.REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"kvstore leaves this model alone ({reason}): {allow.explain(reason)}", "it runs uncached")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Present:
    """A model's layout as it is now. dtype: the cache's. stamp: for `ModelLayout.unchanged`."""

    layout: Layout
    dtype: torch.dtype
    stamp: object


class ModelLayout:
    """Follows one model's layout through changes of its weights and adapters. May be used from several threads."""

    def __init__(self, model: Any, block_tokens: int | None = None) -> None:
        self.model = model
        self.cache_name = cache_argument(model)
        self.block_tokens = block_tokens
        self._watch = Watch()
        self._lock = Lock()
        self._known: OrderedDict[tuple[Signature, str], Present] = OrderedDict()
        self._refused: tuple[str, str | None] = ("", None)

    def current(self) -> Present:
        """The present layout. Raises Refused.

        Takes one or two milliseconds while nothing changed; new weights or adapters are read in full.
        """
        with self._lock:
            digest = config_digest(self.model.config)
            if self._refused[0] != digest:
                self._refused = digest, allow.refuse_model(self.model)
            modules = modules_of(self.model)
            reason = self._refused[1] or allow.refuse_state(self.model, modules)
            if reason:
                raise Refused(reason)
            stamp = self._watch.signature(modules), digest
            if stamp not in self._known:
                self._known[stamp] = self._describe(digest, stamp)
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            return self._known[stamp]

    def within(self, reached: str | None) -> Present:
        """The present layout, for a store whose `hbm` is on the device ``reached``. Raises Refused."""
        present = self.current()
        reason = allow.refuse_device(self.device, reached)
        if reason:
            raise Refused(reason)
        return present

    def unchanged(self, stamp: object) -> bool:
        """Whether weights, adapters and configuration are still those of ``stamp``."""
        with self._lock:
            return (self._watch.signature(modules_of(self.model)), config_digest(self.model.config)) == stamp

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        device: torch.device = self.model.device
        return device

    def _describe(self, digest: str, stamp: object) -> Present:
        shapes, dtype = self._probe()
        name = dtype_name(dtype)
        rope = json.dumps(getattr(self.model.config, "rope_parameters", None), sort_keys=True, default=str)
        traits = {
            "engine": "transformers " + ".".join(transformers.__version__.split(".")[:2]),
            "config": digest,
            "weights": weights_digest(self.model),
            "adapters": adapters_digest(self.model),
            "rope": rope,
        }
        block = self.block_tokens or default_block_tokens([shapes], name)
        return Present(Layout(name, (shapes,), block, tuple(traits.items())), dtype, stamp)

    def _probe(self) -> tuple[tuple[LayerShape, ...], torch.dtype]:
        """Shapes and dtype of the cache that the model fills. Raises Refused."""
        vocabulary = int(getattr(self.model.config, "vocab_size", PROBE_TOKENS))
        ids = torch.arange(1, PROBE_TOKENS + 1, device=self.device)[None] % vocabulary
        long, short = self._run(ids), self._run(ids[:, : PROBE_TOKENS // 2])
        shapes = []
        dtypes = set()
        for layer, part in zip(long.layers, short.layers, strict=True):
            if type(layer) is not DynamicLayer or type(part) is not DynamicLayer:
                raise Refused("cache-kind")
            keys, values = layer.keys, layer.values
            if keys is None or values is None:
                raise Refused("cache-kind")
            heads = keys.shape[1] if keys.dim() == 4 else 0
            if any(side.dim() != 4 or side.shape[:3] != (1, heads, PROBE_TOKENS) for side in (keys, values)):
                raise Refused("cache-kind")
            if _differs(keys, part.keys) or _differs(values, part.values):
                raise Refused("not-causal")
            shapes.append(LayerShape(heads, keys.shape[3], values.shape[3]))
            dtypes |= {keys.dtype, values.dtype}
        if len(dtypes) != 1 or dtype_name(next(iter(dtypes))) not in DTYPE_BYTES:
            raise Refused("dtype")
        return tuple(shapes), dtypes.pop()

    def _run(self, ids: torch.Tensor) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        with torch.inference_mode(False), torch.no_grad():  # in this order: the first switches gradients on
            try:
                self.model(input_ids=ids, use_cache=True, **{self.cache_name: cache})
            except Exception as error:
                raise Refused("probe") from error
        if not cache.layers or cache.get_seq_length() != ids.shape[1]:
            raise Refused("cache-kind")
        return cache


def cache_argument(model: Any) -> str:
    """The name of the forward's cache argument: ``past_key_values`` up to transformers 5.20, then ``cache``."""
    names = signature_of(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), "past_key_values")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def unwrap(model: Any) -> Any:
    """The transformers model inside PEFT's and torch.compile's wrappers. Raises Refused for learned prompts."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            configs = model.peft_config.values() if hasattr(model.peft_config, "values") else []
            if any(getattr(config, "is_prompt_learning", False) for config in configs):
                raise Refused("prompt-learning")
            model = model.get_base_model()
        else:
            return model


def _differs(whole: torch.Tensor, part: torch.Tensor | None) -> bool:
    """Whether the first tokens changed by more than rounding, which is far below half the square root of epsilon."""
    if part is None:
        return True
    front = whole[:, :, : part.shape[2]].float()
    scale = float(front.abs().mean()) or 1.0
    rounding = 0.5 * torch.finfo(whole.dtype).eps ** 0.5
    return not float((front - part.float()).abs().mean()) <= rounding * scale
