"""The usual suspects: why two prompts that should begin alike do not, told from their texts around the difference.

Each suspect is one function from a `Sight` to a finding or None; `recognise` asks them in an order in which a special
cause comes before the general one it looks like. Pure: must not know tokens, files or stores.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

BOM = "\ufeff"
FORMS: Final[tuple[Literal["NFC", "NFD"], ...]] = ("NFC", "NFD")
LOOK = 48
"""Characters that must agree again for two texts to count as going on alike."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The prompt's text, a stored one's, and the first character at which they differ."""

    prompt: str
    stored: str
    at: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause by its code. says, advice: for people. repaired: the prompt without this difference, where known."""

    code: str
    says: str
    advice: str
    repaired: str | None = None


FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "ChatML": ("<|im_start|>",),
    "Llama 3": ("<|start_header_id|>",),
    "Llama 2": ("[INST]",),
    "Gemma": ("<start_of_turn>",),
    "Harmony": ("<|start|>",),
    "Phi": ("<|user|>", "<|assistant|>"),
    "DeepSeek": ("<｜User｜>",),
    "Alpaca": ("### Instruction:",),
}
GENERATION = re.compile(
    r"(?:<\|im_start\|>assistant\n?|<\|start_header_id\|>assistant<\|end_header_id\|>\n*|<start_of_turn>model\n?"
    r"|<\|start\|>assistant|<\|assistant\|>\n?|<｜Assistant｜>|### Response:\n?|\[/INST\] ?|(?<=\n)assistant: ?)"
    r"(?:<think>\s*(?:</think>\s*)?)?\Z"
)
MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
DATE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
    rf"|(?:{DAY},? )?(?:{MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}}\.? {MONTH},? \d{{4}})"
    r"(?:,?(?: at)? \d\d?:\d\d(?::\d\d)?(?: ?[AP]M)?)?"
    rf"|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}|\d\d?:\d\d(?::\d\d)?(?: ?[AP]M)?|{DAY}|{MONTH} \d{{1,2}}"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b"
)
ID = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|\b[a-z]{2,12}[-_][0-9A-Za-z]{6,}\b|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\b[0-9A-HJKMNP-TV-Z]{26}\b|#?\b\d+\b"
)
THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
LATE = "put what changes behind what stays: into the last user message, or leave it out"


def recognise(sight: Sight) -> Suspect:
    """The cause of the difference; the general one, code ``text``, where none of the special ones shows."""
    for ask in ASKED:
        found = ask(sight)
        if found is not None:
            return found
    return Suspect("text", "the texts differ here", "keep the beginning as it was, and add what is new at the end")


def _bom(sight: Sight) -> Suspect | None:
    bare, other = sight.prompt.lstrip(BOM), sight.stored.lstrip(BOM)
    if sight.at or (bare != sight.prompt) == (other != sight.stored):
        return None
    who, repaired = ("the prompt", bare) if bare != sight.prompt else ("the stored text", BOM + sight.prompt)
    return Suspect(
        "byte-order-mark",
        f"{who} begins with a byte-order mark, which is a token of its own",
        "read files as utf-8-sig, which drops the mark",
        repaired,
    )


def families(text: str) -> set[str]:
    """The chat templates whose markers a text has."""
    return {name for name, markers in FAMILIES.items() if any(marker in text for marker in markers)}


def _template(sight: Sight) -> Suspect | None:
    mine, other = families(sight.prompt), families(sight.stored)
    if mine == other:
        return None
    names = " and ".join(sorted(mine)) or "no chat template", " and ".join(sorted(other)) or "no chat template"
    return Suspect(
        "template",
        f"the prompt is written with {names[0]}, what is stored with {names[1]}",
        "render both with the model's own chat template (apply_chat_template)",
    )


def _line_ending(sight: Sight) -> Suspect | None:
    pair = sight.prompt[sight.at : sight.at + 1], sight.stored[sight.at : sight.at + 1]
    if pair not in (("\r", "\n"), ("\n", "\r")):
        return None
    dos = pair[0] == "\r"
    bare = sight.prompt.replace("\r\n", "\n")
    return Suspect(
        "line-ending",
        f"lines end in CR LF in {'the prompt' if dos else 'what is stored'}, in LF in the other",
        "open text files in text mode, or normalise line ends before the template",
        bare if dos else bare.replace("\n", "\r\n"),
    )


def _unicode(sight: Sight) -> Suspect | None:
    for form in FORMS:
        repaired = unicodedata.normalize(form, sight.prompt)
        if repaired != sight.prompt and common(repaired, sight.stored) > sight.at:
            return Suspect(
                "unicode",
                "the same letters are composed in one text and decomposed in the other",
                "normalise text (NFC) where it enters the application",
                repaired,
            )
    return None


def _tools(sight: Sight) -> Suspect | None:
    mine, other = list(json_values(sight.prompt)), list(json_values(sight.stored))
    if not mine or not _covers(mine, sight.at) or not _covers(other, sight.at):
        return None
    said = [[_canonical(value) for value, _, _ in values] for values in (mine, other)]
    if said[0][: len(said[1])] == said[1][: len(said[0])]:
        code, says = "json-spelling", "the same JSON is written with its keys in another order, or spaced otherwise"
        advice = "serialise with fixed settings, such as json.dumps(…, sort_keys=True)"
    elif sorted(_items(mine)) == sorted(_items(other)):
        code, says = "tools-order", "the same tools are listed in another order"
        advice = "sort tools by name before the template is rendered"
    else:
        return None
    return Suspect(
        code,
        says,
        advice,
        sight.prompt[: mine[0][1]] + sight.stored[other[0][1] : other[-1][2]] + sight.prompt[mine[-1][2] :],
    )


def _generation(sight: Sight) -> Suspect | None:
    mine, other = GENERATION.search(sight.prompt), GENERATION.search(sight.stored)
    if (
        mine is not None
        and mine.start() <= sight.at
        and (other is None or other.start() > sight.at or mine[0] != other[0])
    ):
        ending = other[0] if other is not None and other.start() == mine.start() else ""
        who, repaired = "the prompt", sight.prompt[: mine.start()] + ending
    elif other is not None and other.start() <= sight.at:
        who, repaired = "what is stored", sight.prompt[: other.start()] + other[0]
    else:
        return None
    return Suspect(
        "generation-prompt",
        f"{who} ends in a generation prompt (the beginning of an answer) that the other does not have there",
        "render what is to be stored without add_generation_prompt, and with the same thinking mode",
        repaired,
    )


def openings(sight: Sight) -> Suspect | None:
    """Both texts end in a generation prompt that begins at the same place and goes on otherwise."""
    mine, other = GENERATION.search(sight.prompt), GENERATION.search(sight.stored)
    alike = mine is not None and other is not None and mine.start() == other.start() and mine[0] != other[0]
    return _generation(sight) if alike else None


def _reasoning(sight: Sight) -> Suspect | None:
    for text, other, who in ((sight.stored, sight.prompt, "stored"), (sight.prompt, sight.stored, "prompt")):
        found = next((one for one in THINKING.finditer(text) if one.start() <= sight.at <= one.end()), None)
        start = found.start() if found else 0
        if found is None or not agree(other[start:], text[found.end() :]):
            continue
        mended = sight.prompt[:start] + (
            found[0] + sight.prompt[start:] if who == "stored" else sight.prompt[found.end() :]
        )
        missing = (
            "left the reasoning of an earlier answer out" if who == "stored" else "kept reasoning that is not stored"
        )
        return Suspect(
            "reasoning",
            f"the template {missing}",
            "only the last answer and what follows is computed anew; to keep it, use a template that keeps reasoning",
            mended,
        )
    return None


def _date(sight: Sight) -> Suspect | None:
    return _replaced(sight, DATE, "date", "a date or time", f"{LATE}; a date alone changes less often than a time")


def _id(sight: Sight) -> Suspect | None:
    return _replaced(sight, ID, "id", "an id or a number of its own", LATE)


def _replaced(sight: Sight, pattern: re.Pattern[str], code: str, what: str, advice: str) -> Suspect | None:
    """Both texts have something of a kind, which begins at the same place and in which they differ."""
    mine, other = _span(pattern, sight.prompt, sight.at), _span(pattern, sight.stored, sight.at)
    if mine is None or other is None or mine[0] != other[0]:
        return None
    values = sight.prompt[slice(*mine)], sight.stored[slice(*other)]
    return Suspect(
        code,
        f"{what} differs: {values[0]!r} in the prompt, {values[1]!r} in what is stored",
        advice,
        sight.prompt[: mine[0]] + values[1] + sight.prompt[mine[1] :],
    )


def _whitespace(sight: Sight) -> Suspect | None:
    mine, other = sight.prompt[sight.at :], sight.stored[sight.at :]
    bare, plain = mine.lstrip(), other.lstrip()
    start = len(sight.prompt[: sight.at].rstrip())
    if (bare == mine and plain == other) or not agree(bare, plain):
        return None
    repaired = sight.prompt[: sight.at] + other[: len(other) - len(plain)] + bare
    before_mark = not bare or not plain or bare[0] in "<[#" or "\n" in sight.prompt[start : sight.at] + mine[:2]
    if before_mark:
        says = "a text ends in a space or an empty line in one of them, which becomes a token of its own"
        return Suspect("trailing-space", says, "strip texts before the template is rendered", repaired)
    return Suspect("whitespace", "the two are spaced otherwise here", "keep white space as it is", repaired)


def _dropped(sight: Sight) -> Suspect | None:
    rest = sight.prompt[sight.at : sight.at + LOOK]
    found = sight.stored.find(rest, sight.at) if len(rest) > LOOK // 3 else -1
    if found <= sight.at:
        return None
    return Suspect(
        "dropped",
        f"{found - sight.at:,} characters that are stored are left out of the prompt, which then goes on alike",
        "keep old messages; where they must go, drop many at once and rarely",
        sight.prompt[: sight.at] + sight.stored[sight.at : found] + sight.prompt[sight.at :],
    )


def _inserted(sight: Sight) -> Suspect | None:
    rest = sight.stored[sight.at : sight.at + LOOK]
    found = sight.prompt.find(rest, sight.at) if len(rest) > LOOK // 3 else -1
    if found <= sight.at:
        return None
    return Suspect(
        "inserted",
        f"{found - sight.at:,} characters were put in before text that is stored",
        "append what is new at the end of the prompt",
        sight.prompt[: sight.at] + sight.prompt[found:],
    )


ASKED: Final[tuple[Callable[[Sight], Suspect | None], ...]] = (
    _bom,
    _template,
    _line_ending,
    _unicode,
    _tools,
    _generation,
    _reasoning,
    _date,
    _id,
    _whitespace,
    _dropped,
    _inserted,
)


def common(first: str, second: str) -> int:
    """How many leading characters two texts share."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def agree(first: str, second: str) -> bool:
    """Whether two texts go on alike for a while, or as long as the shorter of them lasts."""
    length = min(len(first), len(second), LOOK)
    return first[:length] == second[:length]


def json_values(text: str) -> Iterator[tuple[Any, int, int]]:
    """JSON objects and lists in a text, the outermost, with where they begin and end."""
    decoder = json.JSONDecoder()
    at = 0
    for opening in re.finditer(r"[{\[](?=\s*[\"{\[])", text):
        if opening.start() < at:
            continue
        try:
            value, at = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            continue
        yield value, opening.start(), at


def _covers(values: list[tuple[Any, int, int]], at: int) -> bool:
    return bool(values) and values[0][1] <= at <= values[-1][2]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _items(values: list[tuple[Any, int, int]]) -> list[str]:
    """Entries of lists, and values that stand alone."""
    return [_canonical(one) for value, _, _ in values for one in (value if isinstance(value, list) else [value])]


def _span(pattern: re.Pattern[str], text: str, at: int) -> tuple[int, int] | None:
    """Where a match lies that covers a character; what begins 64 characters before it may reach it."""
    for found in pattern.finditer(text, max(0, at - 64), at + 64):
        if found.start() <= at <= found.end():
            return found.span()
    return None
