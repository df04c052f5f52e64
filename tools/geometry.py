"""What a model's ``config.json`` says about its KV: how much each layer keeps of a token, and for how many tokens.

Reads the fields of the configuration families in use (MHA, MQA, GQA, MLA, windows, layers that differ, the text part
of multimodal models) and names the field that is missing or impossible. Pure: must not know files, machines or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvstore.errors import LayoutError, UnsupportedError
from kvstore.layout import DTYPE_BYTES, LAYERS_MAX, LayerShape

Config: TypeAlias = Mapping[str, Any]

TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_key_value_heads_per_layer")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
FULL = frozenset({"full_attention", "attention", "global", "global_attention", "hybrid", "nope"})
WINDOWED = frozenset({"sliding_attention", "sliding", "local", "local_attention", "chunked_attention"})
STATES = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "m", "gated_delta"})
FILE_REMEDY = "pass the config.json that lies beside the model's weights, or give the field with --set NAME=VALUE"


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps: its shape, and the last ``window`` tokens only (None: all). shape None: no KV at all."""

    shape: LayerShape | None
    window: int | None = None

    def elements(self, tokens: int) -> int:
        """Elements after ``tokens`` tokens."""
        if self.shape is None:
            return 0
        return self.shape.elements * (tokens if self.window is None else min(tokens, self.window))


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's KV. heads: query heads. parameters: estimated from the shapes, None where they do not tell.

    context: the longest prompt the configuration allows, None where it does not say. notes: what was assumed.
    """

    family: str
    kind: str
    dtype: str
    hidden: int
    heads: int
    layers: tuple[LayerKV, ...]
    parameters: int | None
    context: int | None
    notes: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes while every layer still keeps it."""
        return self.bytes_at(1)

    def bytes_at(self, tokens: int) -> int:
        """Bytes of a sequence of ``tokens`` tokens."""
        return sum(layer.elements(tokens) for layer in self.layers) * self.itemsize

    def groups(self) -> list[tuple[LayerShape, ...]]:
        """Shapes of the layers that keep all tokens, then of those with a window, as a store would keep them."""
        full = tuple(layer.shape for layer in self.layers if layer.shape is not None and layer.window is None)
        windowed = tuple(layer.shape for layer in self.layers if layer.shape is not None and layer.window is not None)
        return [group for group in (full, windowed) if group]


def geometry(config: Config, dtype: str | None = None) -> Geometry:
    """The KV of the model a configuration describes.

    dtype: of the KV, where it is not the weights'. Raises LayoutError for a missing or impossible field,
    UnsupportedError for encoder-decoders and for models without KV.
    """
    if not isinstance(config, Mapping):
        raise LayoutError("the configuration is not a JSON object", FILE_REMEDY)
    text = text_part(config)
    family = str(text.get("model_type") or config.get("model_type") or "unknown")
    family = family.encode("utf-8", "replace").decode()  # JSON may hold half a character
    if text.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise UnsupportedError(f"{family} is an encoder-decoder", "plan covers models that only decode")
    notes: list[str] = []
    if text is not config:
        notes.append("only the text part of a multimodal model is counted")
    count = _number(text, LAYERS, most=LAYERS_MAX)
    layers = _layers(text, count, family)
    if not any(layer.shape for layer in layers):
        raise UnsupportedError(f"no layer of {family} keeps KV", "there is nothing to store for it")
    if any(layer.shape is None for layer in layers):
        without = sum(layer.shape is None for layer in layers)
        notes.append(f"{without} of {count} layers keep no KV of their own; recurrent states are not counted")
    chosen = _dtype(config, text, dtype, notes)
    hidden = _optional(text, HIDDEN) or 0
    heads = _optional(text, HEADS) or 1
    context = _optional(text, ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"))
    return Geometry(
        family, _kind(text, layers, heads), chosen, hidden, heads, layers, _parameters(text), context, tuple(notes)
    )


def text_part(config: Config) -> Config:
    """The language model's own part of a configuration: the whole of it unless it is multimodal."""
    part = config
    for _ in range(3):
        below = next((part[name] for name in TEXT_PARTS if isinstance(part.get(name), Mapping)), None)
        if below is None or any(name in part for name in LAYERS):
            break
        part = below
    return part


def _layers(text: Config, count: int, family: str) -> tuple[LayerKV, ...]:
    kinds = _kinds(text, count, family)
    shapes = _shapes(text, count, kinds)
    window = _optional(text, WINDOWS)
    chunk = _optional(text, ("attention_chunk_size",))
    shared = _optional(text, ("num_kv_shared_layers",)) or 0
    found: list[LayerKV] = []
    for index, kind in enumerate(kinds):
        if kind in STATES or kind == "none" or index >= count - shared:
            found.append(LayerKV(None))
        elif kind in WINDOWED:
            size = chunk if kind == "chunked_attention" and chunk else window
            if size is None:
                raise _missing(WINDOWS, f"layer {index} is {kind}")
            found.append(LayerKV(shapes[index], size))
        else:
            found.append(LayerKV(shapes[index]))
    return tuple(found)


def _kinds(text: Config, count: int, family: str) -> list[str]:
    """Every layer's kind, from whichever field tells it."""
    listed = next((text[name] for name in ("layer_types", "layers_block_type") if text.get(name)), None)
    if listed is not None:
        if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != count:
            raise LayoutError(f"layer_types does not list {count} layers", FILE_REMEDY)
        kinds = [str(kind) for kind in listed]
        unknown = sorted(set(kinds) - FULL - WINDOWED - STATES - {"none"})
        if unknown:
            raise UnsupportedError(f"layers of kind {', '.join(unknown)}", "plan knows no size of their state")
        return kinds
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return _fitting([{"*": "full_attention", "M": "mamba"}.get(letter, "none") for letter in pattern], count)
    if _optional(text, ("attn_layer_period",)):
        period, offset = _number(text, ("attn_layer_period",)), _optional(text, ("attn_layer_offset",), 0) or 0
        return ["full_attention" if index % period == offset else "mamba" for index in range(count)]
    chosen = next((text[name] for name in ("full_attn_idxs", "attn_layer_indices") if text.get(name)), None)
    if chosen is not None:
        return ["full_attention" if index in chosen else "none" for index in range(count)]
    if not _optional(text, WINDOWS) or text.get("use_sliding_window") is False:
        return ["full_attention"] * count
    return _windowed(text, count, family)


def _windowed(text: Config, count: int, family: str) -> list[str]:
    """Kinds where the configuration names a window but does not list its layers."""
    every = _optional(text, ("sliding_window_pattern", "_sliding_window_pattern"))
    if every is None and family.startswith("gemma2"):
        every = 2
    if every:
        return ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(count)]
    if "use_sliding_window" in text and _optional(text, ("max_window_layers",), 0) is not None:
        first = _optional(text, ("max_window_layers",), 0) or 0
        return ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    return ["sliding_attention"] * count


