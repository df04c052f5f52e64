"""KV tensors in host memory, seen as a source and a destination of blocks.

`KVBuffer` is the seam between the store and an engine: the store knows payload bytes, an engine knows its tensors,
and a KVBuffer moves one into the other, many blocks by one strided copy. Must not know torch, tiers or keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvstore.errors import LayoutError
from kvstore.layout import LayerShape, Layout

Bytes: TypeAlias = npt.NDArray[np.uint8]
Array: TypeAlias = npt.NDArray[Any]
Told: TypeAlias = Callable[[memoryview], object]
"""Given all bytes of a payload while it is gathered, front to back, in pieces, each as soon as it is there."""
Gathering: TypeAlias = Callable[[int, Told], None]
"""Gathers one payload of a run, by its number, and tells of its bytes. Called from several threads at once."""

STRETCH_BYTES = 1 << 20
"""Bytes that a gather writes before it tells of them: few enough to be still in the core's own cache."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` payloads of ``tokens`` tokens each, at equal distances in one byte buffer.

    memory: flat uint8. offset: byte of the first payload. stride: bytes from one payload to the next. take: tokens
    used of each payload, from its front; less than ``tokens`` only where count is 1.
    """

    memory: Bytes
    offset: int
    stride: int
    count: int
    tokens: int
    take: int

    def __post_init__(self) -> None:
        if not 0 <= self.take <= self.tokens or (self.take < self.tokens and self.count > 1):
            raise ValueError(f"{self.count} payloads of {self.tokens} tokens cannot give {self.take} each")

    def part(self, first: int, count: int) -> Run:
        """``count`` payloads from ``first`` on."""
        return Run(self.memory, self.offset + first * self.stride, self.stride, count, self.tokens, self.take)

    def payload(self, index: int, size: int) -> Bytes:
        """The bytes of payload ``index``, ``size`` of them."""
        start = self.offset + index * self.stride
        return self.memory[start : start + size]


@runtime_checkable
class KVBuffer(Protocol):
    """KV of one sequence; token i of the sequence is at position i.

    `gather`, `scatter` and what `gathering` gives are called from several threads at once, for disjoint tokens, and
    release the GIL while they copy. ``device`` is None for host memory; other values name a device that the `hbm` tier
    copies for.
    """

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""

    @property
    def device(self) -> str | None:
        """None for host memory."""

    def fits(self, layout: Layout, group: int) -> bool:
        """Whether its payloads are those of a layout's group. A save or a load of another one is refused."""

    def gather(self, start: int, run: Run) -> None:
        """Copy tokens from ``start`` on into the run's payloads."""

    def gathering(self, start: int, run: Run) -> Gathering:
        """A gather, prepared, to be done payload by payload, for a run whose payloads are used whole.

        All bytes of a payload must be written and told of, each once and in order: a slot still has what was in it
        before, and the checksum is taken of what is told. A block whose checksum is wrong is dropped when it is
        verified, which not every read from `ram` does. Raises LayoutError past the capacity, or what it gives does.
        """

    def scatter(self, start: int, run: Run) -> None:
        """Copy the run's payloads to the tokens from ``start`` on."""


@dataclass(frozen=True, slots=True)
class _Plane:
    """One array ``[*lead, tokens, dim]`` and where its elements lie in a payload.

    base, steps: elements *a token* before the plane's first element, and from one index of each lead axis to the
    next; a payload of n tokens multiplies both by n.
    """

    array: Array
    base: int
    steps: tuple[int, ...]

    @property
    def every_layer(self) -> bool:
        """Whether its first axis is the layers; else it is K or V of one layer."""
        return len(self.steps) > 1


class _Cut(NamedTuple):
    """Layers, or planes of one each, that fill the next bytes of a payload. stop: elements *a token* up to there."""

    first: int
    last: int
    stop: int


