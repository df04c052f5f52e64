"""Torch tensors as a source and a destination of blocks.

Host tensors are seen through numpy, without a copy; tensors of another device go through one contiguous copy a run.
Must not know of caches or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.kv import Array, HostKV, KVBuffer, Run
from kvstore.layout import Layout

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def buffer_over(layout: Layout, tensors: Sequence[torch.Tensor]) -> KVBuffer:
    """A KVBuffer over one sequence's tensors.

    tensors: one ``[layers, 2, heads, tokens, dim]``; or K and V, each ``[layers, heads, tokens, dim]``; or K and V of
    every layer in turn, each ``[heads, tokens, dim]``. Raises LayoutError where they do not fit the layout.
    """
    if tensors[0].device.type != "cpu":
        return DeviceKV(layout, tensors)
    arrays: list[Array] = [raw(tensor).numpy() for tensor in tensors]
    if len(arrays) == 1:
        return HostKV.stacked(layout, arrays[0])
    if arrays[0].ndim == 4:
        return HostKV.paired(layout, arrays[0], arrays[1])
    return HostKV.layered(layout, list(zip(arrays[::2], arrays[1::2], strict=True)))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` seen as integers of its item size: numpy knows no bfloat16."""
    return tensor.detach().view(_RAW[tensor.dtype.itemsize])


class DeviceKV:
    """A KVBuffer over tensors that are not in host memory; each run is one copy a plane through a staging tensor.

    tensors: as `buffer_over` takes them.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._planes = tuple(map(raw, tensors))
        self._device = tensors[0].device
        self._capacity = min(int(tensor.shape[-2]) for tensor in tensors)

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self._capacity

    @property
    def device(self) -> str | None:
        """Where the tensors are, such as ``cuda:0``."""
        return str(self._device)

    def gather(self, start: int, run: Run) -> None:
        """Copy tokens from ``start`` on into the run's payloads."""
        staged = [self._window(plane, start, run).cpu() for plane in self._planes]
        buffer_over(self.layout, staged).gather(0, run)

    def scatter(self, start: int, run: Run) -> None:
        """Copy the run's payloads to the tokens from ``start`` on."""
        windows = [self._window(plane, start, run) for plane in self._planes]
        staged = [torch.empty(window.shape, dtype=window.dtype) for window in windows]
        buffer_over(self.layout, staged).scatter(0, run)
        for window, source in zip(windows, staged, strict=True):
            window.copy_(source)

    def _window(self, plane: torch.Tensor, start: int, run: Run) -> torch.Tensor:
        return plane[..., start : start + run.count * run.take, :]