def _shapes(text: Config, count: int, kinds: Sequence[str]) -> list[LayerShape | None]:
    rank = _optional(text, ("kv_lora_rank",))
    if rank:
        rope = _number(text, ("qk_rope_head_dim",), why="kv_lora_rank says that this is MLA")
        return [LayerShape(1, rank, rope)] * count
    if text.get("block_configs"):
        return _shapes_of_blocks(text, count)
    heads = _kv_heads(text, count)
    dim = _head_dim(text)
    v_dim = _optional(text, ("v_head_dim",)) or dim
    wide = _optional(text, ("global_head_dim",))
    few = _optional(text, ("num_global_key_value_heads",))
    found: list[LayerShape | None] = []
    for index, kind in enumerate(kinds):
        if wide and kind in FULL:
            found.append(LayerShape(few or heads[index], wide, wide))
        else:
            found.append(LayerShape(heads[index], dim, v_dim) if heads[index] else None)
    return found


def _shapes_of_blocks(text: Config, count: int) -> list[LayerShape | None]:
    """Layers described one by one (networks found by architecture search)."""
    blocks = _fitting(text["block_configs"], count)
    heads, dim = _number(text, HEADS), _head_dim(text)
    found: list[LayerShape | None] = []
    for index, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise LayoutError(f"block_configs[{index}] has no attention", FILE_REMEDY)
        if attention.get("no_op") or attention.get("replace_with_linear"):
            found.append(None)
            continue
        shared = _number(attention, ("n_heads_in_group",), why=f"block_configs[{index}]")
        found.append(LayerShape(_divided(heads, shared, "num_attention_heads", "n_heads_in_group"), dim, dim))
    return found


def _kv_heads(text: Config, count: int) -> list[int]:
    """KV heads of every layer; 0 for a layer without."""
    nested = text.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return [_number(nested, ("kv_n_heads",))] * count
    for name in KV_HEADS:
        value = text.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [_whole(one, f"{name}[{index}]", least=0) for index, one in enumerate(_fitting(value, count))]
    if text.get("multi_query_attention") and text.get("multi_query_group_num"):
        return [_number(text, ("multi_query_group_num",))] * count
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return [1] * count
    heads = _optional(text, KV_HEADS) or _number(text, HEADS)
    queries = _optional(text, HEADS) or heads
    if queries % heads:
        raise LayoutError(f"{queries} heads cannot share {heads} KV heads evenly", FILE_REMEDY)
    return [heads] * count


