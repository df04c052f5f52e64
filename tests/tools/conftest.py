"""A store with two namespaces and a few sequences, on a disk and a tmpfs directory of the test's own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.kv import HostKV
from kvstore.layout import Layout

LAYOUT = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
SEQUENCES = {"first": (40, 7), "second": (64, 9)}
"""Label → lengths of the namespace's sequences; each begins with its own length."""


def sequence(length: int) -> list[int]:
    """Token ids of the sequence of a length."""
    return [length, *range(100, 100 + length - 1)]


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No settings of the machine's; ``ram`` in a directory that must be empty of stores when asked."""
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        monkeypatch.setenv("KVSTORE_RAM_DIRECTORY", shared)
        yield Path(shared)


@dataclass(frozen=True)
class Made:
    """A closed store, everything of it on ``nvme`` too; the sequence of 40 tokens is pinned as ``greeting``.

    lengths: of the sequences, by their namespace's label.
    """

    path: Path
    layout: Layout
    lengths: dict[str, tuple[int, ...]]

    def tokens(self, length: int) -> list[int]:
        """Token ids of the sequence of a length."""
        return sequence(length)

    def held(self, label: str, length: int) -> dict[str, int]:
        """Tokens of a sequence that are stored, by the tier that would serve them."""
        with kvstore.open(self.path, ram="8MiB", nvme="16MiB") as store:
            return store.match(store.namespace(self.layout, salt=label), self.tokens(length)).by_tier


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """The store."""
    path = tmp_path / "store"
    with kvstore.open(path, ram="8MiB", nvme="16MiB") as store:
        for label, lengths in SEQUENCES.items():
            space = store.namespace(LAYOUT, salt=label, label=label)
            for length in lengths:
                kv = np.random.default_rng(length).integers(0, 2**32, (2, 2, 2, length, 16), dtype=np.uint32)
                store.save(space, sequence(length), HostKV.stacked(LAYOUT, kv))
        store.pin("greeting", store.namespace(LAYOUT, salt="first", label="first"), sequence(40))
        assert store.flush(30)
    return Made(path, LAYOUT, SEQUENCES)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real but tiny Llama with random weights, and a tokenizer of bytes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
