"""The demo's conversation is counted to the token, whatever the template."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import SettingsError
from kvstore.tools.demo_text import ANSWER_TOKENS, TOKENS_MIN, conversation, documents


class Words:
    """A tokenizer of characters, as real ones are called; with a chat template, or without."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, said: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        turns = "".join(f"[{turn['role'][0]}]{turn['content']}[/]" for turn in said)
        return f"<s>{turns}" + ("[a]" if add_generation_prompt else "")


@pytest.mark.parametrize("template", [None, "yes"])
@pytest.mark.parametrize(("tokens", "new"), [(TOKENS_MIN, 16), (1000, 17), (4096, 40)])
def test_stored_and_new_tokens_are_exactly_those_asked_for(template: str | None, tokens: int, new: int) -> None:
    made = conversation(Words(template), tokens, new)
    answer = list(range(10**6, 10**6 + ANSWER_TOKENS))
    history = [*made.prompt, *answer]
    assert len(history) - 1 == tokens
    assert len(made.request(history)) == tokens + new
    assert made.request(history)[: len(history)] == history


def test_variants_share_the_stored_tokens_and_nothing_more() -> None:
    made = conversation(Words("yes"), 500, 20)
    history = [*made.prompt, *range(ANSWER_TOKENS)]
    plain = made.request(history)
    variants = [made.request(history, number) for number in range(12)]
    assert all(variant[:500] == plain[:500] for variant in variants)
    assert len({plain[500], *(variant[500] for variant in variants)}) == 13
    assert all(len(variant) == 520 for variant in variants)


def test_the_template_is_kept_around_the_texts() -> None:
    made = conversation(Words("yes"), 400, 20)
    text = "".join(map(chr, made.prompt))
    assert text.startswith("<s>[u]")
    assert text.endswith("[/][a]")
    turn = "".join(map(chr, made.turn))
    assert turn.startswith("[/][u]")
    assert turn.endswith("[/][a]")


@pytest.mark.parametrize(("tokens", "new"), [(TOKENS_MIN - 1, 40), (500, 3)])
def test_numbers_too_small_for_a_conversation_say_what_would_do(tokens: int, new: int) -> None:
    with pytest.raises(SettingsError, match="too few") as caught:
        conversation(Words("yes"), tokens, new)
    number = int("".join(filter(str.isdigit, caught.value.remedy)))
    conversation(Words("yes"), max(tokens, number), max(new, number))


def test_the_documents_are_the_projects_own_and_long() -> None:
    texts = list(documents())
    assert sum(map(len, texts)) > 40_000
    assert any("kvstore" in text for text in texts)


def test_a_real_tokenizer_gives_the_same_numbers() -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, **{word: number for number, word in enumerate(("the", "of", "a", "store", "is"), 1)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = conversation(transformers.PreTrainedTokenizerFast(tokenizer_object=backend), 300, 16)
    assert len(made.prompt) + ANSWER_TOKENS - 1 == 300
    assert len(made.turn) == 15
