"""Who is alive: one locked file a process.

An owner is a random id. Its file in ``owners/`` stays locked (flock) as long as its process lives; a free lock means
dead. Process ids prove nothing, since containers share them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.host import pid_namespace

_CARD = struct.Struct("<QI??QQ")
_CARD_LIMIT = _CARD.size + 4096


@dataclass(frozen=True, slots=True)
class Card:
    """What an owner says of itself.

    device: whether it copies to a device, whose copies may outlive it for a moment. disk: whether it uses `nvme`.
    memory_device, memory_inode: of its ``ram_directory``, whatever that is called there. memory: what it calls it.
    """

    pid_namespace: int
    pid: int
    device: bool
    disk: bool
    memory_device: int
    memory_inode: int
    memory: str = ""


class Owner:
    """This process, as long as it keeps its file locked.

    To be made under the store's opening lock: a hidden file is then always of a process that died before it was ready.
    """

    def __init__(self, directory: Path, *, device: bool, disk: bool, memory: Path) -> None:
        for stale in directory.glob(".*"):
            stale.unlink(missing_ok=True)
        self.id = secrets.token_bytes(16)
        self._path = directory / self.id.hex()
        hidden = directory / f".{self.id.hex()}"
        self._fd: int | None = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            place = memory.stat()
            card = _CARD.pack(pid_namespace(), os.getpid(), device, disk, place.st_dev, place.st_ino)
            os.write(self._fd, card + os.fsencode(memory))
            hidden.rename(self._path)
        except OSError:
            self.disown()
            hidden.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Die properly: nothing must be left to take back."""
        self._path.unlink(missing_ok=True)
        self.disown()

    def disown(self) -> None:
        """Let go of the file without unlocking it for others: what a forked child does."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def survey(directory: Path, mine: bytes | None = None) -> tuple[dict[bytes, Card], dict[bytes, Card]]:
    """The other owners: (the living, the dead)."""
    living: dict[bytes, Card] = {}
    dead: dict[bytes, Card] = {}
    for path in directory.iterdir():
        try:
            owner = bytes.fromhex(path.name)
        except ValueError:
            continue
        if owner == mine or len(owner) != 16:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            card = _unpacked(os.read(fd, _CARD_LIMIT))
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                dead[owner] = card
            except BlockingIOError:
                living[owner] = card
        finally:
            os.close(fd)
    return living, dead


def _unpacked(raw: bytes) -> Card:
    """A card from its file; one that was never written whole is of no namespace that there is."""
    if len(raw) < _CARD.size:
        return Card(0, 0, device=True, disk=True, memory_device=0, memory_inode=0)
    return replace(Card(*_CARD.unpack_from(raw)), memory=os.fsdecode(raw[_CARD.size :]))


def bury(directory: Path, owner: bytes) -> None:
    """Remove a dead owner's file, after all it left behind was taken back."""
    (directory / owner.hex()).unlink(missing_ok=True)
