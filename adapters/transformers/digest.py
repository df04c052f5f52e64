"""What a model's KV depends on besides tokens: its configuration, every byte of its weights, its active adapters.

Digests are full; whether they still hold is checked cheaply on every request by a `Signature`. Must not know layouts,
caches or the store.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

_CHUNK = 64 << 20
_SAMPLES = 8
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_NAMES_ONLY = frozenset(
    [
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "architectures",
        "dtype",
        "torch_dtype",
        "auto_map",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "use_cache",
        "return_dict",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "tokenizer_class",
        "chunk_size_feed_forward",
        "_attn_implementation",
        "_attn_implementation_internal",
        "attn_implementation",
        "_experts_implementation",
        "experts_implementation",
    ]
)
"""Entries of a configuration that name things, or choose among kernels, and do not change what KV means."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What can be read without reading the weights; equal signatures are taken to mean equal weights.

    tensors: address and version of every parameter, and a few of its elements. adapters: the active ones, by layer.
    """

    tensors: tuple[tuple[int, int], ...]
    sample: bytes
    adapters: tuple[tuple[Any, ...], ...]


def config_digest(config: Any) -> str:
    """Digest of a model's configuration without its names, 32 hex digits."""
    text = json.dumps(_plain(config.to_dict()), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every module once, in a fixed order. ``model.modules()`` takes several times as long, and every request asks."""
    found: dict[int, torch.nn.Module] = {}
    left = [model]
    while left:
        module = left.pop()
        if id(module) not in found:
            found[id(module)] = module
            left.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


class Watch:
    """Reads a model's signature again and again, as cheaply as it can. Not for several threads at once."""

    def __init__(self) -> None:
        self._tensors: tuple[tuple[int, int], ...] = ()
        self._host: list[Any] = []
        self._device: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    def signature(self, modules: Iterable[torch.nn.Module]) -> Signature:
        """The present signature of a model's modules, in the order of `modules_of`.

        About a millisecond for a few hundred tensors in host memory.
        """
        found: list[torch.Tensor] = []
        adapters: list[tuple[Any, ...]] = []
        for module in modules:
            found += [tensor for tensor in module._parameters.values() if tensor is not None]
            if _is_tuner(module):
                adapters.append(_tuner_state(module))
        tensors = tuple((tensor.data_ptr(), _version(tensor)) for tensor in found)
        if tensors != self._tensors:
            self._pick(found)
            self._tensors = tensors
        return Signature(tensors, self._sample(), tuple(adapters))

    def _pick(self, tensors: list[torch.Tensor]) -> None:
        """Choose a few elements of every tensor: what is written through ``.data`` bumps no version."""
        self._host, self._device = [], {}
        for tensor in tensors:
            flat = tensor.detach()
            if type(flat) not in (torch.Tensor, torch.nn.Parameter) or not flat.is_contiguous() or not flat.numel():
                continue
            flat = flat.view(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
            if flat.device.type == "cpu":
                self._host.append(some.view(_RAW[some.dtype.itemsize]).numpy())
            else:
                self._device.setdefault((some.device, some.dtype), []).append(some)

    def _sample(self) -> bytes:
        picked = [array.tobytes() for array in self._host]
        for parts in self._device.values():
            picked.append(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes())
        return xxhash.xxh3_128_digest(b"".join(picked))


def weights_digest(model: torch.nn.Module) -> str:
    """xxh3-128 over every byte of the weights, adapters left out; independent of the order of the tensors."""
    tuned = {id(tensor) for _, module in _tuners(model) for _, tensor in _adapter_tensors(module)}
    entries = sorted(
        (name.replace(".base_layer", ""), tensor) for name, tensor in _tensors(model) if id(tensor) not in tuned
    )
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers:
        digests = list(workers.map(tensor_digest, (tensor for _, tensor in entries)))
    total = xxhash.xxh3_128()
    for (name, _), digest in zip(entries, digests, strict=True):
        total.update(name.encode() + b"\0" + digest)
    return total.hexdigest()


def adapters_digest(model: torch.nn.Module) -> str:
    """Digest of the adapters that act on a forward now, with their weights and scaling; empty where none does."""
    total = xxhash.xxh3_128()
    acting = False
    for name, module in sorted(_tuners(model), key=lambda pair: pair[0].replace(".base_layer", "")):
        if module.disable_adapters or module.merged:
            continue  # a merged adapter is in the bytes of the base weights
        for place, adapter in enumerate(module.active_adapters):
            scaling = getattr(module, "scaling", {}).get(adapter)
            for kind, tensor in _adapter_tensors(module, adapter):
                acting = True
                label = f"{name}\0{place}\0{type(module).__name__}\0{kind}\0{scaling}\0"
                total.update(label.encode() + tensor_digest(tensor))
    return total.hexdigest() if acting else ""


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """xxh3-128 of dtype, shape and contents, 16 bytes."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    data = tensor.detach()
    if data.dim() == 0:
        data = data.reshape(1)
    flat = data.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        part: Any = flat[start : start + _CHUNK].cpu().numpy()
        digest.update(part)
    return digest.digest()


def mixes_adapters(module: torch.nn.Module) -> bool:
    """Whether a call is on its way that gives rows or positions adapters of their own in this module."""
    hooks = module._forward_pre_hooks.values() if module._forward_pre_hooks and _is_tuner(module) else ()
    return any(getattr(hook, "keywords", None) for hook in hooks)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor a forward may read: parameters, buffers, and what quantized modules add to their state."""
    seen: set[str] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.add(name)
        yield name, tensor
    if getattr(model, "hf_quantizer", None) is not None:
        for name, entry in model.state_dict().items():
            if name not in seen and isinstance(entry, torch.Tensor):
                yield name, entry


def _is_tuner(module: torch.nn.Module) -> bool:
    """PEFT's adapter layers, without importing PEFT."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "active_adapters")


def _tuners(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if _is_tuner(module)]


def _tuner_state(module: Any) -> tuple[Any, ...]:
    scaling = getattr(module, "scaling", {})
    active = tuple(module.active_adapters)
    scales = tuple(scaling.get(adapter) for adapter in active) if isinstance(scaling, Mapping) else ()
    return bool(module.disable_adapters), tuple(getattr(module, "merged_adapters", ())), active, scales


def _adapter_tensors(module: Any, adapter: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of one adapter of a tuner layer, or of all of them."""
    for kind in module.adapter_layer_names:
        container = getattr(module, kind, None)
        if container is None:
            continue
        for name in container if adapter is None else [adapter]:
            if name not in container:
                continue
            entry = container[name]
            if isinstance(entry, torch.Tensor):
                yield kind, entry
            else:
                yield from ((f"{kind}.{part}", tensor) for part, tensor in entry.named_parameters())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _plain(value: Any) -> Any:
    """A configuration's dictionary without the entries that only name things, at every depth."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if key not in _NAMES_ONLY}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
