"""The allow-list: which models, and which ways of generating, may have KV loaded and saved.

Reusing KV is right only where a token's KV depends on earlier tokens alone. Whatever is not known to be so is refused
by name, and the model then runs as if the adapter were not there. Must not know the store, layouts or caches' insides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.utils import GenerationMixin

from kvstore.adapters.transformers.digest import mixes_adapters
from kvstore.adapters.transformers.growing import GrowingCache, GrowingLayer

ROPE_KINDS = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope kinds under which a token's K does not change with the total length. No rope and ALiBi are as good."""

REASONS: Mapping[str, str] = {
    "encoder-decoder": "an encoder-decoder's cross-attention depends on more than earlier tokens",
    "unknown-class": "the model's class is not one of transformers' own, so nothing is known about its KV",
    "own-generate": "the model's class brings its own generate or prefill",
    "multimodal": "the model takes more than text, which token ids do not show",
    "rope-dynamic": "dynamic-NTK rope changes the K of earlier tokens with the total length",
    "rope-longrope": "longrope changes the K of earlier tokens with the total length",
    "rope-unknown": "the rope kind is not default, linear, llama3 or yarn",
    "rope-multi-axis": "rope over several axes needs more than token positions",
    "sliding-window": "some layers keep only a window of tokens",
    "recurrent": "some layers keep a recurrent state, which is valid at one position only",
    "indexer": "some layers keep the keys of an indexer beside K and V",
    "shared-kv": "some layers use the KV of other layers",
    "layer-kind": "some layers are of a kind that is not known",
    "not-causal": "a token's KV changed when tokens were added behind it",
    "cache-kind": "the model does not fill a plain cache",
    "probe": "a short forward of the model failed",
    "dtype": "the cache's dtype cannot be stored",
    "several-devices": "the model is spread over several devices",
    "device": "the store reaches no device but its hbm tier's: open it with hbm=1GiB or more, and device= the model's",
    "sharded": "the model's weights are sharded tensors",
    "no-weights": "some weights are not loaded (meta device, or offloaded)",
    "inference-weights": "weights made under inference_mode cannot be watched for changes",
    "compiled": "the model, or a part of it, is compiled",
    "hooks": "forward hooks that are not transformers' own may change what the model computes",
    "prompt-learning": "a learned prompt comes before the tokens",
    "mixed-adapters": "rows or positions of this call have adapters of their own",
    "training": "the model is in training mode",
    "gradients": "gradients are being recorded",
    "autocast": "autocast changes the dtype of the cache",
    "beams": "beam search reorders the cache",
    "assisted": "assisted decoding takes tokens back",
    "prompt-lookup": "prompt-lookup decoding takes tokens back",
    "contrastive": "contrastive search is not supported",
    "dola": "DoLa is not supported",
    "constrained": "constrained search reorders the cache",
    "custom-generate": "a custom generation loop was passed",
    "static-cache": "a static cache was asked for",
    "quantized-cache": "a quantized cache was asked for",
    "offloaded-cache": "an offloaded cache was asked for",
    "other-cache": "a cache implementation was asked for that is not the plain dynamic one",
    "no-cache": "use_cache is False",
    "inputs-embeds": "embeddings were passed instead of token ids",
    "filled-cache": "the cache that was passed already holds tokens",
    "foreign-cache": "the cache that was passed is not exactly a DynamicCache",
    "right-padding": "a row is padded on the right",
    "mask": "the attention mask is not one row of ones with padding on the left",
    "own-positions": "position ids were passed that do not count from 0 on",
    "outputs": "hidden states or attentions of every position were asked for",
    "inputs": "the model was given inputs that token ids do not show",
    "fault": "the adapter failed on this request, which went on without it",
}
"""Every reason code, and what it means for people."""

_NEUTRAL_INPUTS = frozenset(
    [
        "input_ids",
        "attention_mask",
        "position_ids",
        "cache",
        "past_key_values",
        "cache_position",
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "inputs_embeds",
        "is_first_iteration",
    ]
)
_MODES: Mapping[str, str] = {
    "greedy_search": "",
    "sample": "",
    "beam_search": "beams",
    "beam_sample": "beams",
    "group_beam_search": "beams",
    "constrained_beam_search": "constrained",
    "assisted_generation": "assisted",
    "contrastive_search": "contrastive",
    "dola_generation": "dola",
}
_OWN_MODULES = ("transformers.", "peft.", "accelerate.", "torch.", "kvstore.")


_POSITIONS_FROM_MASK = frozenset({"bloom", "mpt", "opt"})


def takes_positions_from_mask(model: Any) -> bool:
    """Whether padding on the left changes nothing for a model that is given no position ids (ALiBi)."""
    return getattr(model.config, "model_type", "") in _POSITIONS_FROM_MASK


def explain(reason: str) -> str:
    """What a reason code means."""
    return REASONS[reason]


