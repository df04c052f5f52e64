"""What cannot be opened is refused by an error of its own that says what to do, and nothing is lost by trying."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from children import Child
from known_kv import SPEAKERS, load, open_small, save, shm

from kvstore.errors import (
    BudgetError,
    DamagedError,
    FilesystemError,
    FormatError,
    KVStoreError,
    OwnershipError,
    PathError,
    PidNamespaceError,
    RamDirectoryError,
    SettingsError,
)
from kvstore.events import Event, Notice
from kvstore.store import Store
from kvstore.superblock import prepare_directory
from kvstore.tiers.opening import Superblock

TOKENS = list(range(150))
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try to be somebody else")


@pytest.fixture
def filled(tmp_path: Path, memory: Path) -> Path:
    """A store with one conversation on `nvme`; `ram` is empty."""
    with open_small(tmp_path / "kv", memory) as store:
        save(store, SPEAKERS[0], TOKENS)
        assert store.flush(60)
        store.evict(everything=True, tier="ram")
    return tmp_path / "kv"


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory that every user can walk through."""
    directory = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_a_path_that_nobody_can_make_is_refused(memory: Path) -> None:
    with pytest.raises(FilesystemError, match="nothing can be stored there"):
        open_small(Path("/proc/no-such-store"), memory)


def still_served(path: Path, memory: Path) -> bool:
    with open_small(path, memory) as store:
        got, wrong = load(store, SPEAKERS[0], TOKENS)
        return (got.tokens, wrong, store.verify().problems) == (len(TOKENS), 0, [])


def refusal(path: Path, memory: Path, **over: object) -> KVStoreError:
    """The error that opening raises; it says what to do."""
    with pytest.raises(KVStoreError) as caught:
        open_small(path, memory, **over).close()
    assert caught.value.problem
    assert caught.value.remedy
    return caught.value


