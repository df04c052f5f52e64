"""Which processes have a store open. Must not know what they do with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvstore import superblock
from kvstore.host import pid_namespace
from kvstore.owners import survey
from kvstore.store import Store

PROC = Path("/proc")


def processes(store: Store) -> list[dict[str, Any]]:
    """The living owners, this process among them, the longest attached first.

    name: what the kernel calls it; None for one of another PID namespace, or one that has just ended.
    """
    core = store._core
    directory = core.settings.path / superblock.OWNERS
    mine = core.owner.id
    found = [_told(directory, mine, os.getpid(), pid_namespace(), bool(core.settings.hbm), bool(core.settings.nvme))]
    for owner, card in survey(directory, mine)[0].items():
        found.append(_told(directory, owner, card.pid, card.pid_namespace, card.device, card.disk))
    found[0]["self"] = True
    return sorted(found, key=lambda one: (one["since"] or 0, one["id"]))


def _told(directory: Path, owner: bytes, pid: int, namespace: int, device: bool, disk: bool) -> dict[str, Any]:
    try:
        since: float | None = (directory / owner.hex()).stat().st_ctime
    except OSError:
        since = None
    return {
        "id": owner.hex(),
        "pid": pid,
        "name": _name(pid) if namespace == pid_namespace() else None,
        "since": since,
        "hbm": device,
        "nvme": disk,
        "self": False,
    }


def _name(pid: int) -> str | None:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return None
