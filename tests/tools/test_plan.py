"""`kvstore plan` reproduces published figures, reads every family of configurations, and names what is wrong in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvstore.errors import LayoutError, SettingsError, UnsupportedError
from kvstore.layout import LayerShape
from kvstore.tools.cli import app
from kvstore.tools.geometry import Geometry, LayerKV, geometry
from kvstore.tools.planning import Machine, break_even, plan, prefill_seconds
from kvstore.tools.published import PUBLISHED

GB = 10**9
PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


def planned(*words: str | Path, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *map(str, words), "--json"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


EIGHT = ("--context", "131072", "--memory", "80GB", "--devices", "8", "--weights", "141GB")


def test_llama_3_1_70b_as_published() -> None:
    found = planned("llama-3.1-70b", *EIGHT)
    assert found["token_bytes"] == 327_680
    assert found["session_bytes"] == 40 << 30
    assert round(found["session_gb"], 1) == 42.9
    assert found["attention"] == "GQA"
    sessions = found["sessions"]
    assert sessions["free_bytes"] == 499 * GB
    assert (round(sessions["exact"], 1), sessions["whole"]) == (11.6, 11)


@pytest.mark.parametrize(("kv_heads", "gigabytes", "sessions"), [(64, 343, 1), (1, 5.4, 92)])
def test_llama_3_1_70b_with_other_kv_heads(kv_heads: int, gigabytes: float, sessions: int) -> None:
    found = planned("llama-3.1-70b", *EIGHT, "--set", f"num_key_value_heads={kv_heads}")
    assert found["session_gb"] == pytest.approx(gigabytes, rel=0.01)
    assert found["sessions"]["whole"] == sessions
    assert found["attention"] == ("MQA" if kv_heads == 1 else "MHA")


def test_two_cards_hold_the_70b_but_no_session_and_it_says_so() -> None:
    words = ("--context", "131072", "--memory", "80GB", "--devices", "2", "--weights", "141GB")
    sessions = planned("llama-3.1-70b", *words)["sessions"]
    assert (sessions["free_bytes"], sessions["whole"]) == (19 * GB, 0)
    assert sessions["sentence"] == "19 GB are left beside the weights: no full session of 131,072 tokens fits."
    text = CliRunner().invoke(app, ["plan", "llama-3.1-70b", *words]).stdout
    assert "no full session" in text


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [("llama-3.1-8b", 131_072), ("llama-2-7b", 4 * 131_072), ("qwen2.5-0.5b", 12 << 10), ("opt-13b", 800 << 10)],
)
def test_bytes_a_token_as_published(name: str, token_bytes: int) -> None:
    assert planned(name)["token_bytes"] == token_bytes


def test_sessions_as_published() -> None:
    assert planned("llama-3.1-8b", "--context", str(128 << 10))["session_bytes"] == 16 << 30
    assert planned("opt-13b")["context"] == 2048
    assert round(planned("opt-13b")["session_bytes"] / GB, 1) == 1.7
    assert planned("opt-13b")["session_bytes"] // (GB // 10) == 16  # published, cut, as 1.6 GB


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-70b", 70.6), ("llama-3.1-8b", 8.03), ("llama-2-7b", 6.74), ("opt-13b", 12.85)]
)
def test_weights_follow_from_the_shapes(name: str, billions: float) -> None:
    assert planned(name)["parameters"] == pytest.approx(billions * GB, rel=0.01)


def test_mla_keeps_one_latent_and_one_rope_key() -> None:
    config = {**PLAIN, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 256}
    found = geometry(config)
    assert found.token_bytes == 61 * (512 + 64) * 2 == 70_272
    assert found.kind == "MLA"
    assert found.parameters is None


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 1024, "sliding_window_pattern": 4},
        {"sliding_window": 1024, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 1},
        {"attention_chunk_size": 1024, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
    ],
)
def test_layers_with_a_window_stop_growing(fields: dict[str, Any]) -> None:
    found = geometry({**PLAIN, **fields})
    a_layer = 2 * 512 * 2
    assert found.token_bytes == 4 * a_layer
    assert found.bytes_at(10_000) == (10_000 + 3 * 1024) * a_layer
    assert "3 of 4 layers with a window" in found.kind


def test_a_window_that_is_switched_off_counts_for_nothing() -> None:
    found = geometry({**PLAIN, "sliding_window": 128, "use_sliding_window": False})
    assert found.bytes_at(1000) == 1000 * found.token_bytes


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"num_kv_heads": [1, 2, 4, 8]}, [1, 2, 4, 8]),
        ({"num_key_value_heads_per_layer": [4, 4, 2, 1]}, [4, 4, 2, 1]),
        (
            {
                "block_configs": [
                    {"attention": {"n_heads_in_group": 4}},
                    {"attention": {"no_op": True}},
                    {"attention": {"n_heads_in_group": 8}},
                    {"attention": {"replace_with_linear": True}},
                ]
            },
            [2, 1],
        ),
        ({"layers_block_type": ["mamba", "attention", "mamba", "attention"]}, [8, 8]),
        ({"hybrid_override_pattern": "M*-M"}, [8]),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, [8]),
        ({"num_kv_shared_layers": 3}, [8]),
        ({"multi_query": True}, [1, 1, 1, 1]),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, [2, 2, 2, 2]),
        ({"attn_config": {"kv_n_heads": 4}}, [4, 4, 4, 4]),
    ],
)
def test_layers_that_differ_are_counted_one_by_one(fields: dict[str, Any], heads: list[int]) -> None:
    found = geometry({**PLAIN, **fields})
    assert [layer.shape.heads for layer in found.layers if layer.shape] == heads
    assert found.token_bytes == sum(heads) * 2 * 64 * 2


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_of_a_multimodal_model_only_the_text_part_counts(name: str) -> None:
    found = geometry({"model_type": "seeing", "vision_config": {"num_hidden_layers": 99}, name: PLAIN})
    assert found.token_bytes == geometry(PLAIN).token_bytes
    assert any("multimodal" in note for note in found.notes)


def test_full_layers_with_wider_heads_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    fields = {"sliding_window": 64, "layer_types": kinds, "global_head_dim": 256, "num_global_key_value_heads": 2}
    assert geometry({**PLAIN, **fields}).token_bytes == 2 * (8 * 64 * 2 + 2 * 256 * 2) * 2


@pytest.mark.parametrize(
    ("config", "error", "problem"),
    [
        ({}, LayoutError, "no num_hidden_layers"),
        ([], LayoutError, "not a JSON object"),
        ({**PLAIN, "num_attention_heads": None}, LayoutError, "no num_attention_heads"),
        ({**PLAIN, "hidden_size": None}, LayoutError, "no hidden_size"),
        ({**PLAIN, "hidden_size": 510}, LayoutError, "510 is not a multiple of num_attention_heads 8"),
        ({**PLAIN, "num_key_value_heads": 3}, LayoutError, "8 heads cannot share 3"),
        ({**PLAIN, "num_hidden_layers": "many"}, LayoutError, "'many', not a number"),
        ({**PLAIN, "num_hidden_layers": 0}, LayoutError, "not a whole number from 1 on"),
        ({**PLAIN, "num_hidden_layers": 10**9}, LayoutError, "num_hidden_layers is 1000000000"),
        ({**PLAIN, "num_hidden_layers": True}, LayoutError, "not a whole number"),
        ({**PLAIN, "kv_lora_rank": 512}, LayoutError, "no qk_rope_head_dim"),
        ({**PLAIN, "num_kv_heads": [1, 2]}, LayoutError, "4 layers one by one"),
        ({**PLAIN, "block_configs": [{}] * 4}, LayoutError, "has no attention"),
        ({**PLAIN, "layer_types": ["full_attention"]}, LayoutError, "does not list 4 layers"),
        ({**PLAIN, "layer_types": ["sliding_attention"] * 4}, LayoutError, "no sliding_window"),
        ({**PLAIN, "layer_types": ["telepathy"] * 4}, UnsupportedError, "telepathy"),
        ({**PLAIN, "layer_types": ["mamba"] * 4}, UnsupportedError, "no layer of llama keeps KV"),
        ({**PLAIN, "is_encoder_decoder": True}, UnsupportedError, "encoder-decoder"),
        ({**PLAIN, "torch_dtype": "int3"}, LayoutError, "'int3'"),
    ],
)
def test_a_bad_configuration_is_refused_with_the_field_named(config: Any, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem.replace("(", r"\(")):
        geometry(config)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nowhere/config.json"], 13),
        (["gpt-99"], 13),
        (["llama-3.1-8b", "--memory", "80G"], 2),
        (["llama-3.1-8b", "--set", "nothing"], 2),
        (["llama-3.1-8b", "--set", "num_hidden_layers=none"], 11),
        (["llama-3.1-8b", "--flops", "0"], 2),
        (["llama-3.1-8b", "--ram-rate", "0"], 2),
        (["llama-3.1-8b", "--dtype", "int3"], 11),
    ],
)
def test_what_cannot_be_planned_is_one_message_and_a_code(words: list[str], code: int) -> None:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.output


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert CliRunner().invoke(app, ["plan", str(tmp_path)]).exit_code == 11
    (tmp_path / "config.json").write_text("[1]")
    assert CliRunner().invoke(app, ["plan", str(tmp_path)]).exit_code == 11


def test_weights_come_from_the_files_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "max_position_embeddings": 64}))
    (tmp_path / "model-1.safetensors").write_bytes(bytes(1000))
    assert planned(tmp_path, "--memory", "1MB")["sessions"]["weights_bytes"] == 1000
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5000}}))
    assert planned(tmp_path, "--memory", "1MB")["sessions"]["weights_bytes"] == 5000
    assert planned(tmp_path, "--memory", "1MB", "--weights", "7000")["sessions"]["weights_bytes"] == 7000


def test_memory_without_known_weights_is_refused() -> None:
    config = {**PLAIN, "num_experts": 8, "max_position_embeddings": 64}
    with pytest.raises(SettingsError, match="weights is not known"):
        plan(geometry(config), Machine(memory=1 << 30))


def test_weights_larger_than_the_memory_are_said() -> None:
    found = plan(geometry(PUBLISHED["llama-3.1-70b"]), Machine(memory=80 * GB, weights=141 * GB))
    assert found.sessions is not None
    assert "weights alone take 61 GB more" in found.sessions.sentence(found.context)


def test_a_tier_holds_whole_blocks_after_its_index() -> None:
    found = plan(geometry(PUBLISHED["llama-3.1-8b"]), Machine(tiers={"ram": 256 << 20}), 1024)
    assert found.block_tokens == 32
    held = found.tiers["ram"]
    assert held.blocks == (255 << 20) // ((4 << 20) + 4096)
    assert held.tokens == held.blocks * 32
    assert held.sessions == held.blocks // 32


@given(
    st.integers(1, 80),
    st.integers(1, 16),
    st.integers(10**7, 10**11),
    st.floats(1e9, 1e15),
    st.integers(10**6, 10**11),
    st.floats(0, 1),
)
def test_break_even_is_where_loading_begins_to_win(
    layers: int, heads: int, weights: int, flops: float, rate: int, latency: float
) -> None:
    shape = LayerKV(LayerShape(heads, 64, 64))
    model = Geometry("x", "MHA", "bfloat16", heads * 64, heads, (shape,) * layers, weights, 4096)

    def wins(tokens: int) -> bool:
        prefill = prefill_seconds(model, tokens, flops)
        assert prefill is not None
        return latency + model.bytes_at(tokens) / rate < prefill

    found = break_even(model, rate, flops, latency, 4096)
    if found is None:
        assert not wins(4096)
    else:
        assert wins(found)
        assert found == 1 or not wins(found - 1)


@pytest.mark.parametrize("name", ["head_dim", "hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"])
@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_a_number_that_no_model_has_is_refused_by_name(name: str, digits: int) -> None:
    with pytest.raises(LayoutError, match=name):
        geometry({**PLAIN, name: 10**digits})


def test_a_model_type_that_is_no_text_can_be_told_all_the_same() -> None:
    assert geometry({**PLAIN, "model_type": "\ud800"}).family.encode()


def test_what_a_verdict_rests_on_is_said() -> None:
    found = planned("llama-3.1-70b", *EIGHT, "--flops", "4e14", "--nvme-rate", "5GB")
    assert {name: load["bytes_per_s"] for name, load in found["loads"].items()} == {"ram": 10**10, "nvme": 5 * 10**9}
    words = ["plan", "llama-3.1-70b", *EIGHT, "--flops", "4e14", "--nvme-rate", "5GB", "--set", "num_kv_heads=8"]
    told = CliRunner().invoke(app, words)
    assert "at 10 GB/s" in told.stdout
    assert "at 5 GB/s" in told.stdout
    assert "num_kv_heads" in told.stderr
