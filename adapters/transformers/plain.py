"""`load` and `save` on a cache object, for those who write their own loop.

    loading = load(store, model, input_ids)
    output = model(input_ids[:, loading.columns :], use_cache=True, **{loading.argument: loading.cache})
    …
    save(store, model, all_ids, loading.cache)

Must not know `generate`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvstore.adapters.transformers import allow
from kvstore.adapters.transformers.buffers import buffer_over
from kvstore.adapters.transformers.growing import install, stack_of
from kvstore.adapters.transformers.layout import ModelLayout, Refused, unwrap
from kvstore.adapters.transformers.pool import Pool
from kvstore.adapters.transformers.rows import fill, left_pads, rows_of
from kvstore.adapters.transformers.stack import Stack
from kvstore.errors import LayoutError
from kvstore.gate import Gate
from kvstore.kv import KVBuffer
from kvstore.layout import Layout

if TYPE_CHECKING:
    from kvstore.saving import Saving
    from kvstore.store import Store

_pool = Pool()
_EVERYTHING = Gate(on=False, floor=1)
_lock = Lock()
_layouts: weakref.WeakKeyDictionary[Any, ModelLayout] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Loading:
    """A cache that holds the first ``columns`` columns of the input; run the rest, with the whole attention mask.

    argument: the name of the model's cache argument. tokens: tokens loaded, padding left out, of all rows.
    """

    cache: DynamicCache
    columns: int
    tokens: int
    argument: str


def load(
    store: Store,
    model: Any,
    input_ids: torch.Tensor,
    cache: DynamicCache | None = None,
    *,
    salt: str | bytes = "",
    attention_mask: torch.Tensor | None = None,
    room: int = 512,
    block_tokens: int | None = None,
) -> Loading:
    """Fill a cache with what is stored of ``input_ids`` ``[batch, columns]``; at least one column is left to run.

    cache: an empty `DynamicCache` (its layers are replaced by growing ones) or `GrowingCache`; None makes one.
    attention_mask: where rows are padded on the left. room: tokens of room made beyond the input.
    block_tokens: as given to `attach`; another one is another namespace. Raises UnsupportedError for a model, mask or
    cache that is not on the allow-list.
    """
    models = _layout_of(model, block_tokens)
    present = models.within(store.device)
    layout = present.layout
    reason = allow.refuse_cache(cache) if cache is not None else None
    pads = left_pads(input_ids, attention_mask)
    if reason or isinstance(pads, str):
        raise Refused(reason or str(pads))
    if max(pads) >= input_ids.shape[1]:
        raise Refused("mask")
    space = store.namespace(layout, salt=salt)
    batch, columns = input_ids.shape
    stack = Stack(layout.groups[0], present.dtype, models.device, batch, columns + room, _pool)
    loaded, _ = fill(store, space, layout, rows_of(input_ids, pads), stack, _EVERYTHING)
    filled = DynamicCache() if cache is None else cache
    install(filled, stack, loaded)
    return Loading(filled, loaded, sum(max(0, loaded - pad) for pad in pads), models.cache_name)


def save(
    store: Store,
    model: Any,
    input_ids: torch.Tensor,
    cache: DynamicCache,
    *,
    salt: str | bytes = "",
    attention_mask: torch.Tensor | None = None,
    block_tokens: int | None = None,
) -> list[Saving]:
    """Store what ``cache`` holds of ``input_ids`` ``[batch, columns]``, one result a row.

    input_ids: the tokens that were run, and possibly more: what the cache holds no KV of is left out.
    block_tokens: as given to `attach`; another one is another namespace. The cache may change as soon as this returns.
    Raises UnsupportedError for a model, mask or cache that is not on the allow-list, LayoutError for a cache of another
    model or batch.
    """
    layout = _layout_of(model, block_tokens).within(store.device).layout
    pads = left_pads(input_ids, attention_mask)
    if isinstance(pads, str):
        raise Refused(pads)
    buffers = _buffers(layout, cache, pads)
    held = cache.get_seq_length()
    if held > input_ids.shape[1]:
        raise LayoutError(
            f"the cache holds {held} tokens, {input_ids.shape[1]} ids were given", "pass all ids that were run"
        )
    rows = rows_of(input_ids[:, :held], [min(pad, held) for pad in pads])
    space = store.namespace(layout, salt=salt)
    return [store.save(space, row, buffer) for row, buffer in zip(rows.tokens, buffers, strict=True) if len(row)]


def _layout_of(model: Any, block_tokens: int | None) -> ModelLayout:
    inner = unwrap(model)
    with _lock:
        known = _layouts.get(inner)
        if known is None or known.block_tokens != block_tokens:
            known = _layouts[inner] = ModelLayout(inner, block_tokens)
        return known


def _buffers(layout: Layout, cache: DynamicCache, pads: list[int]) -> list[KVBuffer]:
    """A buffer for every row of a stock or a growing cache."""
    stack = stack_of(cache)
    if stack is not None and stack.batch == len(pads):
        return [stack.row(layout, index, pad) for index, pad in enumerate(pads)]
    sides: list[torch.Tensor] = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.is_sliding or layer.keys is None or layer.values is None:
            raise Refused("foreign-cache")
        sides += [layer.keys, layer.values]
    if not sides or any(side.dim() != 4 or side.shape[0] != len(pads) for side in sides):
        raise LayoutError(f"the cache does not hold {len(pads)} rows", "pass the ids of the batch that filled it")
    return [buffer_over(layout, [side[index, :, pad:] for side in sides]) for index, pad in enumerate(pads)]
