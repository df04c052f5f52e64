"""Which stores this process has open: one core a directory, however many handles; none after a fork."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from kvstore import superblock
from kvstore.assembly import Wrap
from kvstore.core import Core
from kvstore.errors import BusyError, ClosedError, PathError, SettingsError
from kvstore.events import Observer
from kvstore.host import FULL, OPENING_BYTES, full_error, refuse_off_tmpfs
from kvstore.settings import Settings
from kvstore.sizes import format_size
from kvstore.tiers.opening import SUPERBLOCK, default_index_bytes

_cores: dict[tuple[int, int], Core] = {}
_inherited: dict[tuple[int, int], Core] = {}
"""Cores that were open when this process was forked. Kept, not freed: LMDB's state in them is the parent's, and LMDB
opens no environment twice in a process."""
_lock = threading.Lock()


def acquire(
    settings: Settings, given: Collection[str], wrap: Wrap | None, observers: Sequence[Observer]
) -> tuple[Core, bool]:
    """The core of a directory, and whether it was opened for this call, observers told.

    given: settings that the caller named; one that is open already must have these, and this wrap. Raises SettingsError
    where it has not, and what opening raises.
    """
    with _lock, superblock.undone(settings.path, settings.ram_directory):
        core = _known(settings.path)
        if core is not None:
            _refuse_others(core, settings, given, wrap)
            core.handles += 1
            return core, False
        refuse_off_tmpfs(settings.ram_directory)
        superblock.prepare_directory(settings.path)
        core = _opened(settings, wrap, observers)
        _cores[_key(settings.path)] = core
        core.handles += 1
        return core, True


def _key(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _known(path: Path) -> Core | None:
    """What this process has open in a directory. Raises ClosedError where that was so before a fork."""
    try:
        key = _key(path)
    except OSError:  # opening says why
        return None
    if key in _inherited:
        raise ClosedError(
            f"{path} was open when this process was forked",
            "start the process by spawn, or open the store only after the fork",
        )
    core = _cores.get(key)
    return None if core is None or core.closed else core


def _refuse_others(core: Core, settings: Settings, given: Collection[str], wrap: Wrap | None) -> None:
    """Raises SettingsError that names what a further handle asks for and would not get."""
    others = [text for name in sorted(given) if (text := _difference(core, name, getattr(settings, name)))]
    if wrap is not None and wrap != core.wrap:
        others.append("wrap is another")
    if others:
        raise SettingsError(
            f"{settings.path} is open in this process with other settings: {'; '.join(others)}",
            "open it with the same settings or with its path alone, or close the other handles first",
        )


def _difference(core: Core, name: str, asked: Any) -> str:
    """How what is asked for differs from what is in force; empty where it does not."""
    there = getattr(core.settings, name)
    match name:
        case "path":
            same = True  # another name of the directory
        case "ram" | "nvme":
            same = asked in (there, *(tier.budget() for tier in core.tiers if tier.name == name))
        case "hbm":
            same = asked in (0, there)  # who wants no device loses nothing by one
        case "device":
            same = asked in (None, there, core.device)
        case "ram_directory":
            same = asked.resolve() == there.resolve()
        case _:
            same = asked == there
    if same:
        return ""
    texts = [str(value) for value in (asked, there)]
    if name in ("ram", "nvme", "hbm") or name.endswith("_bytes"):
        sizes = [format_size(value) for value in (asked, there)]
        texts = sizes if sizes[0] != sizes[1] else texts
    return f"{name} is {texts[1]}, asked for {texts[0]}"


def _opened(settings: Settings, wrap: Wrap | None, observers: Sequence[Observer]) -> Core:
    try:
        return Core(settings, wrap, tuple(observers))
    except OSError as error:
        if error.errno in FULL:
            raise full_error(error, _needs(settings)) from error
        where = error.filename or settings.path
        place = "" if str(where) == str(settings.path) else f"{where}: "
        raise PathError(
            f"{settings.path} cannot be opened: {place}{error.strerror}",
            "check that path and ram_directory are directories you can write",
        ) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise BusyError(
            f"{settings.path} cannot be opened: {error}",
            "raise the limit of processes and threads (ulimit -u, a container's pids limit), or end others",
        ) from error


def _needs(settings: Settings) -> dict[Path, int]:
    """Bytes that opening may write on the store's disk and on tmpfs: the index of each tier that is not made yet."""
    needs = {settings.path: OPENING_BYTES, settings.ram_directory: OPENING_BYTES}
    if settings.nvme and not (settings.path / "nvme" / SUPERBLOCK).exists():
        needs[settings.path] += default_index_bytes(settings.nvme)
    return needs


def release(core: Core) -> None:
    """One handle less; the last one closes the core."""
    with _lock:
        core.handles -= 1
        if core.handles:
            return
        for key, known in list(_cores.items()):
            if known is core:
                del _cores[key]
        core.close()


def _close_all() -> None:
    """At the end of a program that did not close its stores: what waits for `nvme` is still written."""
    with _lock:
        for core in _cores.values():
            core.close()
        _cores.clear()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for core in _cores.values():
        core.disown()
    _inherited.update(_cores)
    _cores.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
