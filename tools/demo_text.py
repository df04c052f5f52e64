"""The demo's conversation: a long question over the project's own documents, an answer, and a second question.

All of it is counted to the token, so that exactly as many tokens are stored as asked for, and each later request
brings exactly as many new ones. Must not know the store or how a model runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import kvstore.errors
from kvstore.errors import SettingsError

ANSWER_TOKENS = 16
TOKENS_MIN = 128
FIRST_QUESTION = "\n\nIn two sentences: what is this project for, and how does it keep its promises?"
NEXT_QUESTION = "What is a slot? Who frees it, and what happens to a reader that is still copying from it then?"
_HERE, _THERE, _NEXT = "\x02here\x02", "\x02there\x02", "\x02next\x02"


@dataclass(frozen=True, slots=True)
class Conversation:
    """prompt: the first request. turn: what the second adds after the answer's last token. spare: other tokens."""

    prompt: tuple[int, ...]
    turn: tuple[int, ...]
    spare: tuple[int, ...]

    def request(self, history: Sequence[int], variant: int | None = None) -> list[int]:
        """The second request: ``history`` (prompt and answer), then the turn.

        variant: goes on from the stored tokens with another token than the answer's last one, each number with its
        own, so that a timed request never finds what an earlier one left.
        """
        last = history[-1]
        if variant is not None:
            others = [token for token in self.spare if token != last]
            last = others[variant % len(others)]
        return [*history[:-1], last, *self.turn]


def conversation(tokenizer: Any, tokens: int, new_tokens: int) -> Conversation:
    """A conversation of which ``tokens`` are stored after its first answer, and ``new_tokens`` are new in the second.

    The first answer has ANSWER_TOKENS tokens, the last of which is never run and so not stored. Raises SettingsError
    for numbers with which no conversation can be made.
    """
    before, after, between, end = _template(tokenizer)
    question = _ids(tokenizer, FIRST_QUESTION)
    room = tokens - (ANSWER_TOKENS - 1) - len(before) - len(question) - len(after)
    asked = new_tokens - 1 - len(between) - len(end)
    if tokens < TOKENS_MIN or room < 1:
        raise SettingsError(f"--tokens {tokens} is too few for a conversation", f"use {TOKENS_MIN} or more")
    if asked < 1:
        least = new_tokens - asked + 1
        raise SettingsError(f"--new-tokens {new_tokens} is too few for a question", f"use {least} or more")
    body, following = document(tokenizer, room), _repeated(_ids(tokenizer, NEXT_QUESTION), asked)
    spare = tuple(dict.fromkeys(body))
    return Conversation((*before, *body, *question, *after), (*between, *following, *end), spare)


def documents() -> Iterator[str]:
    """The project's own texts: its documents, then its sources, so that there is always something to read."""
    package = Path(kvstore.errors.__file__).parent
    for path in (package.parent / "README.md", *sorted(package.glob("*.md"))):
        if path.is_file():
            yield path.read_text(encoding="utf-8")
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield str(metadata.metadata("prefix-kvstore").json.get("description", ""))
    for path in sorted(package.glob("*.py")):
        yield f"\n# {path.name}\n\n{path.read_text(encoding='utf-8')}"


def document(tokenizer: Any, count: int) -> tuple[int, ...]:
    """The first ``count`` tokens of the project's own texts."""
    found: list[int] = []
    for text in documents():
        found.extend(_ids(tokenizer, text))
        if len(found) >= count:
            break
    return tuple(_repeated(found, count))


def _repeated(ids: Sequence[int], count: int) -> list[int]:
    return [ids[index % len(ids)] for index in range(count)]


def _template(tokenizer: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """The chat template's tokens: before and after a user's text, from an answer to the next text, and after that."""
    if not getattr(tokenizer, "chat_template", None):
        return [], _ids(tokenizer, "\n\n"), _ids(tokenizer, "\n\n"), _ids(tokenizer, "\n")
    said = [{"role": "user", "content": _HERE}]
    first = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    said += [{"role": "assistant", "content": _THERE}, {"role": "user", "content": _NEXT}]
    whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    before, after = first.split(_HERE)
    between, end = whole.split(_THERE)[1].split(_NEXT)
    return _ids(tokenizer, before), _ids(tokenizer, after), _ids(tokenizer, between), _ids(tokenizer, end)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
