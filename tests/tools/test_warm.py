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
from kvstore.tools import metrics
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


def served(path: Path) -> dict[str, Any]:
    """What everything that counts requests tells: counters, metrics, and the days of savings."""
    with kvstore.open(path) as store:
        found, days = store.stats(), store.days().values()
        samples = [one for family in metrics.of_counters(found.counters) for one in family.samples]
    of_requests = ("hit.", "miss.", "load.", "asked.", "gate.", "refuse.")
    return {
        "asked": (found.asked_tokens, sum(day.asked for day in days)),
        "reused": (sum(found.hit_tokens.values()), sum(day.served for day in days)),
        "missed": sum(found.miss_tokens.values()),
        "rerun": sum(day.rerun for day in days),
        "counters": [name for name, value in found.counters.items() if name.startswith(of_requests) and value],
        "metrics": sum(one.value for one in samples if one.name in ("kvstore_hit_tokens_total", MISSED)),
    }


MISSED = "kvstore_miss_tokens_total"
NOTHING = {"asked": (0, 0), "reused": (0, 0), "missed": 0, "rerun": 0, "counters": [], "metrics": 0}


def test_what_is_warmed_is_nobodys_request(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces load the earlier ones, and a second run loads what was there: nobody asked, and nothing was saved."""
    torch = pytest.importorskip("torch")
    from kvstore.adapters.transformers import attach
    from kvstore.tools import model as models

    monkeypatch.setenv("KVSTORE_RAM", "64MiB")
    monkeypatch.setenv("KVSTORE_NVME", "128MiB")
    monkeypatch.setattr(warming, "PIECE_TOKENS", 64)
    original, store = warming._prefill, tmp_path / "store"
    words = (TEXT, "--text", "--model", tiny_model, "--path", store)

    def interrupted(attachment: Any, ids: Any) -> None:
        if len(ids) > 128:
            raise KeyboardInterrupt
        original(attachment, ids)

    with monkeypatch.context() as patched:
        patched.setattr(warming, "_prefill", interrupted)
        run(*words, code=130)
    assert served(store) == NOTHING, "two pieces"
    assert run(*words)["already_there"] == 128
    assert served(store) == NOTHING, "resumed"
    assert run(*words)["prefilled"] == 0
    CliRunner().invoke(app, ["evict", "--tier", "ram", "--yes", "--path", str(store)])
    run(*words)
    assert served(store) == NOTHING, "all was there, then only on the disk"
    told = json.loads(CliRunner().invoke(app, ["savings", "--path", str(store), "--json"]).stdout)["total"]
    assert (told["asked_tokens"], told["reused_tokens"], told["seconds_saved"] or 0) == (0, 0, 0)

    model, tokenizer = models.load(tiny_model)
    row = tokenizer(TEXT + "Hello?", return_tensors="pt")["input_ids"]
    with kvstore.open(store) as opened, attach(model, opened, warm_tokens=0) as kv:
        model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=1, pad_token_id=0)
        kv.flush()
    asked, reused = row.shape[1], len(TEXT)
    found = served(store)
    assert (found["asked"], found["reused"], found["missed"]) == ((asked, asked), (reused, reused), asked - reused)
    assert found["metrics"] == asked


def test_a_warmed_prompt_is_pinned_by_name(tiny_model: Path, made: Any) -> None:
    run("Hello there.", "--text", "--name", "hello", "--ttl", "60", "--model", tiny_model, "--path", made.path)
    listed = json.loads(CliRunner().invoke(app, ["names", "--path", str(made.path), "--json"]).stdout)["names"]
    (found,) = (one for one in listed if one["name"] == "hello")
    assert (found["stored"], found["pinned"]) == (12, True)


def test_it_says_why_a_first_request_finds_less_than_is_stored(tiny_model: Path, made: Any) -> None:
    words = ["Hello there.", "--text", "--threads", "1", "--model", str(tiny_model), "--path", str(made.path)]
    for _ in range(2):
        said = " ".join(CliRunner().invoke(app, ["warm", *words]).stdout.split())
        assert "find 11 tokens" in said
        assert "or all 12 where more follows: the last token of a request always runs." in said


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
