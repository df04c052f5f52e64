"""Models whose KV must not be reused run as without the adapter, with one warning and a count, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstore.adapters.transformers import REASONS, attach  # noqa: E402
from kvstore.events import Cause, Counters, Miss, Notice  # noqa: E402

GREEDY = {"max_new_tokens": 4, "do_sample": False}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def made(family: str, config: dict[str, Any] | None = None, model: str | None = None, **changes: Any) -> Any:
    model_class = getattr(transformers, model or f"{family}ForCausalLM")
    return model_class(getattr(transformers, f"{family}Config")(**{**SMALL, **(config or {}), **changes}))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    return made("Bert", model="BertLMHeadModel", is_decoder=False)


def gemma() -> Any:
    changes = {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 6}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**SMALL, **changes}))


def mamba() -> Any:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=None)
    )


def of_the_users_own() -> Any:
    class Mine(transformers.LlamaForCausalLM):
        pass

    return Mine(transformers.LlamaConfig(**SMALL))


def hooked() -> Any:
    model = made("Llama")

    def steers(module: Any, args: Any, output: Any) -> Any:
        return output * 1.1

    model.model.layers[0].mlp.register_forward_hook(steers)
    return model


def unloaded() -> Any:
    model = made("Llama")
    model.model.layers[1].mlp.to("meta")
    return model


def under_inference() -> Any:
    with torch.inference_mode():
        return made("Llama")


def two_devices() -> Any:
    model = made("Llama")
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    return model


def compiled() -> Any:
    model = made("Llama")
    model.compile(backend="eager")
    return model


def rope(kind: str, **more: Any) -> Callable[[], Any]:
    return lambda: made("Llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **more})


def with_own_generate() -> Any:
    class Mine(transformers.LlamaForCausalLM):
        __module__ = "transformers.models.llama.modeling_llama"

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    return Mine(transformers.LlamaConfig(**SMALL))


def seeing() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.LlamaConfig(**SMALL)
    eye = transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(vision_config=eye, text_config=text)
    return transformers.LlavaForConditionalGeneration(config)


def with_config(**entries: Any) -> Callable[[], Any]:
    def build() -> Any:
        model = made("Llama")
        for name, value in entries.items():
            setattr(model.config, name, value)
        return model

    return build


def failing() -> Any:
    model = made("Llama")
    model.model.embed_tokens = torch.nn.Embedding(1, 32)
    return model


def sharded() -> Any:
    class DTensor(torch.nn.Parameter):
        pass

    model = made("Llama")
    model.lm_head.weight = DTensor(model.lm_head.weight.detach())
    return model


def with_a_learned_prompt() -> Any:
    model = made("Llama")
    model.prepare_inputs_for_generation = lambda *args, **kwargs: None
    return model


def xlnet() -> Any:
    return transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=97, d_model=32, n_layer=2, n_head=4, d_inner=8)
    )


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0, "original_max_position_embeddings": 64}
RUNS = {
    "encoder-decoder": t5,
    "unknown-class": of_the_users_own,
    "rope-dynamic": rope("dynamic", factor=2.0),
    "rope-longrope": rope("longrope", **LONG),
    "sliding-window": lambda: made("Mistral", sliding_window=16),
    "sliding-window in some layers": gemma,
    "recurrent": mamba,
    "not-causal": bert,
    "hooks": hooked,
    "inference-weights": under_inference,
    "several-devices": two_devices,
}
STANDS = {
    "no-weights": unloaded,
    "compiled": compiled,
    "own-generate": with_own_generate,
    "multimodal": seeing,
    "rope-unknown": with_config(rope_parameters={"rope_type": "proportional", "rope_theta": 10000.0}),
    "rope-multi-axis": with_config(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]}),
    "shared-kv": with_config(num_kv_shared_layers=1),
    "layer-kind": with_config(layer_types=["full_attention", "never_heard_of"]),
    "cache-kind": xlnet,
    "probe": failing,
    "dtype": lambda: made("Llama").double(),
    "sharded": sharded,
    "prompt-learning": with_a_learned_prompt,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_refused_model_runs_as_without_the_adapter(
    name: str, ids: Any, store: Any, counted: Counters, seen: list[Any]
) -> None:
    reason = name.split(" ")[0]
    torch.manual_seed(0)
    model = RUNS[name]().eval()
    expected = model.generate(ids(30), **GREEDY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachment = attach(model, store)
        for _ in range(2):
            assert torch.equal(model.generate(ids(30), **GREEDY), expected)
        attachment.detach()
    assert attachment.refusal() == reason
    said = [str(entry.message) for entry in caught if "kvstore leaves" in str(entry.message)]
    assert said == [f"kvstore leaves this request uncached ({reason}): {REASONS[reason]}"]
    assert counted.snapshot()[f"refuse.transformers.{reason}"] == 3  # once when attached, once a request
    assert sum(event.tokens for event in seen if isinstance(event, Miss) and event.cause is Cause.REFUSED) == 60
    assert not any(name.startswith(("save", "hit", "fault")) for name in counted.snapshot())


@pytest.mark.parametrize("reason", STANDS)
def test_a_model_that_cannot_run_here_is_refused_by_name(reason: str, store: Any) -> None:
    with pytest.warns(UserWarning, match=reason), attach(STANDS[reason]().eval(), store) as attachment:
        assert attachment.refusal() == reason


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="transformers without DeepSeek V3.2")
def test_a_model_with_an_indexer_is_refused(store: Any, ids: Any) -> None:
    config = transformers.DeepseekV32Config(**{**SMALL, "num_key_value_heads": 4})
    with torch.device("meta"):
        model = transformers.DeepseekV32ForCausalLM(config)
    with pytest.warns(UserWarning, match="indexer"), attach(model, store) as attachment:
        assert attachment.refusal() == "indexer"


def test_a_model_that_leaves_training_is_served_from_then_on(store: Any, ids: Any) -> None:
    torch.manual_seed(0)
    model = made("Llama").train()
    with pytest.warns(UserWarning, match="training"):
        attachment = attach(model, store, least_tokens=1)
    model.eval()
    for _ in range(2):
        model.generate(ids(30), **GREEDY)
        attachment.flush()
    assert attachment.last.reused_tokens == 29
    attachment.detach()


def test_inputs_that_token_ids_do_not_show_are_refused(store: Any, ids: Any) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    kinds = {"token_type_ids": torch.ones_like(ids(30)), **GREEDY}
    expected = model.generate(ids(30), pad_token_id=0, **kinds)
    with attach(model, store) as attachment:
        with pytest.warns(UserWarning, match="inputs"):
            found = model.generate(ids(30), pad_token_id=0, **kinds)
        assert torch.equal(found, expected)
        assert attachment.last.refused == "inputs"


def test_where_warnings_are_errors_a_refusal_is_told_and_raises_nothing(
    tiny: Callable[..., Any], store: Any, ids: Any, seen: list[Any]
) -> None:
    model = tiny("llama")
    expected = model.generate(ids(30), num_beams=2, **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attach(model, store) as attachment:
            assert torch.equal(model.generate(ids(30), num_beams=2, **GREEDY), expected)
    assert attachment.last.refused == "beams"
    assert [event.subject for event in seen if isinstance(event, Notice)] == ["request uncached"]


def test_every_reason_says_what_it_means() -> None:
    assert all(len(text) > 10 and not text.endswith(".") for text in REASONS.values())
