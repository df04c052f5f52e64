"""What the bytes of a block mean: shapes, dtype, and the digest of everything that changes them.

A payload is one contiguous buffer ``[layer][K, V][kv_head][token][dim]``. K and V have their own dims, and layers may
differ. Must not know where payloads are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import LayoutError
from kvstore.identity import root_key

LAYOUT_VERSION = 1

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

BLOCK_TOKENS_MIN, BLOCK_TOKENS_MAX = 16, 256
PAYLOAD_TARGET = 4 << 20
LAYERS_MAX = 1 << 14
_DAMAGED = "the record is damaged; run kvstore verify"


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One stored piece of a block: a group of layers (0 is full attention) and a shard of the heads."""

    group: int = 0
    shard: int = 0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's KV for one shard: K is ``[heads, tokens, k_dim]``, V is ``[heads, tokens, v_dim]``."""

    heads: int
    k_dim: int
    v_dim: int

    @property
    def elements(self) -> int:
        """Elements a token, K and V together."""
        return self.heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that changes what stored bytes mean.

    groups: for every group its layers' shapes, of one shard. traits: whatever else the bytes depend on, as short
    strings (digest of the model's configuration, of its weights, of each active adapter; rope regime; …): two layouts
    that differ in any trait never share a block. Raises LayoutError for impossible values.
    """

    dtype: str
    groups: tuple[tuple[LayerShape, ...], ...]
    block_tokens: int
    traits: tuple[tuple[str, str], ...] = ()
    shards: int = 1
    fingerprint: bytes = field(init=False, compare=False, repr=False)
    _token_bytes: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"unknown dtype {self.dtype!r}", f"use one of {', '.join(sorted(DTYPE_BYTES))}")
        for name, value in self.traits:
            if type(name) is not str or type(value) is not str:
                raise LayoutError(f"trait {name!r} is {value!r}, which is not text", "give names and values as str")
        shapes = {shape for group in self.groups for shape in group}
        sizes = [size for shape in shapes for size in (shape.heads, shape.k_dim, shape.v_dim)]
        if any(type(size) is not int for size in (self.block_tokens, self.shards, *sizes)):
            raise LayoutError("a size in this layout is not an int", "give heads, dims, block_tokens and shards as int")
        if self.block_tokens < 1 or self.block_tokens > 4096:
            raise LayoutError(f"block_tokens is {self.block_tokens}", "use a number in 1…4096, or leave it out")
        if not 1 <= self.shards <= 0xFFFF:
            raise LayoutError(f"shards is {self.shards}", "use the number of tensor-parallel pieces, at least 1")
        if not self.groups or any(not group for group in self.groups):
            raise LayoutError("a layout needs at least one group with at least one layer", "check the model's config")
        if sum(len(group) for group in self.groups) > LAYERS_MAX:
            raise LayoutError(f"a layout of more than {LAYERS_MAX} layers", "check the model's config")
        for shape in (shape for group in self.groups for shape in group):
            if min(shape.heads, shape.k_dim, shape.v_dim) < 1:
                raise LayoutError(f"a layer has an empty shape: {shape}", "check the model's config")
        if len({name for name, _ in self.traits}) != len(self.traits):
            raise LayoutError("a trait is named twice", "join its values into one")
        object.__setattr__(self, "traits", tuple(sorted(self.traits)))
        token_bytes = tuple(sum(shape.elements for shape in group) * DTYPE_BYTES[self.dtype] for group in self.groups)
        object.__setattr__(self, "_token_bytes", token_bytes)
        object.__setattr__(self, "fingerprint", hashlib.sha256(self.to_json().encode()).digest())

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        heads: int,
        k_dim: int,
        v_dim: int | None = None,
        dtype: str = "float32",
        block_tokens: int | None = None,
        traits: Mapping[str, str] | None = None,
        shards: int = 1,
    ) -> Layout:
        """A layout of one group whose layers are all alike; block_tokens is chosen when left out."""
        shape = LayerShape(heads, k_dim, k_dim if v_dim is None else v_dim)
        group = (shape,) * layers
        chosen = default_block_tokens([group], dtype) if block_tokens is None else block_tokens
        return cls(dtype, (group,), chosen, tuple((traits or {}).items()), shards)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPE_BYTES[self.dtype]

    def alike(self, group: int, other: Layout, other_group: int) -> bool:
        """Whether payloads of two groups are cut alike: the same layers, heads, dims, and bytes an element."""
        return self.itemsize == other.itemsize and self.groups[group] == other.groups[other_group]

    def parts(self) -> Iterator[Part]:
        """Every part a hit needs, in order."""
        for group in range(len(self.groups)):
            for shard in range(self.shards):
                yield Part(group, shard)

    def token_bytes(self, group: int = 0) -> int:
        """Bytes that one token takes in one part of ``group``."""
        return self._token_bytes[group]

    def payload_bytes(self, group: int = 0, tokens: int | None = None) -> int:
        """Bytes of one part's payload with ``tokens`` tokens (default: a full block)."""
        return self.token_bytes(group) * (self.block_tokens if tokens is None else tokens)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of the KV of so many tokens, in all parts."""
        return tokens * self.shards * sum(self._token_bytes)

    def root(self, salt: bytes | str = b"") -> bytes:
        """The root of this layout's chains under a salt, 32 bytes."""
        return root_key(self.fingerprint, salt)

    def to_json(self) -> str:
        """Canonical JSON, the text that is fingerprinted; `from_json` reads it back."""
        runs: list[list[Any]] = []
        for group in self.groups:
            run: list[list[int]] = []
            for shape in group:
                entry = [shape.heads, shape.k_dim, shape.v_dim]
                if run and run[-1][1:] == entry:
                    run[-1][0] += 1
                else:
                    run.append([1, *entry])
            runs.append(run)
        return json.dumps(
            {
                "version": LAYOUT_VERSION,
                "dtype": self.dtype,
                "groups": runs,
                "block_tokens": self.block_tokens,
                "shards": self.shards,
                "traits": dict(self.traits),
            },
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` described. Raises LayoutError when the text is anything else, spaces included."""
        try:
            data = json.loads(text)
            if data["version"] != LAYOUT_VERSION:
                raise LayoutError(f"layout version {data['version']}", "upgrade kvstore to read it")
            if sum(abs(int(run[0])) for group in data["groups"] for run in group) > LAYERS_MAX:
                raise LayoutError(f"a layout of more than {LAYERS_MAX} layers", _DAMAGED)
            groups = tuple(
                tuple(LayerShape(int(h), int(k), int(v)) for n, h, k, v in run for _ in range(int(n)))
                for run in data["groups"]
            )
            traits = tuple((str(name), str(value)) for name, value in data["traits"].items())
            layout = cls(str(data["dtype"]), groups, int(data["block_tokens"]), traits, int(data["shards"]))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise LayoutError(f"not a layout description: {error}", _DAMAGED) from error
        if layout.to_json() != text:
            raise LayoutError("a layout description that says more than a layout, or the same otherwise", _DAMAGED)
        return layout


def default_block_tokens(groups: Sequence[Sequence[LayerShape]], dtype: str) -> int:
    """The power of two in 16…256 that makes the smallest part's payload at least 4 MiB."""
    smallest = min(sum(shape.elements for shape in group) for group in groups) * DTYPE_BYTES.get(dtype, 4)
    tokens = BLOCK_TOKENS_MIN
    while tokens < BLOCK_TOKENS_MAX and smallest * tokens < PAYLOAD_TARGET:
        tokens *= 2
    return tokens
