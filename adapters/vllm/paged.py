"""One sequence's KV in vLLM's pages, seen as a `KVBuffer`: token i lies in page ``blocks[i // page_tokens]``.

Whole blocks are moved by one operation a layer, for K and for V, however the pages are scattered. Must not know how
requests are scheduled or what the store does with the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import LayoutError
from kvstore.kv import STRETCH_BYTES, Array, Gathering, Run, Told
from kvstore.layout import BLOCK_TOKENS_MAX, PAYLOAD_TARGET, Layout


@dataclass(frozen=True, slots=True)
class PagePlane:
    """K or V of one layer: ``[pages, heads, page_tokens, dim]``, elements as integers of their size.

    base: elements *a token* before this plane in a payload. by_dim: its payload is ``[head][dim][token]``, as its
    pages are, instead of ``[head][token][dim]``.
    """

    array: Array
    base: int
    by_dim: bool

    @property
    def stop(self) -> int:
        """Elements a token up to this plane's end."""
        return self.base + int(self.array.shape[1] * self.array.shape[3])


def page_planes(layout: Layout, layers: Sequence[tuple[Array, Array]], *, by_dim: bool) -> tuple[PagePlane, ...]:
    """Planes over K and V of every layer, in the payload's order.

    layers: K ``[pages, heads, page_tokens, k_dim]`` and V likewise. by_dim: K is kept dimension by dimension. Raises
    LayoutError for shapes or item sizes that are not the layout's.
    """
    shapes = layout.groups[0]
    if len(layers) != len(shapes):
        raise LayoutError(f"{len(layers)} layers registered, the layout has {len(shapes)}", "pass every layer once")
    found: list[PagePlane] = []
    base = 0
    for shape, pair in zip(shapes, layers, strict=True):
        for array, dim, turned in zip(pair, (shape.k_dim, shape.v_dim), (by_dim, False), strict=True):
            if array.ndim != 4 or array.shape[1] != shape.heads or array.shape[3] != dim:
                raise LayoutError(f"pages of shape {array.shape}, the layout says {shape}", "check the engine's layers")
            if array.dtype.itemsize != layout.itemsize:
                raise LayoutError(f"pages of {array.dtype}, the layout says {layout.dtype}", "check the engine's dtype")
            found.append(PagePlane(array.view(f"u{layout.itemsize}"), base, turned))
            base += shape.heads * dim
    return tuple(found)


