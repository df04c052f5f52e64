"""What the host is and allows: filesystems, namespaces, clocks, memory, and O_DIRECT.

Everything is read anew at each call, from the kernel's own files. Functions that read them take ``root``, a directory
that stands for ``/``. Must not know what a store is, beyond which filesystems cannot hold one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import FilesystemError, FullError, PathError, RamDirectoryError
from kvstore.sizes import SIZE_LIMIT, format_size

ROOT = Path("/")
PAGE = 4096
TMPFS_HEADROOM_SHARE = 16
"""One part in 16 of the free tmpfs is left to others: torch's workers, other programs' shared memory."""
MEMORY_HEADROOM_SHARE = 8
"""One part in 8 of the available memory is left: page cache, activations, the engine's own growth."""
OPENING_BYTES = 64 << 10
"""More than opening a store that is there writes on a medium: a card, a probe for O_DIRECT (m: 8 KiB)."""
UNLIMITED = 1 << 60
"""Version 1 control groups write 'no limit' as a number near 2⁶³."""

_UNSAFE = {
    "a network filesystem": "nfs nfs3 nfs4 cifs smb3 smbfs afs coda ncpfs",
    "a cluster filesystem": "ceph lustre glusterfs beegfs gpfs gfs2 ocfs2 orangefs pvfs2 panfs wekafs",
    "a folder of the virtual machine's host": "9p virtiofs vboxsf vmhgfs prl_fs fakeowner",
    "a FUSE filesystem": "fuse fuseblk",
}
_KERNEL = "proc sysfs cgroup cgroup2 devpts debugfs tracefs securityfs pstore bpf configfs binfmt_misc mqueue efivarfs"
KERNEL_FILESYSTEMS = frozenset(_KERNEL.split())
"""Filesystems that show what the kernel knows; files cannot be stored there."""
UNSAFE_FILESYSTEMS = {name: kind for kind, names in _UNSAFE.items() for name in names.split()}
"""Filesystems on which shared mappings or locks are not promised to hold, and what they are."""


@dataclass(frozen=True, slots=True)
class Filesystem:
    """A mounted filesystem. type: as the kernel names it, with a FUSE subtype. device: its ``st_dev``."""

    type: str
    mount_point: Path
    device: int


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. root: the directory of the filesystem that is mounted. options: the super block's."""

    filesystem: Filesystem
    root: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cap:
    """A budget after the host had its say. reason: why it is less than requested, in words; None if it is not."""

    bytes: int
    reason: str | None


def mounts(root: Path = ROOT) -> tuple[Mount, ...]:
    """Every mount of this process, in the order they were mounted."""
    return parse_mounts(_read(root / "proc/self/mountinfo"))


def parse_mounts(mountinfo: str) -> tuple[Mount, ...]:
    """The mounts that a mountinfo text lists (proc(5)); lines that are not mounts are passed over."""
    found: list[Mount] = []
    for line in mountinfo.splitlines():
        front, dash, back = line.partition(" - ")
        fields, rest = front.split(" "), back.split(" ")
        if not dash or len(fields) < 6 or len(rest) < 2:
            continue
        major, colon, minor = fields[2].partition(":")
        if not (colon and major.isdecimal() and minor.isdecimal()):
            continue
        device = os.makedev(int(major), int(minor))
        filesystem = Filesystem(rest[0], Path(_unescape(fields[4])), device)
        found.append(Mount(filesystem, _unescape(fields[3]), tuple(rest[2].split(",")) if len(rest) > 2 else ()))
    return tuple(found)


def find_mount(mounted: Sequence[Mount], path: Path, device: int) -> Filesystem | None:
    """The mount that holds ``path``, an absolute path without links, whose ``st_dev`` is ``device``.

    Of the mounts above the path those with its device are preferred (a mount can hide deeper ones; btrfs and
    overlayfs report devices that no mount has), then the deepest, then the last. None where nothing is above it.
    """
    above = [
        (mount.filesystem.device == device, len(mount.filesystem.mount_point.parts), order, mount.filesystem)
        for order, mount in enumerate(mounted)
        if path.is_relative_to(mount.filesystem.mount_point)
    ]
    return max(above, key=lambda entry: entry[:3])[3] if above else None


def filesystem(path: Path, root: Path = ROOT) -> Filesystem:
    """The filesystem that holds ``path``, or would hold it if it were made. Raises PathError if none can be found."""
    there = _existing(path)
    found = find_mount(mounts(root), there, _stat(there).st_dev)
    if found is None:
        raise PathError(f"no mounted filesystem holds {path}", "mount /proc in this container, or choose another path")
    return found


