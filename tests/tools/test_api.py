"""The API answers as the command line does, changes what it says, and says what it will not do."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.kv import HostKV

pytest.importorskip("fastapi")
from served import Served, serving

from kvstore import errors, pins, sizes, store
from kvstore.tools import answers, geometry, naming, planning, standing, tenants
from kvstore.tools.wording import for_api

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served(made: Any) -> Iterator[Served]:
    with serving(made.path) as server:
        yield server


def command(*words: Any) -> Any:
    """What a command prints, in a process of its own."""
    line = [sys.executable, "-m", "kvstore.tools.cli", *map(str, words), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", ["stats", "names"])
def test_the_api_answers_what_the_command_line_does(made: Any, served: Served, words: str) -> None:
    told, shown = served.get(f"/v1/{words}"), command(words, "--path", made.path)
    for one in (told, shown):
        one.pop("processes", None)  # the command is one itself
    assert told == shown


def test_namespaces_and_prefixes_are_those_of_ls(made: Any, served: Served) -> None:
    assert served.get("/v1/namespaces") == command("ls", "--path", made.path)
    found = served.get("/v1/prefixes?limit=200")
    assert found["total"] == 4
    for label in made.lengths:
        listed = {one["key"]: one for one in command("ls", label, "--path", made.path)["prefixes"]}
        paged = {one["key"]: one for one in found["prefixes"] if one["label"] == label}
        assert set(paged) == set(listed)
        for key, one in paged.items():
            assert all(one[name] == listed[key][name] for name in ("tokens", "whole", "blocks"))
            assert one["first_tokens"] == listed[key]["first_tokens"][:8]
            assert one["idle_s"] == pytest.approx(listed[key]["idle_s"], abs=5)


def test_prefixes_are_sorted_searched_and_paged(made: Any, served: Served) -> None:
    biggest = served.get("/v1/prefixes?sort=biggest")["prefixes"]
    assert [one["tokens"] for one in biggest] == [64, 40, 9, 7]
    pages = [served.get(f"/v1/prefixes?sort=biggest&limit=1&offset={at}")["prefixes"] for at in range(5)]
    assert list(itertools.chain(*pages)) == biggest
    key = biggest[2]["key"]
    assert [one["tokens"] for one in served.get(f"/v1/prefixes?search={key[:10]}")["prefixes"]] == [9]
    assert {one["tokens"] for one in served.get("/v1/prefixes?search=SECOND")["prefixes"]} == {64, 9}
    assert [one["tokens"] for one in served.get("/v1/prefixes?search=greet")["prefixes"]] == [40]
    root = biggest[0]["namespace"]
    assert {one["tokens"] for one in served.get(f"/v1/prefixes?namespace={root}")["prefixes"]} == {64, 9}
    coldest = [one["key"] for one in served.get("/v1/prefixes?sort=coldest")["prefixes"]]
    assert coldest == [one["key"] for one in served.get("/v1/prefixes?sort=hottest")["prefixes"]][::-1]


def test_a_name_is_told_with_the_sequences_that_go_on_from_it(made: Any, served: Served) -> None:
    layout = made.layout
    space = served.store.namespace(layout, salt="first", label="first")
    longer = [*made.tokens(40)[:32], *range(900, 940)]
    served.store.save(space, longer, HostKV.stacked(layout, np.zeros((2, 2, 2, 72, 16), np.uint32)))
    served.post("/v1/pin", {"tokens": longer[:32], "pin_as": "shared"})
    found = {one["tokens"]: [name["name"] for name in one["names"]] for one in served.get("/v1/prefixes")["prefixes"]}
    assert found == {72: ["shared"], 64: [], 40: ["greeting", "shared"], 9: [], 7: []}


def test_a_sequence_that_lost_its_beginning_is_listed_as_such(made: Any, served: Served) -> None:
    store = served.store
    match = store.match(store.namespace(made.layout, salt="second"), made.tokens(64))
    first = next(iter(match.pieces.values()))[0]
    for tier in store._core.tiers:
        tier.remove([(first.name.index_key, first.name.key)], "lru")
    one = served.get("/v1/prefixes?sort=biggest")["prefixes"][0]
    assert (one["tokens"], one["whole"], one["first_tokens"]) == (64, False, [])
    assert one["blocks"] == {"ram": 3, "nvme": 3}


def test_pin_and_unpin_are_what_the_commands_see(made: Any, served: Served) -> None:
    found = served.post("/v1/pin", {"tokens": made.tokens(64), "pin_as": "rules", "ttl": 3600, "priority": 7})
    assert (found["tokens"], found["asked"], found["label"]) == (64, 64, "second")
    listed = {one["name"]: one for one in command("names", "--path", made.path)["names"]}
    assert (listed["rules"]["priority"], listed["rules"]["pinned"]) == (7, True)
    key = served.get("/v1/prefixes?sort=biggest")["prefixes"][0]["key"]
    assert served.post("/v1/pin", {"key": key, "namespace": "second", "pin_as": "by key"})["tokens"] == 64
    assert served.post("/v1/unpin", {"name": "rules"}) == {"name": "rules", "unpinned": True, "tokens": 64}
    assert served.ask("POST", "/v1/unpin", {"name": "rules"}).status == 404


def test_an_eviction_is_counted_first_and_takes_what_was_counted(made: Any, served: Served) -> None:
    asked = {"namespace": "first"}
    would = served.post("/v1/evict", asked)
    assert (would["dry_run"], would["evicted"], would["blocks"]) == (True, False, {"ram": 4, "nvme": 4})
    assert served.ask("POST", "/v1/evict", {**asked, "dry_run": False}).status == 422
    other = {"namespace": "second", "dry_run": False, "confirm": would["confirm"]}
    assert served.ask("POST", "/v1/evict", other).status == 404
    assert made.held("second", 64)
    done = served.ask("POST", "/v1/evict", {**asked, "dry_run": False, "confirm": would["confirm"]})
    assert done.status == 404, "the word was used up by the wrong eviction"
    would = served.post("/v1/evict", asked)
    done = served.post("/v1/evict", {**asked, "dry_run": False, "confirm": would["confirm"]})
    assert (done["evicted"], done["blocks"]) == (True, would["blocks"])
    assert made.held("first", 40) == {}
    assert {one["label"] for one in served.get("/v1/prefixes")["prefixes"]} == {"second"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"everything": True, "tier": "rma"}, "'ram' or 'nvme'"),
        ({"everything": True, "tier": "ram", "forget_names": True}, "forget_names"),
        ({"everything": True, "tier": "ram", "wipe": True}, "wipe"),
        ({"name": "greeting", "everything": True}, "exclude one another"),
        ({"namespace": "first", "prefix": "1,2", "name": "greeting"}, "exclude one another"),
    ],
)
def test_an_eviction_that_is_refused_forgets_no_name(made: Any, served: Served, asked: Any, says: str) -> None:
    before = served.get("/v1/names"), served.get("/v1/stats")["tiers"]
    found = served.ask("POST", "/v1/evict", asked)
    assert found.status == 422
    assert says in found.told["detail"] + " ".join(found.told["errors"])
    assert served.ask("POST", "/v1/evict", {**asked, "dry_run": False, "confirm": "x"}).status in (404, 422)
    assert (served.get("/v1/names"), served.get("/v1/stats")["tiers"]) == before


def test_names_stay_where_one_tier_is_emptied(made: Any, served: Served) -> None:
    asked = {"name": "greeting", "tier": "ram"}
    would = served.post("/v1/evict", asked)
    assert would["forgotten"] == []
    served.post("/v1/evict", {**asked, "dry_run": False, "confirm": would["confirm"]})
    assert "greeting" in [one["name"] for one in served.get("/v1/names")["names"]]


def test_evicting_a_name_forgets_it(made: Any, served: Served) -> None:
    would = served.post("/v1/evict", {"name": "greeting"})
    served.post("/v1/evict", {"name": "greeting", "dry_run": False, "confirm": would["confirm"]})
    assert served.get("/v1/names") == {"names": []}
    assert made.held("first", 7) == {"ram": 7}


def test_a_prefix_is_brought_up_as_a_job(made: Any, served: Served) -> None:
    served.store.evict(everything=True, tier="ram")
    job = served.finished(served.post("/v1/prefetch", {"name": "greeting"}, 202))
    assert (job["state"], job["result"]) == ("done", {"tier": "ram", "tokens": 40, "asked": 40})
    assert made.held("first", 40) == {"ram": 40}
    for tier, why in (
        ("hbm", "only the engine's own process"),
        ("nvme", "by itself"),
        ("disk", "Input should be 'ram'"),
    ):
        found = served.ask("POST", "/v1/prefetch", {"name": "greeting", "tier": tier})
        assert found.status == 422
        assert why in " ".join(found.told["errors"])
    described = served.get("/openapi.json")["paths"]["/v1/prefetch"]["post"]["description"]
    assert "hbm" in described


def test_verify_is_a_job_that_tells_what_it_found(served: Served) -> None:
    job = served.finished(served.post("/v1/verify", {}, 202))
    assert (job["done"], job["total"], job["result"]["ok"], job["result"]["checked"]) == (18, 18, True, 18)
    assert served.get("/v1/jobs")["jobs"][0] == job
    assert served.ask("GET", "/v1/jobs/0123456789abcdef").status == 404


def test_a_job_stops_when_it_is_told_to(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real = served.store.verify

    def slow(**given: Any) -> Any:
        for done in range(10_000):
            given["progress"](done, 10_000)
            time.sleep(0.005)
        return real(**given)

    monkeypatch.setattr(type(served.store), "verify", lambda self, **given: slow(**given))
    job = served.post("/v1/verify", {}, 202)
    assert served.ask("POST", "/v1/verify", {}).status == 409, "one at a time"
    assert served.ask("DELETE", f"/v1/jobs/{job['id']}").status == 200
    assert served.finished(job)["state"] == "cancelled"


def test_show_explain_and_plan_are_those_of_the_commands(made: Any, served: Served) -> None:
    assert served.post("/v1/show", {"name": "greeting"}) == command("show", "greeting", "--path", made.path)
    asked = served.post("/v1/explain", {"tokens": [40, 100, 101, 7, 8, 9]})
    told = command("explain", "40,100,101,7,8,9", "--path", made.path)
    for one in (asked, told):
        one["nearest"].pop("idle_s")
    assert asked == told
    words = ["--context", "131072", "--memory", "640GB", "--weights", "141GB", "--flops", "4e14"]
    body = {"model": "llama-3.1-70b", "context": 131072, "memory": "640GB", "weights": "141GB", "flops": 4e14}
    assert served.post("/v1/plan", body) == command("plan", "llama-3.1-70b", *words)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert served.post("/v1/plan", {"config": config, "context": 10})["layers"] == 2


OF_COMMANDS = re.compile(r"--[a-z]|kvstore (?!doctor)[a-z]+\\b")


def test_whatever_a_call_may_say_is_worded_for_the_api() -> None:
    """Of every module that calls reach, whatever text has an option or a command in it."""
    said = []
    for module in (answers, errors, geometry, naming, pins, planning, sizes, standing, store, tenants):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
                for one in node.args:
                    parts = [part.value for part in ast.walk(one) if isinstance(part, ast.Constant)]
                    said += [text for text in parts if isinstance(text, str)]
    said = [*(text for text in said if OF_COMMANDS.search(text)), geometry.FILE_REMEDY]
    assert len(said) > 15
    for text in said:
        told = for_api(text)
        assert not OF_COMMANDS.search(told), told
        assert told


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("pin", {"tokens": [1, 2], "pin_as": "x"}, 404, "nothing of this prompt is stored"),
        ("pin", {"tokens": [40, 1], "pin_as": "x"}, 404, "only 1 of 2 tokens"),
        ("pin", {"tokens": [40], "key": "abcdef", "pin_as": "x"}, 422, "exactly one of tokens, key and name"),
        ("show", {"name": "/etc/passwd"}, 404, "is no name, and begins no key"),
        ("evict", {"prefix": "1,2"}, 422, "prefix needs the namespace"),
        ("evict", {"namespace": "first", "prefix": ","}, 422, "an empty prefix"),
        ("evict", {"namespace": "first", "prefix": " "}, 422, "an empty prefix"),
        ("evict", {"namespace": "first", "prefix": ", ,"}, 422, "an empty prefix"),
        ("evict", {"namespace": "first", "prefix": ""}, 422, "at least 1 character"),
        ("evict", {"namespace": "third"}, 404, "no namespace"),
        ("show", {"tokens": [1, 2, 3], "namespace": "third"}, 404, "no namespace"),
        ("show", {"tokens": [1, 2, 3]}, 404, "nothing of this prompt"),
        ("unpin", {"name": "absent"}, 404, "no prefix is named"),
        ("explain", {"tokens": [4294967295]}, 422, "less than 4294967295"),
        ("show", {"tokens": [4294967296]}, 422, "less than 4294967295"),
        ("plan", {"config": {"model_type": "llama"}}, 422, "num_hidden_layers"),
        ("plan", {"model": "llama-3.1-8b", "memory": "0"}, 422, "memory is 0"),
        ("plan", {"model": "llama-3.1-8b", "dtype": "x"}, 422, "dtype"),
        ("evict", {}, 422, "nothing was named"),
        ("evict", {"everything": True, "salt": "first"}, 422, "exclude one another"),
        ("evict", {"name": "absent"}, 404, "no prefix is named"),
        ("evict", {"everything": True, "unknown": 1}, 422, "unknown"),
        ("evict", {"everything": "true"}, 422, "valid boolean"),
        ("plan", {"model": "../../etc/passwd"}, 404, "no model is known"),
        ("plan", {"model": "llama-3.1-8b", "ram": "much"}, 422, "much"),
        ("plan", {"config": {"model_type": ["x"]}}, 422, ""),
        ("explain", {"tokens": [-1]}, 422, "greater than or equal to 0"),
        ("explain", {"tokens": []}, 422, "at least 1"),
    ],
)
def test_what_cannot_be_done_is_a_problem_that_says_what_to_do(
    served: Served, path: str, body: Any, status: int, says: str
) -> None:
    found = served.ask("POST", f"/v1/{path}", body)
    assert found.status == status, found.body
    assert found.headers["content-type"] == "application/problem+json"
    assert found.told["status"] == status
    assert found.told["remedy"]
    assert says in found.told["detail"] + " ".join(found.told["errors"])
    assert not OF_COMMANDS.search(str(found.told)), "an option or a command, told to who uses the API"


def test_the_stream_tells_what_another_handle_does(made: Any, served: Served) -> None:
    with served.raw() as line:
        line.sendall(b"GET /v1/events?most=300 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard = b""
        while b"event: look" not in heard:
            heard += line.recv(65536)
        space = served.store.namespace(made.layout, salt="first", label="first")
        match = served.store.match(space, [*made.tokens(40), 1, 2])
        served.store.load(match, HostKV.stacked(made.layout, np.zeros((2, 2, 2, 40, 16), np.uint32)))
        while b'"hit_tokens":{"ram":40}' not in heard:
            heard += line.recv(65536)
            assert len(heard) < 1 << 22
        assert b"text/event-stream" in heard
        assert b'"miss_tokens":{"absent":2}' in heard
    looks = served.get("/v1/history")["looks"]
    assert sum(look["hit_tokens"].get("ram", 0) for look in looks) == 40


def test_a_quota_is_counted_first_and_evicts_what_was_counted(made: Any, served: Served) -> None:
    served.post("/v1/unpin", {"name": "greeting"})
    slot = 12288
    asked = {"salt": "first", "ram": str(2 * slot)}
    would = served.post("/v1/quota", asked)
    assert (would["changed"], would["evicted"], would["quotas"]) == (False, {"ram": 2}, [])
    assert served.get("/v1/quotas") == {"quotas": []}
    assert served.ask("POST", "/v1/quota", {**asked, "dry_run": False}).status == 422
    wrong = {"everything": True, "dry_run": False, "confirm": would["confirm"]}
    assert served.ask("POST", "/v1/evict", wrong).status == 404, "a word for a quota evicts nothing else"
    would = served.post("/v1/quota", asked)
    done = served.post("/v1/quota", {**asked, "dry_run": False, "confirm": would["confirm"]})
    assert (done["changed"], done["evicted"]) == (True, {"ram": 2})
    assert [(one["tier"], one["limit_bytes"]) for one in done["quotas"]] == [("ram", 2 * slot)]
    assert served.post("/v1/quota", {"salt": "first"})["quotas"] == done["quotas"]
    assert served.ask("POST", "/v1/quota", {"salt": "nobody"}).status == 404
    assert served.ask("POST", "/v1/quota", {"salt": "first", "ram": "much"}).status == 422


def test_a_ttl_is_set_and_empty_namespaces_are_forgotten(made: Any, served: Served) -> None:
    assert served.post("/v1/namespace", {"namespace": "first"})["ttl"] == 0
    assert served.post("/v1/namespace", {"namespace": "first", "ttl": 60})["ttl"] == 60
    assert {one["label"]: one["ttl"] for one in served.get("/v1/namespaces")["namespaces"]} == {
        "first": 60,
        "second": 0,
    }
    assert served.post("/v1/namespace", {"namespace": "first", "ttl": 30.0})["ttl"] == 30
    assert served.ask("POST", "/v1/namespace", {"namespace": "first", "ttl": 30.5}).status == 422
    assert served.post("/v1/namespace", {"namespace": "first", "ttl": 0})["ttl"] == 0
    served.store.evict(salt="second")
    would = served.post("/v1/drop-empty", {})
    assert ([one["label"] for one in would["namespaces"]], would["dropped"]) == (["second"], False)
    assert served.post("/v1/drop-empty", {"dry_run": False})["dropped"] is True
    assert [one["label"] for one in served.get("/v1/namespaces")["namespaces"]] == ["first"]


def test_quotas_are_told_with_what_is_held(served: Served) -> None:
    assert served.get("/v1/quotas") == {"quotas": []}
    served.store.set_quota("first", ram=1 << 20)
    (one,) = served.get("/v1/quotas")["quotas"]
    assert (one["tier"], one["limit_bytes"], one["used_bytes"]) == ("ram", 1 << 20, 4 * 12288)


def test_the_server_tells_its_settings_and_who_is_attached(made: Any, served: Served) -> None:
    found = served.get("/v1/server")
    assert (found["read_only"], found["may_change"]) == (False, True)
    assert served.get("/v1/server", token=None)["may_change"] is False
    assert (found["settings"]["ram"], found["settings"]["nvme"]) == (8 << 20, 16 << 20)
    (mine,) = served.get("/v1/processes")["processes"]
    assert mine["self"] is True
    assert mine["nvme"] is True
    program = (
        "import kvstore, sys; held = kvstore.open(sys.argv[1], ram='8MiB', nvme='16MiB'); print('open', flush=True);"
        " sys.stdin.read(); held.close()"
    )
    line = [sys.executable, "-c", program, str(made.path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        pids = {one["pid"]: one for one in served.get("/v1/processes")["processes"]}
        assert pids[other.pid]["self"] is False
        assert pids[other.pid]["name"]
        other.communicate()
    assert len(served.get("/v1/processes")["processes"]) == 1


def test_health_and_readiness(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.get("/healthz", token=None)["ok"] is True
    until = time.monotonic() + 10
    while served.ask("GET", "/readyz").status != 200:
        assert time.monotonic() < until
    from kvstore.errors import StorageError

    def broken(self: Any) -> Any:
        raise StorageError("the disk is gone", "look at the cables")

    monkeypatch.setattr(type(served.store), "stats", broken)
    while served.ask("GET", "/readyz").status != 503:
        assert time.monotonic() < until
    assert "the disk is gone" in served.ask("GET", "/readyz").told["says"]
    assert served.get("/healthz")["ok"] is True
    found = served.ask("GET", "/v1/stats")
    assert (found.status, found.told["remedy"]) == (500, "look at the cables")
