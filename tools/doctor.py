"""``kvstore doctor``: what this host and these settings allow, and what a store would refuse, before it is opened.

Nothing is created but a probe file for O_DIRECT, which is deleted at once. Must not open the store: of one that is
there, indexes tell what budgets it was given.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import typer

from kvstore import host, superblock
from kvstore.errors import BudgetError, DamagedError, FormatError, KVStoreError
from kvstore.memory_home import orphans
from kvstore.owners import survey
from kvstore.settings import Settings
from kvstore.sizes import GIB, MIB, counted, format_size
from kvstore.tiers import opening
from kvstore.tools import terminal
from kvstore.tools.standing import budgets

PACKAGES = ("prefix-kvstore", "lmdb", "numpy", "xxhash", "zstandard", "torch", "transformers", "vllm")
SERVING = ("fastapi", "prometheus-client", "uvicorn")
SERVE_ADVICE = 'for kvstore serve: pip install "prefix-kvstore[serve]", or in a checkout: pip install ".[serve]"'
DESCRIPTORS_MIN = 1024
RAM_USEFUL = 256 * MIB
ORPHANS_ADVICE = "opening any store of this user frees it"


class Grade(StrEnum):
    """What a finding means."""

    OK = "ok"
    NOTE = "note"
    """It works, but slower or smaller than it could, or without a part."""
    REFUSED = "refused"
    """The store would not open, or a tier would not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. advice: what to do, empty where nothing needs doing."""

    subject: str
    value: str
    grade: Grade = Grade.OK
    advice: str = ""


def doctor(path: terminal.PathOption = None, as_json: terminal.JsonOption = False) -> None:
    """Tell what this host allows and what a store here would refuse, and why. Exit code 1 when something is refused.

    Example:

        kvstore doctor --path ./store
    """
    findings = examine(path)
    refused = any(finding.grade is Grade.REFUSED for finding in findings)
    if as_json:
        terminal.print_json({"ok": not refused, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.grade, finding.subject, finding.value, finding.advice) for finding in findings]
        terminal.console().print(terminal.table("This host", ("", "what", "found", "what to do"), rows))
    if refused:
        raise typer.Exit(1)


def examine(path: Path | None) -> list[Finding]:
    """Every finding, for the store at ``path`` (default: what the settings name, else the current directory)."""
    findings = list(_versions())
    try:
        named = path is not None or "KVSTORE_PATH" in os.environ or "KVSTORE_CONFIG" in os.environ
        settings = Settings.resolve(path if named else Path.cwd())
    except KVStoreError as error:
        return [*findings, _refused("settings", error)]
    findings += (
        _contained("store", _store, settings)
        if named
        else [Finding("store", f"none named; looking at {settings.path}")]
    )
    place = _contained("filesystem", LOOKS["filesystem"], settings)
    findings += place
    usable = place[0].grade is not Grade.REFUSED
    for subject, look in LOOKS.items():
        if subject != "filesystem" and (usable or subject not in ON_THE_DISK):
            findings += _contained(subject, look, settings)
    return findings


def _contained(subject: str, look: Callable[[Settings], Iterator[Finding]], settings: Settings) -> list[Finding]:
    """What a look found; where it raised, that, under the same subject."""
    try:
        return list(look(settings))
    except KVStoreError as error:
        return [_refused(subject, error)]
    except PermissionError as error:
        advice = "run as the user the store belongs to, or choose another path"
        return [Finding(subject, f"{error.filename} may not be looked at", Grade.REFUSED, advice)]


def _refused(subject: str, error: KVStoreError) -> Finding:
    return Finding(subject, error.problem, Grade.REFUSED, error.remedy)


def _versions() -> Iterator[Finding]:
    yield Finding("system", f"{platform.system()} {platform.release()}, {os.cpu_count()} processors")
    yield Finding("python", platform.python_version())
    for name in PACKAGES:
        yield Finding(name, _version(name) or "not installed")
    missing = [name for name in SERVING if _version(name) is None]
    if missing:
        yield Finding("extra serve", f"without {', '.join(missing)}", Grade.NOTE, SERVE_ADVICE)
    else:
        yield Finding("extra serve", "installed")
    yield Finding("CUDA", "a driver is loaded" if Path("/proc/driver/nvidia/version").exists() else "no driver")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _store(settings: Settings) -> Iterator[Finding]:
    path = settings.path
    if (path / superblock.SUPERBLOCK).is_file():
        superblock.read_store_id(path)
        yield Finding("store", f"{path}, format {superblock.VERSION}")
        superblock.refuse_other_namespaces(path, None)
        users = counted(len(survey(path / superblock.OWNERS)[0]), "process")
        yield Finding("in use", f"by {users} of this PID namespace")
    elif not (there := _nearest(path)).is_dir():
        advice = "name a directory, or one that does not exist yet"
        yield Finding("store", f"{there} is not a directory", Grade.REFUSED, advice)
    elif path.is_dir() and any(path.iterdir()):
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:3])
        advice = "name an empty directory, or one that does not exist"
        yield Finding("store", f"{path} is not one, and holds {names}", Grade.REFUSED, advice)
    else:
        yield Finding("store", f"{path}, not made yet")


def _orphans(settings: Settings) -> Iterator[Finding]:
    left = orphans(settings.ram_directory)
    if left:
        size = format_size(sum(map(allocated_bytes, left)))
        text = f"{size}, left by {counted(len(left), 'store')} no longer there"
        yield Finding("orphaned memory", text, Grade.NOTE, ORPHANS_ADVICE)


def _filesystem(settings: Settings) -> Iterator[Finding]:
    found = host.refuse_unsafe_filesystem(settings.path)
    yield Finding("filesystem", f"{found.type} at {found.mount_point}")
    yield Finding("PID namespace", str(host.pid_namespace()))


def _owner(settings: Settings) -> Iterator[Finding]:
    there, user = _nearest(settings.path), os.geteuid()
    if there != settings.path:
        if os.access(there, os.W_OK | os.X_OK):
            yield Finding("owner", f"the store does not exist yet; user {user} may make it")
        else:
            advice = "give this user access, or choose another path"
            yield Finding("owner", f"user {user} may not write to {there}", Grade.REFUSED, advice)
    elif (owner := there.stat().st_uid) != user:
        advice = f"run as user {owner}, or choose another path"
        yield Finding("owner", f"it belongs to user {owner}, this is user {user}", Grade.REFUSED, advice)
    else:
        yield Finding("owner", f"user {owner}, as this process")


def _direct(settings: Settings) -> Iterator[Finding]:
    if settings.direct_io == "off":
        yield Finding("O_DIRECT", "turned off by direct_io")
    elif host.supports_o_direct(_nearest(settings.path)):
        yield Finding("O_DIRECT", "yes")
    elif settings.direct_io == "on":
        yield Finding(
            "O_DIRECT", "not on this filesystem", Grade.REFUSED, 'set direct_io to "auto", or choose ext4 or xfs'
        )
    else:
        yield Finding("O_DIRECT", "not on this filesystem: buffered files are used", Grade.NOTE, "choose ext4 or xfs")


def _nvme(settings: Settings) -> Iterator[Finding]:
    if not settings.nvme:
        yield Finding(
            "nvme budget", "0: the tier is off", Grade.NOTE, "give nvme a budget, or restarts forget everything"
        )
        return
    held, free = opening.medium_room(directory := settings.path / "nvme")
    text = f"{format_size(settings.nvme)} asked for, {format_size(held)} held, {format_size(free)} free"
    try:
        opening.refuse_larger_than_medium("nvme", settings.nvme, directory)
        yield Finding("nvme budget", text)
    except BudgetError as error:
        yield Finding("nvme budget", text, Grade.REFUSED, error.remedy)


def _shared_memory(settings: Settings) -> Iterator[Finding]:
    where = settings.ram_directory
    found = host.refuse_off_tmpfs(where)
    status = os.statvfs(where)
    whole, free = status.f_blocks * status.f_frsize, host.free_bytes(where)
    text = f"{found.type} at {found.mount_point}, {format_size(whole)}, {format_size(free)} free"
    if whole < RAM_USEFUL:
        yield Finding(
            "ram directory", text, Grade.NOTE, "enlarge it: docker run --shm-size=4g, or mount a larger tmpfs"
        )
    else:
        yield Finding("ram directory", text)


def _ram(settings: Settings) -> Iterator[Finding]:
    cap = host.ram_cap(settings.ram, settings.ram_directory, 0)
    if cap.reason:
        yield Finding("ram budget", cap.reason, Grade.NOTE, "enlarge what limits it, or set ram lower")
    else:
        yield Finding("ram budget", f"{format_size(settings.ram)} can be had")


def _in_force(settings: Settings) -> Iterator[Finding]:
    """Budgets of a store that is there, where the host could not give what was asked for."""
    if not (settings.path / superblock.SUPERBLOCK).is_file() or settings.path.stat().st_uid != os.geteuid():
        return
    try:
        found = budgets(settings)
    except KVStoreError as error:  # such as a store that this very process has open
        grade = Grade.REFUSED if isinstance(error, DamagedError | FormatError) else Grade.NOTE
        yield Finding("budgets in force", f"they cannot be read: {error.problem}", grade, error.remedy)
        return
    for name, one in found.items():
        if one.why:
            text = f"{name}: {format_size(one.budget)} instead of {format_size(one.asked)}: {one.why}"
            yield Finding("budgets in force", text, Grade.NOTE, "enlarge what limits it, then open the store anew")
    if found and not any(one.why for one in found.values()):
        text = ", ".join(f"{name} {format_size(one.budget)}" for name, one in found.items())
        yield Finding("budgets in force", f"{text}: what was asked for")


def _memory(settings: Settings) -> Iterator[Finding]:
    group = host.cgroup_memory_headroom()
    limit = "no control group limit" if group is None else f"{format_size(group)} left in the control group"
    yield Finding("memory", f"{format_size(host.memory_available())} available, {limit}")


def _descriptors(settings: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < DESCRIPTORS_MIN
    advice = f"ulimit -n {DESCRIPTORS_MIN}: every segment is an open file" if few else ""
    yield Finding("open files", f"{_limit(soft)} (hard {_limit(hard)})", Grade.NOTE if few else Grade.OK, advice)


def _file_size(settings: Settings) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(settings.ram_segment_bytes, settings.nvme_segment_bytes)
    if soft != resource.RLIM_INFINITY and soft < largest:
        advice = "ulimit -f unlimited, or smaller segments"
        yield Finding("file size", f"{format_size(soft)}, a segment is {format_size(largest)}", Grade.REFUSED, advice)
    else:
        yield Finding("file size", _limit(soft))


def _locked_memory(settings: Settings) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _limit(soft) if soft == resource.RLIM_INFINITY else format_size(soft)
    short = settings.hbm > 0 and soft != resource.RLIM_INFINITY and soft < min(settings.ram, GIB)
    advice = "ulimit -l unlimited: page-locked copies are faster" if short else ""
    yield Finding("locked memory", text, Grade.NOTE if short else Grade.OK, advice)


def allocated_bytes(folder: Path) -> int:
    """Bytes that the files below ``folder`` take on their medium; 0 where there is none."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _nearest(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


LOOKS: Mapping[str, Callable[[Settings], Iterator[Finding]]] = {
    "filesystem": _filesystem,
    "owner": _owner,
    "O_DIRECT": _direct,
    "nvme budget": _nvme,
    "ram directory": _shared_memory,
    "ram budget": _ram,
    "budgets in force": _in_force,
    "orphaned memory": _orphans,
    "open files": _descriptors,
    "file size": _file_size,
    "locked memory": _locked_memory,
    "memory": _memory,
}
"""By the subject of their first finding."""
ON_THE_DISK = frozenset({"owner", "O_DIRECT", "nvme budget"})
"""Subjects that say nothing of a place where no store can be: the filesystem is refused, and that is enough."""
