"""A tokenizer small enough to read: words with the space before them, marks of chat templates, single characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvstore.tools.differ import Side, spelled

PIECE = re.compile(r"<\|?/?[a-z_｜|]+\|?>|\[/?INST\]| ?[^\W\d_]+|\d|\s+?(?=\S|\Z)|\s|.", re.DOTALL)


class Words:
    """Gives each piece a number when it is first seen."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.pieces: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        found = []
        for piece in PIECE.findall(text):
            if piece not in self.known:
                self.known[piece] = len(self.pieces)
                self.pieces.append(piece)
            found.append(self.known[piece])
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids."""
        return "".join(self.pieces[token] for token in tokens)

    def side(self, tokens: Sequence[int]) -> Side:
        """Ids with their text."""
        return spelled(tokens, self.decode)

    def of(self, text: str) -> Side:
        """A text with its ids."""
        return self.side(self.encode(text))