def refuse_model(model: Any) -> str | None:
    """Why this model's KV must not be reused, from its configuration and class; None where it may."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if not type(model).__module__.startswith("transformers.models."):
        return "unknown-class"
    own = any(
        getattr(type(model), name, None) is not getattr(GenerationMixin, name)
        for name in ("generate", "_sample", "_prefill")
    )
    if own:
        return "own-generate"
    if config.get_text_config(decoder=True) is not config or hasattr(config, "vision_config"):
        return "multimodal"
    return _refuse_rope(config) or _refuse_layers(model, config)


def refuse_state(model: Any, modules: Iterable[Any]) -> str | None:
    """Why the model, which consists of ``modules``, must not be served in its present state; None where it may."""
    if "prepare_inputs_for_generation" in vars(model):
        return "prompt-learning"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast"
    devices: set[torch.device] = set()
    for module in modules:
        if _is_compiled(module):
            return "compiled"
        if mixes_adapters(module):
            return "mixed-adapters"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(_is_foreign(hook) for hook in hooks):
            return "hooks"
        for tensor in module._parameters.values():
            if tensor is not None:
                if tensor.device.type == "meta":
                    return "no-weights"
                if tensor.is_inference():
                    return "inference-weights"
                if type(tensor).__name__ == "DTensor":
                    return "sharded"
                devices.add(tensor.device)
    if len(devices) > 1 or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "several-devices"
    return "training" if model.training else None


def refuse_device(device: torch.device, reached: str | None) -> str | None:
    """Why a model on ``device`` must not be served by a store whose `hbm` is on ``reached``; None where it may."""
    return None if device.type == "cpu" or str(device) == reached else "device"


def resolve(model: Any, given: GenerationConfig | None, kwargs: Mapping[str, Any]) -> GenerationConfig:
    """The generation config that `generate` will use, on a copy: arguments, then ``given``, then the model's own."""
    config: GenerationConfig = copy.deepcopy(model.generation_config)
    for name, value in (given.to_dict() if given is not None else {}).items():
        if value is not None:
            setattr(config, name, value)
    for name, value in kwargs.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def refuse_mode(config: GenerationConfig, arguments: Mapping[str, Any]) -> str | None:
    """Why a call of `generate` must run uncached; None where it need not.

    config: as `resolve` returns it. arguments: everything passed to `generate`, by name.
    """
    if arguments.get("custom_generate") is not None:
        return "custom-generate"
    if getattr(config, "prompt_lookup_num_tokens", None) is not None:
        return "prompt-lookup"
    mode = _MODES.get(str(config.get_generation_mode(arguments.get("assistant_model")).value), "other-cache")
    if mode:
        return mode
    if config.use_cache is False:
        return "no-cache"
    if arguments.get("inputs_embeds") is not None:
        return "inputs-embeds"
    if getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
        return "outputs"
    kind = config.cache_implementation
    if kind not in (None, "dynamic", "dynamic_full"):
        named = {"quantized": "quantized-cache", "offloaded": "offloaded-cache"}
        return "static-cache" if "static" in kind else named.get(kind, "other-cache")
    cache = next((arguments[name] for name in ("cache", "past_key_values") if arguments.get(name) is not None), None)
    return refuse_cache(cache) if cache is not None else None


def refuse_cache(cache: Any) -> str | None:
    """Why a cache of the user's must be left alone; None where it is a plain, empty one."""
    if type(cache) not in (DynamicCache, GrowingCache) or getattr(cache, "offloading", False):
        return "foreign-cache"
    if any(type(layer) not in (DynamicLayer, GrowingLayer) for layer in cache.layers):
        return (
            "sliding-window" if any(getattr(layer, "is_sliding", False) for layer in cache.layers) else "foreign-cache"
        )
    return "filled-cache" if any(layer.get_seq_length() for layer in cache.layers) else None


def refuse_inputs(inputs: Mapping[str, Any]) -> str | None:
    """Why a prefill with these forward arguments must run uncached; None where it need not."""
    if inputs.get("inputs_embeds") is not None:
        return "inputs-embeds"
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "inputs"
    if inputs.get("output_attentions") or inputs.get("output_hidden_states"):
        return "outputs"
    others = (name for name, value in inputs.items() if value is not None and name not in _NEUTRAL_INPUTS)
    return "inputs" if next(others, None) is not None else None


def _refuse_rope(config: Any) -> str | None:
    for parameters in _ropes(getattr(config, "rope_parameters", None)):
        if parameters.get("mrope_section") is not None:
            return "rope-multi-axis"
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ROPE_KINDS:
            return f"rope-{kind}" if kind in ("dynamic", "longrope") else "rope-unknown"
    return None


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Rope parameters: one dictionary, or one a kind of layer."""
    if not isinstance(parameters, Mapping):
        return
    nested = [entry for entry in parameters.values() if isinstance(entry, Mapping)]
    yield from nested or [parameters]


def _refuse_layers(model: Any, config: Any) -> str | None:
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None):
        return "shared-kv"
    if getattr(config, "index_topk", None) or getattr(config, "index_n_heads", None):
        return "indexer"
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if bidirectional or any(getattr(module, "is_causal", True) is False for module in model.modules()):
        return "not-causal"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    for kind, reason in (
        ("sliding_attention", "sliding-window"),
        ("chunked_attention", "sliding-window"),
        ("linear_attention", "recurrent"),
        ("conv", "recurrent"),
        ("hybrid", "recurrent"),
        ("indexed_attention", "indexer"),
    ):
        if kind in kinds:
            return reason
    if kinds != {"full_attention"}:
        return "layer-kind"
    if getattr(model, "_is_stateful", False) or hasattr(config, "layers_block_type"):
        return "recurrent"
    if not model._supports_default_dynamic_cache():
        return "cache-kind"
    layers = DynamicCache(config=config).layers
    if any(getattr(layer, "is_sliding", False) for layer in layers):
        return "sliding-window"
    return "cache-kind" if any(type(layer) is not DynamicLayer for layer in layers) else None


def _is_compiled(module: Any) -> bool:
    if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def _is_foreign(hook: Callable[..., Any]) -> bool:
    target = getattr(hook, "func", hook)
    target = getattr(target, "__wrapped__", target)
    module = getattr(target, "__module__", None) or type(target).__module__
    return not f"{module}.".startswith(_OWN_MODULES)
