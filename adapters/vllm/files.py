"""Digests of weights from a model's files: every byte, once; later by the files' identity.

The scheduler of an engine has no tensors, and its workers' tensors are fused and cut, so the files are what a model's
identity is taken from. Must not know layouts or vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from kvstore.errors import UnsupportedError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_CHUNK = 16 << 20


def weights_digest(directory: Path, also: Sequence[str] = ()) -> str:
    """xxh3-128 over the names and bytes of all weight files of a directory, 32 hex digits.

    also: names of other files that count. Raises UnsupportedError when there are no weights, or a file cannot be read.
    """
    files = sorted({file for pattern in WEIGHTS for file in directory.glob(pattern) if file.is_file()})
    if not files:
        raise UnsupportedError(f"{directory} holds no weight files", "the engine runs uncached")
    files += [directory / name for name in also]
    total = xxhash.xxh3_128()
    try:
        for file, digest in zip(files, _digests(files), strict=True):
            total.update(file.name.encode(errors="surrogateescape") + b"\0" + digest)
    except OSError as error:
        raise UnsupportedError(f"cannot read {error.filename}: {error.strerror}", "the engine runs uncached") from error
    return total.hexdigest()


def _digests(files: Sequence[Path]) -> list[bytes]:
    memory = _cache_directory()
    names = [_identity(file) for file in files]
    known = [_recall(memory / name) for name in names]
    missing = [at for at, digest in enumerate(known) if digest is None]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers:
        for at, digest in zip(missing, workers.map(_read, [files[at] for at in missing]), strict=True):
            known[at] = digest
            if _identity(files[at]) == names[at]:  # nobody wrote to it meanwhile
                _remember(memory / names[at], digest)
    return [digest for digest in known if digest is not None]


def _identity(file: Path) -> str:
    """A name for this very file in its present state."""
    resolved = file.resolve()
    state = resolved.stat()
    facts = [str(resolved), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read(file: Path) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(view[:count])
    return digest.digest()


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvstore" / "digests"


def _recall(file: Path) -> bytes | None:
    try:
        digest = bytes.fromhex(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return digest if len(digest) == 16 else None


def _remember(file: Path, digest: bytes) -> None:
    """Keep a digest; where that is not possible, it is computed again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="ascii") as target:
            target.write(digest.hex())
        os.replace(target.name, file)
    except OSError:
        return
