"""Stores that a demo or a benchmark makes for itself, on a disk, and leaves no trace of."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvstore import host, superblock
from kvstore.errors import KVStoreError, PathError, SettingsError
from kvstore.settings import Settings
from kvstore.tools import terminal
from kvstore.tools.model import cache_folder


def folder_on_disk(wanted: Path | None) -> Path:
    """``wanted``, else the current directory, else (where that is memory) the user's cache folder.

    Raises PathError for what is no folder, SettingsError for a named folder on tmpfs, FilesystemError where no store
    may lie.
    """
    folder = (wanted or Path.cwd()).absolute()
    if not folder.is_dir():
        raise PathError(f"{folder} is not a folder", "pass --path with a folder on the disk to be measured")
    kind = host.refuse_unsafe_filesystem(folder).type
    if kind not in ("tmpfs", "ramfs"):
        return folder
    if wanted is not None:
        raise SettingsError(f"{folder} lies on {kind}, which is memory", "pass --path with a folder on a disk")
    fallback = cache_folder()
    fallback.mkdir(parents=True, exist_ok=True)
    terminal.say(f"{folder} lies on {kind}, which is memory: the store is made in {fallback}")
    return fallback


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent``; at the end it is removed, and every store directly in it. Raises PathError."""
    work: Path | None = None
    try:
        with terminal.undisturbed():
            work = _made(parent)
        yield work
    finally:
        if work is not None:
            with terminal.undisturbed():
                for path in work.iterdir():
                    if path.is_dir():
                        remove_store(path)
                shutil.rmtree(work, ignore_errors=True)


def _made(parent: Path) -> Path:
    try:
        work = Path(tempfile.mkdtemp(prefix=".kvstore-scratch-", dir=parent))
        (work / ".gitignore").write_text("*\n")  # what a killed process leaves in a checkout must not be committed
        return work
    except OSError as error:
        raise PathError(f"{parent} cannot be written: {error.strerror}", "pass --path with another folder") from error


@contextlib.contextmanager
def scratch_store(parent: Path) -> Iterator[Path]:
    """Where a store may be made that is removed at the end."""
    with scratch_folder(parent) as work:
        yield work / "store"


def remove_store(path: Path) -> None:
    """Delete a store that nobody has open, with what it holds in shared memory, where the settings say that is."""
    with contextlib.suppress(KVStoreError, OSError):
        if (path / superblock.SUPERBLOCK).is_file():
            name = superblock.ram_name(path, superblock.read_store_id(path))
            shutil.rmtree(Settings.resolve(path).ram_directory / name, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
