"""Two prompts side by side: how far they agree to the token, both texts around the difference, and what causes it.

Pure: a tokenizer is two functions that are passed in, and where there is none, characters are counted in the place of
tokens. Must not know files or stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.tools.suspects import Sight, Suspect, common, openings, recognise

Encode: TypeAlias = Callable[[str], Sequence[int]]
Ids: TypeAlias = npt.NDArray[np.integer[Any]]
CAUSES_MAX = 4
BEFORE, AFTER = 60, 40
"""Characters shown around a difference."""
IDS = 6
UNFINISHED, LETTER_TOKENS = "\ufffd", 8
"""What a tokenizer gives for a part of a letter, and how many tokens a letter may take."""


@dataclass(frozen=True, slots=True)
class Side:
    """A prompt as tokens, as text, or both. ``ends[i]``: characters of the text up to the end of token i."""

    tokens: tuple[int, ...] | None
    text: str | None
    ends: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Tokens, or characters where there are none."""
        return len(self.tokens) if self.tokens is not None else len(self.text or "")


@dataclass(frozen=True, slots=True)
class Cause:
    """A suspect, where it strikes, and what it costs.

    at: the first token that differs. lost: tokens of the prompt from there on. regained: how many of them match once
    this difference, and those before it, are gone; None where that cannot be told.
    """

    code: str
    says: str
    advice: str
    at: int
    lost: int
    regained: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Two sides compared. shared: leading tokens (or characters) in common. around: the text before the difference,
    then what the prompt, and what is stored, has there; ids in words where there is no text."""

    unit: str
    prompt: int
    stored: int
    shared: int
    around: tuple[str, str, str]
    causes: tuple[Cause, ...]

    @property
    def lost(self) -> int:
        """What of the prompt lies behind the difference."""
        return self.prompt - self.shared

    @property
    def would_match(self) -> int:
        """Leading tokens in common without the differences that were recognised."""
        return max([self.shared, *(cause.at + cause.regained for cause in self.causes if cause.regained is not None)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        before, mine, other = self.around
        return {
            "unit": self.unit,
            "prompt": self.prompt,
            "stored": self.stored,
            "shared": self.shared,
            "lost": self.lost,
            "would_match": self.would_match,
            "before": before,
            "prompt_text": mine,
            "stored_text": other,
            "causes": [asdict(cause) for cause in self.causes],
        }


def compare(prompt: Side, stored: Side, encode: Encode | None = None) -> Difference:
    """Compare a prompt with what is stored. encode: text to tokens, without adding any; None: characters count."""
    counted = prompt.tokens is not None and stored.tokens is not None
    shared = (
        shared_tokens(prompt.tokens or (), stored.tokens or ()) if counted else common(_text(prompt), _text(stored))
    )
    causes = _causes(prompt, stored, shared, encode if counted else None, counted)
    around = _around(prompt, stored, shared, counted)
    return Difference("tokens" if counted else "characters", len(prompt), len(stored), shared, around, tuple(causes))


def spelled(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Side:
    """Tokens with their text. A letter that several tokens make up ends with the last of them."""
    ends: list[int] = []
    pending: list[int] = []
    text = ""
    for token in tokens:
        pending.append(token)
        piece = decode(pending)
        if not piece.endswith(UNFINISHED) or len(pending) >= LETTER_TOKENS:
            text += piece
            pending = []
        ends.append(len(text))
    return Side(tuple(tokens), text + (decode(pending) if pending else ""), tuple(ends))


def shared_tokens(first: Sequence[int] | Ids, second: Sequence[int] | Ids) -> int:
    """Leading tokens in common."""
    length = min(len(first), len(second))
    different = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(different[0]) if len(different) else length


def _causes(prompt: Side, stored: Side, shared: int, encode: Encode | None, counted: bool) -> list[Cause]:
    """The causes from the first difference on; each is looked for with those before it repaired."""
    total = len(prompt)
    if shared == total:
        return []
    special = _special(prompt, stored) if counted else None
    if special is not None:
        return [special]
    if counted and shared == len(stored):
        says = "all that is stored matched; what follows is new"
        return [Cause("new", says, "nothing to do: it is stored once it was computed", shared, total - shared, None)]
    if prompt.text is None or stored.text is None:
        says = "the tokens differ here; pass --tokenizer to see why"
        return [Cause("tokens", says, "keep the beginning as it was", shared, total - shared, None)]
    found: list[Cause] = []
    text, at = prompt.text, shared
    for _ in range(CAUSES_MAX):
        suspect = _suspect(text, prompt, stored, at if text is prompt.text else None)
        if suspect is None:
            break
        reached = _reached(suspect, stored, encode, counted)
        if reached is not None:
            reached = min(reached, total)  # a repaired text may have more tokens: an id of two instead of one
        gained = None if reached is None else max(0, reached - at)
        found.append(Cause(suspect.code, suspect.says, suspect.advice, at, max(0, total - at), gained))
        if suspect.repaired is None or reached is None or reached <= at or reached >= min(total, len(stored)):
            break
        text, at = suspect.repaired, reached
    return found


def _suspect(text: str, prompt: Side, stored: Side, at: int | None) -> Suspect | None:
    """What differs first between a text and the stored one. at: the first token that differs, in the prompt itself."""
    other = stored.text or ""
    where = common(text, other)
    opening = openings(Sight(text, other, where)) if at is not None else None
    if opening is not None:
        return opening
    if at is not None and prompt.tokens is not None and _same_text(prompt, stored, at, where):
        return _boundary(text, other, where)
    if where == len(text) or (where == len(other) and prompt.tokens is None):
        if where == len(text) or at is None:
            return None
        says = "all that is stored matched; what follows is new"
        return Suspect("new", says, "nothing to do: it is stored once it was computed")
    return recognise(Sight(text, other, where))


def _same_text(prompt: Side, stored: Side, at: int, where: int) -> bool:
    """Whether the first tokens that differ spell the same text, as far as the shorter text goes."""
    if where == len(prompt.text or "") or where == len(stored.text or ""):
        return True
    if at >= len(prompt.ends) or at >= len(stored.ends):
        return False
    return prompt.ends[at] <= where and stored.ends[at] <= where


def _boundary(text: str, other: str, where: int) -> Suspect:
    """The texts agree where the tokens do not."""
    short = text if where == len(text) else other if where == len(other) else ""
    if short[-1:].isspace():
        who = "the prompt" if short is text else "what is stored"
        says = f"{who} ends in white space, which is a token of its own there and part of the next word in the other"
        return Suspect(
            "trailing-space", says, "strip the end of a text before it is stored or asked for", text.rstrip()
        )
    return Suspect(
        "retokenized",
        "the same text was cut into other tokens here",
        "pass on token ids instead of text that is tokenized again; only what follows is computed anew",
    )


def _special(prompt: Side, stored: Side) -> Cause | None:
    """One of them begins with a special token that the other lacks, and goes on alike."""
    mine, other = prompt.tokens or (), stored.tokens or ()
    for first, second, side in ((mine, other, prompt), (other, mine, stored)):
        spelled = (side.text or "")[: side.ends[0]] if side.ends else "<"
        if not first or not second or first[0] == second[0] or spelled[:1] not in ("<", "["):
            continue
        gained = shared_tokens(first[1:], second)
        if gained < max(2, min(16, len(second) // 2)):
            continue
        who = "the prompt" if side is prompt else "what is stored"
        return Cause(
            "special-tokens",
            f"{who} begins with token {first[0]}, which the other lacks (a beginning-of-sequence token, most often)",
            "add special tokens once: a rendered chat template already has them (add_special_tokens=False)",
            0,
            len(mine),
            gained,
        )
    return None


def _reached(suspect: Suspect, stored: Side, encode: Encode | None, counted: bool) -> int | None:
    """Leading tokens (or characters) in common once a suspect is repaired; None where that is not known."""
    if suspect.repaired is None or (counted and encode is None):
        return None
    if encode is None:
        return common(suspect.repaired, _text(stored))
    return shared_tokens(tuple(encode(suspect.repaired)), stored.tokens or ())


def _around(prompt: Side, stored: Side, shared: int, counted: bool) -> tuple[str, str, str]:
    if prompt.text is None or stored.text is None:
        mine, other = prompt.tokens or (), stored.tokens or ()
        return (
            _ids(mine[max(0, shared - IDS) : shared]),
            _ids(mine[shared : shared + IDS]),
            _ids(other[shared : shared + IDS]),
        )
    cut = shared
    if counted:
        cut = prompt.ends[shared - 1] if 0 < shared <= len(prompt.ends) else 0
    other_cut = (stored.ends[shared - 1] if 0 < shared <= len(stored.ends) else 0) if counted else shared
    before = prompt.text[max(0, cut - BEFORE) : cut]
    return before, prompt.text[cut : cut + AFTER], stored.text[other_cut : other_cut + AFTER]


def _ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _text(side: Side) -> str:
    return side.text or ""
