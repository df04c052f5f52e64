"""`ram` lies on tmpfs, in one directory for all processes of a store: any other is refused, and nothing is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from known_kv import open_small

from kvstore import host
from kvstore.errors import RamDirectoryError

PROGRAM = """
import sys
from pathlib import Path
from known_kv import open_small
from kvstore.errors import RamDirectoryError

try:
    open_small(Path(sys.argv[1]), Path(sys.argv[2])).close()
except RamDirectoryError as error:
    print(error)
"""


def test_a_place_that_is_not_there_or_not_on_tmpfs_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.rglob("*"))
    for place, why in {
        tmp_path / "absent": "does not exist",
        Path("/no-such-folder"): "does not exist",
        tmp_path / "file": "is not a directory",
        tmp_path / "dangling": "is not a directory",
        tmp_path / "disk": "not on tmpfs",
        tmp_path / "link": "not on tmpfs",
        Path("/proc"): "not on tmpfs",
    }.items():
        with pytest.raises(RamDirectoryError, match=why) as refused:
            open_small(tmp_path / "kv", place)
        assert str(place) in refused.value.problem
        assert "/dev/shm" in refused.value.remedy
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/no-such-folder").exists()


@pytest.mark.parametrize("kind", ["ramfs", "hugetlbfs", "devtmpfs", "ext4"])
def test_memory_that_is_not_tmpfs_will_not_do(tmp_path: Path, kind: str) -> None:
    device = tmp_path.stat().st_dev
    mounted = tmp_path / "proc/self/mountinfo"
    mounted.parent.mkdir(parents=True)
    mounted.write_text(f"1 0 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - {kind} none rw\n")
    with pytest.raises(RamDirectoryError, match=f"lies on {kind}"):
        host.refuse_off_tmpfs(tmp_path, tmp_path)
    mounted.write_text(mounted.read_text().replace(kind, "tmpfs"))
    assert host.refuse_off_tmpfs(tmp_path, tmp_path).type == "tmpfs"


def test_a_second_process_with_another_one_is_refused_by_name(tmp_path: Path, memory: Path) -> None:
    other, same = memory / "other", memory / "same"
    other.mkdir()
    same.symlink_to(memory)

    def join(place: Path) -> str:
        words = [sys.executable, "-c", PROGRAM, str(tmp_path / "kv"), str(place)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=env).stdout

    with open_small(tmp_path / "kv", memory):
        told = join(other)
        assert f"is {other} here and {memory} in process {os.getpid()}" in told
        assert f"KVSTORE_RAM_DIRECTORY={memory}" in told
        assert list(other.iterdir()) == []
        assert join(memory) == join(same) == "", "the same directory, whatever it is called"
    assert join(other) == "", "alone, it may be another one"
