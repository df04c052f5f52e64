"""`kvstore warm`: what it stored is found by the next process, and what was there is not computed again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.tools import warm as warming
from kvstore.tools.cli import app

TEXT = "You are a careful assistant who answers in short sentences, and says so when he does not know. " * 2


def run(*words: str | Path, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["warm", *map(str, words), "--threads", "1", "--json"])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    found: dict[str, Any] = json.loads(done.stdout) if code == 0 else {}
    return found


def test_every_warmed_token_is_reused_by_another_process(tiny_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = ["warm", TEXT, "--text", "--model", tiny_model, "--path", store, "--json"]
    environment = {"KVSTORE_RAM": "64MiB", "KVSTORE_NVME": "128MiB"}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.tools.cli", *map(str, words)],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["tokens"], told["already_there"], told["prefilled"]) == (len(TEXT), 0, len(TEXT))
    import torch

    from kvstore.adapters.transformers import attach
    from kvstore.tools import model as models

    model, tokenizer = models.load(tiny_model)
    row = tokenizer(TEXT + "Hello?", return_tensors="pt")["input_ids"]
    with kvstore.open(store, ram="64MiB", nvme="128MiB") as opened, attach(model, opened) as kv:
        model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=2, pad_token_id=0)
        assert kv.last.reused_tokens == len(TEXT)


def test_warming_goes_on_where_it_was_interrupted(tiny_model: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "PIECE_TOKENS", 64)
    original, pieces = warming._prefill, []

    def interrupted(attachment: Any, ids: Any) -> None:
        if len(pieces) == 2:
            raise KeyboardInterrupt
        pieces.append(len(ids))
        original(attachment, ids)

    words = (TEXT, "--text", "--model", tiny_model, "--path", made.path)
    monkeypatch.setattr(warming, "_prefill", interrupted)
    run(*words, code=130)
    monkeypatch.setattr(warming, "_prefill", original)
    told = run(*words)
    assert pieces == [64, 128]
    assert (told["already_there"], told["prefilled"]) == (128, len(TEXT) - 128)
    assert run(*words)["prefilled"] == 0


def test_a_warmed_prompt_is_pinned_by_name(tiny_model: Path, made: Any) -> None:
    run("Hello there.", "--text", "--name", "hello", "--ttl", "60", "--model", tiny_model, "--path", made.path)
    listed = json.loads(CliRunner().invoke(app, ["names", "--path", str(made.path), "--json"]).stdout)["names"]
    (found,) = (one for one in listed if one["name"] == "hello")
    assert (found["stored"], found["pinned"]) == (12, True)


def test_a_dry_run_computes_nothing(tiny_model: Path, made: Any) -> None:
    told = run("Hello there.", "--text", "--dry-run", "--model", tiny_model, "--path", made.path)
    assert (told["prefilled"], told["prompts"][0]["missing"]) == (0, 12)


def test_what_only_the_disk_has_is_brought_up(tiny_model: Path, made: Any) -> None:
    words = (TEXT, "--text", "--model", tiny_model, "--path", made.path)
    run(*words)
    CliRunner().invoke(app, ["evict", "--tier", "ram", "--yes", "--path", str(made.path)])
    assert run(*words, "--tier", "nvme")["prompts"][0]["by_tier"] == {"nvme": len(TEXT)}
    assert run(*words)["prompts"][0]["by_tier"] == {"ram": len(TEXT)}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nothing.txt"], 13),
        (["Hello", "--text", "--tier", "tape"], 2),
        (["Hello", "There", "--text", "--name", "x"], 2),
        (["1,2,300"], 12),
    ],
)
def test_what_cannot_be_warmed_is_one_message_and_a_code(
    tiny_model: Path, made: Any, words: list[str], code: int
) -> None:
    run(*words, "--model", tiny_model, "--path", made.path, code=code)
