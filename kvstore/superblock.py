"""The store's own directory: its superblock, its opening lock, and who may open it.

Must not know tiers or indexes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from kvstore.errors import (
    BusyError,
    DamagedError,
    FormatError,
    KVStoreError,
    OwnershipError,
    PathError,
    PidNamespaceError,
    RamDirectoryError,
    SettingsError,
)
from kvstore.host import FULL, OPENING_BYTES, full_error, pid_namespace, refuse_unsafe_filesystem
from kvstore.owners import survey

SUPERBLOCK = "STORE"
LOCK = "LOCK"
OWNERS = "owners"
MAGIC = b"KVSTORE\n"
VERSION = 1
_FIELDS = struct.Struct("<8sI4x16s")
_DIGEST = struct.Struct("<Q")
SETTINGS = "kvstore.toml"
_OURS = frozenset({SUPERBLOCK, f"{SUPERBLOCK}.new", LOCK, OWNERS, "nvme", SETTINGS})
OPEN_TIMEOUT_S = 30.0


def prepare_directory(path: Path) -> None:
    """Make the store's directory, or check that it is one that can be used.

    Raises PathError, FilesystemError, OwnershipError, FormatError (it holds something else).
    """
    refuse_unsafe_filesystem(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid == os.geteuid():  # another user's is refused below, as that
            (path / OWNERS).stat()  # raises where a directory is one, but what would be in it has too long a path
    except (FileExistsError, NotADirectoryError) as error:
        raise PathError(f"{path} is not a directory", "name a directory, or one that does not exist yet") from error
    except FileNotFoundError as error:
        if not path.is_dir():  # such as below /proc
            raise PathError(f"{path} cannot be made: {error.strerror}", "choose a path you can write") from error
    except OSError as error:
        if error.errno in FULL:
            raise full_error(error, {path: OPENING_BYTES}) from error
        raise PathError(f"{path} cannot be made: {error.strerror}", "choose a path you can write") from error
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise OwnershipError(
            f"{path} belongs to user {owner}, you are {os.geteuid()}",
            "open it as that user, or choose a path of your own: a store has one user",
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PathError(f"{path} cannot be written", "make it writable, or choose another path")
    strange = sorted(entry.name for entry in path.iterdir() if entry.name not in _OURS)
    if strange and not (path / SUPERBLOCK).exists():
        raise FormatError(
            f"{path} is not a store: it holds {', '.join(strange[:3])}",
            "name an empty directory, or one that does not exist",
        )
    try:
        (path / OWNERS).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise full_error(error, {path: OPENING_BYTES}) from error
        raise PathError(
            f"{path} cannot be written: {error.strerror}", "make it writable, or choose another path"
        ) from error


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Hold the lock under which a store is made, opened and closed. Raises BusyError after half a minute."""
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    fd = -1
    try:
        while True:
            if fd < 0:
                fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError(f"{path} is being opened by another process", "try again in a moment") from None
                time.sleep(0.01)
                continue
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # who held it has withdrawn the store, and the file with it
            fd = -1
        yield
    finally:
        if fd >= 0:
            os.close(fd)


@contextmanager
def undone(path: Path, ram_directory: Path) -> Iterator[None]:
    """Where a store cannot be opened that was not there before: nothing of it stays, nor a directory made for it."""
    fresh = _is_unused(path)
    missing = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    try:
        yield
    except BaseException:
        if fresh:
            _withdraw(path, ram_directory)
            for place in missing:
                with suppress(OSError):
                    place.rmdir()
        raise


