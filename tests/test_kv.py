"""Payload bytes and an engine's arrays agree, element by element, whatever the strides."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvstore.kv
from kvstore.errors import LayoutError
from kvstore.kv import HostKV, KVBuffer, Run
from kvstore.layout import LayerShape, Layout

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "float8_e5m2": np.uint8}
Array = npt.NDArray[Any]
Pairs = list[tuple[Array, Array]]
FILL = 0xA5


def offset_in_payload(shapes: tuple[LayerShape, ...], tokens: int, at: tuple[int, int, int, int, int]) -> int:
    """Element ``(layer, K or V, head, token, dim)`` of a payload, by the format's definition."""
    layer, kv, head, token, dim = at
    before = sum(shape.heads * (shape.k_dim + shape.v_dim) * tokens for shape in shapes[:layer])
    shape = shapes[layer]
    before += kv * shape.heads * shape.k_dim * tokens
    width = shape.v_dim if kv else shape.k_dim
    return before + (head * tokens + token) * width + dim


def elements(shapes: tuple[LayerShape, ...], tokens: int) -> list[tuple[int, int, int, int, int]]:
    return [
        (layer, kv, head, token, dim)
        for layer, shape in enumerate(shapes)
        for kv, width in enumerate((shape.k_dim, shape.v_dim))
        for head, token, dim in product(range(shape.heads), range(tokens), range(width))
    ]


