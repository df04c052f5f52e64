"""A buffer of other tensors than the namespace's is refused by saves and loads, before a slot is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from known_kv import PLAIN, Speaker, save

from kvstore.errors import LayoutError
from kvstore.kv import HostKV, KVBuffer
from kvstore.layout import Layout
from kvstore.store import Store

ME = Speaker(PLAIN, "a")
TOKENS = list(range(40))


def over(layers: int, heads: int, dim: int, dtype: str) -> tuple[Layout, Any]:
    layout = Layout.uniform(layers=layers, heads=heads, k_dim=dim, dtype=dtype, block_tokens=16)
    return layout, np.zeros((layers, 2, heads, len(TOKENS), dim), f"u{layout.itemsize}")


def on_host(layout: Layout, array: Any) -> KVBuffer:
    return HostKV.stacked(layout, array)


def on_device(layout: Layout, array: Any) -> KVBuffer:
    torch = pytest.importorskip("torch")
    from kvstore.tiers.devicekv import DeviceKV

    return DeviceKV.stacked(layout, torch.from_numpy(array.view(f"i{layout.itemsize}")))


@pytest.mark.parametrize("made", [on_host, on_device])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 16, "float32"), (3, 2, 16, "float32"), (2, 1, 32, "float32"), (2, 4, 8, "float32"), (2, 2, 16, "float16")],
    ids=["fewer layers", "more layers", "as large with other heads", "the same bytes cut otherwise", "half the bytes"],
)
def test_a_buffer_of_another_shape_is_refused(
    shape: tuple[int, int, int, str], made: Callable[[Layout, Any], KVBuffer], reopen: Callable[..., Store]
) -> None:
    store = reopen(hbm="1MiB", device="cpu")
    space = store.namespace(PLAIN, salt="a")
    layout, array = over(*shape)
    with pytest.raises(LayoutError, match="other layers, heads, dims"):
        store.save(space, TOKENS, made(layout, array))
    assert store.match(space, TOKENS).tokens == 0
    save(store, ME, TOKENS)
    with pytest.raises(LayoutError, match="other layers, heads, dims"):
        store.load(store.match(space, TOKENS), made(layout, array))
    assert not array.any()


def test_a_buffer_of_another_group_is_refused(reopen: Callable[..., Store]) -> None:
    full, half = over(2, 2, 16, "float32"), over(2, 2, 8, "float32")
    layout = Layout("float32", (*full[0].groups, *half[0].groups), 16)
    store, (first, second) = reopen(), layout.parts()
    space = store.namespace(layout)
    right = {first: HostKV.stacked(layout, full[1], group=0), second: HostKV.stacked(layout, half[1], group=1)}
    with pytest.raises(LayoutError, match="Part\\(group=0"):
        store.save(space, TOKENS, {first: right[second], second: right[first]})
    assert store.save(space, TOKENS, right).new_blocks == 6


def test_a_layout_with_other_traits_or_another_dtype_of_that_size_copies_the_same_bytes(
    reopen: Callable[..., Store],
) -> None:
    store = reopen()
    layout, array = over(2, 2, 16, "float32")
    named = Layout("float32", layout.groups, 32, (("weights", "abc"),))
    assert store.save(store.namespace(PLAIN), TOKENS, HostKV.stacked(named, array)).skipped_blocks == 0
