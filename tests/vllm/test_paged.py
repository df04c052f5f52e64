"""Paged KV: every token is where the block table says, whatever the payloads' size, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import StoreMaker, tokens_of

from kvstore.adapters.vllm import paged
from kvstore.adapters.vllm.paged import PagedKV, block_tokens_for, page_planes
from kvstore.errors import LayoutError
from kvstore.kv import Run
from kvstore.layout import LayerShape, Layout

HEADS, DIM, LAYERS = 2, 3, 2
SHAPE = LayerShape(HEADS, DIM, DIM)
Pages = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]


def pages(count: int, page: int, *, by_dim: bool, seed: int | None = None) -> Pages:
    """K and V pages of every layer, as strided views of one page tensor each; zeros without a seed."""
    found: Pages = []
    for layer in range(LAYERS):
        whole = np.zeros((count, HEADS, 2, page * DIM), np.float32)
        if seed is not None:
            whole[...] = np.random.default_rng(seed + layer).standard_normal(whole.shape)
        keys = whole[:, :, 0].reshape(count, HEADS, DIM, page) if by_dim else whole[:, :, 0]
        keys = np.moveaxis(keys, -1, -2) if by_dim else keys.reshape(count, HEADS, page, DIM)
        found.append((keys, whole[:, :, 1].reshape(count, HEADS, page, DIM)))
    return found


def layout(block: int) -> Layout:
    return Layout("float32", ((SHAPE,) * LAYERS,), block)


def sequence(pairs: Pages, blocks: Sequence[int]) -> npt.NDArray[np.float32]:
    """``[2 · layers, heads, tokens, dim]`` of a sequence, page by page."""
    sides = [side for pair in pairs for side in pair]
    return np.stack([np.concatenate([side[block] for block in blocks], axis=1) for side in sides])


@given(
    page=st.sampled_from([2, 4, 8]),
    ratio=st.integers(1, 4),
    count=st.integers(1, 4),
    by_dim=st.booleans(),
    scattered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_gathered_comes_back_at_other_pages(
    page: int, ratio: int, count: int, by_dim: bool, scattered: bool, seed: int
) -> None:
    block, needed = page * ratio, ratio * count
    source, target = pages(20, page, by_dim=by_dim, seed=seed), pages(20, page, by_dim=by_dim)
    order = np.random.default_rng(seed).permutation(20)[:needed].tolist() if scattered else list(range(2, 2 + needed))
    other = order[::-1]
    stride = layout(block).payload_bytes() + 64
    run = Run(np.zeros(stride * count + 64, np.uint8), 32, stride, count, block, block)
    PagedKV(page_planes(layout(block), source, by_dim=by_dim), order).gather(0, run)
    PagedKV(page_planes(layout(block), target, by_dim=by_dim), other).scatter(0, run)
    assert np.array_equal(sequence(source, order), sequence(target, other))
    untouched = [at for at in range(20) if at not in other]
    assert not sequence(target, untouched).any()


@given(
    tokens=st.integers(1, 16),
    data=st.data(),
    start=st.sampled_from([0, 4, 8]),
    by_dim=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_partial_payload_gives_exactly_the_tokens_taken(
    tokens: int, data: st.DataObject, start: int, by_dim: bool, seed: int
) -> None:
    page, take = 4, data.draw(st.integers(1, tokens))
    source, target = pages(9, page, by_dim=by_dim, seed=seed), pages(9, page, by_dim=by_dim)
    blocks = np.random.default_rng(seed).permutation(9)[:6].tolist()
    run = Run(np.zeros(layout(16).payload_bytes(), np.uint8), 0, 0, 1, tokens, tokens)
    PagedKV(page_planes(layout(16), source, by_dim=by_dim), blocks).gather(start, run)
    fewer = Run(run.memory, 0, 0, 1, tokens, take)
    PagedKV(page_planes(layout(16), target, by_dim=by_dim), blocks).scatter(start, fewer)
    sent, got = sequence(source, blocks), sequence(target, blocks)
    assert np.array_equal(sent[:, :, start : start + take], got[:, :, start : start + take])
    assert not got[:, :, :start].any()
    assert not got[:, :, start + take :].any()


def test_pages_before_the_first_wanted_token_stay_as_they_are() -> None:
    source, target = pages(8, 4, by_dim=True, seed=1), pages(8, 4, by_dim=True)
    run = Run(np.zeros(layout(16).payload_bytes(), np.uint8), 0, 0, 1, 16, 16)
    PagedKV(page_planes(layout(16), source, by_dim=True), [0, 1, 2, 3]).gather(0, run)
    PagedKV(page_planes(layout(16), target, by_dim=True), [4, 5, 6, 7], first=8).scatter(0, run)
    assert not sequence(target, [4, 5]).any()
    assert np.array_equal(sequence(target, [6, 7]), sequence(source, [2, 3]))


def test_more_tokens_than_pages_is_refused() -> None:
    buffer = PagedKV(page_planes(layout(8), pages(4, 4, by_dim=False), by_dim=False), [0, 1])
    run = Run(np.zeros(layout(8).payload_bytes() * 2, np.uint8), 0, layout(8).payload_bytes(), 2, 8, 8)
    with pytest.raises(LayoutError):
        buffer.gather(0, run)
    with pytest.raises(LayoutError):
        PagedKV(page_planes(layout(8), pages(4, 4, by_dim=False), by_dim=False), [4])


def test_pages_of_another_shape_are_refused() -> None:
    wrong = [(keys[:, :1], values) for keys, values in pages(4, 4, by_dim=False)]
    with pytest.raises(LayoutError):
        page_planes(layout(8), wrong, by_dim=False)
    with pytest.raises(LayoutError):
        page_planes(layout(8), pages(4, 4, by_dim=False)[:1], by_dim=False)


@pytest.mark.parametrize("by_dim", [False, True])
def test_a_store_brings_pages_back_to_the_token(make_store: StoreMaker, by_dim: bool) -> None:
    store = make_store().store
    space = store.namespace(layout(16))
    source, target = pages(40, 4, by_dim=by_dim, seed=3), pages(40, 4, by_dim=by_dim)
    blocks, tokens = np.random.default_rng(0).permutation(40)[:20].tolist(), tokens_of(1, 77)
    store.save(space, tokens, PagedKV(page_planes(layout(16), source, by_dim=by_dim), blocks))
    store.evict(everything=True, tier="ram") if store.flush(30) and by_dim else None
    loaded = store.load(
        store.match(space, tokens, limit=70), PagedKV(page_planes(layout(16), target, by_dim=by_dim), blocks[::-1])
    )
    assert loaded.tokens == 70
    assert np.array_equal(sequence(source, blocks)[:, :, :70], sequence(target, blocks[::-1])[:, :, :70])
    assert not sequence(target, blocks[::-1])[:, :, 70:].any()


@pytest.mark.parametrize(
    ("page", "token_bytes", "expected"), [(128, 46_080, 128), (16, 46_080, 128), (16, 512, 256), (16, 131_072, 32)]
)
def test_a_block_is_whole_pages_of_about_four_mebibytes(page: int, token_bytes: int, expected: int) -> None:
    assert block_tokens_for(page, token_bytes) == expected


@given(
    tokens=st.integers(1, 16),
    start=st.sampled_from([0, 4, 8]),
    by_dim=st.booleans(),
    scattered=st.booleans(),
    stretch=st.integers(1, 400),
)
def test_what_is_gathered_by_the_payload_is_the_same_and_told_of_when_it_is_there(
    tokens: int, start: int, by_dim: bool, scattered: bool, stretch: int
) -> None:
    source = pages(9, 4, by_dim=by_dim, seed=tokens)
    blocks = [7, 2, 5, 0, 8, 1] if scattered else list(range(6))
    size = layout(16).payload_bytes(tokens=tokens)
    count = 1 if tokens > 6 else 2
    run, whole = (Run(np.zeros(size * count, np.uint8), 0, size, count, tokens, tokens) for _ in range(2))
    buffer = PagedKV(page_planes(layout(16), source, by_dim=by_dim), blocks)
    buffer.gather(start, whole)
    pieces: list[memoryview] = []

    def tell(piece: memoryview) -> None:
        pieces.append(piece)
        told = b"".join(pieces)
        assert bytes(run.memory[-size:][: len(told)]) == told

    with mock.patch.object(paged, "STRETCH_BYTES", stretch):
        gather = buffer.gathering(start, run)
        gather(count - 1, tell)
        assert b"".join(pieces) == whole.memory[-size:].tobytes()
        assert not run.memory[:-size].any()
        gather(0, lambda piece: None)
    assert np.array_equal(run.memory, whole.memory)
    assert len(pieces) > 1 or stretch > size // 2
