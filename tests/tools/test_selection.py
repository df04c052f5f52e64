"""`kvstore ls` and GET /v1/prefixes choose the same sequences, by namespace, salt, tier, age and size."""

from __future__ import annotations

import itertools
import json
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.host import boottime_ns
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.settings import Settings
from kvstore.sizes import parse_size

pytest.importorskip("fastapi")
from served import TOKEN, Served, serving

from kvstore.tools.cli import app

SALTED, PLAIN = 40 * 512, 64 * 512
"""Bytes of the sequence of 40 tokens under ``first``, and of that of 64 tokens under ``second``."""
AGE_S = min(600.0, boottime_ns() / 2e9)
"""How long ago the sequence of 9 tokens was used: no stamp is from before the host started."""


@pytest.fixture
def mixed(made: Any) -> Any:
    """As `made`; besides a sequence under no salt, of which the first block alone is in `ram`, and that of 9 tokens is
    old."""
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(made.layout)
        store.save(space, range(200, 248), HostKV.stacked(made.layout, np.zeros((2, 2, 2, 48, 16), np.uint32)))
        assert store.flush(30)
        ram = store._core.tiers[0]
        tail = next(iter(store.match(space, range(200, 248)).pieces.values()))[1:]
        ram.remove([(piece.name.index_key, piece.name.key) for piece in tail], "lru")
        old = next(iter(store.match(store.namespace(made.layout, salt="second"), made.tokens(9)).pieces.values()))
        for tier in store._core.tiers:
            refs = [entry.ref for entry in tier.find([piece.name for piece in old]) if entry is not None]
            tier.touch(refs, [0] * len(refs), boottime_ns() - round(AGE_S * 1e9))
        store.evict(prefix=store.match(store.namespace(made.layout, salt="first"), made.tokens(7)), tier="ram")
    return made


@pytest.fixture
def served(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("KVSTORE_TOKEN", TOKEN)
    with serving(mixed.path) as server:
        yield server


def run(*words: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def places(served: Served) -> Iterator[list[str]]:
    """Where to ask: through the server, then, once it has closed the store, the store itself."""
    yield ["--url", served.url]
    served.stop()
    served.store.close()
    yield ["--path", str(served.store.settings.path)]


def lengths(*words: Any) -> list[int]:
    """Lengths of the sequences that `ls` lists."""
    told = json.loads(run("ls", *words, "--json"))
    assert told["total"] == len(told["prefixes"])
    return sorted(one["tokens"] for one in told["prefixes"])


CHOICES = [
    (["--larger", "0"], [7, 9, 40, 48, 64]),
    (["--larger", SALTED], [48, 64]),
    (["--larger", f"{SALTED - 1}"], [40, 48, 64]),
    (["--larger", "20KiB"], [48, 64]),
    (["--larger", "1GiB"], []),
    (["--salt", "first"], [7, 40]),
    (["--salt", ""], [48]),
    (["--tier", "ram"], [9, 40, 48, 64]),
    (["--tier", "nvme"], [7, 9, 40, 48, 64]),
    (["--unused", AGE_S / 2], [9]),
    (["--unused", "0"], [7, 9, 40, 48, 64]),
    (["second", "--larger", "16KiB"], [64]),
    (["second", "--unused", AGE_S / 2, "--tier", "ram"], [9]),
    (["--salt", "first", "--tier", "ram"], [40]),
    (["first", "--salt", "second"], []),
]


def shown(one: list[Any]) -> str:
    """The name of words, or of lengths, in a test's name: the same in every process, whatever the host's age."""
    return " ".join("AGE" if isinstance(word, float) else str(word) for word in one)


@pytest.mark.parametrize(("words", "wanted"), CHOICES, ids=shown)
def test_each_choice_and_several_at_once(mixed: Any, words: list[Any], wanted: list[int]) -> None:
    assert lengths(*words, "--path", mixed.path) == wanted


def test_through_a_server_the_choices_are_the_same(served: Served) -> None:
    for words, wanted in CHOICES:
        assert lengths(*words, "--url", served.url) == wanted, words


def test_pages_of_a_choice_are_the_whole_of_it(served: Served) -> None:
    (salt,) = {one["salt"] for one in served.get("/v1/namespaces")["namespaces"] if one["label"] == "second"}
    for asked in ({"larger": "16KiB", "tier": "ram"}, {"salt": salt}, {"tier": "nvme", "unused": 0}, {"larger": 0}):
        query = urllib.parse.urlencode({**asked, "sort": "biggest"})
        whole = served.get(f"/v1/prefixes?{query}")
        pages = [served.get(f"/v1/prefixes?{query}&limit=1&offset={at}") for at in range(whole["total"] + 1)]
        keys = [one["key"] for one in itertools.chain(*(page["prefixes"] for page in pages))]
        assert keys == [one["key"] for one in whole["prefixes"]]
        assert len(keys) == whole["total"] == pages[-1]["total"] > 0


def test_what_is_chosen_of_all_namespaces_is_shown_with_its_own(served: Served) -> None:
    for where in places(served):
        shown = run("ls", "--larger", SALTED, *where)
        assert shown.split("\n")[0].strip() == "2 sequences"
        assert re.search(r"second\W.*\W64\W.*\W32 KiB\W.*ram 4, nvme 4", shown)
        assert "first tokens" in shown
        assert "namespace" not in run("ls", "first", *where)


def test_a_salt_is_chosen_as_it_was_told_so_that_nobody_can_guess_one(served: Served) -> None:
    for one in served.get("/v1/namespaces", token=None)["namespaces"]:
        found = served.get(f"/v1/prefixes?salt={one['salt']}", token=None)["prefixes"]
        assert {prefix["namespace"] for prefix in found} == {one["root"]}
    for one in served.get("/v1/namespaces")["namespaces"]:
        if one["salt"]:
            assert served.get(f"/v1/prefixes?salt={one['salt']}")["total"] > 0
            assert served.get(f"/v1/prefixes?salt={one['salt']}", token=None)["total"] == 0


def test_a_salt_without_the_token_is_an_error_that_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_TOKEN")
    refused = run("ls", "--salt", "first", "--url", served.url, code=2)
    assert "salts are told only with the token" in " ".join(refused.split())
    assert "set KVSTORE_TOKEN" in " ".join(refused.split())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--salt", "third"], 13, "nothing is stored under the salt 'third'"),
        (["--larger", "20G"], 2, "write 20GiB"),
        (["--larger", "much"], 2, "'much' is not a size"),
    ],
)
def test_a_choice_that_cannot_be_is_the_same_error_everywhere(
    served: Served, words: list[str], code: int, says: str
) -> None:
    for where in places(served):
        assert says in " ".join(run("ls", *words, *where, code=code).split())


