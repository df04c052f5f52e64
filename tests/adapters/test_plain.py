"""`load` and `save` around a loop of one's own, with stock caches and growing ones."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvstore.adapters.transformers import GrowingCache, Refused, load, save  # noqa: E402
from kvstore.adapters.transformers.layout import ModelLayout, cache_argument  # noqa: E402
from kvstore.errors import LayoutError  # noqa: E402

OPTIONS = {"block_tokens": 16}


def run(model: Any, ids: Any, cache: Any, mask: Any = None) -> Any:
    with torch.no_grad():
        positions = None
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments = {"attention_mask": mask, "position_ids": positions, cache_argument(model): cache}
        return model(input_ids=ids, use_cache=True, **arguments).logits[:, -1]


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("saved", ["stock", "growing"])
@pytest.mark.parametrize("given", ["none", "stock", "growing"])
def test_a_loop_of_ones_own_resumes(family: str, saved: str, given: str, tiny: Any, ids: Any, store: Any) -> None:
    model = tiny(family)
    layout = ModelLayout(model).current().layout
    whole = ids(50)

    def empty(kind: str) -> Any:
        if kind == "none":
            return None
        return DynamicCache() if kind == "stock" else GrowingCache(layout.groups[0], torch.float32)

    cache = empty(saved)
    run(model, whole[:, :40], cache)
    done = save(store, model, whole[:, :40], cache, **OPTIONS)
    assert [saving.new_blocks for saving in done] == [3]
    loading = load(store, model, whole, empty(given), **OPTIONS)
    assert (loading.columns, loading.tokens, loading.argument) == (40, 40, cache_argument(model))
    resumed = run(model, whole[:, 40:], loading.cache)
    torch.testing.assert_close(resumed, run(model, whole, DynamicCache()), rtol=1e-4, atol=1e-4)
    assert [saving.new_blocks for saving in save(store, model, whole, loading.cache, **OPTIONS)] == [2]


def test_one_token_is_always_left_to_run(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    cache = DynamicCache()
    run(model, ids(40), cache)
    save(store, model, ids(40), cache, **OPTIONS)
    assert load(store, model, ids(40), **OPTIONS).columns == 39
    assert load(store, model, ids(40)[:, :17], **OPTIONS).columns == 16
    assert load(store, model, ids(40)[:, :1], **OPTIONS).columns == 0


def test_padded_rows_load_and_save(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    whole = ids(40, rows=2)
    mask = torch.ones_like(whole)
    mask[1, :10] = 0
    whole = whole * mask
    cache = DynamicCache()
    expected = run(model, whole, cache, mask)
    assert len(save(store, model, whole, cache, attention_mask=mask, **OPTIONS)) == 2
    loading = load(store, model, whole, attention_mask=mask, **OPTIONS)
    assert (loading.columns, loading.tokens) == (39, 39 + 29)
    resumed = run(model, whole[:, 39:], loading.cache, mask)
    torch.testing.assert_close(resumed, expected, rtol=1e-4, atol=1e-4)


def test_salts_part_what_is_loaded(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    cache = DynamicCache()
    run(model, ids(40), cache)
    save(store, model, ids(40), cache, salt="anna", **OPTIONS)
    assert load(store, model, ids(40), salt="bert", **OPTIONS).columns == 0
    assert load(store, model, ids(40), salt="anna", **OPTIONS).columns == 39


def test_ids_beyond_the_cache_are_not_saved_and_missing_ones_are_an_error(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    cache = DynamicCache()
    run(model, ids(40)[:, :30], cache)
    save(store, model, ids(40), cache, **OPTIONS)
    assert load(store, model, ids(40), **OPTIONS).columns == 30
    with pytest.raises(LayoutError, match="30 tokens"):
        save(store, model, ids(40)[:, :20], cache, **OPTIONS)
    with pytest.raises(LayoutError, match="rows"):
        save(store, model, ids(40, rows=2), cache, **OPTIONS)


def test_what_is_not_on_the_allow_list_raises(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    cache = DynamicCache()
    run(model, ids(8), cache)
    with pytest.raises(Refused, match="filled-cache"):
        load(store, model, ids(40), cache, **OPTIONS)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, -1] = 0
    with pytest.raises(Refused, match="right-padding"):
        load(store, model, ids(40), attention_mask=mask, **OPTIONS)
    with pytest.raises(Refused, match="training"):
        load(store, model.train(), ids(40), **OPTIONS)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(Refused, match="rope-dynamic"):
        load(store, tiny("llama", rope_parameters=rope), ids(40), **OPTIONS)
