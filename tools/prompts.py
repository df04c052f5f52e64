"""Prompts as people have them: text, a file, a JSONL chat, a list of token ids; and what a tokenizer makes of them.

An argument is a file where one of that name exists, token ids where it is a list of numbers, and text only where the
caller says so: a mistyped file name must not be taken for a prompt. Must not know the store.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import MissingExtraError, NotFoundError, PathError, SettingsError, TokenError
from kvstore.identity import as_tokens
from kvstore.tools.differ import Side, spelled

PROMPT_LIMIT = 64 << 20
IDS = re.compile(r"\s*\[?\s*\d+(?:\s*[,\s]\s*\d+)*\s*,?\s*\]?\s*")
PROBES = ("\x02a", "b\x03")
"""Two next messages that begin differently: what renders alike before both is settled."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of ``text``, ``ids`` and ``messages`` is there. source: where it came from, for people. tools: of a chat."""

    source: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()


def read_prompt(argument: str, as_text: bool = False) -> Prompt | None:
    """The prompt an argument means; None where it is neither a file nor token ids, and so may be a name.

    ``-`` is standard input. Raises PathError for a file that cannot be read, TokenError and SettingsError for one that
    cannot be a prompt.
    """
    if as_text:
        return Prompt("the argument", text=argument)
    if argument == "-":
        return parse_prompt(sys.stdin.buffer.read(PROMPT_LIMIT + 1), "standard input", "")
    path = Path(argument)
    try:
        is_file = path.is_file()
    except OSError:
        is_file = False
    if is_file:
        try:
            with path.open("rb") as file:
                raw = file.read(PROMPT_LIMIT + 1)
        except OSError as error:
            raise PathError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error
        return parse_prompt(raw, str(path), path.suffix)
    if "," in argument and IDS.fullmatch(argument):
        return Prompt("the argument", ids=token_ids(argument))
    return None


def require_prompt(argument: str, as_text: bool) -> Prompt:
    """The prompt an argument means. Raises NotFoundError where it is none, and what `read_prompt` raises."""
    found = read_prompt(argument, as_text)
    if found is not None:
        return found
    if os.path.isdir(argument):
        raise NotFoundError(f"{argument!r} is a folder", "name a file in it, or pass --text for the prompt itself")
    raise NotFoundError(f"there is no file {argument!r}", "check the path, or pass --text for the prompt itself")


def parse_prompt(raw: bytes, source: str, suffix: str) -> Prompt:
    """A file's content: a chat (``.jsonl``, ``.json``), token ids (nothing but numbers), or text."""
    if len(raw) > PROMPT_LIMIT:
        raise SettingsError(f"{source} has more than {PROMPT_LIMIT >> 20} MiB", "pass a single prompt")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source} is not UTF-8 text (byte {error.start})", "convert it first") from error
    if not text:
        raise SettingsError(f"{source} is empty", "pass a prompt")
    if suffix in (".jsonl", ".ndjson", ".json"):
        return _chat(text, source) if not IDS.fullmatch(text) else Prompt(source, ids=token_ids(text))
    if IDS.fullmatch(text):
        return Prompt(source, ids=token_ids(text))
    return Prompt(source, text=text)


def token_ids(text: str) -> tuple[int, ...]:
    """Token ids out of a list of numbers. Raises TokenError."""
    found = [int(number) for number in re.findall(r"\d+", text)]
    return tuple(as_tokens(found).tolist())


def _chat(text: str, source: str) -> Prompt:
    """Messages, one a line or as one list; a line or a key ``tools`` has the tools."""
    try:
        whole = json.loads(text)
        lines = whole if isinstance(whole, list) else [whole]
    except ValueError:
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError as error:
                    said = f"line {number} of {source} is not JSON: {error.msg} (column {error.colno})"
                    raise SettingsError(said, _CHAT) from error
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, dict) and isinstance(line.get("tools"), list):
            tools += line["tools"]
        if isinstance(line, dict) and isinstance(line.get("messages"), list):
            messages += line["messages"]
        elif isinstance(line, dict) and "role" in line and "content" in line:
            messages.append(line)
        elif not (isinstance(line, dict) and "tools" in line):
            raise SettingsError(f"line {number} of {source} has no role and content", _CHAT)
    if not messages:
        raise SettingsError(f"{source} has no messages", _CHAT)
    return Prompt(source, messages=tuple(messages), tools=tuple(tools))


