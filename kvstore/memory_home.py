"""The store's directory on tmpfs: whose it is, who uses it, and what becomes of it when its store is gone.

A file ``HOME`` in it names the store. Every process that has the store open holds a shared lock on that file, so a
directory nobody locks, whose store is not where it says, is an orphan: memory that nobody could ever free.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore.superblock import SUPERBLOCK, ram_name, read_store_id

HOME = "HOME"
_NAME = re.compile(r"kvstore-\d+-[0-9a-f]{32}")


class MemoryHome:
    """A store's directory under ``ram_directory``, held as long as the store is open.

    To be made under the store's opening lock.
    """

    def __init__(self, ram_directory: Path, store: Path, identity: bytes) -> None:
        self.path = ram_directory / ram_name(store, identity)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        card = {"store": os.fspath(store.resolve()), "id": identity.hex(), "mounts": _mount_namespace()}
        if not (self.path / HOME).exists():
            fresh = self.path / f"{HOME}.new"  # one name, so that what a dead process left of it is used up here
            fresh.write_text(json.dumps(card))
            fresh.chmod(0o600)
            fresh.rename(self.path / HOME)
        self._fd: int | None = os.open(self.path / HOME, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of it; in a forked child too, where the parent's lock stays the parent's."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def orphans(ram_directory: Path) -> list[Path]:
    """Directories of this user whose store is gone and which nobody has open."""
    found: list[Path] = []
    prefix = f"kvstore-{os.geteuid()}-"
    for path in sorted(ram_directory.glob(f"{prefix}*")):
        if _NAME.fullmatch(path.name) and path.is_dir() and _is_orphan(path):
            found.append(path)
    return found


def sweep(ram_directory: Path) -> list[Path]:
    """Remove orphans; returns them."""
    gone: list[Path] = []
    for path in orphans(ram_directory):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            gone.append(path)
    return gone


def _is_orphan(path: Path) -> bool:
    try:
        fd = os.open(path / HOME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        card = json.loads(os.read(fd, 65536))
        store, identity = Path(card["store"]), bytes.fromhex(card["id"])
        if card["mounts"] != _mount_namespace():
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    finally:
        os.close(fd)
    if not (store / SUPERBLOCK).exists():
        return True
    try:
        return read_store_id(store) != identity
    except KVStoreError:
        return False


def _mount_namespace() -> int:
    """A path means nothing to a process that sees other mounts."""
    return os.stat("/proc/self/ns/mnt").st_ino