class PagedKV:
    """A KVBuffer over pages in host memory. blocks: the sequence's pages in order. first: tokens that stay untouched.

    first: a multiple of the page's tokens; a scatter leaves the pages before it alone, which other sequences may share.
    """

    def __init__(self, planes: Sequence[PagePlane], blocks: Sequence[int], *, first: int = 0) -> None:
        self._planes = tuple(planes)
        self._blocks = np.asarray(blocks, np.int64)
        self._page = int(self._planes[0].array.shape[2])
        self._first = first // self._page
        pages = self._planes[0].array.shape[0]
        if len(self._blocks) and (int(self._blocks.min()) < 0 or int(self._blocks.max()) >= pages):
            raise LayoutError(f"a page outside 0…{pages - 1}", "check the engine's block table")

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return len(self._blocks) * self._page

    @property
    def device(self) -> str | None:
        """Host memory: None."""
        return None

    def fits(self, layout: Layout, group: int) -> bool:
        """Whether its pages are those of a layout's group."""
        wanted = [(shape.heads, dim) for shape in layout.groups[group] for dim in (shape.k_dim, shape.v_dim)]
        arrays = [plane.array for plane in self._planes]
        return wanted == [(array.shape[1], array.shape[3]) for array in arrays] and all(
            array.dtype.itemsize == layout.itemsize for array in arrays
        )

    def gather(self, start: int, run: Run) -> None:
        """Copy tokens from ``start`` on into the run's payloads. Raises LayoutError past the capacity."""
        self._gather(start, run)

    def gathering(self, start: int, run: Run) -> Gathering:
        """A gather, to be done payload by payload (`KVBuffer.gathering`)."""
        return lambda at, told: self._gather(start + at * run.take, run.part(at, 1), told)

    def _gather(self, start: int, run: Run, told: Told | None = None) -> None:
        """told: given with a run of one payload, gets its bytes."""
        whole = self._whole(start, run)
        begin = run.offset
        for plane in self._planes:
            if whole is None:
                for inside, outside in self._pieces(plane, start, run, 0):
                    np.copyto(inside, outside)
            elif isinstance(whole, slice):
                np.copyto(_units(plane, run, self._page)[:, 0], plane.array[whole])
            else:
                _units(plane, run, self._page)[...] = plane.array[whole]
            stop = run.offset + plane.stop * run.tokens * plane.array.dtype.itemsize
            if told is not None and (stop - begin >= STRETCH_BYTES or plane is self._planes[-1]):
                told(run.memory.data[begin:stop])
                begin = stop

    def scatter(self, start: int, run: Run) -> None:
        """Copy the run's payloads to the tokens from ``start`` on. Raises LayoutError past the capacity."""
        whole = self._whole(start, run) if start >= self._first * self._page else None
        for plane in self._planes:
            if whole is None:
                for inside, outside in self._pieces(plane, start, run, self._first):
                    np.copyto(outside, inside)
            elif isinstance(whole, slice):
                np.copyto(plane.array[whole], _units(plane, run, self._page)[:, 0])
            else:
                plane.array[whole] = _units(plane, run, self._page)

    def _whole(self, start: int, run: Run) -> slice | npt.NDArray[np.int64] | None:
        """The pages of a run of whole pages: a slice, or an index ``[payloads, pages each]``; None for other runs."""
        stop = start + run.count * run.take
        if start < 0 or stop > self.capacity:
            raise LayoutError(f"tokens {start}…{stop} of a buffer for {self.capacity}", "make room first")
        if run.take != run.tokens or run.take % self._page or start % self._page or not run.count:
            return None
        pages = self._blocks[start // self._page : stop // self._page]
        if run.take == self._page and bool((np.diff(pages) == 1).all()):
            return slice(int(pages[0]), int(pages[0]) + len(pages))
        return pages.reshape(run.count, -1)

    def _pieces(self, plane: PagePlane, start: int, run: Run, first: int) -> Iterator[tuple[Array, Array]]:
        """Pairs of equal views ``[heads, tokens, dim]``, payload and page, for every page that a payload touches."""
        for payload in range(run.count):
            inside = _payload(plane, run, payload)
            at = start + payload * run.take
            done = 0
            while done < run.take:
                page, offset = divmod(at + done, self._page)
                count = min(run.take - done, self._page - offset)
                if page >= first:
                    outside = plane.array[self._blocks[page], :, offset : offset + count]
                    yield inside[:, done : done + count], outside
                done += count


def _payload(plane: PagePlane, run: Run, index: int) -> Array:
    """The plane's elements in one payload: ``[heads, tokens, dim]``."""
    found: Array = _inside(plane, run, 1, run.tokens, run.offset + index * run.stride)[0, 0]
    return found


def _units(plane: PagePlane, run: Run, page: int) -> Array:
    """The plane's elements in a run of whole pages: ``[payloads, pages each, heads, page_tokens, dim]``."""
    return _inside(plane, run, run.count, page, run.offset)


def _inside(plane: PagePlane, run: Run, count: int, page: int, offset: int) -> Array:
    _, heads, _, dim = plane.array.shape
    size = plane.array.dtype.itemsize
    token, element = (size, run.tokens * size) if plane.by_dim else (dim * size, size)
    return np.ndarray(
        (count, run.tokens // page, heads, page, dim),
        plane.array.dtype,
        buffer=run.memory,
        offset=offset + plane.base * run.tokens * size,
        strides=(run.stride, page * token, dim * run.tokens * size, token, element),
    )


def block_tokens_for(page: int, token_bytes: int, target: int = PAYLOAD_TARGET, most: int = BLOCK_TOKENS_MAX) -> int:
    """Tokens of a stored block: whole pages, as many (a power of two) as make a payload at least ``target`` bytes."""
    pages = max(1, math.ceil(target / (page * token_bytes)))
    pages = 1 << (pages - 1).bit_length()
    while pages > 1 and pages * page > most:
        pages //= 2
    return pages * page
