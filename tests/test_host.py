"""What is said of the host is what the kernel says: from fixtures, from this host, and from namespaces made for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import host
from kvstore.errors import FilesystemError, PathError
from kvstore.host import Filesystem, Mount
from kvstore.sizes import SIZE_LIMIT

GIB = 1 << 30
LAPTOP = r"""22 27 0:21 / /proc rw,relatime shared:5 master:1 - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
24 27 0:6 / /dev rw - devtmpfs devtmpfs rw,size=1k
30 24 0:27 / /dev/shm rw - tmpfs tmpfs rw,size=24684096k
31 24 0:28 / /dev/shm rw - tmpfs tmpfs rw,size=1k
40 27 0:40 /@home /home rw - btrfs /dev/vdb rw,subvol=/@home
41 40 0:41 / /home/ann/a\040b\134c rw - fuse.sshfs host:/x rw
42 27 0:42 / /mnt/hidden/deep rw - xfs /dev/vdc rw
43 27 0:43 / /mnt/hidden rw - ext4 /dev/vdd rw
not a mount
50 27 x:y / /mnt/odd rw - ext4 /dev/vde rw
"""


def mount_for(path: str, minor: int, major: int = 0) -> Filesystem:
    found = host.find_mount(host.parse_mounts(LAPTOP), Path(path), os.makedev(major, minor))
    assert found is not None
    return found


def test_mounts_are_read_with_their_escapes_and_nothing_else_is_taken_for_one() -> None:
    parsed = host.parse_mounts(LAPTOP)
    assert len(parsed) == 9
    assert parsed[0] == Mount(Filesystem("proc", Path("/proc"), os.makedev(0, 21)), "/", ("rw",))
    assert parsed[6].filesystem == Filesystem("fuse.sshfs", Path("/home/ann/a b\\c"), os.makedev(0, 41))
    assert parsed[5].root == "/@home"
    assert host.parse_mounts("") == ()


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_any_mount_point_survives_the_kernel_s_escapes(name: str) -> None:
    escaped = re.sub(r"[ \t\n\\#]", lambda found: f"\\{ord(found[0]):03o}", name)
    if len(f"{escaped}x".splitlines()) > 1:
        return  # the kernel escapes \n alone; other line ends cannot be in this fixture
    (parsed,) = host.parse_mounts(f"27 1 254:0 / /{escaped} rw - ext4 /dev/vda rw")
    assert parsed.filesystem.mount_point == Path("/" + name)


def test_a_path_lies_on_the_deepest_last_mount_with_its_device() -> None:
    assert mount_for("/", 0, 254).mount_point == Path("/")
    assert mount_for("/home/ann/a b\\c/deep", 41).type == "fuse.sshfs"
    assert mount_for("/home/ann/a bc", 40).type == "btrfs"  # not below, though the name begins alike
    assert mount_for("/dev/shm/x", 28).device == os.makedev(0, 28)  # mounted over the other
    assert mount_for("/mnt/hidden/deep/x", 43).type == "ext4"  # the deeper mount was covered by a later one
    assert mount_for("/home/bob", 77).type == "btrfs"  # subvolumes have devices that no mount has
    assert host.find_mount((), Path("/x"), 1) is None


def root_with(tmp_path: Path, **files: str) -> Path:
    """A directory that stands for ``/``; double underscores in names are slashes."""
    for name, content in files.items():
        file = tmp_path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "fuse", "fuseblk", "fuse.sshfs", "fuse.s3fs"],
)
def test_a_store_is_refused_by_name_where_locks_or_mappings_do_not_hold(tmp_path: Path, kind: str) -> None:
    device = tmp_path.stat().st_dev
    line = f"99 1 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - {kind} server:/x rw\n"
    root = root_with(tmp_path / "root", proc__self__mountinfo=line)
    with pytest.raises(FilesystemError, match=re.escape(f"lies on {kind} (mounted at {tmp_path})")) as caught:
        host.refuse_unsafe_filesystem(tmp_path / "not" / "yet" / "there", root)
    assert "local disk" in caught.value.remedy


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "bcachefs", "f2fs", "nilfs2"])
def test_local_filesystems_are_let_through(tmp_path: Path, kind: str) -> None:
    root = root_with(tmp_path, proc__self__mountinfo=f"99 1 0:1 / / rw - {kind} x rw\n")
    assert host.refuse_unsafe_filesystem(tmp_path, root).type == kind


def test_a_host_without_proc_is_told_so(tmp_path: Path) -> None:
    calls = (host.mounts, host.memory_available, host.boot_id, host.pid_namespace)
    for call in calls:
        with pytest.raises(PathError):
            call(tmp_path)
    root = root_with(tmp_path, proc__self__mountinfo="", proc__meminfo="x", proc__sys__kernel__random__boot_id="x")
    with pytest.raises(PathError, match="no mounted filesystem"):
        host.filesystem(tmp_path, root)
    with pytest.raises(PathError, match="MemAvailable"):
        host.memory_available(root)
    with pytest.raises(PathError, match="boot id"):
        host.boot_id(root)


def test_this_host_is_seen_as_the_system_s_own_tool_sees_it(tmp_path: Path) -> None:
    if shutil.which("findmnt") is None:
        pytest.skip("findmnt (util-linux) is not installed")
    for path in (tmp_path, Path("/proc/self"), Path("/dev"), Path("/dev/shm")):
        told = subprocess.run(
            ["findmnt", "--noheadings", "--raw", "--output", "FSTYPE,TARGET", "--target", str(path.resolve())],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        found = host.filesystem(path)
        assert f"{found.type} {found.mount_point}" in told
        assert found.device == path.stat().st_dev


def test_links_are_followed_to_the_filesystem_they_end_on(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self")
    assert host.filesystem(tmp_path / "link").type == "proc"
    (tmp_path / "loop").symlink_to("loop")
    assert host.filesystem(tmp_path / "loop") == host.filesystem(tmp_path)


def test_the_boot_has_one_id_and_a_clock_that_counts_sleep() -> None:
    assert len(host.boot_id()) == 16
    assert host.boot_id() == host.boot_id() != bytes(16)
    first = host.boottime_ns()
    assert time.monotonic_ns() <= host.boottime_ns()
    assert first <= host.boottime_ns()


def test_memory_available_is_a_part_of_all_memory() -> None:
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host.memory_available() < everything


V2 = "31 1 0:31 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = """31 1 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 1 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
"""


def group(root: Path, path: str, **values: str) -> None:
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / name.replace("__", ".")).write_text(value)


def test_the_smallest_room_of_nested_groups_counts(tmp_path: Path) -> None:
    root = root_with(tmp_path, proc__self__mountinfo=V2, proc__self__cgroup="0::/pod/box\n")
    group(root, "")
    group(root, "pod", memory__max="1000\n", memory__current="900\n")
    group(root, "pod/box", memory__max="500\n", memory__current="100\n", memory__high="max\n")
    assert host.cgroup_memory_headroom(root) == 100
    group(root, "pod", memory__max="max\n")
    assert host.cgroup_memory_headroom(root) == 400
    group(root, "pod/box", memory__high="150\n")
    assert host.cgroup_memory_headroom(root) == 50
    group(root, "pod/box", memory__current="700\n")
    assert host.cgroup_memory_headroom(root) == 0


def test_cache_that_the_kernel_would_drop_is_room(tmp_path: Path) -> None:
    root = root_with(tmp_path, proc__self__mountinfo=V2, proc__self__cgroup="0::/box\n")
    group(root, "box", memory__max="1000", memory__current="990", memory__stat="anon 300\ninactive_file 600\nx\n")
    assert host.cgroup_memory_headroom(root) == 610


def test_version_1_groups_are_read_and_their_huge_number_is_no_limit(tmp_path: Path) -> None:
    root = root_with(tmp_path, proc__self__mountinfo=V1, proc__self__cgroup="9:cpu:/other\n4:memory:/a/b\n0::/\n")
    group(root, "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="5\n")
    group(root, "memory/a/b", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="5\n")
    group(root, "memory/other", memory__limit_in_bytes="10\n", memory__usage_in_bytes="5\n")
    assert host.cgroup_memory_headroom(root) is None
    stat = "inactive_file 1\ntotal_inactive_file 40\n"
    group(root, "memory/a", memory__limit_in_bytes="1000\n", memory__usage_in_bytes="900\n", memory__stat=stat)
    assert host.cgroup_memory_headroom(root) == 140


@pytest.mark.parametrize("listed", ["0::/docker/abc\n", "0::/../elsewhere\n", "0::/\n"])
def test_a_container_s_own_limit_is_found_at_its_mount(tmp_path: Path, listed: str) -> None:
    mounted = V2.replace(" / /sys", " /docker/abc /sys") if "docker" in listed else V2
    root = root_with(tmp_path, proc__self__mountinfo=mounted, proc__self__cgroup=listed)
    group(root, "", memory__max="2000", memory__current="500")
    assert host.cgroup_memory_headroom(root) == 1500


def test_a_kernel_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert host.cgroup_memory_headroom(root_with(tmp_path, proc__self__mountinfo="")) is None


def test_this_host_s_limit_can_be_read() -> None:
    room = host.cgroup_memory_headroom()
    assert room is None or room >= 0


SIZES = st.integers(0, 64 * GIB)


@given(requested=SIZES, held=SIZES, available=SIZES, room=st.none() | SIZES)
def test_a_capped_budget_fits_and_says_why(
    tmp_path_factory: pytest.TempPathFactory, requested: int, held: int, available: int, room: int | None
) -> None:
    root = root_with(
        tmp_path_factory.getbasetemp() / "capped",
        proc__meminfo=f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\n",
        proc__self__mountinfo=V2,
        proc__self__cgroup="0::/\n",
    )
    group(root, "", memory__max="max" if room is None else str(room), memory__current="0")
    cap = host.ram_cap(requested, root, held, root)
    assert cap.bytes <= requested
    assert (cap.reason is None) == (cap.bytes == requested)
    assert cap.bytes >= min(requested, held)  # what it holds it may keep
    assert cap.bytes - held <= min(available, available if room is None else room, host.free_bytes(root))
    if cap.reason is not None:
        assert re.search(r"free|of memory are available|control group", cap.reason)


def test_headroom_is_left_to_the_host(tmp_path: Path) -> None:
    root = root_with(
        tmp_path, proc__meminfo="MemAvailable: 1024 kB\n", proc__self__mountinfo=V2, proc__self__cgroup="0::/\n"
    )
    cap = host.ram_cap(GIB, tmp_path, 0, root)
    assert cap.bytes == (1 << 20) * 7 // 8
    assert cap.reason == "1 GiB were asked for, 896 KiB can be had: only 1 MiB of memory are available"
    group(root, "", memory__max="524288", memory__current="0")
    cap = host.ram_cap(GIB, tmp_path, 4096, root)
    assert cap.bytes == 4096 + (1 << 19) * 7 // 8
    assert "control group's memory limit leaves only 512 KiB, and the tier holds 4 KiB already" in (cap.reason or "")


def test_free_bytes_are_those_of_the_filesystem_even_before_the_directory_is_there(tmp_path: Path) -> None:
    assert 0 < host.free_bytes(tmp_path / "a" / "b") <= shutil.disk_usage(tmp_path).free + GIB


def test_probing_for_direct_io_leaves_nothing_behind(tmp_path: Path) -> None:
    assert isinstance(host.supports_o_direct(tmp_path), bool)
    assert list(tmp_path.iterdir()) == []


def test_probing_where_nothing_can_be_written_is_an_error_not_a_no(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(PathError, match="cannot use") as caught:
            host.supports_o_direct(directory)
        assert caught.value.remedy


def inside(namespaces: str, setup: str, program: str, tmp_path: Path) -> object:
    """What ``program`` prints as JSON in new namespaces after ``setup``; skips where they are forbidden."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(host.__file__).parents[1]), *sys.path])}
    command = f'{setup} && exec "$0" -c "$1"'
    ran = subprocess.run(
        ["unshare", *namespaces.split(), "sh", "-c", command, sys.executable, program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0 and "Traceback" not in ran.stderr:
        pytest.skip(f"namespaces or mounts are forbidden here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_another_pid_namespace_has_another_number(tmp_path: Path) -> None:
    ours = subprocess.run(
        [sys.executable, "-c", "from kvstore import host; print(host.pid_namespace())"],
        cwd=Path(host.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ours.stdout) == host.pid_namespace()
    program = "import os; from kvstore import host; print([os.getpid(), host.pid_namespace()])"
    theirs = inside("-Urpf --mount-proc", "true", program, tmp_path)
    assert isinstance(theirs, list)
    assert theirs[1] != host.pid_namespace()


def test_a_small_tmpfs_caps_the_budget_and_a_full_one_is_an_error(tmp_path: Path) -> None:
    program = """
import json, pathlib
from kvstore import host
from kvstore.errors import FullError
shm = pathlib.Path("shm").resolve()
kind, free, cap = host.filesystem(shm).type, host.free_bytes(shm), host.ram_cap(2 << 30, shm, 0)
with open("shm/filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError:
        pass
try:
    host.supports_o_direct(shm)
    full = ""
except FullError as error:
    full = str(error)
print(json.dumps([kind, free, cap.bytes, cap.reason, full, sorted(p.name for p in shm.iterdir())]))
"""
    setup = "mkdir shm && mount -t tmpfs -o size=1m none shm"
    kind, free, capped, reason, full, left = inside("-Urm", setup, program, tmp_path)  # type: ignore[misc, attr-defined]
    assert (kind, free, capped) == ("tmpfs", 1 << 20, (1 << 20) * 15 // 16)
    assert "shm has only 1 MiB free" in reason
    assert full == "" or "is full" in full  # older kernels refuse O_DIRECT on tmpfs before they look for space
    assert left == ["filler"]


def test_a_filesystem_without_direct_io_or_limit_is_a_no_and_unlimited(tmp_path: Path) -> None:
    program = """
import json, pathlib
from kvstore import host
at = pathlib.Path("at").resolve()
print(json.dumps([host.filesystem(at).type, host.supports_o_direct(at), list(at.iterdir()), host.free_bytes(at)]))
"""
    told = inside("-Urm", "mkdir at && mount -t ramfs none at", program, tmp_path)
    assert told == ["ramfs", False, [], SIZE_LIMIT]
