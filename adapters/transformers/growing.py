"""Cache layers that grow in place, and the cache made of them.

A stock layer concatenates the whole layer on every token. These write the new tokens behind the old ones in one
stacked buffer and hand out views of it. What a layer holds is always its ``keys`` and ``values``, as with stock layers:
whoever replaces them (beams, cropping, selecting rows, or the user) is noticed at the next update. Must not know
tokens, the store or `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvstore.adapters.transformers.pool import Pool
from kvstore.adapters.transformers.stack import Stack
from kvstore.layout import LayerShape


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """Layer ``index`` of a `Stack`, for transformers' attention modules."""

    def __init__(self, stack: Stack, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack = stack
        self.index = index
        self._generation = -1
        self._own: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V ``[batch, heads, tokens, dim]`` and return views of everything held.

        Tensors that need gradients, or do not fit the stack, are concatenated as a stock layer does.
        """
        graph = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if graph or not self._fits(key_states, value_states):
            return super().update(key_states, value_states, *args, **kwargs)
        held = self._settle(key_states)
        total = held + key_states.shape[-2]
        if total > self.stack.capacity:
            self.stack.grow(total)
        keys, values = self.stack.keys[self.index], self.stack.values[self.index]
        keys.narrow(2, held, total - held).copy_(key_states)
        values.narrow(2, held, total - held).copy_(value_states)
        return self._show(total)

    def hold(self, tokens: int) -> None:
        """Declare the first ``tokens`` tokens of the stack to be what this layer holds."""
        keys, values = self.stack.keys[self.index], self.stack.values[self.index]
        self.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        self._generation = self.stack.generation
        self._show(tokens)

    @property
    def in_stack(self) -> bool:
        """Whether what this layer holds is the front of its stack."""
        if self._generation != self.stack.generation or self.keys is None:
            return False
        return self._is_own() or self._is_front()

    def reset(self) -> None:
        """Hold nothing; the buffer stays."""
        self.keys = self.values = None
        self._own = (None, None)
        self.is_initialized = False

    def _show(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.stack.keys[self.index].narrow(2, 0, tokens)
        values = self.stack.values[self.index].narrow(2, 0, tokens)
        self.keys, self.values = self._own = keys, values
        return keys, values

    def _settle(self, states: torch.Tensor) -> int:
        """Tokens held, all of them in the stack's buffer and in its present form."""
        stack = self.stack
        if not self.is_initialized or self.keys is None or self.keys.numel() == 0:
            if states.shape[0] != stack.batch:
                stack.rebatch(states.shape[0], states.shape[-2])
            self.lazy_initialization(states[:, :, :0], states[:, :, :0])
            self._generation = stack.generation
            return 0
        tokens = int(self.keys.shape[-2])
        if self.in_stack:
            return tokens
        keys, values = self.keys, self.values
        assert values is not None  # keys and values are set together
        if states.shape[0] != stack.batch:
            stack.rebatch(states.shape[0], tokens + states.shape[-2])
        elif tokens > stack.capacity:
            stack.grow(tokens)
        # The replacement may be another view of this very buffer: overlapping copies are undefined.
        keys, values = (_apart(side, whole[self.index]) for side, whole in ((keys, stack.keys), (values, stack.values)))
        stack.keys[self.index][:, :, :tokens].copy_(keys)
        stack.values[self.index][:, :, :tokens].copy_(values)
        self._generation = stack.generation
        return tokens

    def _is_own(self) -> bool:
        """Whether nobody has replaced keys and values since this layer set them."""
        return self.keys is self._own[0] and self.values is self._own[1]

    def _is_front(self) -> bool:
        """Whether keys and values are the first tokens of the buffer, as after a crop."""
        for side, whole in ((self.keys, self.stack.keys), (self.values, self.stack.values)):
            front = whole[self.index]
            assert side is not None  # asked only when something is held
            if (
                side.data_ptr() != front.data_ptr()
                or side.stride() != front.stride()
                or side.shape[:2] != front.shape[:2]
            ):
                return False
        return True

    def _fits(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether the new states, and what is held, can be kept in the stack."""
        shape = self.stack.shapes[self.index]
        pairs = [(key_states, shape.k_dim), (value_states, shape.v_dim)]
        if self.keys is not None and self.values is not None and self.keys.numel() and not self._is_own():
            pairs += [(self.keys, shape.k_dim), (self.values, shape.v_dim)]
        return all(
            side.dtype == self.stack.dtype
            and side.device == self.stack.device
            and not (side.requires_grad and torch.is_grad_enabled())
            and side.dim() == 4
            and side.shape[1] == shape.heads
            and side.shape[3] == dim
            and side.shape[0] == key_states.shape[0]
            for side, dim in pairs
        )


class GrowingCache(DynamicCache):
    """A `DynamicCache` whose layers grow in place over one stacked buffer.

    shapes: one a layer. capacity: tokens to make room for at first; it doubles when exceeded.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        batch: int = 1,
        capacity: int = 512,
        pool: Pool | None = None,
    ) -> None:
        super().__init__()
        install(self, Stack(shapes, dtype, torch.device(device), batch, capacity, pool or Pool()))


def install(cache: Cache, stack: Stack, tokens: int = 0) -> None:
    """Give ``cache``, which is empty, the layers of ``stack``, the first ``tokens`` tokens of it held."""
    layers = [GrowingLayer(stack, index) for index in range(len(stack.shapes))]
    if tokens:
        for layer in layers:
            layer.hold(tokens)
    cache.layers[:] = layers
    cache.layer_class_to_replicate = None


def hold(cache: Cache, tokens: int) -> None:
    """Declare the first ``tokens`` tokens of its buffer to be what ``cache`` holds."""
    for layer in cache.layers:
        assert isinstance(layer, GrowingLayer)  # only caches that `install` made
        layer.hold(tokens)


def stack_of(cache: Cache) -> Stack | None:
    """The stack that holds all of ``cache`` in its present form; None where some layer holds something else."""
    layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer)]
    if not layers or len(layers) < len(cache.layers):
        return None
    stack = layers[0].stack
    return stack if all(layer.stack is stack and layer.in_stack for layer in layers) else None


def _apart(side: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    shared = side.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return side.clone() if shared else side
