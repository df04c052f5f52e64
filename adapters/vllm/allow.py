"""The allow-list: which engines and which requests may have KV loaded and saved.

Reusing KV is right only where a token's KV depends on earlier tokens alone. What is not known to be so is refused by
name, and the engine then runs as if the connector were not there. Must not know the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.layout import DTYPE_BYTES

ROPE_KINDS = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope kinds under which a token's K does not change with the total length. No rope and ALiBi are as good."""

REASONS: Mapping[str, str] = {
    "encoder-decoder": "an encoder-decoder's cross-attention depends on more than earlier tokens",
    "multimodal-rope": "rope over several axes needs more than token positions",
    "prefix-lm": "tokens of an image see each other both ways",
    "rope-dynamic": "dynamic-NTK rope changes the K of earlier tokens with the total length",
    "rope-longrope": "longrope changes the K of earlier tokens with the total length",
    "rope-unknown": "the rope kind is not default, linear, llama3 or yarn",
    "recurrent": "some layers keep a recurrent state, which is valid at one position only",
    "groups": "the model's layers form several cache groups (sliding windows, hybrids)",
    "attention-kind": "the layers' cache is not that of plain full attention",
    "sliding-window": "some layers attend to a window of tokens only",
    "not-causal": "some layers attend to later tokens",
    "shared-kv": "some layers use the KV of other layers",
    "dtype": "the cache's dtype cannot be stored",
    "quantized-cache": "the cache is quantized, with scales that are not in it",
    "uneven-heads": "K and V have different dims, which page layouts do not show",
    "padded-pages": "pages are padded",
    "speculative": "the draft model's KV depends on more than earlier tokens",
    "pipeline-parallel": "layers are spread over pipeline stages",
    "context-parallel": "tokens are spread over context-parallel ranks",
    "pooling": "the model pools and does not generate",
    "no-weight-files": "the weights do not come from files that can be read",
    "arrangement": "the attention backend places tokens in pages in an order that is not known",
    "store": "the store cannot be opened",
    "budget": "two blocks of the model do not fit the store's ram budget or its segments",
    "layout": "ranks do not agree on the layout",
    "device": "the cache is on a device for which the store has no staging: give hbm a budget",
    "prompt-embeds": "embeddings were passed instead of token ids",
    "multimodal": "the request has more than text, which token ids do not show",
    "lora": "the LoRA's files cannot be read",
    "streaming-input": "the prompt is still being added to",
}
"""Every reason code, and what it means for people."""


def explain(reason: str) -> str:
    """What a reason code means."""
    return REASONS[reason]


def refuse_engine(config: Any, cache: Any) -> str | None:
    """Why an engine must not be served; None where it may. config: VllmConfig. cache: KVCacheConfig."""
    model, parallel = config.model_config, config.parallel_config
    if model.runner_type != "generate":
        return "pooling"
    if model.is_encoder_decoder:
        return "encoder-decoder"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline-parallel"
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "context-parallel"
    if config.speculative_config is not None and config.speculative_config.method not in ("ngram", "suffix"):
        return "speculative"
    if model.uses_mrope:
        return "multimodal-rope"
    if getattr(model, "is_mm_prefix_lm", False):
        return "prefix-lm"
    return _refuse_rope(model.hf_text_config) or _refuse_cache(model, cache)


def refuse_request(request: Any) -> str | None:
    """Why one request must run uncached; None where it need not."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt-embeds"
    if request.mm_features:
        return "multimodal"
    if getattr(request, "resumable", False):
        return "streaming-input"
    return None


def _refuse_rope(config: Any) -> str | None:
    for name in ("rope_parameters", "rope_scaling"):
        for parameters in _ropes(getattr(config, name, None)):
            if parameters.get("mrope_section") is not None:
                return "multimodal-rope"
            kind = parameters.get("rope_type", parameters.get("type", "default"))
            if kind not in ROPE_KINDS:
                return f"rope-{kind}" if kind in ("dynamic", "longrope") else "rope-unknown"
    return None


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Rope parameters: one dictionary, or one a kind of layer."""
    if isinstance(parameters, Mapping):
        nested = [entry for entry in parameters.values() if isinstance(entry, Mapping)]
        yield from nested or [parameters]


def _refuse_cache(model: Any, cache: Any) -> str | None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec

    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in cache.kv_cache_groups):
        return "recurrent"
    if len(cache.kv_cache_groups) != 1:
        return "groups"
    spec = cache.kv_cache_groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return "attention-kind"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "sliding-window"
    if spec.non_causal:
        return "not-causal"
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        return "quantized-cache"
    if str(spec.dtype).removeprefix("torch.") not in DTYPE_BYTES or spec.dtype.itemsize < 2:
        return "dtype"
    if spec.head_size != spec.head_size_v:
        return "uneven-heads"
    if spec.page_size_padded is not None or getattr(spec, "tokens_per_state", 1) != 1:
        return "padded-pages"
    if getattr(model.hf_text_config, "num_kv_shared_layers", None):
        return "shared-kv"
    return None
