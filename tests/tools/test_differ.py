"""Two prompts that should begin alike and do not: the right token and the right cause, for realistic misses."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner
from words import Words

from kvstore.errors import SettingsError
from kvstore.tools.cli import app
from kvstore.tools.differ import Side, compare, shared_tokens

SYSTEM = "You are a careful assistant. Answer in short sentences, and say so when you do not know."
RULES = " Never invent a source. Quote the manual by its chapter. Keep a friendly tone towards everybody."
QUESTION = "How do I change the oil of the pump in the basement?"


def chat(system: str, *turns: str, generation: bool = True) -> str:
    """A ChatML rendering; turns alternate between user and assistant."""
    roles = ["system", *(("user", "assistant")[at % 2] for at in range(len(turns)))]
    text = "".join(
        f"<|im_start|>{role}\n{turn}<|im_end|>\n" for role, turn in zip(roles, (system, *turns), strict=True)
    )
    return text + ("<|im_start|>assistant\n" if generation else "")


def tool(name: str) -> str:
    return json.dumps({"name": name, "description": f"The tool {name}.", "parameters": {"type": "object"}})


def tools(*names: str) -> str:
    return "# Tools\n<tools>\n" + "\n".join(map(tool, names)) + "\n</tools>\n" + SYSTEM + RULES


MISSES: dict[str, tuple[str, str, str, str]] = {
    # name: (cause, prompt, stored, what the prompt has at the first token that differs)
    "a date early in the prompt": (
        "date",
        chat("Today is 2026-11-30. " + SYSTEM + RULES, QUESTION),
        chat("Today is 2026-11-29. " + SYSTEM + RULES, QUESTION),
        "30. You",
    ),
    "a month and a day in words": (
        "date",
        chat("Current date: 26 July 2026\n" + SYSTEM, QUESTION),
        chat("Current date: 26 August 2026\n" + SYSTEM, QUESTION),
        " July",
    ),
    "a time to the second": (
        "date",
        chat(f"It is 09:41:07 now. {SYSTEM}", QUESTION),
        chat(f"It is 09:41:52 now. {SYSTEM}", QUESTION),
        "07 now",
    ),
    "a request's id": (
        "id",
        chat(f"Request 3f2b8a10-9c4d-4e1f-8a77-0d2c5b6e9f01. {SYSTEM}", QUESTION),
        chat(f"Request 3f2b8a10-9c4d-4e1f-8a77-0d2c5b6e9f02. {SYSTEM}", QUESTION),
        "1. You",
    ),
    "a user's number": (
        "id",
        chat(f"You talk to customer 40817. {SYSTEM}", QUESTION),
        chat(f"You talk to customer 40923. {SYSTEM}", QUESTION),
        "817. You",
    ),
    "tools in another order": (
        "tools-order",
        chat(tools("search", "weather", "mail"), QUESTION),
        chat(tools("mail", "search", "weather"), QUESTION),
        "search",
    ),
    "a tool's keys in another order": (
        "json-spelling",
        chat('Tools: [{"name": "search", "kind": "web"}] ' + SYSTEM, QUESTION),
        chat('Tools: [{"kind": "web", "name": "search"}] ' + SYSTEM, QUESTION),
        "name",
    ),
    "another template": (
        "template",
        f"[INST] {SYSTEM} {QUESTION} [/INST]",
        chat(SYSTEM, QUESTION),
        "[INST]",
    ),
    "a generation prompt where the conversation went on": (
        "generation-prompt",
        chat(SYSTEM, QUESTION, generation=False) + "<|im_start|>user\nHello?<|im_end|>\n",
        chat(SYSTEM, QUESTION),
        "user\nHello",
    ),
    "thinking switched off": (
        "generation-prompt",
        chat(SYSTEM, QUESTION) + "<think>\n\n</think>\n\n",
        chat(SYSTEM, QUESTION) + "<think>\n",
        "\n\n</think>",
    ),
    "a space at the end of the system message": (
        "trailing-space",
        chat(SYSTEM + " ", QUESTION),
        chat(SYSTEM, QUESTION),
        " <|im_end|>",
    ),
    "a space at the end of what was stored": (
        "trailing-space",
        SYSTEM + " " + QUESTION,
        SYSTEM + " ",
        " How",
    ),
    "a byte-order mark": ("byte-order-mark", "\ufeff" + SYSTEM + RULES, SYSTEM + RULES, "\ufeffYou"),
    "lines that end in CR LF": (
        "line-ending",
        (SYSTEM + "\n" + RULES + "\n" + QUESTION).replace("\n", "\r\n"),
        SYSTEM + "\n" + RULES + "\n" + QUESTION,
        "\r\n Never",
    ),
    "letters decomposed": (
        "unicode",
        unicodedata.normalize("NFD", "Für Grüße: " + SYSTEM),
        unicodedata.normalize("NFC", "Für Grüße: " + SYSTEM),
        "Fu\u0308r"[:2],
    ),
    "reasoning that the template strips": (
        "reasoning",
        chat(SYSTEM, QUESTION, "Open the valve first.", "And then?"),
        chat(SYSTEM, QUESTION, "<think>\nThe pump has a valve.\n</think>\n\nOpen the valve first.", generation=False),
        "Open the valve",
    ),
    "the oldest messages dropped": (
        "dropped",
        chat(SYSTEM, "And what oil does the pump need, in your opinion?", "Grade 40 does."),
        chat(
            SYSTEM, QUESTION, "Open the valve.", "And what oil does the pump need, in your opinion?", "Grade 40 does."
        ),
        "And what oil",
    ),
    "a retrieved passage put in front": (
        "inserted",
        chat("Passage: pumps are heavy and stand in basements.\n" + SYSTEM + RULES, QUESTION),
        chat(SYSTEM + RULES, QUESTION),
        "Passage",
    ),
    "two spaces": (
        "whitespace",
        chat(SYSTEM.replace("short sentences", "short  sentences"), QUESTION),
        chat(SYSTEM, QUESTION),
        " ",
    ),
    "a changed instruction": (
        "text",
        chat(SYSTEM.replace("careful", "cheerful"), QUESTION),
        chat(SYSTEM, QUESTION),
        " cheerful",
    ),
}
MENDED = set(MISSES) - {"another template", "a changed instruction"}


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_is_explained_by_its_cause_at_its_token(name: str) -> None:
    code, prompt, stored, there = MISSES[name]
    words = Words()
    mine, other = words.of(prompt), words.of(stored)
    found = compare(mine, other, words.encode)
    assert found.causes[0].code == code, found.causes
    assert found.shared == shared_tokens(mine.tokens or (), other.tokens or ())
    assert found.causes[0].at == found.shared
    assert found.around[1].startswith(there), found.around
    assert found.causes[0].lost == found.lost == len(mine) - found.shared
    assert prompt.startswith(found.around[0]) or found.around[0] in prompt
    assert found.causes[0].advice


@pytest.mark.parametrize("name", sorted(MENDED))
def test_without_the_difference_more_would_match(name: str) -> None:
    _, prompt, stored, _ = MISSES[name]
    words = Words()
    found = compare(words.of(prompt), words.of(stored), words.encode)
    if name != "a space at the end of what was stored":
        assert found.would_match > found.shared, found.causes
    assert found.would_match <= len(words.encode(stored))


@pytest.mark.parametrize("name", sorted(set(MISSES) - {"a space at the end of what was stored"}))
def test_without_a_tokenizer_the_same_cause_is_found_in_characters(name: str) -> None:
    code, prompt, stored, _ = MISSES[name]
    found = compare(Side(None, prompt), Side(None, stored))
    assert found.unit == "characters"
    assert found.causes[0].code == code
    assert prompt[: found.shared] == stored[: found.shared]
    assert prompt[found.shared : found.shared + 1] != stored[found.shared : found.shared + 1]


def test_a_beginning_token_that_only_one_has() -> None:
    words = Words()
    found = compare(words.of("<s>" + SYSTEM), words.of(SYSTEM), words.encode)
    assert (found.causes[0].code, found.shared) == ("special-tokens", 0)
    assert found.causes[0].regained == len(words.encode(SYSTEM))
    assert compare(words.of(SYSTEM), words.of("<s>" + SYSTEM), words.encode).causes[0].code == "special-tokens"


def test_text_cut_into_other_tokens() -> None:
    words = Words()
    stored = words.of(SYSTEM)
    cut = words.encode(SYSTEM)
    at = cut.index(words.encode(" careful")[0])
    apart = [*cut[:at], *words.encode(" care"), *words.encode("ful"), *cut[at + 1 :]]
    found = compare(words.side(apart), stored, words.encode)
    assert (found.causes[0].code, found.shared) == ("retokenized", at)


def test_two_differences_are_both_named() -> None:
    words = Words()
    mine = words.of(chat(f"Today is 2026-11-30. {SYSTEM} You talk to customer 40817. {RULES}", QUESTION))
    other = words.of(chat(f"Today is 2026-10-01. {SYSTEM} You talk to customer 51923. {RULES}", QUESTION))
    found = compare(mine, other, words.encode)
    assert [cause.code for cause in found.causes] == ["date", "id"]
    assert found.would_match == len(mine)


def test_what_is_stored_whole_is_no_cause_for_alarm() -> None:
    words = Words()
    assert compare(words.of(SYSTEM), words.of(SYSTEM + RULES), words.encode).causes == ()
    found = compare(words.of(SYSTEM + RULES), words.of(SYSTEM), words.encode)
    assert found.causes[0].code == "new"
    assert found.shared == len(words.encode(SYSTEM))


def test_ids_alone_are_compared_too() -> None:
    found = compare(Side((1, 2, 3, 4), None), Side((1, 2, 9), None))
    assert (found.shared, found.around) == (2, ("1 2", "3 4", "9"))
    assert found.causes[0].code == "tokens"


@example("", "1", "00")
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_any_two_texts_are_compared_without_an_error(head: str, mine: str, other: str) -> None:
    words = Words()
    found = compare(words.of(head + mine), words.of(head + other), words.encode)
    assert 0 <= found.shared <= found.would_match <= max(found.prompt, found.shared)
    assert (found.shared < found.prompt) == bool(found.causes)
    for cause in found.causes:
        assert cause.at >= 0
        assert cause.regained is None or cause.regained >= 0
    compare(Side(None, head + mine), Side(None, head + other))


def explained(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["explain", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout


def test_two_files_are_compared_without_a_store(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffRead this.\r\n".encode())
    (tmp_path / "b.txt").write_bytes(b"Read this.\n")
    found = json.loads(explained(tmp_path / "a.txt", "--against", tmp_path / "b.txt", "--json"))
    assert [cause["code"] for cause in found["causes"]] == ["byte-order-mark", "line-ending"]
    assert "byte-order-mark" in explained(tmp_path / "a.txt", "--against", tmp_path / "b.txt")
    assert json.loads(explained(tmp_path / "a.txt", tmp_path / "b.txt", "--json")) == found
    explained(tmp_path / "a.txt", tmp_path / "b.txt", "--against", tmp_path / "a.txt", code=SettingsError.exit_code)
    assert not (tmp_path / "store").exists()


def test_two_chats_are_compared_message_by_message(tmp_path: Path) -> None:
    for name, day in (("a", "2026-11-30"), ("b", "2026-11-29")):
        lines = [{"role": "system", "content": f"Today is {day}. {SYSTEM}"}, {"role": "user", "content": QUESTION}]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(explained(tmp_path / "a.jsonl", "--against", tmp_path / "b.jsonl", "--json"))
    assert found["causes"][0]["code"] == "date"
    assert found["would_match"] == found["prompt"]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.jsonl", b'{"role": "user"}', 2),
        ("a.jsonl", b"{", 2),
        ("a.json", b'{"tools": []}', 2),
        ("a.txt", b"", 2),
        ("a.txt", b"\xff\xfe", 2),
        ("a.ids", b"99999999999", 12),
    ],
)
def test_a_file_that_is_no_prompt_is_named(tmp_path: Path, name: str, content: bytes, code: int) -> None:
    (tmp_path / name).write_bytes(content)
    done = CliRunner().invoke(app, ["explain", str(tmp_path / name), "--against", str(tmp_path / name)])
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.output


def test_a_mistyped_file_is_not_taken_for_a_prompt(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(tmp_path / "promt.txt"), "--against", "1,2"])
    assert done.exit_code == 13
    assert "there is no file" in done.stderr
