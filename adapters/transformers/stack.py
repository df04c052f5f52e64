"""One buffer for the KV of a whole batch: ``[layer, K/V, batch, head, tokens, dim]``.

Where K and V have different dims (MLA) it is one K stack and one V stack behind each other, and where layers differ,
one pair a layer. Grows by doubling. Must not know of caches, tokens or the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.adapters.transformers.buffers import buffer_over
from kvstore.adapters.transformers.pool import Pool
from kvstore.kv import KVBuffer
from kvstore.layout import LayerShape, Layout

TOKEN_STEP = 64
"""Capacities are multiples of this, which keeps every head's first byte 64-byte aligned."""


@dataclass(frozen=True, slots=True)
class _Planes:
    """The tensors over one piece of memory. ``whole``: all layers in one, K and V apart where their dims differ."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    whole: tuple[torch.Tensor, ...]


class Stack:
    """KV of ``batch`` rows for all layers, with room for ``capacity`` tokens.

    ``keys[i]`` and ``values[i]`` are layer i's views ``[batch, heads, capacity, dim]``. `generation` changes whenever
    what the views held is not carried over.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        batch: int,
        capacity: int,
        pool: Pool,
    ) -> None:
        self.shapes = tuple(shapes)
        self.dtype = dtype
        self.device = device
        self.batch = batch
        self.capacity = _up(capacity)
        self.pool = pool
        self.generation = 0
        self._planes = self._make()

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """K of every layer, ``[batch, heads, capacity, k_dim]``."""
        return self._planes.keys

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """V of every layer, ``[batch, heads, capacity, v_dim]``."""
        return self._planes.values

    def grow(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens, at least double the present, and carry all contents over."""
        old, kept = self._planes, self.capacity
        self.capacity = _up(max(tokens, 2 * kept))
        self._planes = self._make()
        with torch.inference_mode(False), torch.no_grad():
            for source, target in zip((*old.keys, *old.values), (*self.keys, *self.values), strict=True):
                target[:, :, :kept].copy_(source)

    def rebatch(self, batch: int, tokens: int) -> None:
        """Become a stack for another number of rows; contents are not carried over."""
        self.batch = batch
        self.capacity = _up(max(tokens, self.capacity))
        self.generation += 1
        self._planes = self._make()

    def clear_left(self, row: int, columns: int) -> None:
        """Zero the first ``columns`` tokens of a row: padding that is masked must still be finite."""
        for tensor in (*self.keys, *self.values):
            tensor[row, :, :columns].zero_()

    def copy_row(self, source: int, target: int, first: int, last: int) -> None:
        """Copy tokens ``first`` … ``last`` − 1 of one row to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, first:last].copy_(tensor[source, :, first:last])

    def row(self, layout: Layout, row: int, first: int = 0) -> KVBuffer:
        """A row's KV for the store; its token 0 is at column ``first``."""
        if len(self._planes.whole) == 1:
            return buffer_over(layout, [self._planes.whole[0][:, :, row, :, first:]])
        if len(self._planes.whole) == 2:
            return buffer_over(layout, [plane[:, row, :, first:] for plane in self._planes.whole])
        pairs = zip(self.keys, self.values, strict=True)
        return buffer_over(layout, [side[row, :, first:] for pair in pairs for side in pair])

    def _make(self) -> _Planes:
        """Tensors over new memory. Made outside inference mode, or later in-place writes would raise."""
        with torch.inference_mode(False), torch.no_grad():
            itemsize, rows = self.dtype.itemsize, self.batch * self.capacity
            flat = self._memory(sum(shape.elements for shape in self.shapes) * rows * itemsize)
            count, first = len(self.shapes), self.shapes[0]
            if len(set(self.shapes)) > 1:
                return _planes_apart(flat, self.shapes, self.batch, self.capacity)
            lead = (self.batch, first.heads, self.capacity)
            if first.k_dim == first.v_dim:
                whole = flat.view(count, 2, *lead, first.k_dim)
                return _Planes(tuple(whole[:, 0].unbind()), tuple(whole[:, 1].unbind()), (whole,))
            cut = count * rows * first.heads * first.k_dim
            keys, values = flat[:cut].view(count, *lead, first.k_dim), flat[cut:].view(count, *lead, first.v_dim)
            return _Planes(tuple(keys.unbind()), tuple(values.unbind()), (keys, values))

    def _memory(self, size: int) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.empty(size // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        return torch.from_numpy(self.pool.take(size))[:size].view(self.dtype)


def _planes_apart(flat: torch.Tensor, shapes: Sequence[LayerShape], batch: int, capacity: int) -> _Planes:
    """K and V of layers that differ, one after the other."""
    sides: list[list[torch.Tensor]] = [[], []]
    start = 0
    for shape in shapes:
        for side, dim in zip(sides, (shape.k_dim, shape.v_dim), strict=True):
            size = batch * shape.heads * capacity * dim
            side.append(flat[start : start + size].view(batch, shape.heads, capacity, dim))
            start += size
    return _Planes(tuple(sides[0]), tuple(sides[1]), ())


def _up(tokens: int) -> int:
    return -(-max(tokens, 1) // TOKEN_STEP) * TOKEN_STEP