def test_a_tier_that_is_not_there_is_named(mixed: Any) -> None:
    assert "there is no tier 'disk'" in run("ls", "--tier", "disk", "--path", mixed.path, code=2)


@pytest.mark.parametrize("query", ["larger=20G", "larger=", "salt=first", "unused=-1", "unused=nan", "tier=disk"])
def test_the_api_refuses_what_is_no_choice(served: Served, query: str) -> None:
    answer = served.ask("GET", f"/v1/prefixes?{query}")
    assert answer.status == 422, answer.body
    assert answer.told["remedy"]


@pytest.mark.parametrize("size", ["20480", "20KiB", "20 KiB", "20.48kB", "0.02MB", "1GiB", "9999TiB", "9" * 18])
def test_the_api_takes_sizes_as_people_write_them(served: Served, size: str) -> None:
    found = served.get(f"/v1/prefixes?{urllib.parse.urlencode({'larger': size})}")
    assert {one["bytes"] > parse_size(size) for one in found["prefixes"]} <= {True}
    assert found["total"] == (0 if parse_size(size) > 1 << 20 else 3 if parse_size(size) < SALTED else 2)


def test_sequences_of_more_than_a_size_are_evicted_as_they_are_listed(served: Served, mixed: Any) -> None:
    served.post("/v1/unpin", {"name": "greeting"})
    limits = iter([(SALTED, {"ram": 5, "nvme": 7}, [7, 9, 40]), ("10KiB", {"ram": 3, "nvme": 3}, [7, 9])])
    for where, (limit, blocks, left) in zip(places(served), limits, strict=True):
        would = json.loads(run("evict", "--larger", limit, "--dry-run", "--json", *where))
        assert (would["evicted"], would["blocks"]) == (False, blocks)
        done = json.loads(run("evict", "--larger", limit, "--yes", "--json", *where))
        assert (done["evicted"], done["blocks"]) == (True, blocks)
        assert lengths("--larger", "0", *where) == left


def test_a_size_and_another_choice_to_evict_are_refused(mixed: Any) -> None:
    refused = run("evict", "--larger", "1GiB", "--salt", "first", "--yes", "--path", mixed.path, code=2)
    assert "exclude one another" in " ".join(refused.split())


def test_sizes_count_every_part_of_a_layout(tmp_path: Any) -> None:
    layout = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16, shards=2)
    with kvstore.open(tmp_path / "parted", ram="8MiB", nvme=0) as store:
        parts = {part: HostKV.stacked(layout, np.zeros((2, 2, 2, 20, 16), np.uint32)) for part in layout.parts()}
        store.save(store.namespace(layout), range(20), parts)
        path = Settings.resolve(tmp_path / "parted").path
    (space,) = json.loads(run("ls", "--json", "--path", path))["namespaces"]
    (one,) = json.loads(run("ls", "--larger", "0", "--json", "--path", path))["prefixes"]
    assert (space["token_bytes"], one["bytes"]) == (2 * layout.token_bytes(), 20 * 2 * layout.token_bytes())
