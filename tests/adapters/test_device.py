"""A model on a device is served through the `hbm` tier, and left alone by name where the store has none there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.adapters.transformers import allow, attach, buffers, load, save
from kvstore.adapters.transformers.layout import ModelLayout, Refused
from kvstore.events import Counters

GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize(
    ("device", "reached", "reason"),
    [
        ("cpu", None, None),
        ("cpu", "cuda:0", None),
        ("cuda:0", "cuda:0", None),
        ("cuda:1", "cuda:0", "device"),
        ("cuda:0", None, "device"),
        ("mps:0", None, "device"),
        ("cuda:0", "cpu", "device"),
    ],
)
def test_a_device_is_within_reach_of_the_hbm_tier_on_it_alone(
    device: str, reached: str | None, reason: str | None
) -> None:
    assert allow.refuse_device(torch.device(device), reached) == reason


def test_a_model_out_of_reach_runs_as_without_the_adapter(
    tiny: Callable[..., Any], ids: Any, store: Any, counted: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    expected = model.generate(ids(40), **GREEDY)
    with attach(model, store) as attachment:
        assert attachment.refusal() is None
        monkeypatch.setattr(ModelLayout, "device", torch.device("cuda:0"))
        with pytest.warns(UserWarning, match="hbm=1GiB"):
            assert torch.equal(model.generate(ids(40), **GREEDY), expected)
        assert attachment.last.refused == attachment.refusal() == "device"
    assert not any(name.startswith(("save", "hit", "fault")) for name in counted.snapshot())


def test_plain_load_and_save_refuse_a_model_out_of_reach(
    tiny: Callable[..., Any], ids: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    cache = load(store, model, ids(40)).cache
    monkeypatch.setattr(ModelLayout, "device", torch.device("cuda:0"))
    with pytest.raises(Refused, match="hbm=1GiB"):
        load(store, model, ids(40))
    with pytest.raises(Refused, match="hbm=1GiB"):
        save(store, model, ids(40), cache)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("rows", [1, 3])
def test_through_the_hbm_tier_answers_are_the_same(
    family: str,
    rows: int,
    tiny: Callable[..., Any],
    ids: Any,
    open_store: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is the CPU: the adapter takes its tensors for those of a device."""
    monkeypatch.setattr(buffers, "_is_host", lambda tensor: False)
    _resumed(tiny(family), ids(200, rows=rows), open_store, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_on_a_gpu_is_resumed_with_an_hbm_tier_and_refused_without(
    family: str, rows: int, tiny: Callable[..., Any], ids: Any, open_store: Callable[..., Any]
) -> None:
    model, prompt = tiny(family).to("cuda"), ids(200, rows=rows).to("cuda")
    with open_store("host") as store, pytest.warns(UserWarning, match="hbm=1GiB"), attach(model, store) as attachment:
        assert attachment.refusal() == "device"
    _resumed(model, prompt, open_store, "cuda:0")


def _resumed(model: Any, prompt: Any, open_store: Callable[..., Any], device: str) -> None:
    """Greedy answers cold, from `hbm`, and in a new process's place: from the host's tiers."""
    longer = model.generate(prompt, **GREEDY)
    expected = model.generate(longer, **GREEDY)
    held = longer.numel() - longer.shape[0]
    for tier in ("hbm", "ram"):
        with open_store(hbm="16MiB", device=device) as store, attach(model, store, block_tokens=16) as attachment:
            assert store.device == device
            if tier == "hbm":
                assert torch.equal(model.generate(prompt, **GREEDY), longer)
                attachment.flush()
            assert torch.equal(model.generate(longer, **GREEDY), expected)
            assert attachment.last.reused_tokens == held
            attachment.flush()
            assert store.flush(30)
            assert not [fault for fault in store.stats().counters if fault.startswith("fault")]
