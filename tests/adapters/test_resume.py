"""A resumed answer is the cold one, wherever the stored prefix ends, and stored KV is that of its tokens alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvstore.adapters.transformers import attach  # noqa: E402
from kvstore.adapters.transformers.allow import refuse_model  # noqa: E402
from kvstore.adapters.transformers.layout import cache_argument  # noqa: E402
from kvstore.events import Decided, Hit, Miss, Prefilled, Refusal  # noqa: E402

BLOCK = 16
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek"])
def test_greedy_answers_are_equal_at_cuts_in_and_between_blocks(
    family: str, rows: int, tiny: Any, ids: Any, store: Any
) -> None:
    model = tiny(family)
    whole = ids(50, rows=rows)
    expected = model.generate(whole, **GREEDY)
    for cut in (1, 15, 16, 17, 31, 32, 33, 48, 49):
        with attach(model, store, salt=f"{cut}", block_tokens=BLOCK, least_tokens=1, warm_tokens=0) as attachment:
            model.generate(whole[:, :cut], max_new_tokens=1, do_sample=False)
            attachment.flush()
            assert torch.equal(model.generate(whole, **GREEDY), expected), cut
            assert attachment.last.reused_tokens == rows * cut
            attachment.flush()
            assert torch.equal(model.generate(whole, **GREEDY), expected), cut
            assert attachment.last.reused_tokens == rows * 49


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_a_chat_resumes_at_the_token_where_it_diverged(family: str, tiny: Any, ids: Any, store: Any) -> None:
    model = tiny(family)
    with attach(model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0) as attachment:
        answer = model.generate(ids(40), **GREEDY)
        attachment.flush()
        for shared in (47, 44, 41, 23):
            following = torch.cat([answer[:, :shared], (answer[:, shared : shared + 1] + 1) % 97, ids(9, seed=1)], 1)
            attachment.flush()
            out = model.generate(following, **GREEDY)
            assert attachment.last.reused_tokens == shared
            attachment.flush()
            attachment.detach()
            assert torch.equal(out, model.generate(following, **GREEDY))
            attachment = attach(model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0)
        attachment.detach()


def test_rows_with_unequal_hits_resume_at_the_column_that_all_have(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    batch = ids(40, rows=3)
    mask = torch.ones_like(batch)
    mask[1, :10] = 0
    mask[2, :33] = 0
    batch = batch * mask
    expected = model.generate(batch, attention_mask=mask, **GREEDY)
    with attach(model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0) as attachment:
        model.generate(batch[:1, :30], max_new_tokens=1, do_sample=False)
        model.generate(batch[1:2, 10:36], max_new_tokens=1, do_sample=False)
        attachment.flush()
        assert torch.equal(model.generate(batch, attention_mask=mask, **GREEDY), expected)
        assert attachment.last.reused_tokens == 30 + 20  # the third row has only padding before column 30
        attachment.flush()
        assert torch.equal(model.generate(batch, attention_mask=mask, **GREEDY), expected)
        assert attachment.last.reused_tokens == 39 + 29 + 6


def test_rows_are_stored_as_if_they_had_come_alone(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    batch = ids(40, rows=2)
    mask = torch.ones_like(batch)
    mask[1, :10] = 0
    with attach(model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0) as attachment:
        out = model.generate(batch * mask, attention_mask=mask, **GREEDY)
        attachment.flush()
        alone = model.generate(batch[1:, 10:], **GREEDY)
        assert attachment.last.reused_tokens == 29
        assert torch.equal(alone[0], out[1, 10:])


def test_what_follows_a_rows_end_is_not_stored(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    batch = ids(40, rows=2)
    plain = model.generate(batch, **GREEDY)
    end = int(plain[1, 42])
    with attach(model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0) as attachment:
        out = model.generate(batch, eos_token_id=end, pad_token_id=0, **GREEDY)
        attachment.flush()
        space = store.namespace(attachment._ground().layout)
        stop = int((out[1, 40:] == end).nonzero()[0]) + 41
        padded = out[1].numpy()
        assert store.match(space, padded).tokens == min(stop, out.shape[1] - 1)


def test_a_whole_prompt_in_the_store_leaves_one_token_to_run(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    expected = model.generate(ids(32), **GREEDY)
    with attach(model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0) as attachment:
        model.generate(expected, max_new_tokens=1, do_sample=False)
        attachment.flush()
        for length in (32, 33, 39):
            out = model.generate(expected[:, :length], max_new_tokens=40 - length, do_sample=False)
            assert attachment.last.reused_tokens == length - 1
            assert torch.equal(out, expected)


def test_chunks_of_a_prompt_are_loaded_once_and_shown_one_by_one(
    tiny: Any, ids: Any, store: Any, seen: list[Any]
) -> None:
    model = tiny("llama")
    whole = ids(60)
    expected = model.generate(whole, **GREEDY)
    with attach(model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0) as attachment:
        model.generate(whole[:, :45], max_new_tokens=1, do_sample=False)
        attachment.flush()
        seen.clear()
        out = model.generate(whole, prefill_chunk_size=13, cache_implementation="dynamic", **GREEDY)
        assert torch.equal(out, expected)
        assert attachment.last.reused_tokens == 45
        assert [event.tokens for event in seen if isinstance(event, Hit)] == [45]
        assert sum(event.tokens for event in seen if isinstance(event, Hit | Miss)) == 60, "one request, asked once"


def test_calls_that_nobody_asked_for_reuse_and_save_and_count_for_nothing(
    tiny: Any, ids: Any, store: Any, seen: list[Any]
) -> None:
    model = tiny("llama")
    with attach(
        model, store, block_tokens=BLOCK, least_tokens=1, warm_tokens=0, gate=True, counted=False
    ) as attachment:
        for length in (30, 60):
            model.generate(ids(60)[:, :length], **GREEDY)
            attachment.flush()
        assert attachment.last.reused_tokens >= 30
        with pytest.warns(UserWarning, match="beams"):
            model.generate(ids(60), num_beams=2, **GREEDY)
    assert not [event for event in seen if isinstance(event, Hit | Miss | Decided | Refusal)]
    assert not [event for event in seen if isinstance(event, Prefilled) and event.rerun]


def test_hits_and_misses_add_up_to_what_was_asked_for(tiny: Any, ids: Any, store: Any, seen: list[Any]) -> None:
    model = tiny("llama")
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        for length in (30, 40, 12):
            seen.clear()
            model.generate(ids(length), **GREEDY)
            attachment.flush()
            assert sum(event.tokens for event in seen if isinstance(event, Hit | Miss)) == length


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_prefix_has_one_kv_under_two_total_lengths_exactly_for_the_allowed_ropes(
    kind: str, tiny: Any, ids: Any
) -> None:
    limit = 64 if kind == "dynamic" else 256
    model = tiny("llama", rope_parameters=ROPES[kind], max_position_embeddings=limit)
    whole = ids(200)
    caches = []
    for length in (50, 200):
        cache = DynamicCache()
        with torch.no_grad():
            model(whole[:, :length], use_cache=True, **{cache_argument(model): cache})
        caches.append(torch.cat([layer.keys[:, :, :50] for layer in cache.layers]))
    apart = float((caches[0] - caches[1]).abs().max())
    if kind in ("dynamic", "longrope"):
        assert apart > 0.01
        assert refuse_model(model) == f"rope-{kind}"
    else:
        assert apart < 1e-4
        assert refuse_model(model) is None


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_answers_are_equal_with_every_allowed_rope(kind: str, tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama", rope_parameters=ROPES[kind], max_position_embeddings=256)
    whole = ids(100)
    expected = model.generate(whole, **GREEDY)
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        model.generate(whole[:, :70], **GREEDY)
        attachment.flush()
        assert torch.equal(model.generate(whole, **GREEDY), expected)
        assert attachment.last.reused_tokens >= 70


@pytest.mark.parametrize("name", ["gpt2", "bloom", "mpt"])
def test_models_without_rope_are_served(name: str, ids: Any, store: Any) -> None:
    small = {"vocab_size": 97, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    model: Any
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(**small, n_embd=32, n_layer=2, n_head=4, n_positions=128)
        model = transformers.GPT2LMHeadModel(config).eval()
    elif name == "bloom":
        model = transformers.BloomForCausalLM(
            transformers.BloomConfig(**small, hidden_size=32, n_layer=2, n_head=4)
        ).eval()
    else:
        config = transformers.MptConfig(**small, d_model=32, n_layers=2, n_heads=4, max_seq_len=128, use_cache=True)
        model = transformers.MptForCausalLM(config).eval()
    batch = ids(40, rows=2)
    mask = torch.ones_like(batch)
    mask[1, :9] = 0
    expected = model.generate(batch * mask, attention_mask=mask, **GREEDY)
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        for _ in range(2):
            assert torch.equal(model.generate(batch * mask, attention_mask=mask, **GREEDY), expected)
            attachment.flush()
        assert attachment.last.reused_tokens == 39 + 30


def test_half_precision_is_stored_bit_for_bit(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama").to(torch.bfloat16)
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        kept = model.generate(ids(40), return_dict_in_generate=True, **GREEDY)
        again = model.generate(kept.sequences, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
        assert attachment.last.reused_tokens == 47
        name = cache_argument(model)
        for old, new in zip(kept[name].layers, again[name].layers, strict=True):
            assert torch.equal(old.keys, new.keys[:, :, :47])


def test_a_model_built_anew_resumes_from_a_store_opened_anew(tiny: Any, ids: Any, open_store: Any) -> None:
    whole = ids(60)
    expected = tiny("llama").generate(whole, **GREEDY)
    for turn in range(2):
        model = tiny("llama")  # built anew: the same weights, other objects
        with (
            open_store() as opened,
            attach(model, opened, block_tokens=BLOCK, warm_tokens=0) as attachment,
        ):
            out = model.generate(whole, **GREEDY)
            assert attachment.last.reused_tokens == (0, 59)[turn]
            assert attachment.flush(30)
            assert torch.equal(out, expected)


PROGRAM = """
import sys
from pathlib import Path
import torch, transformers, kvstore
from kvstore.adapters.transformers import attach
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
model = transformers.LlamaForCausalLM(config).eval()
store = kvstore.open(sys.argv[1], ram_directory=Path(sys.argv[2]), ram="32MiB", nvme="32MiB")
attachment = attach(model, store, block_tokens=16)
model.generate(torch.arange(3, 43)[None], max_new_tokens=8, do_sample=False)
print(attachment.last.reused_tokens)
"""


def test_a_program_that_closes_nothing_leaves_what_it_computed(tmp_path: Path, shm: Path) -> None:

    printed = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "kept"), str(shm)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        printed.append(int(done.stdout.split()[-1]))
    assert printed == [0, 39]