class HostKV:
    """A KVBuffer over numpy arrays.

    Build it with `stacked` (one array for all layers: the fastest) or `layered` (two arrays a layer). Elements are
    copied as raw bytes, so an array of any dtype of the layout's item size will do (bfloat16 as uint16).
    """

    def __init__(self, layout: Layout, planes: Sequence[_Plane], capacity: int, group: int = 0) -> None:
        self.layout = layout
        self.group = group
        self._planes = tuple(planes)
        self._cuts = _cuts(self._planes, STRETCH_BYTES // (layout.itemsize * layout.block_tokens))
        self._capacity = capacity

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self._capacity

    @property
    def device(self) -> str | None:
        """Host memory: None."""
        return None

    def fits(self, layout: Layout, group: int) -> bool:
        """Whether its arrays are those of a layout's group."""
        return self.layout.alike(self.group, layout, group)

    @classmethod
    def stacked(cls, layout: Layout, array: Array, group: int = 0) -> HostKV:
        """Over one array ``[layers, 2, heads, tokens, dim]``: layers all alike, K and V with the same dim.

        Raises LayoutError for another shape or item size.
        """
        shape = _uniform(layout, group)
        if shape.k_dim != shape.v_dim:
            raise LayoutError("K and V have different dims", "use HostKV.paired or HostKV.layered")
        heads, dim = shape.heads, shape.k_dim
        raw = _raw(array, layout.itemsize, (len(layout.groups[group]), 2, heads, -1, dim), "stacked KV")
        return cls(layout, [_Plane(raw, 0, (2 * heads * dim, heads * dim, dim))], raw.shape[3], group)

    @classmethod
    def paired(cls, layout: Layout, keys: Array, values: Array, group: int = 0) -> HostKV:
        """Over K ``[layers, heads, tokens, k_dim]`` and V ``[layers, heads, tokens, v_dim]``: layers all alike.

        Raises LayoutError for another shape or item size.
        """
        shape = _uniform(layout, group)
        count, heads = len(layout.groups[group]), shape.heads
        raw_k = _raw(keys, layout.itemsize, (count, heads, -1, shape.k_dim), "stacked K")
        raw_v = _raw(values, layout.itemsize, (count, heads, -1, shape.v_dim), "stacked V")
        planes = [
            _Plane(raw_k, 0, (shape.elements, shape.k_dim)),
            _Plane(raw_v, heads * shape.k_dim, (shape.elements, shape.v_dim)),
        ]
        return cls(layout, planes, min(raw_k.shape[2], raw_v.shape[2]), group)

    @classmethod
    def layered(cls, layout: Layout, layers: Sequence[tuple[Array, Array]], group: int = 0) -> HostKV:
        """Over K ``[heads, tokens, k_dim]`` and V ``[heads, tokens, v_dim]`` for every layer.

        Raises LayoutError for another shape, item size or number of layers.
        """
        shapes = layout.groups[group]
        if len(layers) != len(shapes):
            raise LayoutError(f"{len(layers)} layers given, the layout has {len(shapes)}", "pass every layer once")
        planes: list[_Plane] = []
        base = 0
        for index, (shape, pair) in enumerate(zip(shapes, layers, strict=True)):
            for array, dim, name in zip(pair, (shape.k_dim, shape.v_dim), "KV", strict=True):
                raw = _raw(array, layout.itemsize, (shape.heads, -1, dim), f"{name} of layer {index}")
                planes.append(_Plane(raw, base, (dim,)))
                base += shape.heads * dim
        return cls(layout, planes, min(plane.array.shape[-2] for plane in planes), group)

    def gather(self, start: int, run: Run) -> None:
        """Copy tokens from ``start`` on into the run's payloads. Raises LayoutError past the capacity."""
        for inside, outside in self._views(start, run):
            np.copyto(inside, outside)

    def gathering(self, start: int, run: Run) -> Gathering:
        """A gather, to be done payload by payload. Raises LayoutError past the capacity.

        What is between two copies is kept short: they leave nothing of it in a core's cache.
        """
        views, cuts, every_layer = self._views(start, run), self._cuts, self._planes[0].every_layer
        memory, scale = run.memory.data, run.tokens * self.layout.itemsize

        def gather(at: int, told: Told) -> None:
            here = begin = run.offset + at * run.stride
            for first, last, stop in cuts:
                if every_layer:
                    for inside, outside in views:
                        inside[at, first:last] = outside[at, first:last]
                else:
                    for inside, outside in views[first:last]:
                        inside[at] = outside[at]
                end = here + stop * scale
                told(memory[begin:end])
                begin = end

        return gather

    def scatter(self, start: int, run: Run) -> None:
        """Copy the run's payloads to the tokens from ``start`` on. Raises LayoutError past the capacity."""
        if run.count == 0:
            return
        for inside, outside in self._views(start, run):
            np.copyto(outside, inside)

    def _views(self, start: int, run: Run) -> list[tuple[Array, Array]]:
        """Every plane's elements in the run, and its own tokens: ``[count, *lead, take, dim]`` both."""
        if run.count == 0:
            return []
        return [(self._inside(plane, run), self._outside(plane, start, run)) for plane in self._planes]

    def _inside(self, plane: _Plane, run: Run) -> Array:
        """The plane's elements in the run: ``[count, *lead, take, dim]``."""
        lead, dim, size = plane.array.shape[:-2], plane.array.shape[-1], self.layout.itemsize
        return np.ndarray(
            (run.count, *lead, run.take, dim),
            plane.array.dtype,
            buffer=run.memory,
            offset=run.offset + plane.base * run.tokens * size,
            strides=(run.stride, *(step * run.tokens * size for step in plane.steps), dim * size, size),
        )

    def _outside(self, plane: _Plane, start: int, run: Run) -> Array:
        """The plane's own tokens from ``start`` on: ``[count, *lead, take, dim]``."""
        stop = start + run.count * run.take
        if start < 0 or stop > self._capacity:
            raise LayoutError(f"tokens {start}…{stop} of a buffer for {self._capacity}", "make room first")
        tokens = plane.array[..., start:stop, :]
        if run.count == 1:
            return tokens[None]
        lead = tokens.ndim - 2
        apart = tokens.reshape(*tokens.shape[:lead], run.count, run.take, tokens.shape[-1])
        return apart.transpose(lead, *range(lead), lead + 1, lead + 2)


def _cuts(planes: Sequence[_Plane], most: int) -> list[_Cut]:
    """Where a payload can be cut so that about ``most`` elements a token lie between two cuts: between layers."""
    if planes[0].every_layer:
        layer, count = planes[0].steps[0], len(planes[0].array)
        stops = [layer * number for number in range(1, count + 1)]
    else:  # one behind the other
        stops = [plane.base + len(plane.array) * plane.steps[0] for plane in planes]
    cuts: list[_Cut] = []
    first = start = 0
    for last, stop in enumerate(stops, 1):
        if stop - start >= most or last == len(stops):
            cuts.append(_Cut(first, last, stop))
            first, start = last, stop
    return cuts


def _uniform(layout: Layout, group: int) -> LayerShape:
    shapes = layout.groups[group]
    if len(set(shapes)) != 1:
        raise LayoutError("layers have different shapes", "use HostKV.layered")
    return shapes[0]


def _raw(array: Array, itemsize: int, expected: tuple[int, ...], name: str) -> Array:
    """``array`` seen as unsigned integers of its item size, after a check of its shape (-1: any)."""
    fits = array.ndim == len(expected) and all(
        want in (-1, have) for want, have in zip(expected, array.shape, strict=False)
    )
    if not fits or array.dtype.itemsize != itemsize:
        wanted = "×".join("tokens" if want == -1 else str(want) for want in expected)
        raise LayoutError(
            f"{name} has shape {array.shape} of {array.dtype}, expected {wanted} with {itemsize} bytes an element",
            "pass tensors of the model the layout was made for",
        )
    return array.view(f"u{itemsize}")
