"""`kvstore explain` on a store: what matches in which tier, and why the rest does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_kv import open_small
from stores import kv_of
from typer.testing import CliRunner
from words import Words

from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.store import Store
from kvstore.tools.cli import app
from kvstore.tools.explaining import Explanation, explain
from kvstore.tools.stored import layout_difference, sequences

TRAITS = {"weights": "w1", "config": "c1", "adapters": "", "rope": "default"}


def layout(dtype: str = "float32", **traits: str) -> Layout:
    return Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16, dtype=dtype, traits={**TRAITS, **traits})


PLAIN = layout()
TEXT = (
    "<|im_start|>system\nToday is 2026-11-29. You are a careful assistant who answers in short sentences, knows the "
    "manual of the pump by heart, and says so when a question is not answered in it.<|im_end|>\n"
    "<|im_start|>user\nHow do I change the oil of the pump in the basement?<|im_end|>\n"
)


class Place:
    """A small store, and a tokenizer."""

    def __init__(self, store: Store) -> None:
        self.store, self.words = store, Words()

    def save(self, text: str, kind: Layout = PLAIN, salt: str = "", label: str = "") -> None:
        ids = np.array(self.words.encode(text), np.uint32)
        space = self.store.namespace(kind, salt=salt, label=label)
        kv = (kv_of(ids, PLAIN) % 1000).astype(kind.dtype)
        self.store.save(space, ids, HostKV.stacked(kind, kv))
        assert self.store.flush(30)

    def why(self, text: str, label: str | None = None) -> Explanation:
        uses = self.store.namespaces()
        chosen = [use for use in uses if label is None or use.record.label == label]
        return explain(self.store, self.words.encode(text), chosen, uses, self.words)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path, own_settings: Path) -> Iterator[Place]:
    with open_small(tmp_path / "store", own_settings) as store:
        yield Place(store)


def test_what_is_stored_matches_and_has_no_cause(place: Place) -> None:
    place.save(TEXT)
    found = place.why(TEXT)
    assert found.matched == found.asked == len(place.words.encode(TEXT))
    assert found.by_tier == {"ram": found.asked}
    assert found.causes == ()
    place.store.evict(everything=True, tier="ram")
    assert place.why(TEXT).by_tier == {"nvme": found.asked}


def test_a_date_is_found_with_what_it_costs(place: Place) -> None:
    place.save(TEXT)
    place.save("Something else altogether, about gardens and rivers.")
    found = place.why(TEXT.replace("11-29", "11-30"))
    assert [cause.code for cause in found.causes] == ["date"]
    at = len(place.words.encode(TEXT.split("29. You")[0]))
    assert found.matched == found.causes[0].at == at
    assert found.causes[0].lost == found.asked - at
    assert found.would_match == found.asked
    assert found.difference is not None
    assert found.difference.around[1].startswith("30. You")
    assert found.difference.around[2].startswith("29. You")
    assert found.nearest is not None
    assert found.nearest.tokens == found.asked


def test_the_stored_sequence_that_goes_on_alike_is_compared_not_the_one_that_begins_alike(place: Place) -> None:
    place.save(TEXT)
    place.save(TEXT.split("You are")[0].replace("29", "30") + "Something else.")
    found = place.why(TEXT.replace("11-29", "11-30"))
    assert found.causes[0].code == "date"
    assert found.would_match == found.asked


def test_another_salt(place: Place) -> None:
    place.save(TEXT, salt="tenant one", label="one")
    place.save("Nothing of it.", salt="tenant two", label="two")
    found = place.why(TEXT, "two")
    assert (found.matched, found.causes[0].code) == (0, "salt")
    assert found.causes[0].regained == found.elsewhere[0].matched == found.asked
    assert place.why(TEXT).causes == ()


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (layout(weights="w2"), "revision"),
        (layout(config="c2"), "revision"),
        (layout(adapters="lora"), "adapter"),
        (layout(rope="yarn"), "rope"),
        (layout(dtype="float16"), "dtype"),
    ],
)
def test_another_layout_is_named(place: Place, other: Layout, code: str) -> None:
    place.save(TEXT, other, label="old")
    place.save("Nothing of it.", label="new")
    found = place.why(TEXT, "new")
    assert (found.matched, found.causes[0].code) == (0, code)
    assert "old" in found.causes[0].says


def test_a_prompt_that_was_evicted_by_hand(place: Place) -> None:
    place.save(TEXT)
    place.save("Something else altogether.")
    place.store.evict(prefix=place.store.match(place.store.namespace(PLAIN), place.words.encode(TEXT)))
    found = place.why(TEXT)
    assert (found.matched, found.causes[0].code) == (0, "evicted")
    assert "by hand" in found.causes[0].says


def test_a_namespace_that_was_evicted_by_hand(place: Place) -> None:
    place.save(TEXT)
    place.store.evict(namespace=place.store.namespace(PLAIN).root)
    found = place.why(TEXT)
    assert (found.matched, found.causes[0].code) == (0, "evicted")


def test_a_beginning_that_was_pushed_out(place: Place) -> None:
    place.save(TEXT)
    first = place.store.match(place.store.namespace(PLAIN), place.words.encode(TEXT)).pieces
    name = next(iter(first.values()))[0].name
    for tier in place.store._core.tiers:
        tier.remove([(name.index_key, name.key)], "lru")
    found = place.why(TEXT)
    assert (found.matched, found.causes[0].code) == (0, "evicted")
    assert found.would_match == found.asked


def test_a_name_remembers_what_was_pushed_out(place: Place) -> None:
    place.save(TEXT)
    ids = place.words.encode(TEXT)
    space = place.store.namespace(PLAIN)
    place.store.pin("greeting", space, ids)
    pieces = next(iter(place.store.match(space, ids).pieces.values()))
    for tier in place.store._core.tiers:
        tier.remove([(piece.name.index_key, piece.name.key) for piece in pieces], "lru")
    found = place.why(TEXT)
    assert found.causes[0].code == "evicted"
    assert "'greeting'" in found.causes[0].says


def test_an_empty_namespace_says_whether_things_expire_there(place: Place) -> None:
    place.save("Elsewhere.", label="a")
    for label, ttl, code in (("b", 0, "empty"), ("c", 60, "expired")):
        kind = layout(weights=label)
        space = place.store.namespace(kind, label=label, ttl=ttl)
        ids = np.array([1, 2, 3], np.uint32)
        place.store.save(space, ids, HostKV.stacked(kind, kv_of(ids, PLAIN)))
        assert place.store.flush(30)
        for tier in place.store._core.tiers:
            pieces = next(iter(place.store.match(space, ids).pieces.values()))
            tier.remove([(piece.name.index_key, piece.name.key) for piece in pieces], "expired")
        assert place.why(TEXT, label).causes[0].code == code


def test_a_prompt_that_goes_on_is_only_new(place: Place) -> None:
    place.save(TEXT)
    found = place.why(TEXT + "<|im_start|>user\nAnd then?<|im_end|>\n")
    assert [cause.code for cause in found.causes] == ["new"]
    assert found.matched == len(place.words.encode(TEXT))


def test_all_sequences_are_read_whole(place: Place) -> None:
    texts = [TEXT, TEXT + "One.", "Two. " * 40, "Three."]
    for text in texts:
        place.save(text)
    found = sequences(place.store, place.store.namespace(PLAIN).root)
    assert {tuple(one.tokens.tolist()) for one in found} >= {tuple(place.words.encode(text)) for text in texts[1:]}
    assert len(sequences(place.store, place.store.namespace(PLAIN).root, most=2)) == 2


def test_two_layouts_differ_in_what_is_named() -> None:
    assert layout_difference(PLAIN, PLAIN) == []
    other = Layout.uniform(layers=3, heads=2, k_dim=16, block_tokens=32, dtype="float16", traits={"weights": "w2"})
    assert [name for name, _, _ in layout_difference(PLAIN, other)] == [
        "dtype",
        "block_tokens",
        "shapes",
        "adapters",
        "config",
        "rope",
        "weights",
    ]


def run(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["explain", *map(str, words)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.stdout


def test_the_command_compares_token_ids_with_every_namespace(made: Any, tmp_path: Path) -> None:
    found = json.loads(run("40,100,101,102,7,8", "--path", made.path, "--json"))
    assert (found["label"], found["matched"], found["lost"], found["would_match"]) == ("first", 4, 2, 4)
    assert found["causes"][0]["code"] == "tokens"
    (tmp_path / "prompt.ids").write_text(" ".join(map(str, made.tokens(64))))
    text = run(tmp_path / "prompt.ids", "--namespace", "second", "--path", made.path)
    assert text.startswith("64 of 64 tokens match in second")
    other = json.loads(run(tmp_path / "prompt.ids", "--namespace", "first", "--path", made.path, "--json"))
    assert other["causes"][0]["code"] == "salt"
    assert json.loads(run("40,100", "--salt", "first", "--path", made.path, "--json"))["label"] == "first"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nothing.txt"], 13),
        (["1,2", "--namespace", "third"], 13),
        (["1,2", "--salt", "nobody"], 13),
        (["Hello", "--text"], 2),
        (["1,99999999999"], 12),
    ],
)
def test_what_cannot_be_explained_is_one_message_and_a_code(made: Any, words: list[str], code: int) -> None:
    assert run(*words, "--path", made.path, code=code) == ""
