"""Layers that grow in place behave like stock layers, whatever is done to the cache in between."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402

from kvstore.adapters.transformers import buffers  # noqa: E402
from kvstore.adapters.transformers.growing import GrowingCache, GrowingLayer, hold, install, stack_of  # noqa: E402
from kvstore.adapters.transformers.pool import Pool  # noqa: E402
from kvstore.adapters.transformers.stack import Stack  # noqa: E402
from kvstore.layout import LayerShape, Layout  # noqa: E402

GQA = (LayerShape(2, 4, 4),) * 3
MLA = (LayerShape(1, 6, 2),) * 2
MIXED = (LayerShape(2, 4, 4), LayerShape(1, 8, 8), LayerShape(3, 4, 2))
POOL = Pool()
CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters

steps = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 90)),
        st.tuples(st.just("crop"), st.integers(1, 5)),
        st.tuples(st.just("crop to"), st.integers(1, 5)),
        st.tuples(st.just("reorder"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.integers(2, 3)),
        st.tuples(st.just("select"), st.integers(0, 5)),
        st.tuples(st.just("deepcopy"), st.just(0)),
        st.tuples(st.just("shorten by hand"), st.integers(1, 3)),
        st.tuples(st.just("drop the front by hand"), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.integers(1, 3)),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, shapes=st.sampled_from([GQA, MLA, MIXED]), seed=st.integers(0, 99))
def test_growing_and_stock_cache_hold_the_same_whatever_is_done(steps: Any, shapes: Any, seed: int) -> None:
    torch.manual_seed(seed)
    ours: Any = GrowingCache(shapes, torch.float32, batch=1, capacity=64, pool=POOL)
    stock: Any = DynamicCache()
    batch = 1
    _update(ours, stock, shapes, batch, 5)
    for verb, number in steps:
        length = stock.get_seq_length()
        if verb == "update":
            _update(ours, stock, shapes, batch, number)
        elif verb == "crop" and length > number:
            both(ours, stock, lambda cache, n=number: cache.crop(-n))
        elif verb == "crop to" and CROPS_TO_LENGTH:
            both(ours, stock, lambda cache, n=number: cache.crop(n))
        elif verb == "reorder":
            order = torch.roll(torch.arange(batch), number)
            both(ours, stock, lambda cache, order=order: cache.reorder_cache(order))
        elif verb == "repeat" and batch < 4:
            batch *= number
            both(ours, stock, lambda cache, n=number: cache.batch_repeat_interleave(n))
        elif verb == "select" and batch > 1:
            keep = torch.tensor([number % batch])
            batch = 1
            both(ours, stock, lambda cache, keep=keep: cache.batch_select_indices(keep))
        elif verb == "deepcopy":
            left, ours = ours, copy.deepcopy(ours)
            both(left, stock, lambda cache: None)
            left.layers[0].update(*_states(shapes[0], batch, 1))  # must not reach the copy
        elif verb == "shorten by hand" and length > number:
            both(ours, stock, lambda cache, n=number: _cut_by_hand(cache, slice(None, -n)))
        elif verb == "drop the front by hand" and length > number:
            both(ours, stock, lambda cache, n=number: _cut_by_hand(cache, slice(n, None)))
        elif verb == "restart":
            ours.reset()
            stock, batch = DynamicCache(), number
            assert ours.get_seq_length() == 0
            _update(ours, stock, shapes, batch, 3)
        same(ours, stock)
    _update(ours, stock, shapes, batch, 1)
    assert stack_of(ours) is not None


def test_a_growing_cache_is_a_dynamic_cache_of_dynamic_layers() -> None:
    cache = GrowingCache(GQA, torch.float32)
    assert isinstance(cache, DynamicCache)
    assert all(isinstance(layer, DynamicLayer) for layer in cache.layers)
    assert len(cache) == len(GQA)


def test_what_was_handed_out_before_growing_stays_as_it_was() -> None:
    cache = GrowingCache(GQA, torch.float32, capacity=64)
    keys, _ = cache.update(*_states(GQA[0], 1, 60), 0)
    before = keys.clone()
    cache.update(*_states(GQA[0], 1, 60), 0)
    assert torch.equal(keys, before)
    assert torch.equal(cache.layers[0].keys[:, :, :60], before)


def test_buffers_made_under_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        cache = GrowingCache(GQA, torch.float32, capacity=64)
        for index in range(3):
            cache.update(*_states(GQA[0], 1, 3), index)
    for index in range(3):
        cache.update(*_states(GQA[0], 1, 80), index)
    with torch.inference_mode():
        cache.update(*_states(GQA[0], 1, 80), 0)
    assert cache.get_seq_length() == 163


def test_gradients_flow_through_a_growing_cache_as_through_a_stock_one() -> None:
    torch.manual_seed(1)
    first, second = _states(GQA[0], 1, 3), _states(GQA[0], 1, 2)
    sums = []
    for cache in (GrowingCache(GQA, torch.float32), DynamicCache()):
        wanted = [side.clone().requires_grad_() for side in first]
        cache.update(*wanted, 0)
        keys, values = cache.update(*second, 0)
        (keys.pow(2).sum() + values.sum()).backward()
        sums.append([side.grad for side in wanted])
    assert all(torch.equal(ours, stock) for ours, stock in zip(*sums, strict=True))


@pytest.mark.parametrize("shapes", [GQA, MLA, MIXED])
def test_every_layer_starts_at_an_aligned_address(shapes: Any) -> None:
    stack = Stack(shapes, torch.float32, torch.device("cpu"), 2, 65, Pool())
    for tensor in (*stack.keys, *stack.values):
        assert all(tensor[row, head].data_ptr() % 64 == 0 for row in range(2) for head in range(tensor.shape[1]))


@pytest.mark.parametrize("shapes", [GQA, MLA, MIXED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_store_sees_the_rows_of_a_cache(shapes: Any, dtype: Any) -> None:
    layout = Layout(str(dtype).removeprefix("torch."), (tuple(shapes),), 16)
    cache: Any = DynamicCache()
    stack = Stack(shapes, dtype, torch.device("cpu"), 2, 64, Pool())
    install(cache, stack)
    for index, shape in enumerate(shapes):
        cache.update(*_states(shape, 2, 20, dtype), index)
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    payload = _payload(layout, 15)
    stack.row(layout, 1, 5).gather(0, payload)
    for tensor in (*stack.keys, *stack.values):
        tensor.zero_()
    stack.row(layout, 0, 2).scatter(0, payload)
    hold(cache, 17)
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        assert isinstance(layer, GrowingLayer)
        assert torch.equal(layer.keys[0, :, 2:], keys[1, :, 5:])
        assert torch.equal(layer.values[0, :, 2:], values[1, :, 5:])


@pytest.mark.parametrize("shapes", [GQA, MLA, MIXED])
def test_tensors_on_a_device_are_gathered_as_host_tensors_are(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout("float32", (tuple(shapes),), 16)
    stack = Stack(shapes, torch.float32, torch.device("cpu"), 2, 64, Pool())
    for tensor in (*stack.keys, *stack.values):
        tensor.normal_()
    host, device = _payload(layout, 15), _payload(layout, 15)
    stack.row(layout, 1, 5).gather(3, host)
    monkeypatch.setattr(buffers, "_is_host", lambda tensor: False)
    stack.row(layout, 1, 5).gather(3, device)
    assert (host.memory == device.memory).all()


def test_memory_is_reused_only_when_nobody_can_see_it() -> None:
    pool = Pool()
    first = Stack(GQA, torch.float32, torch.device("cpu"), 1, 64, pool)
    address, held = first.keys[0].data_ptr(), first.values[2]
    del first
    second = Stack(GQA, torch.float32, torch.device("cpu"), 1, 64, pool)
    assert second.keys[0].data_ptr() != address
    del held
    third = Stack(GQA, torch.float32, torch.device("cpu"), 1, 64, pool)
    assert third.keys[0].data_ptr() == address
    assert (pool.made, pool.reused) == (2, 1)


def test_a_pool_keeps_no_more_than_it_may() -> None:
    pool = Pool(keep_bytes=8 << 20)
    arrays = [pool.take(3 << 20) for _ in range(6)]
    assert all(array.ctypes.data % 4096 == 0 and array.size >= 3 << 20 for array in arrays)
    del arrays
    again = [pool.take(3 << 20) for _ in range(6)]
    assert all(array.size == 4 << 20 for array in again)
    assert (pool.made, pool.reused) == (10, 2)


def test_a_warmed_pool_hands_out_what_it_warmed() -> None:
    pool = Pool()
    pool.warm(5 << 20)
    assert pool.take(5 << 20).size >= 5 << 20
    assert (pool.made, pool.reused) == (1, 1)


def _states(shape: LayerShape, batch: int, tokens: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    keys = torch.randn(batch, shape.heads, tokens, shape.k_dim, dtype=dtype)
    return keys, torch.randn(batch, shape.heads, tokens, shape.v_dim, dtype=dtype)


def _update(ours: Any, stock: Any, shapes: Any, batch: int, tokens: int) -> None:
    for index, shape in enumerate(shapes):
        keys, values = _states(shape, batch, tokens)
        for left, right in zip(ours.update(keys, values, index), stock.update(keys, values, index), strict=True):
            assert torch.equal(left, right)


def _cut_by_hand(cache: Any, part: slice) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, part], layer.values[:, :, part]


def both(ours: Any, stock: Any, act: Any) -> None:
    act(ours)
    act(stock)
    same(ours, stock)


def same(ours: Any, stock: Any) -> None:
    assert ours.get_seq_length() == stock.get_seq_length()
    for left, right in zip(ours.layers, stock.layers, strict=True):
        assert torch.equal(left.keys, right.keys)
        assert torch.equal(left.values, right.values)


def _payload(layout: Layout, tokens: int) -> Any:
    import numpy as np

    from kvstore.kv import Run

    size = layout.payload_bytes(0, tokens)
    return Run(np.zeros(size, np.uint8), 0, size, 1, tokens, tokens)
