"""Torch tensors of one sequence as a `KVBuffer`: host tensors through numpy, without a copy, others where they are.

Must not know of caches or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.kv import Array, HostKV, KVBuffer
from kvstore.layout import Layout
from kvstore.tiers.devicekv import DeviceKV

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def buffer_over(layout: Layout, tensors: Sequence[torch.Tensor]) -> KVBuffer:
    """A KVBuffer over one sequence's tensors.

    tensors: one ``[layers, 2, heads, tokens, dim]``; or K and V, each ``[layers, heads, tokens, dim]``; or K and V of
    every layer in turn, each ``[heads, tokens, dim]``. Raises LayoutError where they do not fit the layout.
    """
    if not _is_host(tensors[0]):
        return _on_device(layout, tensors)
    # numpy knows no bfloat16: elements are moved as integers of their size
    arrays: list[Array] = [tensor.detach().view(_RAW[tensor.dtype.itemsize]).numpy() for tensor in tensors]
    if len(arrays) == 1:
        return HostKV.stacked(layout, arrays[0])
    if arrays[0].ndim == 4:
        return HostKV.paired(layout, arrays[0], arrays[1])
    return HostKV.layered(layout, list(zip(arrays[::2], arrays[1::2], strict=True)))


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _on_device(layout: Layout, tensors: Sequence[torch.Tensor]) -> KVBuffer:
    if len(tensors) == 1:
        return DeviceKV.stacked(layout, tensors[0])
    if tensors[0].dim() == 4:
        return DeviceKV.paired(layout, tensors[0], tensors[1])
    return DeviceKV.layered(layout, list(zip(tensors[::2], tensors[1::2], strict=True)))
