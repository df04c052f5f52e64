"""Tiny random models, one a family, and a store for each test."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvstore  # noqa: E402
from kvstore.events import Counters, Event  # noqa: E402

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,  # with smaller random weights answers hardly depend on the prompt
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEEPSEEK = {
    **BASE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model that never ends an answer by itself."""
    configs = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, BASE),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**BASE, "head_dim": 8}),
        "deepseek": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, DEEPSEEK),
    }
    config, model_class, settings = configs[family]
    torch.manual_seed(seed)
    model = model_class(config(**{**settings, **changes})).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return build


@pytest.fixture
def seen() -> list[Event]:
    """Every event of the test's store, in order."""
    return []


@pytest.fixture
def counted() -> Counters:
    return Counters()


@pytest.fixture
def open_store(tmp_path: Path, shm: Path) -> Callable[..., Any]:
    """Opens the store of a name, with room for the tests here; the caller closes it."""

    def opened(name: str = "store", **settings: Any) -> Any:
        return kvstore.open(tmp_path / name, ram_directory=shm, **{"ram": "48MiB", "nvme": "64MiB", **settings})

    return opened


@pytest.fixture
def store(open_store: Callable[..., Any], seen: list[Event], counted: Counters) -> Iterator[Any]:
    with open_store(observers=(seen.append, counted)) as opened:
        yield opened


@pytest.fixture
def quiet() -> Iterator[None]:
    """Refusals warn; tests that are about something else do not care."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="kvstore leaves")
        yield


def prompt(length: int, seed: int = 7, rows: int = 1) -> Any:
    """Random token ids ``[rows, length]`` without special ones."""
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ids() -> Callable[..., Any]:
    return prompt
