"""`kvstore warm --engine`: a server prefills and stores; the command believes the store, not the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.errors import EngineError
from kvstore.tools import engine as engines
from kvstore.tools.cli import app
from kvstore.tools.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
TEXT = "You are a careful assistant who answers in short sentences, and says so when he does not know. " * 2
Serve = Callable[..., str]


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts the server over the store ``tmp_path / "store"``; its address."""
    running: list[subprocess.Popen[str]] = []

    def start(manner: str = "") -> str:
        seen = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
        child = subprocess.Popen(
            [sys.executable, "-m", "engine_server", str(tiny_model), str(tmp_path / "store"), manner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": seen, "OMP_NUM_THREADS": "1"},
        )
        running.append(child)
        assert child.stdout is not None
        return child.stdout.readline().strip()

    yield start
    for child in running:
        child.communicate("", timeout=60)
        assert child.returncode == 0


def warm(tmp_path: Path, url: str, *words: str | Path, code: int = 0) -> Any:
    arguments = ["warm", *map(str, words), "--engine", url, "--path", str(tmp_path / "store"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return json.loads(done.stdout) if code == 0 else done.stderr


def ran(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        found: list[int] = json.loads(answer.read())["ran"]
        return found


def test_the_engine_prefills_and_the_store_has_it(serve: Serve, tmp_path: Path, tiny_model: Path) -> None:
    url = serve()
    told = warm(tmp_path, url, TEXT, "--text", "--name", "rules", "--salt", "tenant")
    assert (told["model"], told["tokens"], told["already_there"], told["prefilled"]) == (
        "tiny",
        len(TEXT),
        0,
        len(TEXT),
    )
    assert told["prompts"][0]["by_tier"] == {"ram": len(TEXT)}
    assert ran(url) == [len(TEXT)]
    again = warm(tmp_path, f"{url}/v1/", TEXT, "--text", "--salt", "tenant", "--tokenizer", tiny_model)
    assert (again["already_there"], again["prefilled"], ran(url)) == (len(TEXT), 0, [len(TEXT)])
    with kvstore.open(tmp_path / "store", ram="64MiB", nvme="128MiB") as store:
        (use,) = store.namespaces()
        assert use.record.salt != b""
        assert len(store.names()["rules"].tokens) == 4 * len(TEXT)


def test_an_interrupted_run_goes_on_where_it_was(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PIECE_TOKENS", 64)
    url = serve()
    asked, original = [], Engine.prefill

    def interrupted(self: Engine, ids: Any, salt: str) -> None:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(ids))
        original(self, ids, salt)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "prefill", interrupted)
        warm(tmp_path, url, TEXT, "--text", code=130)
    told = warm(tmp_path, url, TEXT, "--text")
    assert asked == [64, 128]
    assert (told["already_there"], told["prefilled"]) == (128, len(TEXT) - 128)
    assert ran(url) == [64, 128, len(TEXT)]


def test_an_engine_that_stores_nothing_is_found_out(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines.Wanted.__init__, "__defaults__", ("", None, 0.3))
    url = serve("forgetful")
    assert "the store has 0 of them" in " ".join(warm(tmp_path, url, TEXT, "--text", code=20).split())
    assert ran(url) == [len(TEXT)]
    dry = warm(tmp_path, url, TEXT, "--text", "--dry-run")
    assert (dry["prompts"][0]["missing"], ran(url)) == (len(TEXT), [len(TEXT)])


def test_a_key_is_read_from_its_file(serve: Serve, tmp_path: Path) -> None:
    url = serve("keyed")
    (tmp_path / "key").write_text("secret\n")
    assert "answers 401" in warm(tmp_path, url, TEXT, "--text", code=20)
    warm(tmp_path, url, "1,2,3,4", "--api-key-file", tmp_path / "key")
    warm(tmp_path, url, TEXT, "--text", "--api-key-file", tmp_path / "nothing", code=3)


def test_what_is_no_engine_is_one_message(serve: Serve, tmp_path: Path) -> None:
    url = serve()
    warm(tmp_path, "ftp://nowhere", TEXT, "--text", code=2)
    warm(tmp_path, "http://127.0.0.1:1", TEXT, "--text", code=20)
    warm(tmp_path, url, TEXT, "--text", "--threads", "1", code=2)
    with pytest.raises(EngineError, match="answers 404"):
        Engine(f"{url}/elsewhere")