class Case:
    """One buffer, the arrays under it, and a run over a memory full of FILL."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.kind = draw(st.sampled_from(["stacked", "paired", "layered"]))
        self.dtype = draw(st.sampled_from(sorted(DTYPES)))
        self.itemsize = np.dtype(DTYPES[self.dtype]).itemsize
        self.shapes = self._shapes(draw)
        self.tokens = draw(st.integers(1, 5))
        self.count = draw(st.integers(1, 3))
        self.take = self.tokens if self.count > 1 else draw(st.integers(0, self.tokens))
        self.start = draw(st.integers(0, 4))
        self.capacity = self.start + self.count * self.take + draw(st.integers(0, 3))
        self.layout = Layout(self.dtype, (self.shapes,), self.tokens)
        self.random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.strided = draw(st.booleans())
        self.buffer, self.pairs = self._buffer()
        payload = self.layout.payload_bytes()
        self.stride = payload + draw(st.sampled_from([0, 64, 4096])) // self.itemsize * self.itemsize
        self.offset = draw(st.sampled_from([0, 64, 128]))
        self.memory = np.full(self.offset + self.count * self.stride, FILL, np.uint8)
        self.run = Run(self.memory, self.offset, self.stride, self.count, self.tokens, self.take)

    def _shapes(self, draw: st.DrawFn) -> tuple[LayerShape, ...]:
        dims = st.integers(1, 3)
        if self.kind == "layered":
            return tuple(draw(st.lists(st.builds(LayerShape, dims, dims, dims), min_size=1, max_size=3)))
        heads, k_dim = draw(dims), draw(dims)
        return (LayerShape(heads, k_dim, k_dim if self.kind == "stacked" else draw(dims)),) * draw(st.integers(1, 3))

    def _array(self, *shape: int) -> Array:
        """Random bytes; where ``strided``, a view whose heads, tokens and dims lie apart and backwards."""
        if not self.strided:
            return self._random(shape)
        wide = self._random((*shape[:-3], shape[-2], shape[-3], shape[-1] * 2))
        return wide.swapaxes(-3, -2)[..., ::-1, ::2]

    def _random(self, shape: tuple[int, ...]) -> Array:
        size = int(np.prod(shape)) * self.itemsize
        return np.frombuffer(bytearray(self.random.bytes(size)), DTYPES[self.dtype]).reshape(shape)

    def _buffer(self) -> tuple[HostKV, Pairs]:
        layers, first = len(self.shapes), self.shapes[0]
        if self.kind == "stacked":
            array = self._array(layers, 2, first.heads, self.capacity, first.k_dim)
            return HostKV.stacked(self.layout, array), [(array[layer, 0], array[layer, 1]) for layer in range(layers)]
        if self.kind == "paired":
            keys = self._array(layers, first.heads, self.capacity, first.k_dim)
            values = self._array(layers, first.heads, self.capacity, first.v_dim)
            return HostKV.paired(self.layout, keys, values), list(zip(keys, values, strict=True))
        pairs = [
            (self._array(s.heads, self.capacity, s.k_dim), self._array(s.heads, self.capacity, s.v_dim))
            for s in self.shapes
        ]
        return HostKV.layered(self.layout, pairs), pairs

    def raw(self) -> list[tuple[Array, Array]]:
        """The arrays as unsigned integers, copied."""
        return [(k.view(f"u{self.itemsize}").copy(), v.view(f"u{self.itemsize}").copy()) for k, v in self.pairs]

    def expected_memory(self) -> npt.NDArray[np.uint8]:
        memory = np.full_like(self.memory, FILL)
        for index in range(self.count):
            words = memory[self.offset + index * self.stride :][: self.layout.payload_bytes()].view(f"u{self.itemsize}")
            for layer, kv, head, token, dim in elements(self.shapes, self.take):
                source = self.pairs[layer][kv].view(f"u{self.itemsize}")
                at = offset_in_payload(self.shapes, self.tokens, (layer, kv, head, token, dim))
                words[at] = source[head, self.start + index * self.take + token, dim]
        return memory


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(draw)


@settings(max_examples=150)
@given(cases())
def test_gather_writes_every_element_where_the_format_says_and_nothing_else(case: Case) -> None:
    before = case.raw()
    case.buffer.gather(case.start, case.run)
    np.testing.assert_array_equal(case.memory, case.expected_memory())
    for (k, v), (old_k, old_v) in zip(case.raw(), before, strict=True):
        np.testing.assert_array_equal(k, old_k)
        np.testing.assert_array_equal(v, old_v)


@settings(max_examples=150)
@given(cases(), st.integers(1, 600))
def test_what_is_gathered_by_the_payload_is_the_same_and_told_of_when_it_is_there(case: Case, stretch: int) -> None:
    whole = case.expected_memory()
    assume(case.take == case.tokens)
    size = case.layout.payload_bytes(tokens=case.tokens)
    with mock.patch.object(kvstore.kv, "STRETCH_BYTES", stretch):
        gather = HostKV(case.layout, case.buffer._planes, case.capacity).gathering(case.start, case.run)
    for at in reversed(range(case.count)):
        told = bytearray()

        def tell(piece: memoryview, at: int = at, told: bytearray = told) -> None:
            told.extend(piece)
            assert len(piece)
            assert told == case.run.payload(at, len(told)).tobytes()

        gather(at, tell)
        first = case.offset + at * case.stride
        assert told == whole[first : first + size].tobytes()
    np.testing.assert_array_equal(case.memory, whole)


@settings(max_examples=150)
@given(cases())
def test_scatter_is_the_inverse_of_gather_and_leaves_other_tokens_alone(case: Case) -> None:
    original = case.raw()
    case.buffer.gather(case.start, case.run)
    stored = case.memory.copy()
    for pair in case.pairs:
        for array in pair:
            array.view(f"u{case.itemsize}")[...] = 0x5A
    case.buffer.scatter(case.start, case.run)
    np.testing.assert_array_equal(case.memory, stored)
    stop = case.start + case.count * case.take
    for now, then in zip(case.raw(), original, strict=True):
        for mine, old in zip(now, then, strict=True):
            np.testing.assert_array_equal(mine[:, case.start : stop], old[:, case.start : stop])
            assert (mine[:, : case.start] == 0x5A).all()
            assert (mine[:, stop:] == 0x5A).all()


@settings(max_examples=50)
@given(cases(), st.data())
def test_a_run_in_pieces_does_what_the_whole_run_does(case: Case, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, case.count))
    case.buffer.gather(case.start, case.run.part(0, cut))
    case.buffer.gather(case.start + cut * case.take, case.run.part(cut, case.count - cut))
    np.testing.assert_array_equal(case.memory, case.expected_memory())


@settings(max_examples=50)
@given(cases())
def test_a_front_of_a_payload_is_loaded_without_the_rest(case: Case) -> None:
    # What partial matching does: the payload has more tokens than the prefix shares.
    case.buffer.gather(case.start, case.run)
    wanted = case.raw()
    for take in range(case.take + 1):
        for pair in case.pairs:
            for array in pair:
                array.view(f"u{case.itemsize}")[...] = 0
        case.buffer.scatter(case.start, Run(case.memory, case.offset, case.stride, 1, case.tokens, take))
        for now, then in zip(case.raw(), wanted, strict=True):
            for mine, old in zip(now, then, strict=True):
                np.testing.assert_array_equal(
                    mine[:, case.start : case.start + take], old[:, case.start : case.start + take]
                )
                assert not mine[:, case.start + take :].any()


def test_payloads_of_a_run_are_found_by_index() -> None:
    memory = np.arange(40, dtype=np.uint8)
    run = Run(memory, 4, 10, 3, 1, 1)
    assert run.payload(2, 6).tolist() == [24, 25, 26, 27, 28, 29]
    assert run.part(1, 2).payload(1, 6).tolist() == run.payload(2, 6).tolist()


@pytest.mark.parametrize(("count", "tokens", "take"), [(1, 4, 5), (1, 4, -1), (2, 4, 3)])
def test_a_run_cannot_take_what_its_payloads_do_not_hold(count: int, tokens: int, take: int) -> None:
    with pytest.raises(ValueError, match="cannot give"):
        Run(np.zeros(64, np.uint8), 0, 16, count, tokens, take)


UNIFORM = Layout.uniform(layers=2, heads=3, k_dim=4, block_tokens=4)
MLA = Layout.uniform(layers=2, heads=1, k_dim=6, v_dim=2, block_tokens=4)
MIXED = Layout("float32", ((LayerShape(1, 2, 2), LayerShape(2, 2, 2)),), 4)


def zeros(*shape: int, dtype: npt.DTypeLike = np.float32) -> Array:
    return np.zeros(shape, dtype)


def test_a_host_buffer_is_a_kv_buffer() -> None:
    buffer = HostKV.stacked(UNIFORM, zeros(2, 2, 3, 9, 4))
    assert isinstance(buffer, KVBuffer)
    assert (buffer.capacity, buffer.device) == (9, None)
    assert HostKV.paired(MLA, zeros(2, 1, 9, 6), zeros(2, 1, 7, 2)).capacity == 7
    assert HostKV.layered(MLA, [(zeros(1, 9, 6), zeros(1, 8, 2)), (zeros(1, 5, 6), zeros(1, 9, 2))]).capacity == 5


@pytest.mark.parametrize(
    "array",
    [zeros(3, 2, 3, 9, 4), zeros(2, 1, 3, 9, 4), zeros(2, 2, 4, 9, 4), zeros(2, 2, 3, 9, 5), zeros(2, 3, 9, 4),
     zeros(2, 2, 3, 9, 4, dtype=np.float16), zeros(2, 2, 3, 9, 4, dtype=np.float64)],
)  # fmt: skip
def test_arrays_of_another_shape_or_item_size_are_refused(array: Array) -> None:
    with pytest.raises(LayoutError, match="stacked KV has shape"):
        HostKV.stacked(UNIFORM, array)


def test_arrays_that_do_not_fit_the_layout_are_refused() -> None:
    with pytest.raises(LayoutError, match="different dims"):
        HostKV.stacked(MLA, zeros(2, 2, 1, 9, 6))
    with pytest.raises(LayoutError, match="stacked V"):
        HostKV.paired(MLA, zeros(2, 1, 9, 6), zeros(2, 1, 9, 6))
    with pytest.raises(LayoutError, match="different shapes"):
        HostKV.paired(MIXED, zeros(2, 1, 9, 2), zeros(2, 1, 9, 2))
    with pytest.raises(LayoutError, match="1 layers given, the layout has 2"):
        HostKV.layered(MIXED, [(zeros(1, 9, 2), zeros(1, 9, 2))])
    with pytest.raises(LayoutError, match="K of layer 1"):
        HostKV.layered(MIXED, [(zeros(1, 9, 2), zeros(1, 9, 2))] * 2)


@pytest.mark.parametrize("start", [-1, 6, 100])
def test_tokens_outside_the_buffer_are_refused_before_anything_is_copied(start: int) -> None:
    array = zeros(2, 2, 3, 9, 4)
    buffer = HostKV.stacked(UNIFORM, array)
    memory = np.full(UNIFORM.payload_bytes(), FILL, np.uint8)
    run = Run(memory, 0, len(memory), 1, 4, 4)
    with pytest.raises(LayoutError):
        buffer.gather(start, run)
    with pytest.raises(LayoutError):
        buffer.scatter(start, run)
    assert (memory == FILL).all()
    assert not array.any()


def test_a_run_past_the_end_of_its_memory_is_refused_not_read() -> None:
    buffer = HostKV.stacked(UNIFORM, zeros(2, 2, 3, 9, 4))
    short = Run(np.zeros(UNIFORM.payload_bytes() - 1, np.uint8), 0, 0, 1, 4, 4)
    with pytest.raises(ValueError, match=r"strides|buffer"):
        buffer.scatter(0, short)
