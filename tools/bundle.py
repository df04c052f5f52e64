"""An export: stored sequences as one safetensors file, whose payloads are packed, checksummed, and moved one by one.

The header's metadata has a manifest (layout, label, counts) and its SHA-256, which covers tokens, tree and the SHA-256
of every payload. Blocks are numbered, not named by their keys, since keys would let a salt be guessed. What is read is
length-checked and verified before it counts. Must not know the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import zstandard

from kvstore.errors import DamagedError, FormatError, KVStoreError, NoSpaceError, PathError
from kvstore.identity import Tokens, as_tokens
from kvstore.kv import Bytes
from kvstore.layout import Layout, Part

VERSION = 1
MANIFEST, DIGEST = "kvstore", "sha256"
HEADER_LIMIT = 100_000_000
"""Longest header that safetensors readers take."""
ENTRY_BYTES = 128
"""What a payload takes in the header at most."""
CHUNK = 1 << 20
RAW, PACKED = "raw", "zstd-planes"
_LENGTH = struct.Struct("<Q")
_AGAIN = "export it again, and copy it whole"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an export holds. layout: as JSON. salted: whether it had a salt; salt: its digest, where that was asked for.

    name: of the prefix, where it was exported by name.
    """

    layout: str
    label: str
    salted: bool
    salt: str | None
    codec: str
    blocks: int
    tokens: int
    name: str | None = None
    version: int = VERSION

    def to_json(self) -> str:
        """Canonical JSON, the text that is digested."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises FormatError for another version, DamagedError for anything else."""
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise FormatError(f"an export of version {data['version']}", "upgrade kvstore to read it")
            found = cls(**data)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(f"the export's manifest cannot be read: {error}", _AGAIN) from error
        kinds = (("layout", str), ("label", str), ("salted", bool), ("codec", str), ("blocks", int), ("tokens", int))
        for field_name, kind in kinds:
            if not isinstance(getattr(found, field_name), kind):
                raise DamagedError(f"the export's manifest has a bad {field_name}", _AGAIN)
        if found.codec not in (RAW, PACKED):
            raise FormatError(f"an export packed as {found.codec!r}", "upgrade kvstore to read it")
        return found


def pack(payload: Bytes, itemsize: int, level: int) -> bytes:
    """A payload's bytes, first those of all elements, then the second ones, and so on, compressed; raw at level 0."""
    if not level:
        return payload.tobytes()
    planes = np.ascontiguousarray(payload.reshape(-1, itemsize).T)
    return zstandard.ZstdCompressor(level=level).compress(planes.data)


def unpack(stored: bytes, itemsize: int, size: int, codec: str) -> Bytes:
    """A payload of ``size`` bytes out of what `pack` made. Raises DamagedError for any other length."""
    if codec == PACKED:
        try:
            if zstandard.frame_content_size(stored) != size:
                raise DamagedError("a payload of the export has another length", _AGAIN)
            stored = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
        except zstandard.ZstdError as error:
            raise DamagedError(f"a payload of the export cannot be unpacked: {error}", _AGAIN) from error
    found = np.frombuffer(stored, np.uint8)
    if len(found) != size:
        raise DamagedError("a payload of the export has another length", _AGAIN)
    return found if codec == RAW else np.ascontiguousarray(found.reshape(itemsize, -1).T).reshape(-1)


def payload_name(block: int, part: Part) -> str:
    """A payload's name in the file."""
    return f"kv.{block}.{part.group}.{part.shard}"