def _head_dim(text: Config) -> int:
    given = _optional(text, HEAD_DIM)
    if given:
        return given
    return _divided(_number(text, HIDDEN), _number(text, HEADS), "hidden_size", "num_attention_heads")


def _dtype(config: Config, text: Config, wanted: str | None, notes: list[str]) -> str:
    names = ("dtype", "torch_dtype")
    found = wanted or next((part[name] for part in (text, config) for name in names if part.get(name)), None)
    if found is None:
        notes.append("the configuration names no dtype: bfloat16 is assumed")
        found = "bfloat16"
    name = str(found).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}.get(
        name, name
    )
    if name not in DTYPE_BYTES:
        raise LayoutError(f"KV of dtype {found!r}", f"pass --dtype with one of {', '.join(sorted(DTYPE_BYTES))}")
    return name


def _kind(text: Config, layers: Sequence[LayerKV], heads: int) -> str:
    """The kind of attention in the words people use."""
    shapes = {layer.shape for layer in layers if layer.shape is not None}
    counts = {shape.heads for shape in shapes}
    if _optional(text, ("kv_lora_rank",)):
        name = "MLA"
    elif len(counts) > 1:
        name = "GQA, layers differ"
    else:
        kv = counts.pop()
        name = "MQA" if kv == 1 and heads > 1 else "MHA" if kv == heads else "GQA"
    windowed = sum(layer.window is not None for layer in layers)
    return f"{name}, {windowed} of {len(layers)} layers with a window" if windowed else name


def _parameters(text: Config) -> int | None:
    """Weights in all, from the shapes of a plain decoder; None for mixtures, MLA and recurrent layers."""
    special = ("kv_lora_rank", "block_configs", "hybrid_override_pattern", "attn_layer_period", "layers_block_type")
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
    if any(text.get(name) for name in (*special, *experts)):
        return None
    hidden, layers, heads = _optional(text, HIDDEN), _optional(text, LAYERS), _optional(text, HEADS)
    vocabulary = _optional(text, ("vocab_size",))
    if not (hidden and layers and heads and vocabulary):
        return None
    inner = _optional(text, ("intermediate_size", "ffn_dim", "n_inner")) or 4 * hidden
    try:
        dim, kv_heads = _head_dim(text), _kv_heads(text, layers)
    except LayoutError:
        return None
    gated = str(text.get("hidden_act", text.get("activation_function", "gelu"))) in ("silu", "swiglu", "geglu")
    gated = gated or "gelu_pytorch_tanh" in (text.get("hidden_activation"), text.get("hidden_act"))
    a_layer = 2 * hidden * heads * dim + (3 if gated else 2) * hidden * inner
    attention = sum(2 * hidden * one * dim for one in kv_heads)
    embeddings = vocabulary * hidden * (1 if text.get("tie_word_embeddings", not gated) else 2)
    return embeddings + layers * a_layer + attention


MOST = 1 << 40
"""No field that is counted here is larger in any model."""


def _number(text: Config, names: Sequence[str], *, why: str = "", most: int = MOST) -> int:
    """The first of these fields that is there. Raises LayoutError."""
    found = _optional(text, names)
    if found is None:
        raise _missing(names, why)
    if found > most:
        raise LayoutError(f"{names[0]} is {found}", FILE_REMEDY)
    return found


def _optional(text: Config, names: Sequence[str], least: int = 1) -> int | None:
    for name in names:
        value = text.get(name)
        if value is not None and not isinstance(value, Sequence | Mapping):
            return _whole(value, name, least)
        if isinstance(value, str):
            raise LayoutError(f"{name} is {value!r}, not a number", FILE_REMEDY)
    return None


def _whole(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LayoutError(f"{name} is {value!r}, not a whole number from {least} on", FILE_REMEDY)
    if value > MOST:
        raise LayoutError(f"{name} is a number of {value.bit_length()} bits", FILE_REMEDY)
    return value


def _fitting(values: Any, count: int) -> list[Any]:
    """A list with one entry a layer. Raises LayoutError."""
    if not isinstance(values, Sequence) or len(values) != count:
        raise LayoutError(f"a field that should describe {count} layers one by one does not", FILE_REMEDY)
    return list(values)


def _divided(whole: int, part: int, whole_name: str, part_name: str) -> int:
    if whole % part:
        raise LayoutError(f"{whole_name} {whole} is not a multiple of {part_name} {part}", FILE_REMEDY)
    return whole // part


def _missing(names: Sequence[str], why: str) -> LayoutError:
    reason = f" ({why})" if why else ""
    return LayoutError(f"the configuration has no {names[0]}{reason}", FILE_REMEDY)
