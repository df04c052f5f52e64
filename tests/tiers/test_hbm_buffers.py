"""`DeviceKV` moves the same bytes as `HostKV`, whatever the shapes, dtypes, strides and slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import LayoutError, UnsupportedError
from kvstore.kv import HostKV, Run
from kvstore.layout import DTYPE_BYTES, LayerShape, Layout
from kvstore.tiers.devicekv import DeviceKV, SlotRows, host_tensor
from kvstore.tiers.lanes import single_device

CAPACITY, STRIDE = 40, 12288


def random_bytes(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Random bits; as floats they hold NaNs, which must survive."""
    return torch.from_numpy(rng.integers(0, 256, shape, np.uint8))


def tensors(layout: Layout, kind: str, rng: np.random.Generator, spare: int) -> list[torch.Tensor]:
    """KV of random bits in the layout's dtype. spare: tokens of room past the capacity, so that strides differ."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    shapes, size = layout.groups[0], layout.itemsize
    one, count, room = shapes[0], len(shapes), CAPACITY + spare

    def make(*shape: int) -> torch.Tensor:
        whole = random_bytes(rng, *shape[:-2], room, shape[-1] * size).view(dtype)
        return whole[..., spare:, :]

    if kind == "stacked":
        return [make(count, 2, one.heads, room, one.k_dim)]
    if kind == "paired":
        return [make(count, one.heads, room, one.k_dim), make(count, one.heads, room, one.v_dim)]
    return [make(shape.heads, room, dim) for shape in shapes for dim in (shape.k_dim, shape.v_dim)]


def device_kv(layout: Layout, kind: str, made: list[torch.Tensor]) -> DeviceKV:
    if kind == "stacked":
        return DeviceKV.stacked(layout, made[0])
    if kind == "paired":
        return DeviceKV.paired(layout, made[0], made[1])
    return DeviceKV.layered(layout, list(zip(made[::2], made[1::2], strict=True)))


def host_kv(layout: Layout, kind: str, made: list[torch.Tensor]) -> HostKV:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[layout.itemsize]
    arrays = [tensor.view(words).numpy().view(f"u{layout.itemsize}") for tensor in made]
    if kind == "stacked":
        return HostKV.stacked(layout, arrays[0])
    if kind == "paired":
        return HostKV.paired(layout, arrays[0], arrays[1])
    return HostKV.layered(layout, list(zip(arrays[::2], arrays[1::2], strict=True)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, str]:
    kind = draw(st.sampled_from(["stacked", "paired", "layered"]))
    dims = st.sampled_from([1, 3, 4, 8, 16])
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    layers = draw(st.integers(1, 3))
    if kind == "layered":
        shapes = tuple(LayerShape(draw(st.integers(1, 3)), draw(dims), draw(dims)) for _ in range(layers))
        return Layout(dtype, (shapes,), 8), kind
    k_dim = draw(dims)
    v_dim = k_dim if kind == "stacked" else draw(dims)
    return Layout(dtype, ((LayerShape(draw(st.integers(1, 3)), k_dim, v_dim),) * layers,), 8), kind


@settings(max_examples=120, deadline=None)
@given(cases(), st.integers(0, 3), st.data())
def test_slots_hold_the_payloads_that_host_buffers_make(
    case: tuple[Layout, str], spare: int, data: st.DataObject
) -> None:
    layout, kind = case
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    made = tensors(layout, kind, rng, spare)
    tokens = data.draw(st.integers(1, 8))
    slots = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    start = data.draw(st.integers(0, CAPACITY - tokens * len(slots)))
    payload = layout.payload_bytes(0, tokens)
    arena = random_bytes(rng, 6 * STRIDE)
    before = arena.clone()

    device_kv(layout, kind, made).gather_rows(start, SlotRows(arena, STRIDE, slots, tokens, tokens))
    expected = np.zeros(len(slots) * payload, np.uint8)
    host_kv(layout, kind, made).gather(start, Run(expected, 0, payload, len(slots), tokens, tokens))

    for at, slot in enumerate(slots):
        before[slot * STRIDE : slot * STRIDE + payload] = torch.from_numpy(expected[at * payload : (at + 1) * payload])
    assert torch.equal(arena, before), "payloads differ, or bytes around them changed"


@settings(max_examples=120, deadline=None)
@given(cases(), st.integers(0, 3), st.data())
def test_tokens_come_back_where_host_buffers_put_them(
    case: tuple[Layout, str], spare: int, data: st.DataObject
) -> None:
    layout, kind = case
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens = data.draw(st.integers(1, 8))
    slots = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    take = tokens if len(slots) > 1 else data.draw(st.integers(1, tokens))
    start = data.draw(st.integers(0, CAPACITY - take * len(slots)))
    arena = random_bytes(rng, 6 * STRIDE)
    made = tensors(layout, kind, rng, spare)
    expected = [tensor.clone() for tensor in made]

    device_kv(layout, kind, made).scatter_rows(start, SlotRows(arena, STRIDE, slots, tokens, take))
    for at, slot in enumerate(slots):
        run = Run(arena.numpy(), slot * STRIDE, STRIDE, 1, tokens, take)
        host_kv(layout, kind, expected).scatter(start + at * take, run)

    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(made, expected, strict=True))


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_host_runs_go_both_ways_as_with_host_buffers(case: tuple[Layout, str], data: st.DataObject) -> None:
    layout, kind = case
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    made = tensors(layout, kind, rng, 0)
    tokens, count = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    take = tokens if count > 1 else data.draw(st.integers(1, tokens))
    start = data.draw(st.integers(0, CAPACITY - take * count))
    memory = rng.integers(0, 256, 5 * STRIDE, np.uint8)
    other = memory.copy()
    run, same = Run(memory, 64, STRIDE, count, tokens, take), Run(other, 64, STRIDE, count, tokens, take)

    device_kv(layout, kind, made).gather(start, run)
    host_kv(layout, kind, made).gather(start, same)
    assert np.array_equal(memory, other)
    if take == tokens:
        single = Run(np.zeros_like(memory), 64, STRIDE, count, tokens, take)
        told: list[bytes] = []
        gather = device_kv(layout, kind, made).gathering(start, single)
        for at in range(count):
            gather(at, lambda piece: told.append(bytes(piece)))
        size = layout.payload_bytes(0, tokens)
        assert told == [run.payload(at, size).tobytes() for at in range(count)]
        assert told == [single.payload(at, size).tobytes() for at in range(count)]

    target = [tensor.clone() for tensor in made]
    device_kv(layout, kind, made).scatter(0, run)
    host_kv(layout, kind, target).scatter(0, same)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(made, target, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_long_run_goes_through_bounded_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.devicekv.STAGING_BYTES", 3000)
    layout = Layout.uniform(layers=2, heads=1, k_dim=8, block_tokens=8)
    rng = np.random.default_rng(5)
    made = tensors(layout, "stacked", rng, 0)
    memory, other = np.zeros(5 * STRIDE, np.uint8), np.zeros(5 * STRIDE, np.uint8)
    device_kv(layout, "stacked", made).gather(0, Run(memory, 0, STRIDE, 5, 8, 8))
    host_kv(layout, "stacked", made).gather(0, Run(other, 0, STRIDE, 5, 8, 8))
    assert np.array_equal(memory, other)
    back = torch.zeros_like(made[0])
    DeviceKV.stacked(layout, back).scatter(0, Run(memory, 0, STRIDE, 5, 8, 8))
    assert torch.equal(bits(back), bits(made[0]))


def test_read_only_host_memory_is_a_source() -> None:
    layout = Layout.uniform(layers=1, heads=1, k_dim=4, block_tokens=4)
    raw = bytes(range(128))
    target = torch.zeros(1, 2, 1, 4, 4)
    DeviceKV.stacked(layout, target).scatter(0, Run(np.frombuffer(raw, np.uint8), 0, 128, 1, 4, 4))
    assert bits(target).flatten().numpy().tobytes() == raw
    assert host_tensor(np.frombuffer(raw, np.uint8)).numpy().tobytes() == raw


def test_buffers_made_under_inference_mode_can_be_filled_outside_it() -> None:
    layout = Layout.uniform(layers=1, heads=1, k_dim=4, block_tokens=4)
    with torch.inference_mode():
        target = torch.zeros(1, 2, 1, 4, 4)
    memory = np.arange(128, dtype=np.uint8)
    DeviceKV.stacked(layout, target).scatter(0, Run(memory, 0, 128, 1, 4, 4))
    with torch.inference_mode():
        assert bits(target).flatten().numpy().tobytes() == memory.tobytes()


def test_wide_words_are_used_where_every_dim_allows_it() -> None:
    wide = Layout.uniform(layers=2, heads=2, k_dim=64, dtype="bfloat16", block_tokens=16)
    narrow = Layout.uniform(layers=2, heads=2, k_dim=6, dtype="bfloat16", block_tokens=16)
    for layout, words in ((wide, torch.int64), (narrow, torch.int32)):
        kv = DeviceKV.stacked(layout, torch.zeros(2, 2, 2, 16, layout.groups[0][0].k_dim, dtype=torch.bfloat16))
        assert {plane.tensor.dtype for plane in kv._planes} == {words}


BAD: list[tuple[str, Callable[[Layout], object]]] = [
    ("wrong dim", lambda layout: DeviceKV.stacked(layout, torch.zeros(2, 2, 1, 9, 5))),
    ("wrong item size", lambda layout: DeviceKV.stacked(layout, torch.zeros(2, 2, 1, 9, 4, dtype=torch.float16))),
    ("wrong rank", lambda layout: DeviceKV.stacked(layout, torch.zeros(2, 2, 1, 9))),
    ("a layer missing", lambda layout: DeviceKV.layered(layout, [(torch.zeros(1, 9, 4), torch.zeros(1, 9, 4))])),
    ("past the end", lambda layout: DeviceKV.stacked(layout, torch.zeros(2, 2, 1, 9, 4)).scatter(8, run_of(layout))),
    (
        "before the start",
        lambda layout: DeviceKV.stacked(layout, torch.zeros(2, 2, 1, 9, 4)).gather(-1, run_of(layout)),
    ),
]


def run_of(layout: Layout) -> Run:
    return Run(np.zeros(layout.payload_bytes(), np.uint8), 0, layout.payload_bytes(), 1, 4, 4)


@pytest.mark.parametrize(("name", "make"), BAD, ids=[name for name, _ in BAD])
def test_tensors_that_do_not_fit_the_layout_are_refused(name: str, make: Callable[[Layout], object]) -> None:
    with pytest.raises(LayoutError):
        make(Layout.uniform(layers=2, heads=1, k_dim=4, block_tokens=4))


def test_unlike_k_and_v_are_refused_by_stacked_and_unlike_layers_by_paired() -> None:
    unlike = Layout.uniform(layers=2, heads=1, k_dim=4, v_dim=2, block_tokens=4)
    with pytest.raises(LayoutError, match="different dims"):
        DeviceKV.stacked(unlike, torch.zeros(2, 2, 1, 9, 4))
    layers = Layout("float32", ((LayerShape(1, 4, 4), LayerShape(2, 4, 4)),), 4)
    with pytest.raises(LayoutError, match="different shapes"):
        DeviceKV.paired(layers, torch.zeros(2, 1, 9, 4), torch.zeros(2, 1, 9, 4))


def test_several_or_unknown_devices_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="cuda:0, cuda:1"):
        single_device(["cuda:0", "cuda:1"])
    with pytest.raises(UnsupportedError, match="meta"):
        single_device(["meta"])
    layout = Layout.uniform(layers=1, heads=1, k_dim=4, block_tokens=4)
    with pytest.raises(UnsupportedError, match="cpu, meta"):
        DeviceKV.paired(layout, torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4, device="meta"))