@dataclass(slots=True)
class _Books:
    """What is known once all payloads are written."""

    parents: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class BundleWriter:
    """Writes an export beside its place and renames it at the end; nothing is left of one that did not get so far."""

    def __init__(self, path: Path, payloads: int, *, replace: bool = False) -> None:
        """payloads: how many there may be at most. Raises PathError, NoSpaceError."""
        if path.exists() and not replace:
            raise PathError(f"{path} is there already", "choose another name, or pass --force")
        self.path = path
        self._room = 8192 + payloads * ENTRY_BYTES
        if self._room > HEADER_LIMIT:
            raise NoSpaceError(f"{payloads} payloads do not fit one safetensors file", "export fewer prefixes at once")
        self._entries: dict[str, dict[str, Any]] = {}
        self._at = 0
        self.books = _Books()
        with _named(path):
            number, made = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
            self._part, self._file = Path(made), os.fdopen(number, "wb")
            self._file.seek(_LENGTH.size + self._room)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written is of no use any more
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._part.unlink()

    def add(self, parent: int, tokens: Tokens, payloads: dict[Part, bytes]) -> int:
        """Add a block. parent: the number of the block before it, -1 for the first. Returns its number."""
        number = len(self.books.parents)
        self.books.parents.append(parent)
        self.books.counts.append(len(tokens))
        self.books.tokens.append(tokens)
        for part, stored in payloads.items():
            self._put(payload_name(number, part), "U8", [len(stored)], stored)
            self.books.digests.append(hashlib.sha256(stored).digest())
        return number

    def finish(self, manifest: Manifest) -> str:
        """Write the rest and put the file in its place; returns the manifest's SHA-256."""
        books = self.books
        tokens = np.concatenate([np.empty(0, np.uint32), *books.tokens]).astype("<u4").tobytes()
        tree = np.array([books.parents, books.counts], "<i4").tobytes()
        digests = b"".join(books.digests)
        self._put("tokens", "U32", [len(tokens) // 4], tokens)
        self._put("tree", "I32", [2, len(books.parents)], tree)
        self._put("digests", "U8", [len(books.digests), 32], digests)
        text = manifest.to_json()
        digest = _digest(text, _canonical(self._entries), tokens, tree, digests)
        header = json.dumps({"__metadata__": {MANIFEST: text, DIGEST: digest}, **self._entries}, separators=(",", ":"))
        with _named(self.path):
            self._file.seek(0)
            raw = header.encode()
            if len(raw) > self._room:
                raise KVStoreError("the export's header is larger than was planned", "this is a defect: report it")
            self._file.write(_LENGTH.pack(self._room) + raw.ljust(self._room))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.rename(self.path)
        return digest

    def _put(self, name: str, dtype: str, shape: list[int], raw: bytes) -> None:
        with _named(self.path):
            self._file.write(raw)
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self._at, self._at + len(raw)]}
        self._at += len(raw)