_CHAT = 'a chat is one object a line: {"role": "user", "content": "…"}'


class Tokens:
    """A tokenizer of transformers, as commands use it."""

    def __init__(self, name_or_folder: str) -> None:
        """Raises MissingExtraError without transformers, NotFoundError where there is no such tokenizer."""
        try:
            import transformers
        except ImportError as error:
            raise MissingExtraError(
                "transformers is not installed, and a text needs a tokenizer",
                'pip install "prefix-kvstore[transformers]", or pass token ids',
            ) from error
        logging: Any = transformers.utils.logging
        logging.set_verbosity_error()
        self.name = name_or_folder
        try:
            self._inner: Any = transformers.AutoTokenizer.from_pretrained(name_or_folder)
        except (OSError, ValueError) as error:
            first = (str(error).splitlines() or [repr(error)])[0]
            raise NotFoundError(
                f"no tokenizer could be loaded from {name_or_folder!r}: {first}", "pass the model's folder or its name"
            ) from error

    @property
    def size(self) -> int:
        """Token ids there are."""
        return len(self._inner)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are recognised, none are added."""
        ids: list[int] = self._inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def ids(self, prompt: Prompt, settled: bool = False) -> tuple[int, ...]:
        """Ids of a prompt, as an engine would ask for them.

        settled: of a chat only what stays whatever is said next. Raises SettingsError for a chat the tokenizer has no
        template for, TokenError for ids it does not have.
        """
        if prompt.ids is not None:
            self.check(prompt.ids)
            return prompt.ids
        if prompt.text is not None:
            return tuple(self._inner(prompt.text, verbose=False)["input_ids"])
        messages = list(prompt.messages or ())
        if not settled:
            return self._rendered(prompt, messages, generation=messages[-1].get("role") != "assistant")
        role = "assistant" if messages[-1].get("role") == "user" else "user"
        ends = [self._rendered(prompt, [*messages, {"role": role, "content": probe}], False) for probe in PROBES]
        shared = 0
        while shared < min(map(len, ends)) and ends[0][shared] == ends[1][shared]:
            shared += 1
        return ends[0][:shared]

    def side(self, tokens: Sequence[int]) -> Side:
        """Tokens with their text, and where in it each ends."""
        self.check(tokens)
        return spelled(tokens, self.decode)

    def check(self, tokens: Sequence[int]) -> None:
        """Raises TokenError for ids that this tokenizer does not have: it belongs to another model."""
        most = max(tokens, default=0)
        if most >= self.size:
            raise TokenError(
                f"token id {most} is beyond the {self.size} tokens of {self.name}",
                "pass the tokenizer of the model whose KV this is",
            )

    def _rendered(self, prompt: Prompt, messages: list[dict[str, Any]], generation: bool) -> tuple[int, ...]:
        if not getattr(self._inner, "chat_template", None):
            raise SettingsError(f"{self.name} has no chat template", "pass the rendered text instead of a chat")
        tools = list(prompt.tools) or None
        try:
            text = self._inner.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:
            raise SettingsError(f"the chat template refuses {prompt.source}: {error}", _CHAT) from error
        return tuple(self.encode(text))


def plain_text(prompt: Prompt) -> str | None:
    """The text of a prompt without a tokenizer; None for token ids. A chat is written as ChatML, tools first."""
    if prompt.text is not None or prompt.messages is None:
        return prompt.text
    tools = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in prompt.tools)
    lines = [f"<|im_start|>{one.get('role')}\n{one.get('content')}<|im_end|>\n" for one in prompt.messages]
    return tools + "".join(lines)
