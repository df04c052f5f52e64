"""What is told of keys, roots and digests of salts to whom: they themselves, or stand-ins that only tell them apart.

A key is a hash of all tokens up to a block: whoever has one, or but its beginning, can try guesses of a short prompt
against it, without asking anybody. A stand-in is made with the store's id, which only the store's user can read. Must
not know what it stands beside.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import TypeAlias

from kvstore import superblock
from kvstore.store import Store

Spell: TypeAlias = Callable[[bytes], str]
"""How a digest is told; an empty one is told as an empty text."""
MARK = "~"
DIGITS = 11
"""With its mark a stand-in is as long as the beginning of a key that listings show."""
whole: Spell = bytes.hex


def stand_ins(store: Store) -> Spell:
    """The same for the same digest as long as the store lives, and no beginning of it. Raises FormatError."""
    secret = superblock.read_store_id(store.settings.path)

    def spell(digest: bytes) -> str:
        return MARK + hmac.digest(secret, digest, hashlib.sha256).hex()[:DIGITS] if digest else ""

    return spell
