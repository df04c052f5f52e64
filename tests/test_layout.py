"""A layout's fingerprint changes with everything that changes what bytes mean, and with nothing else."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import LayoutError
from kvstore.layout import DTYPE_BYTES, LAYERS_MAX, LayerShape, Layout, Part, default_block_tokens

SHAPES = st.builds(LayerShape, st.integers(1, 9), st.integers(1, 300), st.integers(1, 300))
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=6).map(tuple), min_size=1, max_size=3).map(tuple)
TRAITS = st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=4).map(lambda traits: tuple(traits.items()))
LAYOUTS = st.builds(
    Layout, st.sampled_from(sorted(DTYPE_BYTES)), GROUPS, st.integers(1, 4096), TRAITS, st.integers(1, 0xFFFF)
)


def layout(**changes: object) -> Layout:
    base = Layout("bfloat16", ((LayerShape(2, 8, 8),) * 3,), 16, (("weights", "abc"), ("rope", "default")))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@given(LAYOUTS)
def test_what_is_written_is_read_back_with_the_same_fingerprint(written: Layout) -> None:
    read = Layout.from_json(written.to_json())
    assert read == written
    assert read.fingerprint == written.fingerprint
    assert written.to_json().isascii()


@given(LAYOUTS, LAYOUTS)
def test_layouts_share_a_fingerprint_only_if_equal(left: Layout, right: Layout) -> None:
    assert (left.fingerprint == right.fingerprint) == (left == right)


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_the_order_of_traits_does_not_matter(one: Layout, random: object) -> None:
    turned = dataclasses.replace(one, traits=tuple(reversed(one.traits)))
    assert turned.fingerprint == one.fingerprint


@pytest.mark.parametrize("layers", [LAYERS_MAX - 1, LAYERS_MAX])
def test_as_many_layers_as_can_be_read_back(layers: int) -> None:
    shapes = ((LayerShape(1, 1, 1),) * layers, (LayerShape(1, 2, 1),))
    if layers + 1 > LAYERS_MAX:
        with pytest.raises(LayoutError, match="more than"):
            layout(groups=shapes)
    else:
        assert Layout.from_json(layout(groups=shapes).to_json()).groups == shapes


@pytest.mark.parametrize(
    "changes",
    [
        {"traits": (("rope_theta", 10000.0),)},
        {"traits": ((7, "seven"),)},
        {"traits": (("rope", None),)},
        {"block_tokens": 16.0},
        {"block_tokens": True},
        {"shards": 1.0},
        {"groups": ((LayerShape(2.0, 8, 8),),)},
        {"groups": ((LayerShape(2, 8, 8), LayerShape(2, 8, True)),)},
    ],
)
def test_what_its_text_would_not_tell_again_is_refused(changes: dict[str, object]) -> None:
    """A store keeps a layout as text, and must be able to read it back: for every namespace, or none is listed."""
    with pytest.raises(LayoutError, match=r"not text|not an int"):
        layout(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"groups": ((LayerShape(2, 8, 8),) * 4,)},
        {"groups": ((LayerShape(2, 8, 9),) * 3,)},
        {"groups": ((LayerShape(2, 8, 8),) * 3, (LayerShape(2, 8, 8),))},
        {"groups": ((LayerShape(2, 8, 8),), (LayerShape(2, 8, 8),) * 2)},
        {"block_tokens": 32},
        {"shards": 2},
        {"traits": ()},
        {"traits": (("weights", "abd"), ("rope", "default"))},
        {"traits": (("weights", "default"), ("rope", "abc"))},
    ],
)
def test_whatever_changes_the_bytes_changes_the_fingerprint(changes: dict[str, object]) -> None:
    assert layout(**changes).fingerprint != layout().fingerprint


def test_the_fingerprint_does_not_depend_on_the_process_or_the_release() -> None:
    assert layout().to_json() == (
        '{"block_tokens":16,"dtype":"bfloat16","groups":[[[3,2,8,8]]],"shards":1,'
        '"traits":{"rope":"default","weights":"abc"},"version":1}'
    )
    assert layout().fingerprint.hex() == "b2d1305fbffa74a1504eace536ab485ea1e90d5d5b725e892cc9a2b3ea9fa92e"


@given(LAYOUTS)
def test_sizes_add_up(one: Layout) -> None:
    for group, shapes in enumerate(one.groups):
        elements = sum(shape.heads * (shape.k_dim + shape.v_dim) for shape in shapes)
        assert one.token_bytes(group) == elements * DTYPE_BYTES[one.dtype]
        assert (
            one.payload_bytes(group)
            == one.block_tokens * one.token_bytes(group)
            == one.payload_bytes(group, one.block_tokens)
        )


def test_a_hit_needs_every_group_of_every_shard() -> None:
    two = layout(groups=((LayerShape(1, 2, 2),), (LayerShape(1, 4, 4),)), shards=2)
    assert list(two.parts()) == [Part(0, 0), Part(0, 1), Part(1, 0), Part(1, 1)]


@given(GROUPS, st.sampled_from(sorted(DTYPE_BYTES)))
def test_blocks_are_the_smallest_power_of_two_that_reaches_four_mebibytes(
    groups: tuple[tuple[LayerShape, ...], ...], dtype: str
) -> None:
    chosen = default_block_tokens(groups, dtype)
    smallest = min(Layout(dtype, groups, chosen).payload_bytes(group) for group in range(len(groups)))
    assert chosen in (16, 32, 64, 128, 256)
    assert smallest >= 4 << 20 or chosen == 256
    assert smallest < 8 << 20 or chosen == 16


def test_a_uniform_layout_chooses_its_block_unless_told() -> None:
    # SmolLM2-135M: 46,080 bytes a token, so 128 tokens make 5.6 MiB.
    chosen = Layout.uniform(layers=30, heads=3, k_dim=64)
    assert (chosen.token_bytes(), chosen.block_tokens) == (46080, 128)
    assert Layout.uniform(layers=30, heads=3, k_dim=64, block_tokens=7).block_tokens == 7
    assert Layout.uniform(layers=1, heads=1, k_dim=576, v_dim=64).groups == ((LayerShape(1, 576, 64),),)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int3"},
        {"groups": ()},
        {"groups": ((),)},
        {"groups": ((LayerShape(0, 8, 8),),)},
        {"groups": ((LayerShape(1, 8, -1),),)},
        {"block_tokens": 0},
        {"block_tokens": 4097},
        {"shards": 0},
        {"shards": 65536},
        {"traits": (("a", "1"), ("a", "2"))},
    ],
)
def test_an_impossible_layout_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        layout(**changes)


def test_a_uniform_layout_without_layers_or_block_is_refused() -> None:
    with pytest.raises(LayoutError):
        Layout.uniform(layers=0, heads=1, k_dim=1)
    with pytest.raises(LayoutError):
        Layout.uniform(layers=1, heads=1, k_dim=1, block_tokens=0)
    with pytest.raises(LayoutError):
        Layout.uniform(layers=1, heads=1, k_dim=1, dtype="int3")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.text(max_size=30) | JSON.map(json.dumps))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


@given(LAYOUTS, st.sampled_from(["version", "dtype", "groups", "block_tokens", "shards", "traits"]), JSON)
def test_a_damaged_description_is_refused_or_means_what_it_says(one: Layout, field: str, value: object) -> None:
    data = json.loads(one.to_json())
    text = json.dumps(data | {field: value}, sort_keys=True, separators=(",", ":"))
    try:
        read = Layout.from_json(text)
    except LayoutError:
        return
    assert read.to_json() == text


@pytest.mark.parametrize(
    "groups",
    [[[[10**12, 1, 1, 1]]], [[[10**12, 1, 1, 1], [-(10**12), 1, 1, 1]]], [[]], [[[1]]], [[[1e400, 1, 1, 1]]], 3],
)
def test_a_description_cannot_exhaust_memory_or_escape_as_another_error(groups: object) -> None:
    text = json.dumps(json.loads(layout().to_json()) | {"groups": groups})
    with pytest.raises(LayoutError):
        Layout.from_json(text)
    with pytest.raises(LayoutError):
        Layout.from_json("[" * 100_000)
