"""One sequence's KV in vLLM's pages on a device: the counterpart of `PagedKV` for the `hbm` tier.

All tokens of a run are moved by one indexed operation a layer, for K and for V. Must not know who owns the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.errors import LayoutError
from kvstore.layout import Layout
from kvstore.tiers.devicekv import DeviceKV, SlotRows, _Plane

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DevicePlane:
    """K or V of one layer: ``[pages, heads, page_tokens, dim]``; base and by_dim as in `PagePlane`."""

    tensor: torch.Tensor
    base: int
    by_dim: bool


def device_planes(
    layout: Layout, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], *, by_dim: bool
) -> tuple[DevicePlane, ...]:
    """Planes over K and V of every layer, as integers of their size. Raises LayoutError for other shapes."""
    shapes = layout.groups[0]
    if len(layers) != len(shapes):
        raise LayoutError(f"{len(layers)} layers registered, the layout has {len(shapes)}", "pass every layer once")
    found: list[DevicePlane] = []
    base = 0
    for shape, pair in zip(shapes, layers, strict=True):
        for tensor, dim, turned in zip(pair, (shape.k_dim, shape.v_dim), (by_dim, False), strict=True):
            if tensor.dim() != 4 or (tensor.shape[1], tensor.shape[3]) != (shape.heads, dim):
                raise LayoutError(f"pages of shape {tuple(tensor.shape)}, the layout says {shape}", "check the layers")
            if tensor.element_size() != layout.itemsize:
                raise LayoutError(f"pages of {tensor.dtype}, the layout says {layout.dtype}", "check the dtype")
            found.append(DevicePlane(tensor.view(_WORDS[layout.itemsize]), base, turned))
            base += shape.heads * dim
    return tuple(found)


class PagedDeviceKV(DeviceKV):
    """A DeviceKV over pages. blocks: the sequence's pages in order. first: tokens that a scatter leaves alone."""

    def __init__(self, layout: Layout, planes: Sequence[DevicePlane], blocks: Sequence[int], *, first: int = 0) -> None:
        page = int(planes[0].tensor.shape[2])
        # The base class is told of the device; rows are gathered and scattered here.
        super().__init__(layout, [_Plane(planes[0].tensor, 0, ())], len(blocks) * page)
        self._pages, self._page, self._first = tuple(planes), page, first
        pages = planes[0].tensor.shape[0]
        if any(not 0 <= block < pages for block in blocks):
            raise LayoutError(f"a page outside 0…{pages - 1}", "check the engine's block table")
        self._blocks = torch.tensor(list(blocks), dtype=torch.int64)

    def gather_rows(self, start: int, rows: SlotRows) -> None:
        """Queue copies of tokens from ``start`` on into slots. Raises LayoutError past the capacity."""
        page, offset = self._places(start, rows)
        slots = self._slots(rows)
        for plane in self._pages:
            heads, dim = plane.tensor.shape[1], plane.tensor.shape[3]
            tokens = plane.tensor[page, :, offset].view(len(rows.slots), rows.take, heads, dim)
            self._payloads(plane, rows)[slots, :, : rows.take] = tokens.transpose(1, 2)

    def scatter_rows(self, start: int, rows: SlotRows) -> None:
        """Queue copies of slots to the tokens from ``start`` on. Raises LayoutError past the capacity."""
        page, offset = self._places(start, rows)
        slots = self._slots(rows)
        skip = max(0, min(self._first - start, len(page)))
        for plane in self._pages:
            heads, dim = plane.tensor.shape[1], plane.tensor.shape[3]
            tokens = self._payloads(plane, rows)[slots, :, : rows.take].transpose(1, 2).reshape(-1, heads, dim)
            plane.tensor[page[skip:], :, offset[skip:]] = tokens[skip:]

    def _places(self, start: int, rows: SlotRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset of every token of the rows, on the device."""
        count = len(rows.slots) * rows.take
        self._within(start, count)
        at = torch.arange(start, start + count)
        return self._there(self._blocks[at // self._page]), self._there(at % self._page)

    def _slots(self, rows: SlotRows) -> torch.Tensor:
        return self._there(torch.tensor(list(rows.slots), dtype=torch.int64))

    def _there(self, index: torch.Tensor) -> torch.Tensor:
        """From pinned memory: an index from ordinary memory would make the host wait for the engine's stream."""
        if self._device.type == "cuda":
            index = index.pin_memory()
        return index.to(self._device, non_blocking=True)

    def _payloads(self, plane: DevicePlane, rows: SlotRows) -> torch.Tensor:
        """The plane's elements in every slot: ``[slots, heads, tokens, dim]``."""
        heads, dim = plane.tensor.shape[1], plane.tensor.shape[3]
        words = rows.memory.view(plane.tensor.dtype)
        size = plane.tensor.element_size()
        token, element = (1, rows.tokens) if plane.by_dim else (dim, 1)
        return words.as_strided(
            (rows.memory.numel() // rows.stride, heads, rows.tokens, dim),
            (rows.stride // size, dim * rows.tokens, token, element),
            words.storage_offset() + plane.base * rows.tokens,
        )