def refuse_unsafe_filesystem(path: Path, root: Path = ROOT) -> Filesystem:
    """The filesystem that holds ``path``. Raises FilesystemError, by name, where a store must not lie."""
    found = filesystem(path, root)
    kind = UNSAFE_FILESYSTEMS.get(found.type.partition(".")[0])
    if kind is not None:
        raise FilesystemError(
            f"{path} lies on {found.type} (mounted at {found.mount_point}), {kind}: "
            "locks and shared mappings are not safe there",
            "put the store on a local disk of this host: ext4, xfs, btrfs",
        )
    if found.type in KERNEL_FILESYSTEMS:
        raise FilesystemError(
            f"{path} lies on {found.type} (mounted at {found.mount_point}), which the kernel makes up: "
            "nothing can be stored there",
            "put the store on a local disk of this host: ext4, xfs, btrfs",
        )
    return found


def refuse_off_tmpfs(directory: Path, root: Path = ROOT) -> Filesystem:
    """The tmpfs that holds ``directory``. Raises RamDirectoryError where shared memory must not lie.

    ramfs cannot reserve a file's space and has no limit, hugetlbfs has no pages of 4 KiB and cannot be written: neither
    will do.
    """
    remedy = "set ram_directory to a directory on tmpfs that is there, such as /dev/shm"
    if not directory.is_dir():
        what = "is not a directory" if os.path.lexists(directory) else "does not exist"
        raise RamDirectoryError(f"ram_directory {directory} {what}", remedy)
    found = filesystem(directory, root)
    if found.type != "tmpfs":
        problem = f"ram_directory {directory} lies on {found.type} (mounted at {found.mount_point}), not on tmpfs"
        raise RamDirectoryError(problem, remedy)
    return found


def pid_namespace(root: Path = ROOT) -> int:
    """The inode that names this process's PID namespace."""
    return _stat(root / "proc/self/ns/pid").st_ino


def boot_id(root: Path = ROOT) -> bytes:
    """16 bytes that change at every start of the host."""
    path = root / "proc/sys/kernel/random/boot_id"
    try:
        return uuid.UUID(_read(path).strip()).bytes
    except ValueError as error:
        raise PathError(f"{path} holds no boot id", "mount the host's own /proc in this container") from error


def boottime_ns() -> int:
    """Nanoseconds since the host started, sleep included. Comparable only under one `boot_id`."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def memory_available(root: Path = ROOT) -> int:
    """Bytes that can be taken before the host swaps (MemAvailable)."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    if found is None:
        raise PathError("/proc/meminfo has no MemAvailable", "mount the host's own /proc in this container")
    return int(found[1]) * 1024


def cgroup_memory_headroom(root: Path = ROOT) -> int | None:
    """Bytes left under the memory limits of this process's control groups, versions 1 and 2; None without a limit.

    Groups nest, and the smallest room counts. Inactive page cache is counted as room: the kernel drops it before it
    kills, and a group that has read large files would otherwise always look full.
    """
    rooms = [room for group in _memory_groups(root) if (room := _group_room(group)) is not None]
    return max(0, min(rooms)) if rooms else None


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process can still take on the filesystem of ``path``; 2⁶³−1 where it has no limit."""
    there = _existing(path)
    try:
        status = os.statvfs(there)
    except OSError as error:
        raise _path_error(there, error) from error
    return status.f_bavail * status.f_frsize if status.f_blocks else SIZE_LIMIT


def ram_cap(requested: int, directory: Path, already_allocated: int, root: Path = ROOT) -> Cap:
    """The budget, in bytes, that a tier of shared memory in ``directory`` may have.

    already_allocated: bytes that the tier's files hold there now; they are gone from what is free, and stay usable.
    The rest must fit into the free tmpfs, the available memory and the control group's limit, with headroom.
    """
    free, available, group = free_bytes(directory), memory_available(root), cgroup_memory_headroom(root)
    rooms = [
        (free - free // TMPFS_HEADROOM_SHARE, f"{directory} has only {format_size(free)} free"),
        (available - available // MEMORY_HEADROOM_SHARE, f"only {format_size(available)} of memory are available"),
    ]
    if group is not None:
        reason = f"the control group's memory limit leaves only {format_size(group)}"
        rooms.append((group - group // MEMORY_HEADROOM_SHARE, reason))
    room, reason = min(rooms)
    allowed = already_allocated + room
    if requested <= allowed:
        return Cap(requested, None)
    held = f", and the tier holds {format_size(already_allocated)} already" if already_allocated else ""
    return Cap(allowed, f"{format_size(requested)} were asked for, {format_size(allowed)} can be had: {reason}{held}")


def supports_o_direct(directory: Path) -> bool:
    """Whether files in ``directory`` can be written and read past the page cache; found out by doing it.

    Raises PathError for every failure that does not mean 'not on this filesystem'.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:  # nameless, so that no death can leave it
            flags = fcntl.fcntl(probe, fcntl.F_GETFL)
            fcntl.fcntl(probe, fcntl.F_SETFL, flags | os.O_DIRECT)
            return _direct_round_trip(probe.fileno())
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise _path_error(directory, error) from error
        return False


