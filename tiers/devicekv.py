"""KV tensors on a device, seen as a source and a destination of blocks: the torch counterpart of `kvstore.kv.HostKV`.

Blocks move between the engine's tensors and slots of a device tensor by one operation a plane for all blocks of a
run: a strided copy where the slots are consecutive, an indexed one where they are not. Elements are moved as integers
of the widest size that divides every dim, so any dtype of the layout's item size will do. Must not know who owns the
slots, keys, or other tiers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.errors import LayoutError
from kvstore.kv import Bytes, Gathering, Run, Told
from kvstore.layout import LayerShape, Layout
from kvstore.tiers.lanes import Lane, single_device

STAGING_BYTES = 32 << 20
"""What `DeviceKV.gather` and `DeviceKV.scatter` take from torch's allocator at a time."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Payloads of ``tokens`` tokens each at the fronts of ``slots`` of a device tensor.

    memory: flat uint8 on the device, cut into slots of ``stride`` bytes. take: tokens used of each payload, from its
    front. Both sizes are multiples of 8 for tensors moved as 8-byte words; payloads always are.
    """

    memory: torch.Tensor
    stride: int
    slots: Sequence[int]
    tokens: int
    take: int

    @property
    def consecutive(self) -> bool:
        """Whether the slots follow each other."""
        return self.slots[-1] - self.slots[0] == len(self.slots) - 1 and all(
            after - before == 1 for before, after in zip(self.slots, self.slots[1:], strict=False)
        )


@dataclass(frozen=True, slots=True)
class _Plane:
    """One tensor ``[*lead, tokens, dim]`` of integers and where it lies in a payload.

    base, steps: elements *a token* before the plane's first element, and from one index of each lead axis to the
    next; a payload of n tokens multiplies both by n.
    """

    tensor: torch.Tensor
    base: int
    steps: tuple[int, ...]


class DeviceKV:
    """A KVBuffer over torch tensors on one device; ``device="cpu"`` runs the same code.

    lane: the stream on which the engine works on these tensors (None on the CPU): the one that was current when the
    object was made; set it when the engine moves to another. The store orders itself after it and before it.
    """

    def __init__(self, layout: Layout, planes: Sequence[_Plane], capacity: int, group: int = 0) -> None:
        device = single_device(plane.tensor.device for plane in planes)
        self.layout = layout
        self.group = group
        self.lane: Lane = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._device = device
        self._capacity = capacity
        self._planes = _widened(planes, layout.itemsize)

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self._capacity

    @property
    def device(self) -> str:
        """Such as ``cuda:0`` or ``cpu``."""
        return str(self._device)

    def fits(self, layout: Layout, group: int) -> bool:
        """Whether its tensors are those of a layout's group."""
        return self.layout.alike(self.group, layout, group)

    @classmethod
    def stacked(cls, layout: Layout, tensor: torch.Tensor, group: int = 0) -> DeviceKV:
        """Over one tensor ``[layers, 2, heads, tokens, dim]``: layers all alike, K and V with the same dim.

        Raises LayoutError for another shape or item size, UnsupportedError for a device that hbm does not know.
        """
        shape = _one_shape(layout, group)
        if shape.k_dim != shape.v_dim:
            raise LayoutError("K and V have different dims", "use DeviceKV.paired or DeviceKV.layered")
        heads, dim = shape.heads, shape.k_dim
        raw = _raw(tensor, layout.itemsize, (len(layout.groups[group]), 2, heads, -1, dim), "stacked KV")
        return cls(layout, [_Plane(raw, 0, (2 * heads * dim, heads * dim, dim))], raw.shape[3], group)

    @classmethod
    def paired(cls, layout: Layout, keys: torch.Tensor, values: torch.Tensor, group: int = 0) -> DeviceKV:
        """Over K ``[layers, heads, tokens, k_dim]`` and V ``[layers, heads, tokens, v_dim]``: layers all alike.

        Raises LayoutError for another shape or item size, UnsupportedError for tensors on several devices.
        """
        shape = _one_shape(layout, group)
        count, heads = len(layout.groups[group]), shape.heads
        raw_k = _raw(keys, layout.itemsize, (count, heads, -1, shape.k_dim), "stacked K")
        raw_v = _raw(values, layout.itemsize, (count, heads, -1, shape.v_dim), "stacked V")
        planes = [
            _Plane(raw_k, 0, (shape.elements, shape.k_dim)),
            _Plane(raw_v, heads * shape.k_dim, (shape.elements, shape.v_dim)),
        ]
        return cls(layout, planes, min(raw_k.shape[2], raw_v.shape[2]), group)

    @classmethod
    def layered(cls, layout: Layout, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], group: int = 0) -> DeviceKV:
        """Over K ``[heads, tokens, k_dim]`` and V ``[heads, tokens, v_dim]`` for every layer.

        Raises LayoutError for another shape, item size or number of layers, UnsupportedError for several devices.
        """
        shapes = layout.groups[group]
        if len(layers) != len(shapes):
            raise LayoutError(f"{len(layers)} layers given, the layout has {len(shapes)}", "pass every layer once")
        planes: list[_Plane] = []
        base = 0
        for index, (shape, pair) in enumerate(zip(shapes, layers, strict=True)):
            for tensor, dim, name in zip(pair, (shape.k_dim, shape.v_dim), "KV", strict=True):
                raw = _raw(tensor, layout.itemsize, (shape.heads, -1, dim), f"{name} of layer {index}")
                planes.append(_Plane(raw, base, (dim,)))
                base += shape.heads * dim
        return cls(layout, planes, min(plane.tensor.shape[-2] for plane in planes), group)

    def gather_rows(self, start: int, rows: SlotRows) -> None:
        """Queue copies of tokens from ``start`` on into slots, on the current stream.

        Raises LayoutError past the capacity. Call it under `Lanes.submit`.
        """
        index = self._index(rows)
        for plane in self._planes:
            inside, outside = self._inside(plane, rows), self._outside(plane, start, rows)
            if index is None:
                inside[rows.slots[0] : rows.slots[-1] + 1].copy_(outside)
            else:
                inside.index_copy_(0, index, outside)

    def scatter_rows(self, start: int, rows: SlotRows) -> None:
        """Queue copies of slots to the tokens from ``start`` on, on the current stream.

        Raises LayoutError past the capacity. Call it under `Lanes.submit`.
        """
        index = self._index(rows)
        for plane in self._planes:
            inside, outside = self._inside(plane, rows), self._outside(plane, start, rows)
            if index is None:
                outside.copy_(inside[rows.slots[0] : rows.slots[-1] + 1])
            else:
                torch.index_select(inside, 0, index, out=outside)

    def gather(self, start: int, run: Run) -> None:
        """Copy tokens from ``start`` on into payloads in host memory, through memory of torch's allocator.

        Returns when the bytes are there. Raises LayoutError past the capacity.
        """
        for at, rows, host in self._staged(start, run):
            with torch.inference_mode(), torch.cuda.stream(self.lane):
                if rows.take != rows.tokens:
                    rows.memory.view(host.shape).copy_(host)
                self.gather_rows(at, rows)
                host.copy_(rows.memory.view(host.shape))

    def gathering(self, start: int, run: Run) -> Gathering:
        """A gather, to be done payload by payload (`KVBuffer.gathering`)."""
        size = self.layout.payload_bytes(self.group, run.tokens)

        def gather(at: int, told: Told) -> None:
            self.gather(start + at * run.take, run.part(at, 1))
            told(run.payload(at, size).data)

        return gather

    def scatter(self, start: int, run: Run) -> None:
        """Copy payloads in host memory to the tokens from ``start`` on, through memory of torch's allocator.

        Host memory has been read when this returns; the tokens are there for whatever is queued on `lane` later.
        Raises LayoutError past the capacity.
        """
        for at, rows, host in self._staged(start, run):
            with torch.inference_mode(), torch.cuda.stream(self.lane):
                rows.memory.view(host.shape).copy_(host)
                self.scatter_rows(at, rows)

    def _staged(self, start: int, run: Run) -> list[tuple[int, SlotRows, torch.Tensor]]:
        """The run in pieces: first token, room for its payloads on the device, and its payloads on the host."""
        payload = self.layout.payload_bytes(self.group, run.tokens)
        self._within(start, run.count * run.take)
        step = max(1, min(run.count, STAGING_BYTES // payload))
        with torch.inference_mode(), torch.cuda.stream(self.lane):
            staging = torch.empty(step * payload, dtype=torch.uint8, device=self._device)
        pieces = []
        memory = host_tensor(run.memory)
        for first in range(0, run.count, step):
            part = run.part(first, min(step, run.count - first))
            rows = SlotRows(staging[: part.count * payload], payload, range(part.count), run.tokens, run.take)
            host = memory.as_strided((part.count, payload), (part.stride, 1), part.offset)
            pieces.append((start + first * run.take, rows, host))
        return pieces

    def _inside(self, plane: _Plane, rows: SlotRows) -> torch.Tensor:
        """The plane's elements in every slot: ``[slots, *lead, take, dim]``."""
        words = rows.memory.view(plane.tensor.dtype)
        size, dim = plane.tensor.element_size(), plane.tensor.shape[-1]
        return words.as_strided(
            (rows.memory.numel() // rows.stride, *plane.tensor.shape[:-2], rows.take, dim),
            (rows.stride // size, *(step * rows.tokens for step in plane.steps), dim, 1),
            words.storage_offset() + plane.base * rows.tokens,
        )

    def _outside(self, plane: _Plane, start: int, rows: SlotRows) -> torch.Tensor:
        """The plane's own tokens from ``start`` on: ``[count, *lead, take, dim]``."""
        count = len(rows.slots)
        self._within(start, count * rows.take)
        if plane.tensor.is_cuda:
            # the engine may free the tensor before this stream has used it, having made it on another
            plane.tensor.record_stream(torch.cuda.current_stream(self._device))
        tokens = plane.tensor[..., start : start + count * rows.take, :]
        lead, dim = tokens.shape[:-2], tokens.shape[-1]
        return tokens.view(*lead, count, rows.take, dim).movedim(-3, 0)

    def _within(self, start: int, tokens: int) -> None:
        if start < 0 or start + tokens > self._capacity:
            raise LayoutError(f"tokens {start}…{start + tokens} of a buffer for {self._capacity}", "make room first")

    def _index(self, rows: SlotRows) -> torch.Tensor | None:
        """The slots as an index on the device; None where they are consecutive.

        From pinned memory: an index from ordinary memory would make the host wait for the engine's stream. Torch
        keeps the pinned memory until the copy has happened.
        """
        if rows.consecutive:
            return None
        index = torch.tensor(rows.slots, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return index.to(self._device, non_blocking=True)


def host_tensor(memory: Bytes) -> torch.Tensor:
    """A flat uint8 tensor over host memory; it keeps ``memory`` alive.

    Torch refuses to wrap read-only arrays silently; such memory is only ever a source here.
    """
    if memory.flags.writeable:
        return torch.from_numpy(memory)
    address = memory.__array_interface__["data"][0]
    alias: Any = (ctypes.c_uint8 * memory.nbytes).from_address(address)
    alias.source = memory
    return torch.from_numpy(np.frombuffer(alias, np.uint8))


def _one_shape(layout: Layout, group: int) -> LayerShape:
    shapes = layout.groups[group]
    if len(set(shapes)) != 1:
        raise LayoutError("layers have different shapes", "use DeviceKV.layered")
    return shapes[0]


def _raw(tensor: torch.Tensor, itemsize: int, expected: tuple[int, ...], name: str) -> torch.Tensor:
    """``tensor`` seen as integers of its item size, after a check of its shape (-1: any)."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(w in (-1, have) for w, have in zip(expected, shape, strict=True))
    if not fits or tensor.element_size() != itemsize or tensor.is_complex():
        wanted = "×".join("tokens" if want == -1 else str(want) for want in expected)
        raise LayoutError(
            f"{name} has shape {shape} of {tensor.dtype}, expected {wanted} with {itemsize} bytes an element",
            "pass tensors of the model the layout was made for",
        )
    return tensor.detach().view(_WORDS[itemsize])


def _widened(planes: Sequence[_Plane], itemsize: int) -> tuple[_Plane, ...]:
    """The planes seen as the widest words that divide every dim, stride and address of all of them."""
    word = next(size for size in (8, 4, 2, 1) if size == itemsize or all(_divides(size, p, itemsize) for p in planes))
    ratio = word // itemsize
    if ratio == 1:
        return tuple(planes)
    return tuple(
        _Plane(plane.tensor.view(_WORDS[word]), plane.base // ratio, tuple(step // ratio for step in plane.steps))
        for plane in planes
    )


def _divides(word: int, plane: _Plane, itemsize: int) -> bool:
    tensor = plane.tensor
    lengths = (tensor.shape[-1], plane.base, *plane.steps, *tensor.stride()[:-1], tensor.storage_offset())
    return (
        word > itemsize
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % word == 0
        and all(length * itemsize % word == 0 for length in lengths)
    )
