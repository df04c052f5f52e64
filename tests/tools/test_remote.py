"""Commands with --url answer as they do on the store itself, and say what is wrong as they do there."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

pytest.importorskip("fastapi")
from served import TOKEN, Served, serving

from kvstore.tools.cli import app


@pytest.fixture
def served(made: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("KVSTORE_TOKEN", TOKEN)
    with serving(made.path) as server:
        yield server


def run(*words: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.stdout if code == 0 else done.stderr


def told(*words: Any) -> Any:
    return json.loads(run(*words, "--json"))


@pytest.mark.parametrize(
    "words",
    [
        ["stats"],
        ["ls"],
        ["ls", "first", "--limit", "0"],
        ["names"],
        ["show", "greeting"],
        ["show", "64,100,101"],
        ["evict", "--namespace", "first", "--dry-run"],
        ["explain", "40,100,101,7,8,9"],
        ["explain", "greeting"],
        ["savings", "--price", "3", "--ram-price", "2"],
        ["quota"],
        ["quota", "first"],
        ["quota", "second", "--ram", "24KiB", "--dry-run"],
        ["quota", "third", "--ram", "1MiB", "--dry-run"],
        ["namespace", "first"],
        ["namespace", "--drop-empty", "--dry-run"],
        ["verify"],
        ["verify", "--books-only"],
    ],
    ids=" ".join,
)
def test_the_answer_is_that_of_the_store_itself(made: Any, served: Served, words: list[str]) -> None:
    there, shown = told(*words, "--url", served.url), run(*words, "--url", served.url)
    served.stop()
    served.store.close()
    here, printed = told(*words, "--path", made.path), run(*words, "--path", made.path)
    if words[0] == "ls" and len(words) > 1:
        there["prefixes"].sort(key=lambda one: one["key"])
        here["prefixes"].sort(key=lambda one: one["key"])
        for one, other in zip(there["prefixes"], here["prefixes"], strict=True):
            assert one["first_tokens"] == other["first_tokens"][:8]
            assert {name: one[name] for name in ("key", "tokens", "whole", "blocks")}.items() <= other.items()
        assert shown.split()[:3] == printed.split()[:3] == ["first:", "2", "sequences"]
        return
    for one in (there, here):
        one.pop("seconds", None)
        (one.get("nearest") or {}).pop("idle_s", None)
    if words[0] == "stats":
        there["counters"], here["counters"] = {}, {}
    assert there == here
    if words[0] not in ("stats", "explain"):
        assert shown == printed


def test_pin_unpin_and_evict_through_a_server(made: Any, served: Served, tmp_path: Path) -> None:
    file = tmp_path / "ids.txt"
    file.write_text(" ".join(map(str, made.tokens(64))))
    found = told("pin", file, "--name", "rules", "--ttl", "60", "--url", served.url)
    assert (found["tokens"], found["label"]) == (64, "second"), "the file was read here"
    assert "rules" in run("names", "--url", served.url)
    assert told("unpin", "rules", "--url", served.url)["tokens"] == 64
    run("evict", "--namespace", "second", "--url", served.url, code=1)
    assert made.held("second", 64) == {"ram": 64}
    done = told("evict", "--namespace", "second", "--yes", "--url", served.url)
    assert done == {
        "dry_run": False,
        "evicted": True,
        "blocks": {"ram": 5, "nvme": 5},
        "names": [],
        "forgotten": [],
    }
    assert made.held("second", 64) == {}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["unpin", "absent"], 13, "no prefix is named 'absent'"),
        (["ls", "third"], 13, "no namespace 'third'"),
        (["pin", "40,1", "--name", "x"], 13, "only 1 of 2 tokens"),
        (["evict"], 2, "nothing was named"),
        (["evict"], 2, "pass --all, --tier"),
        (["evict", "--namespace", "first", "--prefix", ","], 12, "an empty prefix"),
        (["unpin", "absent"], 13, "kvstore names lists"),
        (["evict", "--all", "--wipe", "--yes"], 2, "--wipe is not done through a server"),
        (["show", "/etc/passwd", "--text"], 2, "pass --tokenizer"),
    ],
)
def test_an_error_is_the_one_it_is_there(served: Served, words: list[str], code: int, says: str) -> None:
    assert says in " ".join(run(*words, "--url", served.url, code=code).split())


def test_quotas_and_ttls_through_a_server(made: Any, served: Served) -> None:
    run("unpin", "greeting", "--url", served.url)
    done = told("quota", "first", "--ram", "24KiB", "--yes", "--url", served.url)
    assert (done["changed"], done["dry_run"], done["evicted"]) == (True, False, {"ram": 2})
    assert [one["limit_bytes"] for one in told("quota", "--url", served.url)["quotas"]] == [24 << 10]
    assert told("quota", "first", "--ram", "off", "--url", served.url)["quotas"] == []
    assert told("namespace", "first", "--ttl", "3600", "--url", served.url)["ttl"] == 3600
    assert "expire 3,600 seconds" in run("namespace", "first", "--url", served.url)
    assert told("namespace", "first", "--no-ttl", "--url", served.url)["ttl"] == 0
    run("evict", "--namespace", "second", "--yes", "--url", served.url)
    assert told("namespace", "--drop-empty", "--yes", "--url", served.url)["dropped"] is True
    assert [one["label"] for one in told("ls", "--url", served.url)["namespaces"]] == ["first"]


def test_a_configuration_here_is_planned_there(served: Served, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", tmp_path, "--context", "10", "--set", "num_hidden_layers=3"]
    assert told(*words, "--url", served.url) == told(*words)
    assert told(*words, "--url", served.url)["layers"] == 3
    assert run(*words, "--url", served.url) == run(*words)
    machine = ["--memory", "80GB", "--devices", "2", "--flops", "4e14"]
    assert told("plan", "llama-3.1-8b", *machine, "--url", served.url) == told("plan", "llama-3.1-8b", *machine)


HERE_ALONE = {"demo", "doctor", "export", "import", "serve", "warm", "bench"}
"""They need the store's files, or the machine, themselves."""