def _is_unused(path: Path) -> bool:
    """Whether there is nothing, or a directory that holds nothing but settings."""
    try:
        return all(entry.name == SETTINGS for entry in path.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _withdraw(path: Path, ram_directory: Path) -> None:
    """Remove a store's files, unless a process has it open by now. What cannot be removed stays: an error is told."""
    with suppress(KVStoreError, OSError):
        if path.stat().st_uid != os.geteuid() or not (path / OWNERS).is_dir():
            return
        with opening(path):
            living, _ = survey(path / OWNERS, None)
            if living:
                return
            if (path / SUPERBLOCK).exists():
                shutil.rmtree(ram_directory / ram_name(path, read_store_id(path)), ignore_errors=True)
            for name in (SUPERBLOCK, f"{SUPERBLOCK}.new"):
                (path / name).unlink(missing_ok=True)
            for name in ("nvme", OWNERS):
                shutil.rmtree(path / name, ignore_errors=True)
            (path / LOCK).unlink()


def store_id(path: Path) -> bytes:
    """The store's 16 random bytes, made when it is new. Raises DamagedError, FormatError."""
    file = path / SUPERBLOCK
    if not file.exists():
        body = _FIELDS.pack(MAGIC, VERSION, secrets.token_bytes(16))
        fresh = path / f"{SUPERBLOCK}.new"
        fresh.touch(mode=0o600)
        with fresh.open("wb") as out:
            out.write(body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body)))
            out.flush()
            os.fsync(out.fileno())
        fresh.rename(file)
    return read_store_id(path)


def read_store_id(path: Path) -> bytes:
    """The 16 bytes of a store that exists. Raises DamagedError, FormatError."""
    file = path / SUPERBLOCK
    raw = file.read_bytes()
    size = _FIELDS.size
    if len(raw) < len(MAGIC) and MAGIC.startswith(raw):
        raise DamagedError(
            f"{file} is cut short", f"if {path} is a store, remove it: cached blocks are lost, nothing else"
        )
    if raw[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{file} is not the superblock of a store", "choose another path")
    if len(raw) != size + _DIGEST.size or _DIGEST.unpack_from(raw, size)[0] != xxhash.xxh3_64_intdigest(raw[:size]):
        raise DamagedError(f"{file} is damaged", f"remove {path}: cached blocks are lost, nothing else")
    _, version, identity = _FIELDS.unpack_from(raw)
    if version != VERSION:
        raise FormatError(
            f"{path} is a store of format {version}, this kvstore reads {VERSION}",
            f"use the kvstore that made it, or remove {path}: cached blocks are lost, nothing else",
        )
    return bytes(identity)


def ram_name(path: Path, identity: bytes) -> str:
    """Name of the store's directory on tmpfs; a copy of a store gets another one."""
    stat = path.stat()
    place = f"{path.resolve()}\0{stat.st_dev}\0{stat.st_ino}".encode()
    return f"kvstore-{os.geteuid()}-{hashlib.sha256(identity + place).hexdigest()[:32]}"


def refuse_other_tiers(path: Path, mine: bytes, disk: bool) -> None:
    """Raises SettingsError when a live process uses `nvme` and this one will not, or the other way round.

    Names, pins, quotas and tombstones are in the index of the lowest tier there is: all must agree which that is.
    """
    living, _ = survey(path / OWNERS, mine)
    for card in living.values():
        if card.disk != disk:
            here, there = ("on", "off") if disk else ("off", "on")
            raise SettingsError(
                f"nvme is {here} here and {there} in process {card.pid}, which has {path} open",
                "open it with the same tiers, or close it there first",
            )


def refuse_other_memory(path: Path, mine: bytes, ram_directory: Path) -> None:
    """Raises RamDirectoryError when a live process has its `ram` elsewhere: it would be a second one, unseen by it."""
    place = ram_directory.stat()
    living, _ = survey(path / OWNERS, mine)
    for card in living.values():
        if (card.memory_device, card.memory_inode) != (place.st_dev, place.st_ino):
            raise RamDirectoryError(
                f"ram_directory is {ram_directory} here and {card.memory} in process {card.pid}, which has {path} open",
                f"set ram_directory to that of the other process (KVSTORE_RAM_DIRECTORY={card.memory}), "
                "or close the store there first",
            )


def refuse_other_namespaces(path: Path, mine: bytes | None) -> bool:
    """Whether no other process has the store open. Raises PidNamespaceError when one of another namespace has."""
    living, _ = survey(path / OWNERS, mine)
    here = pid_namespace()
    for card in living.values():
        if card.pid_namespace != here:
            raise PidNamespaceError(
                f"{path} is open in a process of another PID namespace (there it has id {card.pid})",
                "run both in one container or with --pid=host, or give each a store of its own",
            )
    return not living