class Bundle:
    """An export, opened. Its books are verified at once, payloads when they are read; any thread may read."""

    def __init__(self, path: Path) -> None:
        """Raises PathError, FormatError for what is no export, DamagedError for a broken one."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PathError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error
        try:
            self._open()
        except BaseException:
            os.close(self._file)
            raise

    def _open(self) -> None:
        entries, told, metadata = self._header()
        if MANIFEST not in metadata:
            raise FormatError(f"{self.path} is no export of kvstore", "pass a file that kvstore export made")
        text = str(metadata[MANIFEST])
        self.manifest = Manifest.from_json(text)
        self._entries = entries
        tokens, tree, digests = (self._whole(name) for name in ("tokens", "tree", "digests"))
        self.digest = _digest(text, told, tokens, tree, digests)
        if self.digest != metadata.get(DIGEST):
            raise DamagedError(f"{self.path} was changed since it was exported", _AGAIN)
        self.layout = Layout.from_json(self.manifest.layout)
        self._check_tree(tokens, tree)
        self.parts = tuple(self.layout.parts())
        names = [payload_name(block, part) for block in range(self.manifest.blocks) for part in self.parts]
        if len(digests) != 32 * len(names) or set(names) != set(entries) - {"tokens", "tree", "digests"}:
            raise DamagedError(f"{self.path} does not hold the payloads its manifest names", _AGAIN)
        self._digests = {name: digests[at * 32 : at * 32 + 32] for at, name in enumerate(names)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def sequences(self) -> Iterator[tuple[list[int], Tokens]]:
        """For every block that no other one continues: the numbers of the blocks up to it, and their tokens."""
        inner = set(self.parents)
        for leaf in range(self.manifest.blocks):
            if leaf not in inner:
                blocks = [leaf]
                while self.parents[blocks[-1]] >= 0:
                    blocks.append(self.parents[blocks[-1]])
                blocks.reverse()
                yield blocks, as_tokens(np.concatenate([self._tokens[one] for one in blocks]))

    def payload(self, block: int, part: Part) -> Bytes:
        """A block's payload, verified. Raises DamagedError."""
        name = payload_name(block, part)
        stored = self._whole(name)
        if hashlib.sha256(stored).digest() != self._digests[name]:
            raise DamagedError(f"{name} of {self.path} was changed since it was exported", _AGAIN)
        size = self.layout.payload_bytes(part.group, self.counts[block])
        return unpack(stored, self.layout.itemsize, size, self.manifest.codec)

    def verify(self, step: Callable[[int, int], None]) -> None:
        """Compare every payload with its digest. step: told bytes read, and how many there are. Raises DamagedError."""
        total, done = sum(stop - start for start, stop in self._entries.values()), 0
        for name, digest in self._digests.items():
            start, stop = self._entries[name]
            found = hashlib.sha256()
            for at in range(start, stop, CHUNK):
                found.update(self._bytes(at, min(CHUNK, stop - at)))
            if found.digest() != digest:
                raise DamagedError(f"{name} of {self.path} was changed since it was exported", _AGAIN)
            done += stop - start
            step(done, total)

    def _header(self) -> tuple[dict[str, tuple[int, int]], bytes, dict[str, Any]]:
        """Where each tensor lies in the file, what the header says of them, and the metadata."""
        size = os.fstat(self._file).st_size
        length = _LENGTH.unpack(self._bytes(0, _LENGTH.size))[0] if size >= _LENGTH.size else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - _LENGTH.size):
            raise FormatError(f"{self.path} is no safetensors file, or a truncated one", _AGAIN)
        first = _LENGTH.size + length
        try:
            header = json.loads(self._bytes(_LENGTH.size, length))
            metadata = dict(header.pop("__metadata__", {}))
            told = _canonical(header)
            entries = {}
            at = 0
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                if start != at or not isinstance(stop, int) or stop < start:
                    raise DamagedError(f"{self.path} has a hole before {name}", _AGAIN)
                entries[name] = first + start, first + stop
                at = stop
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FormatError(f"{self.path} is no safetensors file: {error}", "pass an export") from error
        if first + at != size:
            raise DamagedError(f"{self.path} has {size} bytes, not {first + at}: it is truncated", _AGAIN)
        return entries, told, metadata

    def _check_tree(self, tokens: bytes, tree: bytes) -> None:
        manifest, block_tokens = self.manifest, self.layout.block_tokens
        if len(tokens) != 4 * manifest.tokens or len(tree) != 8 * manifest.blocks or not manifest.blocks:
            raise DamagedError(f"{self.path} does not hold the blocks its manifest names", _AGAIN)
        parents, counts = np.frombuffer(tree, "<i4").reshape(2, -1).tolist()
        for number, (parent, count) in enumerate(zip(parents, counts, strict=True)):
            whole = parent == -1 or (0 <= parent < number and counts[parent] == block_tokens)
            if not whole or not 1 <= count <= block_tokens:
                raise DamagedError(f"block {number} of {self.path} follows no whole block", _AGAIN)
        starts = np.cumsum([0, *counts])
        if int(starts[-1]) != manifest.tokens:
            raise DamagedError(f"{self.path} has tokens that belong to no block", _AGAIN)
        self.parents: list[int] = parents
        self.counts: list[int] = counts
        flat = np.frombuffer(tokens, "<u4")
        self._tokens = [flat[start : start + count] for start, count in zip(starts[:-1].tolist(), counts, strict=True)]

    def _whole(self, name: str) -> bytes:
        if name not in self._entries:
            raise DamagedError(f"{self.path} has no {name}", _AGAIN)
        start, stop = self._entries[name]
        return self._bytes(start, stop - start)

    def _bytes(self, at: int, size: int) -> bytes:
        """Exactly ``size`` bytes. Raises DamagedError, PathError."""
        pieces: list[bytes] = []
        while size:
            try:
                piece = os.pread(self._file, size, at)
            except OSError as error:
                raise PathError(
                    f"{self.path} cannot be read: {error.strerror}", "copy it from a sound medium"
                ) from error
            if not piece:
                raise DamagedError(f"{self.path} is truncated", _AGAIN)
            pieces.append(piece)
            at, size = at + len(piece), size - len(piece)
        return b"".join(pieces)


def _canonical(entries: dict[str, Any]) -> bytes:
    return json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()


def _digest(manifest: str, *pieces: bytes) -> str:
    """SHA-256 of the manifest, and of the header's entries, tokens, tree and digests, each after its length."""
    found = hashlib.sha256(manifest.encode())
    for piece in pieces:
        found.update(_LENGTH.pack(len(piece)))
        found.update(piece)
    return found.hexdigest()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the operating system, as one of ours."""
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno in (28, 122) else PathError
        raise kind(
            f"{path} cannot be written: {error.strerror}", "choose a folder with room, which you may write"
        ) from error