def test_whatever_command_the_api_has_a_call_for_can_be_pointed_at_a_server() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    pointed = {name for name, one in commands.items() if any("--url" in option.opts for option in one.params)}
    assert pointed == set(commands) - HERE_ALONE


def test_without_the_token_a_change_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_TOKEN")
    refused = run("unpin", "greeting", "--url", served.url, code=2)
    assert "needs the token" in refused
    assert "set KVSTORE_TOKEN" in refused
    assert "told only with the token" in run("ls", "first", "--url", served.url)
    monkeypatch.setenv("KVSTORE_TOKEN", TOKEN[:-1])
    assert "not the token" in run("stats", "--url", served.url, code=2)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://localhost/", "localhost:8717", "http://", "http://h/?a=b"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    assert "not a server's address" in " ".join(run("stats", "--url", url, code=2).split())


def test_nobody_there_is_one_message(served: Served) -> None:
    served.stop()
    assert "does not answer" in run("stats", "--url", served.url, code=3)


def test_a_store_is_watched_through_its_server_as_by_itself(made: Any, served: Served) -> None:
    words = ("top", "--every", "0.1")
    there, shown = told(*words, "--url", served.url), run(*words, "--count", "1", "--url", served.url)
    served.stop()
    served.store.close()
    here = told(*words, "--path", made.path)
    assert there.keys() == here.keys()
    for kind in ("biggest", "coldest"):
        assert here[kind], "the store has sequences"
        assert sorted(one["tokens"] for one in there[kind]) == sorted(one["tokens"] for one in here[kind])
        assert [set(one) for one in there[kind]] == [set(one) for one in here[kind]]
    assert here["biggest"][0]["key"][:8] in shown


@pytest.mark.parametrize("words", [("names",), ("evict", "--all", "--dry-run"), ("stats",)])
def test_a_directory_on_the_line_beats_a_server_in_the_environment(
    made: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setenv("KVSTORE_URL", nowhere)
    run(*words, "--path", made.path)
    assert "does not answer" in run(*words, code=3)
    for both in (("--path", made.path, "--url", nowhere), ("--url", nowhere, "--path", made.path)):
        assert "not both" in run(*words, *both, code=2)


def test_a_token_is_not_sent_on_to_where_a_server_points(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    class Pointing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            return

    monkeypatch.setenv("KVSTORE_TOKEN", TOKEN)
    with http.server.HTTPServer(("127.0.0.1", 0), Pointing) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        assert "the server answered 302" in run("stats", "--url", f"http://127.0.0.1:{server.server_port}", code=19)
        server.shutdown()
        thread.join()
    assert asked == ["/v1/stats"]
