"""The layout of a vLLM engine: what the bytes of its pages mean, from its tensors and its files.

A worker describes it once its tensors are registered, and the scheduler is told: it has none. Must not know the store
or requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm

from kvstore.adapters.vllm.allow import explain, refuse_engine
from kvstore.adapters.vllm.arrangement import Arrangement, find_arrangement
from kvstore.adapters.vllm.files import weights_digest
from kvstore.adapters.vllm.paged import block_tokens_for
from kvstore.errors import UnsupportedError
from kvstore.layout import LayerShape, Layout

_NAMES_ONLY = frozenset(
    [
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "architectures",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ]
)
"""Entries of a configuration that name things and do not change what KV means."""


class Refused(UnsupportedError):
    """The engine, or a request, must run uncached; ``reason`` is one of `allow.REASONS`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        told = f": {detail}" if detail else ""
        super().__init__(f"kvstore leaves this engine alone ({reason}): {explain(reason)}{told}", "it runs uncached")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One engine's layout, as its workers describe it to its scheduler.

    page: tokens of one of vLLM's blocks. label: how listings name the model.
    """

    layout: str
    arrangement: Arrangement
    page: int
    label: str = ""

    def with_traits(self, traits: Mapping[str, str]) -> Layout:
        """The layout with what differs by request: a LoRA's digest, a generation of weights."""
        base = Layout.from_json(self.layout)
        return Layout(base.dtype, base.groups, base.block_tokens, (*base.traits, *traits.items()), base.shards)


def describe(config: Any, cache: Any, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> EngineLayout:
    """The engine's layout, from one rank.

    config: VllmConfig. cache: KVCacheConfig. tensors: the registered pages ``[blocks, heads, tokens, content]`` by
    layer. layers: vLLM's attention layers. Raises Refused.
    """
    reason = refuse_engine(config, cache)
    if reason:
        raise Refused(reason)
    group = cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    names = list(group.layer_names)
    if set(names) != set(tensors):
        raise Refused("shared-kv", f"{len(tensors)} tensors for {len(names)} layers")
    expected = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    found: set[Arrangement] = set()
    for name in names:
        tensor = tensors[name]
        if tuple(tensor.shape[1:]) != expected or tensor.dtype != spec.dtype:
            raise Refused("arrangement", f"{name} is {tuple(tensor.shape)} of {tensor.dtype}")
        try:
            found.add(find_arrangement(layers[name], tensor, spec.head_size))
        except UnsupportedError as error:
            raise Refused("arrangement", error.problem) from error
    if len(found) != 1:
        raise Refused("arrangement", "layers differ")
    arrangement = found.pop()
    shape = LayerShape(spec.num_kv_heads, spec.head_size, spec.head_size)
    itemsize = spec.dtype.itemsize
    block = block_tokens_for(spec.block_size, shape.elements * len(names) * itemsize)
    layout = Layout(
        str(spec.dtype).removeprefix("torch."),
        ((shape,) * len(names),),
        block,
        tuple(_traits(config, arrangement).items()),
        config.parallel_config.tensor_parallel_size,
    )
    label = str(config.model_config.model).rstrip("/").rsplit("/", 1)[-1]
    return EngineLayout(layout.to_json(), arrangement, spec.block_size, f"{label} (vllm)")


def _traits(config: Any, arrangement: Arrangement) -> dict[str, str]:
    model = config.model_config
    if config.load_config.load_format in ("dummy", "runai_streamer", "tensorizer", "sharded_state"):
        raise Refused("no-weight-files", str(config.load_config.load_format))
    try:
        weights = weights_digest(weights_directory(model, config.load_config))
    except UnsupportedError as error:
        raise Refused("no-weight-files", error.problem) from error
    return {
        "engine": "vllm " + ".".join(vllm.__version__.split(".")[:2]),
        "kv": "k-by-dim" if arrangement is Arrangement.COLUMNS else "by-token",
        "config": config_digest(model.hf_text_config),
        "weights": weights,
        "compute": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
    }


def config_digest(config: Any) -> str:
    """Digest of a model's configuration without its names, 32 hex digits."""
    text = json.dumps(_plain(config.to_dict()), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_directory(model: Any, load: Any) -> Path:
    """Where a model's files are on this host. Raises UnsupportedError when they are not here."""
    named = Path(getattr(model, "model_weights", "") or model.model)
    if named.is_dir():
        return named
    if named.is_file():
        return named.parent
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(model.model), revision=model.revision, cache_dir=load.download_dir, local_files_only=True
            )
        )
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{model.model} is not in the local cache: {error}", "name a directory") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if key not in _NAMES_ONLY}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
