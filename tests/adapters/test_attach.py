"""Attaching changes nothing but speed; detaching leaves nothing behind; identities never mix."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvstore.adapters.transformers import attach  # noqa: E402
from kvstore.adapters.transformers.digest import Watch, adapters_digest, config_digest, weights_digest  # noqa: E402
from kvstore.adapters.transformers.layout import ModelLayout, cache_argument  # noqa: E402
from kvstore.errors import BudgetError, UnsupportedError  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for an old attribute
OPTIONS = {"block_tokens": 16, "least_tokens": 1, "warm_tokens": 0}


def state_of(model: Any) -> dict[str, Any]:
    return {
        "attributes": {name: id(value) for name, value in vars(model).items()},
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        "marks": (dict(model._forward_hooks_with_kwargs), dict(model._forward_pre_hooks_with_kwargs)),
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
    }


def test_detach_restores_the_model_exactly(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    before = state_of(model)
    attachment = attach(model, store, **OPTIONS)
    assert "generate" in vars(model)
    model.generate(ids(20), **GREEDY)
    attachment.detach()
    attachment.detach()
    assert state_of(model) == before
    assert model.generate.__func__ is type(model).generate


def test_detach_puts_a_generate_of_the_users_back(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    calls: list[int] = []
    original = model.generate

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    model.generate = mine
    with attach(model, store, **OPTIONS):
        model.generate(ids(20), **GREEDY)
    assert model.generate is mine
    assert calls == [1]


def test_a_wrapper_put_over_ours_survives_detach_and_works(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    expected = model.generate(ids(20), **GREEDY)
    attachment = attach(model, store, **OPTIONS)
    ours = model.generate
    model.generate = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
    attachment.detach()
    assert model.generate is theirs
    assert torch.equal(model.generate(ids(20), **GREEDY), expected)


def test_generate_keeps_its_name_signature_and_documentation(tiny: Any, store: Any) -> None:
    model = tiny("llama")
    signature, text = inspect.signature(model.generate), model.generate.__doc__
    with attach(model, store, **OPTIONS):
        assert inspect.signature(model.generate) == signature
        assert model.generate.__doc__ == text


def test_attaching_twice_is_refused_and_attaching_again_works(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    with attach(model, store, **OPTIONS), pytest.raises(UnsupportedError, match="attached already"):
        attach(model, store, **OPTIONS)
    with attach(model, store, **OPTIONS) as attachment:
        model.generate(ids(20), **GREEDY)
        assert attachment.last.prompt_tokens == 20


def test_what_cannot_generate_is_refused(tiny: Any, store: Any) -> None:
    with pytest.raises(UnsupportedError, match="no generate"):
        attach(torch.nn.Linear(2, 2), store)


def test_a_store_too_small_for_one_block_is_said_when_attaching(tiny: Any, open_store: Any) -> None:
    model = tiny("llama", num_key_value_heads=4, hidden_size=1024, num_hidden_layers=2, intermediate_size=8)
    with open_store(ram="24MiB", nvme=0) as opened, pytest.raises(BudgetError):
        attach(model, opened, block_tokens=4096, warm_tokens=0)


def test_a_copy_of_an_attached_model_is_a_model_of_its_own(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    with attach(model, store, **OPTIONS) as attachment:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.model.layers[0].mlp.up_proj.weight.add_(0.5)
        out = twin.generate(ids(20), **GREEDY)
        assert attachment.total.prompt_tokens == 0
        model.generate(ids(20), **GREEDY)
        assert attachment.total.prompt_tokens == 20
    assert not torch.equal(out, model.generate(ids(20), **GREEDY))


def test_two_models_on_one_store_do_not_meet(tiny: Any, ids: Any, store: Any) -> None:
    first, second = tiny("llama"), tiny("llama", seed=1)
    expected = second.generate(ids(40), **GREEDY)
    with attach(first, store, **OPTIONS) as one, attach(second, store, **OPTIONS) as two:
        first.generate(ids(40), **GREEDY)
        one.flush()
        assert torch.equal(second.generate(ids(40), **GREEDY), expected)
        assert two.last.reused_tokens == 0


def test_a_model_built_again_from_the_same_weights_finds_what_was_stored(tiny: Any, ids: Any, store: Any) -> None:
    for turn in range(2):
        model = tiny("llama")
        model.config._name_or_path = f"somewhere/{turn}"
        with attach(model, store, **OPTIONS) as attachment:
            model.generate(ids(40), **GREEDY)
            assert attachment.last.reused_tokens == 39 * turn


def test_two_salts_never_see_each_other(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    reused = []
    for salt in ("anna", "bert", "anna", "", b"anna", "bert"):
        with attach(model, store, salt=salt, **OPTIONS) as attachment:
            model.generate(ids(40), **GREEDY)
            reused.append(attachment.last.reused_tokens)
    assert reused == [0, 0, 39, 0, 39, 39]


def added(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.5)


def added_through_data(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)


def replaced(model: Any) -> None:
    old = model.model.layers[0].self_attn.k_proj.weight
    model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(old.detach() * 1.5)


def swapped_data(model: Any) -> None:
    old = model.model.layers[0].self_attn.k_proj.weight
    old.data = old.data * 1.5


def loaded(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()})


def halved(model: Any) -> None:
    model.to(torch.bfloat16)


def one_element(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[50, 3] += 1


@pytest.mark.parametrize("change", [added, added_through_data, replaced, swapped_data, loaded, one_element, halved])
def test_changed_weights_never_meet_old_kv(change: Any, tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    with attach(model, store, **OPTIONS) as attachment:
        model.generate(ids(40), **GREEDY)
        attachment.flush()
        change(model)
        out = model.generate(ids(40), **GREEDY)
        assert attachment.last.reused_tokens == 0
        attachment.flush()
        assert torch.equal(model.generate(ids(40), **GREEDY), out)
        assert attachment.last.reused_tokens == 39
    assert torch.equal(model.generate(ids(40), **GREEDY), out)


def test_switched_adapters_never_meet_each_others_kv(tiny: Any, ids: Any, store: Any) -> None:
    peft = pytest.importorskip("peft")
    settings_of = {"r": 4, "target_modules": ["q_proj", "k_proj", "up_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(**settings_of), adapter_name="one").eval()
    model.add_adapter("two", peft.LoraConfig(**settings_of))
    model.set_adapter("one")

    def ask() -> Any:
        return model.generate(input_ids=ids(40), **GREEDY)

    plain: dict[str, Any] = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        plain[name] = ask()
    with model.disable_adapter():
        plain["none"] = ask()
    reused = []
    with attach(model, store, **OPTIONS) as attachment:
        for name in ("one", "two", "none", "one", "two", "none"):
            if name == "none":
                with model.disable_adapter():
                    out = ask()
            else:
                model.set_adapter(name)
                out = ask()
            assert torch.equal(out, plain[name]), name
            reused.append(attachment.last.reused_tokens)
            attachment.flush()
        model.set_adapter("one")
        model.merge_adapter()
        merged = ask()
        assert attachment.last.reused_tokens == 0
        attachment.flush()
        model.unmerge_adapter()
        ask()
    assert reused == [0, 0, 0, 39, 39, 39]
    assert merged.shape == plain["one"].shape


def test_rows_with_adapters_of_their_own_are_refused(tiny: Any, ids: Any, store: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("llama"), config, adapter_name="one").eval()
    model.add_adapter("two", config)
    batch = ids(40).repeat(2, 1)
    expected = model.generate(input_ids=batch, adapter_names=["one", "two"], **GREEDY)
    with attach(model, store, **OPTIONS) as attachment:
        model.generate(input_ids=batch, **GREEDY)
        attachment.flush()
        with pytest.warns(UserWarning, match="mixed-adapters"):
            out = model.generate(input_ids=batch, adapter_names=["one", "two"], **GREEDY)
        assert torch.equal(out, expected)


def test_a_learned_prompt_is_refused_when_attaching(tiny: Any, store: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedError, match="prompt-learning"):
        attach(peft.get_peft_model(tiny("llama"), config), store)


def test_the_weights_digest_covers_every_tensor_and_no_order(tiny: Any) -> None:
    model = tiny("llama")
    first = weights_digest(model)
    assert weights_digest(tiny("llama")) == first
    modules = model.model.layers[0]._modules
    for name in sorted(modules):
        modules[name] = modules.pop(name)
    assert weights_digest(model) == first
    for weight in list(model.parameters()):
        with torch.no_grad():
            flat = weight.view(-1)
            kept = float(flat[-1])
            flat[-1] = kept + 1
            assert weights_digest(model) != first
            flat[-1] = kept
    assert weights_digest(model) == first
    assert adapters_digest(model) == ""


@settings(max_examples=25)
@given(element=st.integers(0, 97 * 32 - 1), by=st.floats(0.125, 8, width=32))
def test_a_signature_tells_any_element_written_in_place(element: int, by: float) -> None:
    model = torch.nn.Embedding(97, 32)
    watch = Watch()
    before = watch.signature([model])
    assert watch.signature([model]) == before
    with torch.no_grad():
        model.weight.view(-1)[element] += by
    assert watch.signature([model]) != before


def test_names_do_not_change_the_configurations_digest_and_shapes_do(tiny: Any) -> None:
    config = tiny("llama").config
    first = config_digest(config)
    other = copy.deepcopy(config)
    other._name_or_path, other.architectures, other.pad_token_id = "elsewhere", ["Another"], 5
    assert config_digest(other) == first
    other.rms_norm_eps = 1e-3
    assert config_digest(other) != first


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek"])
def test_the_layout_has_the_shapes_that_the_cache_really_holds(family: str, tiny: Any) -> None:
    model = tiny(family)
    present = ModelLayout(model).current()
    layout = present.layout
    cache = transformers.DynamicCache()
    model(torch.arange(5)[None], use_cache=True, **{cache_argument(model): cache})
    held = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]
    assert [(shape.heads, shape.k_dim, shape.v_dim) for shape in layout.groups[0]] == held
    assert layout.dtype == "float32"
    assert layout.payload_bytes() >= min(1 << 20, layout.payload_bytes(0, 256))
    assert ModelLayout(model).current().layout.fingerprint == layout.fingerprint
    assert ModelLayout(model).current().stamp == present.stamp