def as_nobody(work: Callable[[], None]) -> str:
    """The class of the error that ``work`` raises in a child of another user, or "fine"."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = "died"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            answer = "fine"
        except BaseException as error:  # noqa: BLE001  told to the parent
            answer = type(error).__name__
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        answer = told.read()
    os.waitpid(pid, 0)
    return answer


# ---------------------------------------------------------------- paths and users


def test_a_file_in_the_way_is_a_path_error(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert type(refusal(tmp_path / "file", memory)) is PathError
    assert type(refusal(tmp_path / "file" / "below", memory)) is PathError
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("strange", [False, True])
def test_a_directory_whose_files_would_have_too_long_a_path_is_a_path_error(strange: bool, tmp_path: Path) -> None:
    longest = os.pathconf("/", "PC_PATH_MAX") - 1
    deep = tmp_path
    while (room := longest - len(str(deep)) - len("/STOR")) > 1:
        deep /= "d" * min(room - 1, 200)
    deep.mkdir(parents=True)
    if strange:
        (deep / "a").touch()
    with pytest.raises(PathError, match="cannot be made"):
        prepare_directory(deep)
    shutil.rmtree(tmp_path)


def test_somebody_elses_directory_is_left_alone(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert type(refusal(tmp_path, memory)) is FormatError
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("kind", ["file", "below a file", "not there"])
def test_a_memory_directory_that_cannot_be_used_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    place = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "not there": Path("/proc/kvstore")}
    error = refusal(tmp_path / "kv", place[kind])
    assert type(error) is RamDirectoryError
    assert (tmp_path / "file").read_text() == "mine"


@as_root
def test_paths_that_a_user_cannot_write_are_path_errors(common: Path, memory: Path) -> None:
    closed, walled = common / "closed", common / "walled"
    closed.mkdir(mode=0o500)
    os.chown(closed, NOBODY, NOBODY)
    walled.mkdir(mode=0o700)
    for path in (common / "new", closed, walled / "kv"):
        assert as_nobody(lambda path=path: open_small(path, memory).close()) == "PathError"  # type: ignore[misc]
    assert sorted(entry.name for entry in common.iterdir()) == ["closed", "walled"]


@as_root
def test_another_users_store_is_an_ownership_error_for_both(common: Path) -> None:
    mine, theirs, room = common / "mine", common / "theirs", common / "room"
    for place in (theirs, room):
        place.mkdir(mode=0o700)
        os.chown(place, NOBODY, NOBODY)
    memory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir=shm()))
    memory.chmod(0o777)
    try:
        with open_small(mine, memory) as store:
            save(store, SPEAKERS[0], TOKENS)
        assert as_nobody(lambda: open_small(theirs, memory).close()) == "fine"
        assert as_nobody(lambda: open_small(mine, memory).close()) == "OwnershipError"
        assert type(refusal(theirs, memory)) is OwnershipError
        assert still_served(mine, memory)
    finally:
        shutil.rmtree(memory)


UNSHARE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable)


def test_another_pid_namespace_is_refused_while_the_store_is_open(reopen: Callable[..., Store], memory: Path) -> None:
    tried = subprocess.run([*UNSHARE, "-c", "pass"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"PID namespaces cannot be made here: {tried.stderr.strip()}")
    store = reopen()
    save(store, SPEAKERS[0], TOKENS)
    path = Path(store.settings.path)
    with Child(path, memory, python=UNSHARE, wait=False) as child:
        name, told = child.answer()
        assert name == PidNamespaceError.__name__
        assert "PID namespace" in told
    assert load(store, SPEAKERS[0], TOKENS)[0].tokens == len(TOKENS)
    assert store.flush(60)
    store.close()
    with Child(path, memory, python=UNSHARE) as child:
        assert child.do("load", tokens=TOKENS)[:2] == [len(TOKENS), 0]
        assert type(refusal(path, memory)) is PidNamespaceError
        assert child.end() == 0
    assert still_served(path, memory)


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("over", [{"nvme": "900TiB"}, {"nvme": "100KiB"}, {"ram": "100KiB"}, {"nvme": "1MiB"}])
def test_impossible_budgets_are_budget_errors(over: dict[str, str], filled: Path, tmp_path: Path, memory: Path) -> None:
    assert type(refusal(tmp_path / "new", memory, **over)) is BudgetError
    assert type(refusal(filled, memory, **over)) is BudgetError
    assert still_served(filled, memory)
    assert still_served_new(tmp_path / "new", memory)


def still_served_new(path: Path, memory: Path) -> bool:
    """After a refusal a good budget makes the store."""
    with open_small(path, memory) as store:
        return save(store, SPEAKERS[0], TOKENS).skipped_blocks == 0


def test_no_memory_at_all_is_a_settings_error(tmp_path: Path, memory: Path) -> None:
    assert type(refusal(tmp_path / "kv", memory, ram=0)) is SettingsError


# ---------------------------------------------------------------- files that are not what they should be

Harm = Callable[[bytes], bytes]


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def emptied(raw: bytes) -> bytes:
    return b""


def flipped(raw: bytes) -> bytes:
    return raw[:20] + bytes([raw[20] ^ 1]) + raw[21:]


def foreign(raw: bytes) -> bytes:
    return b"something else entirely ".ljust(len(raw), b"x")


HARMS: list[tuple[str, Harm, tuple[type[KVStoreError], ...]]] = [
    ("STORE", cut, (DamagedError,)),
    ("STORE", emptied, (DamagedError,)),
    ("STORE", flipped, (DamagedError,)),
    ("STORE", foreign, (FormatError,)),
    ("nvme/TIER", cut, (DamagedError,)),
    ("nvme/TIER", emptied, (DamagedError,)),
    ("nvme/TIER", flipped, (DamagedError,)),
    ("nvme/TIER", foreign, (DamagedError, FormatError)),
    ("nvme/index/data.mdb", cut, (DamagedError,)),
    ("nvme/index/data.mdb", emptied, (DamagedError,)),
    ("nvme/index/data.mdb", foreign, (DamagedError,)),
]


@pytest.mark.parametrize(("name", "harm", "errors"), HARMS, ids=[f"{name} {harm.__name__}" for name, harm, _ in HARMS])
def test_a_harmed_file_is_refused_and_put_right_by_its_old_bytes(
    name: str, harm: Harm, errors: tuple[type[KVStoreError], ...], filled: Path, memory: Path
) -> None:
    file = filled / name
    good = file.read_bytes()
    for _ in range(2):
        file.write_bytes(harm(good))
        error = refusal(filled, memory)
        assert type(error) in errors
        assert file.read_bytes() == harm(good), "a file that was refused was touched"
        file.write_bytes(good)
        assert still_served(filled, memory)


@pytest.mark.parametrize("change", [{"version": 0}, {"store": bytes(16)}], ids=["older", "of another store"])
def test_a_tier_is_never_made_anew_while_another_process_has_it_open(
    change: dict[str, Any], filled: Path, memory: Path
) -> None:
    tier, notices = filled / "nvme" / "TIER", list[Event]()
    good = tier.read_bytes()
    with Child(filled, memory) as other:
        tier.write_bytes(replace(Superblock.unpack(good, tier), **change).pack())
        error = refusal(filled, memory, observers=[notices.append])
        assert type(error) is FormatError
        assert "another process has the store open" in error.problem
        assert error.remedy == "close the store in all other processes first"
        assert not any(isinstance(event, Notice) for event in notices)
        tier.write_bytes(good)
        assert other.do("load", tokens=TOKENS)[:2] == [len(TOKENS), 0]
    assert still_served(filled, memory)


@pytest.mark.parametrize("suffix", [".seg", ".slots"])
@pytest.mark.parametrize("harm", [cut, emptied])
def test_a_truncated_segment_costs_its_own_blocks_only(suffix: str, harm: Harm, tmp_path: Path, memory: Path) -> None:
    talks = [list(range(first, first + 150)) for first in range(0, 8000, 1000)]
    with open_small(tmp_path / "kv", memory) as store:
        for tokens in talks:
            save(store, SPEAKERS[0], tokens)
            assert store.flush(60)
        store.evict(everything=True, tier="ram")
    file = sorted((tmp_path / "kv" / "nvme").glob(f"*{suffix}"))[0]
    file.write_bytes(harm(file.read_bytes()))
    events: list[Event] = []
    with open_small(tmp_path / "kv", memory, observers=[events.append]) as store:
        assert [one.subject for one in events if isinstance(one, Notice)] == ["segments dropped"]
        results = [load(store, SPEAKERS[0], tokens) for tokens in talks]
        assert all(wrong == 0 for _, wrong in results)
        assert any(got.tokens == 150 for got, _ in results)
        assert any(got.tokens < 150 for got, _ in results)
        assert store.verify().problems == []


def test_a_lock_file_that_is_not_one_costs_nothing(filled: Path, memory: Path) -> None:
    for raw in (b"", b"x" * 100, b"x" * 32768):
        (filled / "nvme" / "index" / "lock.mdb").write_bytes(raw)
        assert still_served(filled, memory)


def test_a_store_without_its_tier_starts_empty(filled: Path, memory: Path) -> None:
    shutil.rmtree(filled / "nvme")
    with open_small(filled, memory) as store:
        assert load(store, SPEAKERS[0], TOKENS)[0].tokens == 0
        assert save(store, SPEAKERS[0], TOKENS).skipped_blocks == 0
        assert store.flush(60)
        assert store.verify().problems == []


def test_a_path_on_a_full_disk_is_an_error_of_the_packages_own(tmp_path: Path, memory: Path) -> None:
    inside = "import sys; sys.path[:0] = sys.argv[1:3]\n" + FULL_DISK
    tree = Path(__file__).resolve().parents[2]
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", inside]
    told = subprocess.run(
        [*command, str(tree), str(tree / "tests"), str(tmp_path), str(memory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if told.stderr.startswith("unshare:") or "mount:" in told.stderr:
        pytest.skip(f"no mount of one's own here: {told.stderr.strip()}")
    assert told.stdout.split() == ["KVStoreError"] * 5, told.stderr


FULL_DISK = """
import pathlib, shutil, subprocess
from known_kv import open_small
from kvstore.errors import KVStoreError
place = pathlib.Path(sys.argv[3])
for size, free in (("64k", 0), ("64k", 4096), ("1m", 8192), ("3m", 1 << 20), ("3m", 2 << 20)):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + size, "tmpfs", place], check=True)
    (place / "kv").mkdir()
    (place / "ballast").write_bytes(b"x" * (shutil.disk_usage(place).free - free))
    try:
        open_small(place / "kv", pathlib.Path(sys.argv[4]), nvme="0" if size == "64k" else "3MiB").close()
        print("opened")
    except KVStoreError:
        print("KVStoreError")
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    subprocess.run(["umount", place], check=True)
"""


def test_a_refused_store_can_be_opened_in_the_same_process_at_once(tmp_path: Path, memory: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "strange").touch()
    refusal(tmp_path / "kv", memory)
    with suppress(FileNotFoundError):
        (tmp_path / "kv" / "strange").unlink()
    assert still_served_new(tmp_path / "kv", memory)
