"""Engines with tiny random models, shared by tests: a start takes half a minute."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine, Place
from stores import shm_directory

FOLDER = Path(__file__).resolve().parent
TINY = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2)
config = LlamaConfig(vocab_size=512, head_dim=32, max_position_embeddings=4096, eos_token_id=2, **sizes)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():  # random weights of the default size answer every prompt alike
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            weight.mul_(6)
model.save_pretrained(sys.argv[1])
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where vLLM is not installed, everything in this folder is skipped, aloud."""
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # this folder itself may be found as a namespace of that name
        return
    skip = pytest.mark.skip(reason="vLLM is not installed here: tools/test --vllm makes an environment that has it")
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama's directory."""
    directory = tmp_path_factory.mktemp("tiny")
    made = subprocess.run(
        [sys.executable, "-c", TINY, str(directory)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True
    )
    assert made.returncode == 0, made.stderr.decode()[-2000:]
    return directory


@pytest.fixture(scope="session")
def plain(tiny: Path) -> Iterator[Engine]:
    """An engine without a store: what answers should be."""
    with Engine(tiny, None) as engine:
        yield engine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A store of the module's own."""
    with shm_directory() as shm:
        path = tmp_path_factory.mktemp("store")
        yield Place(path / "store", shm)
        shutil.rmtree(path, ignore_errors=True)