FULL = (errno.ENOSPC, errno.EDQUOT)


def full_error(error: OSError, needs: Mapping[Path, int]) -> FullError:
    """What to raise for one of `FULL` while a store was opened. needs: bytes that opening may take in each directory.

    The fullest directory is named where the error names none.
    """
    place = next((one for one in needs if error.filename and Path(error.filename).is_relative_to(one)), None)
    if place is None:
        place = min(needs, key=lambda one: free_bytes(one) - needs[one])
    kind = "the tmpfs" if filesystem(place).type == "tmpfs" else "the disk"
    why = "this user's quota is used up" if error.errno == errno.EDQUOT else "full"
    problem = f"{kind} of {place} is {why}" if why == "full" else f"on {kind} of {place} {why}"
    return FullError(
        f"{problem}: nothing stored is lost, but opening writes up to {format_size(needs[place])} there",
        f"free at least that much there (df, and df -i for files); {format_size(free_bytes(place))} are free now",
    )


_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def _direct_round_trip(descriptor: int) -> bool:
    with mmap.mmap(-1, 2 * PAGE) as memory, memoryview(memory) as view, view[:PAGE] as written, view[PAGE:] as read:
        written[:] = secrets.token_bytes(PAGE)
        whole = os.pwrite(descriptor, written, 0) == PAGE and os.preadv(descriptor, [read], 0) == PAGE
        return whole and written == read


def _memory_groups(root: Path) -> list[Path]:
    """Directories of every control group with a memory controller that this process is in, parents included."""
    listed = root / "proc/self/cgroup"
    lines = _read(listed).splitlines() if listed.is_file() else []  # a kernel may be built without control groups
    hierarchies = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    groups: list[Path] = []
    for mount in mounts(root):
        kind = mount.filesystem.type
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and "memory" not in mount.options):
            continue
        top = root / mount.filesystem.mount_point.relative_to("/")
        for _, controllers, path in hierarchies:
            if (kind == "cgroup2" and not controllers) or (kind == "cgroup" and "memory" in controllers.split(",")):
                group = _group_below(Path(path), Path(mount.root))
                groups.extend(top / below for below in (group, *group.parents))
    return groups


def _group_below(path: Path, mounted: Path) -> Path:
    """``path`` of a group relative to the group that is mounted; the mounted one itself where it is not inside."""
    if ".." in path.parts or not path.is_relative_to(mounted):
        return Path()
    return path.relative_to(mounted)


def _group_room(group: Path) -> int | None:
    """Bytes left in one control group; None where it has no limit. Version 2's throttling limit is a limit too."""
    limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limit = min((number for number in limits if number is not None and number < UNLIMITED), default=None)
    usages = [_number(group / name) for name in ("memory.current", "memory.usage_in_bytes")]
    usage = next((number for number in usages if number is not None), None)
    if limit is None or usage is None:
        return None
    return limit - max(0, usage - _inactive_cache(group))


def _inactive_cache(group: Path) -> int:
    text = _read(group / "memory.stat") if (group / "memory.stat").is_file() else ""
    values = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    value = values.get("total_inactive_file", values.get("inactive_file", "0"))
    return int(value) if value.isdecimal() else 0


def _number(path: Path) -> int | None:
    """The number in a control file; None where the file is missing or says ``max``."""
    if not path.is_file():
        return None
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _existing(path: Path) -> Path:
    """The nearest directory or file above ``path`` that is there, absolute and without links."""
    try:
        there = Path(os.path.realpath(path))
        while not there.exists():
            there = there.parent
    except OSError as error:
        raise _path_error(path, error) from error
    return there


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _path_error(path, error) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise _path_error(path, error) from error


def _path_error(path: Path, error: OSError) -> PathError | FullError:
    if error.errno in FULL:
        return full_error(error, {path: OPENING_BYTES})
    remedy = {
        errno.EACCES: "give this user access to it, or choose another path",
        errno.EPERM: "give this user access to it, or choose another path",
        errno.EROFS: "choose a path on a writable filesystem",
        errno.ENOENT: "create it, or choose another path",
        errno.ENOTDIR: "choose a path whose parents are directories",
    }.get(error.errno or 0, "check the path, or choose another one")
    return PathError(f"cannot use {path}: {error.strerror or error}", remedy)


def _unescape(field: str) -> str:
    r"""Undo mountinfo's escapes: space, tab, newline and backslash are written as ``\040`` and so on."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
