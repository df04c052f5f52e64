"""Who a block is: tokens, the chain of keys over them, and the root of a chain.

Identity is cryptographic on purpose. A store is shared and persistent, so a collision built by hand would hand one
request another one's KV. Must not know of tiers, files or tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import TokenError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

KEY_BYTES = 32
TOKEN_LIMIT = 2**32 - 1

Tokens: TypeAlias = npt.NDArray[np.uint32]
"""A flat, contiguous array of token ids."""


def as_tokens(ids: Iterable[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as a flat, contiguous uint32 array of its own: what the caller does to ``ids`` later does not show.

    ids: any flat sequence of integers in 0 … 2³²−2. Raises TokenError for anything else.
    """
    try:
        array = np.asarray(ids if isinstance(ids, np.ndarray | Sequence) else list(ids))
    except (TypeError, ValueError) as error:
        raise TokenError(f"tokens must be a flat sequence of integers: {error}", _ONE_ROW) from error
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenError(
            f"tokens must be a flat sequence of integers, not shape {array.shape} of {array.dtype}",
            _ONE_ROW,
        )
    least, most = int(array[array.argmin()]), int(array[array.argmax()])
    if least < 0 or most >= TOKEN_LIMIT:
        raise TokenError(
            f"token ids must lie in 0…{TOKEN_LIMIT - 1}, found {least}…{most}",
            "take masked or padded positions (-100, -1) out before asking the store",
        )
    return np.array(array, dtype=np.uint32, order="C")


_ONE_ROW = "pass one row of input_ids, without padding"


def salt_digest(salt: bytes | str) -> bytes:
    """16 bytes that name a salt without revealing it; empty for the empty salt."""
    raw = salt_bytes(salt)
    return hashlib.sha256(b"kvstore salt\0" + raw).digest()[:16] if raw else b""


def salt_bytes(salt: bytes | str) -> bytes:
    """A salt as bytes: text as UTF-8, lone surrogates as they are."""
    return salt.encode(errors="surrogatepass") if isinstance(salt, str) else salt


def root_key(fingerprint: bytes, salt: bytes | str) -> bytes:
    """The parent of a chain's first block: SHA-256(fingerprint ‖ salt), 32 bytes."""
    if len(fingerprint) != KEY_BYTES:
        raise ValueError(f"a fingerprint has {KEY_BYTES} bytes, not {len(fingerprint)}")
    return hashlib.sha256(fingerprint + salt_bytes(salt)).digest()


def block_key(parent: bytes, tokens: ReadableBuffer, extra: bytes = b"") -> bytes:
    """SHA-256(parent ‖ tokens as little-endian u32 ‖ extra), 32 bytes.

    The length of the tokens is not in the digest, so *extra* must not be confusable with tokens: it is either empty
    or begins with a byte string of the caller's whose length is not a multiple of four (see `Extra`).
    """
    digest = hashlib.sha256(parent)
    digest.update(tokens)
    if extra:
        digest.update(extra)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Extra:
    """What token ids do not show about the block at ``index``: image digests, soft-prompt digests, and the like.

    ``encoded`` frames it so that it cannot be mistaken for more tokens.
    """

    index: int
    content: bytes

    def encoded(self) -> bytes:
        """Frame: one tag byte, the SHA-256 of the content, so 33 bytes: never a multiple of four."""
        return b"x" + hashlib.sha256(self.content).digest()


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of a token sequence, block by block; the last block may be partial.

    ``keys[i]`` covers ``tokens[i * block_tokens : (i + 1) * block_tokens]`` and everything before.
    """

    root: bytes
    tokens: Tokens
    block_tokens: int
    keys: tuple[bytes, ...]
    extras: tuple[tuple[int, bytes], ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def whole(self) -> int:
        """How many blocks are full."""
        return len(self.tokens) // self.block_tokens

    def parent(self, index: int) -> bytes:
        """Key of the block before ``index``: the root for the first."""
        return self.keys[index - 1] if index else self.root

    def ancestor(self, index: int) -> bytes:
        """Key at the last multiple of ANCESTOR_BLOCKS before ``index``: the root for the first blocks."""
        return self.parent(index - index % ANCESTOR_BLOCKS)

    def span(self, index: int) -> tuple[int, int]:
        """First and last-plus-one token of block ``index``."""
        start = index * self.block_tokens
        return start, min(start + self.block_tokens, len(self.tokens))

    def block(self, index: int) -> Tokens:
        """Tokens of block ``index``."""
        start, stop = self.span(index)
        return self.tokens[start:stop]

    def extra(self, index: int) -> bytes:
        """The framed extra of block ``index``; empty where there is none."""
        for at, content in self.extras:
            if at == index:
                return content
        return b""


ANCESTOR_BLOCKS = 16
"""Blocks that share one ancestor are neighbours in the index."""


def chain(root: bytes, tokens: Tokens, block_tokens: int, extras: Sequence[Extra] = ()) -> Chain:
    """The chain over ``tokens``, the last, partial block included.

    Extras of blocks past the end are kept and change nothing. Raises TokenError for two extras of one block, or for
    one of no block. 128K tokens take a few milliseconds.
    """
    framed = {extra.index: extra.encoded() for extra in extras}
    if len(framed) != len(extras):
        raise TokenError("two extras for one block", "join them into one")
    if any(index < 0 for index in framed):
        raise TokenError(f"an extra for block {min(framed)}", "blocks are counted from 0")
    raw = np.ascontiguousarray(tokens, "<u4").data.cast("B") if len(tokens) else memoryview(b"")
    step = block_tokens * 4
    keys: list[bytes] = []
    parent = root
    sha256 = hashlib.sha256
    for index, start in enumerate(range(0, len(raw), step)):
        digest = sha256(parent)
        digest.update(raw[start : start + step])
        if index in framed:
            digest.update(framed[index])
        parent = digest.digest()
        keys.append(parent)
    return Chain(root, tokens, block_tokens, tuple(keys), tuple(sorted(framed.items())))
