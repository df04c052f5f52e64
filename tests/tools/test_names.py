"""Prefixes by name: pinned, listed, shown, forgotten and evicted, across restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.errors import NotFoundError, SettingsError, TokenError
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.tools.cli import app
from kvstore.tools.prompts import Prompt, Tokens


def run(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.stdout


def run_json(*words: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json"))
    return found


def names(made: Any) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in run_json("names", "--path", made.path)["names"]}


def test_a_pin_is_listed_with_what_is_stored_and_until_when(made: Any) -> None:
    words = ("64,100,101,102", "--name", "rules", "--ttl", "3600", "--priority", "7")
    found = run_json("pin", *words, "--path", made.path)
    assert (found["tokens"], found["asked"], found["label"]) == (4, 4, "second")
    listed = names(made)
    assert set(listed) == {"greeting", "rules"}
    assert (listed["rules"]["stored"], listed["rules"]["pinned"], listed["rules"]["priority"]) == (4, True, 7)
    assert listed["rules"]["expires"] == pytest.approx(listed["rules"]["created"] + 3600, abs=2)
    assert listed["greeting"]["expires"] is None
    assert "minutes more" in run("names", "--path", made.path)
    assert "for good" in run("names", "--path", made.path)


def test_a_pinned_prefix_outlives_what_pushes_others_out(made: Any) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(made.layout, salt="second", label="second")
        for seed in range(60):
            ids = np.arange(512, dtype=np.uint32) + 10_000 * (seed + 1)
            store.save(space, ids, HostKV.stacked(made.layout, np.zeros((2, 2, 2, 512, 16), np.uint32)))
            assert store.flush(30)
    listed = names(made)
    assert listed["greeting"]["stored"] == 40
    assert made.held("second", 64) == {}


def test_a_name_is_forgotten_and_its_blocks_stay(made: Any) -> None:
    assert run_json("unpin", "greeting", "--path", made.path) == {"name": "greeting", "unpinned": True, "tokens": 40}
    assert names(made) == {}
    assert made.held("first", 40) == {"ram": 40}
    run("unpin", "greeting", "--path", made.path, code=13)


def test_an_expired_pin_is_listed_as_such(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run("pin", "40,100", "--name", "short", "--ttl", "1", "--path", made.path)
    from kvstore import pins

    now = pins.time.time()
    monkeypatch.setattr(pins.time, "time", lambda: now + 5)
    assert names(made)["short"]["pinned"] is False
    assert "expired" in run("names", "--path", made.path)


def test_show_tells_where_a_prefix_is(made: Any) -> None:
    run("evict", "--tier", "ram", "--yes", "--path", made.path)
    found = run_json("show", "greeting", "--path", made.path)
    assert (found["tokens"], found["stored"], found["by_tier"], found["blocks"]) == (40, 40, {"nvme": 40}, {"nvme": 3})
    assert found["bytes"] == 40 * made.layout.token_bytes()
    assert found["first_tokens"] == made.tokens(40)[:32]
    assert [one["name"] for one in found["names"]] == ["greeting"]
    longer = run_json("show", "40,100,101,9,9", "--path", made.path)
    assert (longer["tokens"], longer["stored"], longer["names"]) == (5, 3, [])
    by_key = run_json("show", found["key"][:12], "--path", made.path)
    assert by_key["first_tokens"] == found["first_tokens"]
    assert "40 of 40 are stored" in run("show", "greeting", "--path", made.path)


def test_evicting_a_name_takes_its_pin_along(made: Any) -> None:
    would = run_json("evict", "--name", "greeting", "--dry-run", "--path", made.path)
    assert would["blocks"] == {"ram": 3, "nvme": 3}
    assert set(names(made)) == {"greeting"}
    assert run_json("evict", "--name", "greeting", "--yes", "--path", made.path)["blocks"] == would["blocks"]
    assert names(made) == {}
    assert made.held("first", 40) == {}
    assert made.held("first", 7) == {"ram": 7}


def test_an_eviction_says_which_names_go_before_it_is_done(made: Any) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        store.pin("longer", store.namespace(made.layout, salt="second", label="second"), made.tokens(64))
    where = ("--path", made.path)
    cases: list[tuple[list[str], list[str], list[str]]] = [
        (["--name", "greeting"], ["greeting"], ["greeting"]),
        (["--salt", "first"], ["greeting"], []),
        (["--all"], ["greeting", "longer"], []),
        (["--unused", "0"], ["greeting", "longer"], []),
        (["--all", "--wipe"], ["greeting", "longer"], ["greeting", "longer"]),
        (["--namespace", "second", "--prefix", "9,100"], [], []),
        (["--tier", "ram"], [], []),
    ]
    for words, lose, forgotten in cases:
        would = run_json("evict", *words, "--dry-run", *where)
        assert (would["names"], would["forgotten"]) == (lose, forgotten), words
        said = run("evict", *words, "--dry-run", *where)
        asked = CliRunner().invoke(app, ["evict", *words, "--path", str(made.path)], input="n\n")
        assert asked.exit_code == 1
        for name in ("greeting", "longer"):
            assert (name in said, name in asked.output) == (name in lose,) * 2, words
    assert set(names(made)) == {"greeting", "longer"}, "nothing was done yet"
    assert "with the name greeting" in run("evict", "--name", "greeting", "--yes", *where)
    left = run_json("evict", "--all", "--yes", *where)
    assert (left["names"], set(names(made))) == (["longer"], {"longer"})


def test_evicting_a_name_of_which_the_end_is_gone_touches_nothing_else(made: Any) -> None:
    """What is left of it is the beginning of other conversations."""
    layout = made.layout
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(layout, salt="first", label="first")
        other = [*made.tokens(40)[:32], *range(900, 916)]
        store.save(space, other, HostKV.stacked(layout, np.zeros((2, 2, 2, 48, 16), np.uint32)))
        pieces = next(iter(store.match(space, made.tokens(40)).pieces.values()))
        for tier in store._core.tiers:
            tier.remove([(pieces[2].name.index_key, pieces[2].name.key)], "lru")
        with pytest.raises(NotFoundError, match="only 32 of the 40"):
            store.evict(name="greeting")
        assert store.match(space, other).tokens == 48


def test_evicting_a_salt_leaves_the_others(made: Any) -> None:
    assert run_json("evict", "--salt", "first", "--yes", "--path", made.path)["blocks"] == {"ram": 4, "nvme": 4}
    assert made.held("first", 7) == {}
    assert made.held("second", 64) == {"ram": 64}
    run("evict", "--salt", "nobody", "--yes", "--path", made.path, code=13)
    run("evict", "--salt", "first", "--name", "greeting", "--path", made.path, code=2)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["pin", "1,2,3", "--name", "x"], 13),
        (["pin", "40,100,9", "--name", "x"], 13),
        (["pin", "40,100", "--name", ""], 2),
        (["pin", "Hello", "--text", "--name", "x"], 2),
        (["pin", "nothing.txt", "--name", "x"], 13),
        (["pin", "greeting", "--namespace", "second", "--name", "x"], 13),
        (["pin", "40,100", "--name", "x", "--salt", "nobody"], 13),
        (["show", "nothing"], 13),
        (["unpin", "nothing"], 13),
        (["evict", "--name", "nothing", "--yes"], 13),
    ],
)
def test_what_cannot_be_named_is_one_message_and_a_code(made: Any, words: list[str], code: int) -> None:
    assert run(*words, "--path", made.path, code=code) == ""
    assert set(names(made)) == {"greeting"}


def test_a_part_is_pinned_only_when_told_to(made: Any) -> None:
    found = run_json("pin", "40,100,9", "--partial", "--name", "x", "--path", made.path)
    assert (found["tokens"], found["asked"]) == (2, 3)


def test_a_prompt_that_two_namespaces_hold_is_ambiguous(made: Any) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(made.layout, salt="second", label="second")
        store.save(space, made.tokens(40), HostKV.stacked(made.layout, np.zeros((2, 2, 2, 40, 16), np.uint32)))
    run("pin", "40,100", "--name", "x", "--path", made.path, code=14)
    run("pin", "40,100", "--name", "x", "--namespace", "first", "--path", made.path)


def test_pins_take_at_most_half_of_a_tier(made: Any) -> None:
    layout = Layout.uniform(layers=2, heads=2, k_dim=512, block_tokens=16)
    for first, code in ((10_000, 0), (20_000, 9)):
        ids = np.arange(first, first + 160, dtype=np.uint32)
        with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
            space = store.namespace(layout, salt="wide", label="wide")
            store.save(space, ids, HostKV.stacked(layout, np.zeros((2, 2, 2, 160, 512), np.uint32)))
            assert store.flush(30)
            assert store.match(space, ids).tokens == len(ids)
        run("pin", ",".join(map(str, ids.tolist())), "--name", str(first), "--path", made.path, code=code)
    assert set(names(made)) == {"greeting", "10000"}


# -------------------------------------------------------------------- with a real tokenizer


@pytest.fixture(scope="module")
def tokens(tiny_model: Path) -> Tokens:
    return Tokens(str(tiny_model))


def test_text_becomes_tokens_and_comes_back_with_its_places(tokens: Tokens) -> None:
    text = "Grüße, 日本 and a \ufeff mark"
    ids = tokens.ids(Prompt("test", text=text))
    side = tokens.side(ids)
    assert side.text == text
    assert len(side.ends) == len(ids)
    assert side.ends[-1] == len(text)
    assert tokens.encode(text) == list(ids)


def test_ids_of_another_tokenizer_are_refused(tokens: Tokens) -> None:
    with pytest.raises(TokenError, match="beyond the 256 tokens"):
        tokens.ids(Prompt("test", ids=(1, 256)))


def test_a_chat_without_a_template_is_refused(tokens: Tokens) -> None:
    with pytest.raises(SettingsError, match="no chat template"):
        tokens.ids(Prompt("test", messages=({"role": "user", "content": "Hello"},)))


def test_of_a_chat_only_what_stays_is_settled(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    monkeypatch.setattr(tokens._inner, "chat_template", template)
    chat = Prompt("test", messages=({"role": "user", "content": "Hello"},))
    assert tokens.decode(tokens.ids(chat)) == "<user>Hello\n<assistant>"
    assert tokens.decode(tokens.ids(chat, settled=True)) == "<user>Hello\n<assistant>"
    answered = Prompt("test", messages=(*chat.messages, {"role": "assistant", "content": "Hi"}))  # type: ignore[misc]
    assert tokens.decode(tokens.ids(answered)) == "<user>Hello\n<assistant>Hi\n"
    assert tokens.decode(tokens.ids(answered, settled=True)) == "<user>Hello\n<assistant>Hi\n<user>"


def test_no_tokenizer_where_none_is(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no tokenizer could be loaded"):
        Tokens(str(tmp_path))
