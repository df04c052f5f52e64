"""How vLLM's attention kernels place K and V in a page, found out by having them write a page and looking.

vLLM describes every layer's cache as ``[blocks, heads, tokens, content]``, but what a head's piece of a page holds is
the kernel's business: the CPU kernels keep K transposed in its first half. Must not know layouts or the store.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

from kvstore.errors import UnsupportedError


class Arrangement(StrEnum):
    """What a head's ``tokens × content`` elements of a page are."""

    SIDES = "sides"
    """For every token its K, then its V."""
    HALVES = "halves"
    """K of all tokens, then V of all tokens."""
    COLUMNS = "columns"
    """K dimension by dimension, each with all tokens; then V of all tokens."""


def planes(tensor: torch.Tensor, arrangement: Arrangement, k_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[blocks, heads, tokens, k_dim]`` and V ``[blocks, heads, tokens, v_dim]`` of a layer's pages, as views.

    tensor: ``[blocks, heads, tokens, k_dim + v_dim]``. Raises UnsupportedError where its strides forbid such views.
    """
    blocks, heads, tokens, content = tensor.shape
    per_block, per_head, per_token, per_element = tensor.stride()
    v_dim, at = content - k_dim, tensor.storage_offset()
    if arrangement is Arrangement.SIDES:
        return tensor[..., :k_dim], tensor[..., k_dim:]
    if (per_token, per_element) != (content, 1):
        raise UnsupportedError(f"pages with strides {tensor.stride()} cannot hold K and V apart", "see the limits page")
    k_steps = (k_dim, 1) if arrangement is Arrangement.HALVES else (1, tokens)
    keys = tensor.as_strided((blocks, heads, tokens, k_dim), (per_block, per_head, *k_steps), at)
    values = tensor.as_strided((blocks, heads, tokens, v_dim), (per_block, per_head, v_dim, 1), at + tokens * k_dim)
    return keys, values


def find_arrangement(layer: Any, tensor: torch.Tensor, k_dim: int) -> Arrangement:
    """The arrangement of a layer's pages.

    layer: vLLM's attention layer, whose kernel writes two scratch pages like those of ``tensor``. Raises
    UnsupportedError when the kernel cannot be asked, or places tokens in no way that is known here.
    """
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if update is None:
        raise UnsupportedError(f"{type(layer).__name__} does not write its cache apart from its forward", _UNCACHED)
    _, heads, tokens, content = tensor.shape
    scratch = torch.zeros_like(tensor[:2])
    slots = torch.arange(tokens // 2, tokens + tokens // 2, dtype=torch.int64, device=tensor.device)
    keys = torch.randn(tokens, heads, k_dim, device=tensor.device).to(tensor.dtype)
    values = torch.randn(tokens, heads, content - k_dim, device=tensor.device).to(tensor.dtype)
    update(layer, keys, values, scratch, slots)
    for candidate in Arrangement:
        try:
            found = planes(scratch, candidate, k_dim)
        except UnsupportedError:
            continue
        if all(torch.equal(_written(side, slots), sent) for side, sent in zip(found, (keys, values), strict=True)):
            return candidate
    raise UnsupportedError(f"{type(layer.impl).__name__} places tokens in an order that is not known", _UNCACHED)


_UNCACHED = "the engine runs uncached; the limits page lists the attention backends that are served"


def _written(side: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The tokens at ``slots``, ``[tokens, heads, dim]``."""
    size = side.shape[2]
    return side[slots // size, :, slots % size]
