"""The doctor names what would be refused before a store is opened, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore import assembly
from kvstore.errors import (
    FilesystemError,
    KVStoreError,
    OwnershipError,
    PathError,
    RamDirectoryError,
    SettingsError,
)
from kvstore.host import Cap
from kvstore.settings import Settings
from kvstore.tools import doctor
from kvstore.tools.cli import app
from kvstore.tools.doctor import LOOKS, Finding, Grade, allocated_bytes, examine


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)


def found(path: Path, subject: str) -> Finding:
    return next(finding for finding in examine(path) if finding.subject == subject)


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    examine(tmp_path)
    examine(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []


def test_what_serving_needs_is_told_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict.fromkeys(doctor.SERVING, "1.0")
    monkeypatch.setattr(doctor, "_version", known.get)
    assert found(tmp_path, "extra serve").advice == ""
    del known["uvicorn"]
    told = found(tmp_path, "extra serve")
    assert (told.value, told.grade) == ("without uvicorn", Grade.NOTE)
    assert 'pip install ".[serve]"' in told.advice


def test_a_budget_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path, "nvme budget").grade is Grade.OK
    monkeypatch.setenv("KVSTORE_NVME", "4000PiB")
    assert found(tmp_path, "nvme budget").grade is Grade.REFUSED


@pytest.mark.parametrize("place", ["/proc", "/no-such-folder", "/dev/null", "."])
def test_a_ram_directory_off_tmpfs_is_refused_as_opening_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("KVSTORE_RAM_DIRECTORY", str(tmp_path / place))
    told = found(tmp_path, "ram directory")
    with pytest.raises(RamDirectoryError) as opening:
        kvstore.open(tmp_path / "store", ram="8MiB", nvme=0)
    assert told == Finding("ram directory", opening.value.problem, Grade.REFUSED, opening.value.remedy)


def test_a_store_without_ram_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_RAM", "0")
    told = found(tmp_path, "settings")
    with pytest.raises(SettingsError, match=r"the environment variable KVSTORE_RAM: .*passes through it") as opening:
        kvstore.open(tmp_path / "store")
    assert told == Finding("settings", opening.value.problem, Grade.REFUSED, opening.value.remedy)


def test_a_wrong_setting_is_one_finding_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_RAM", "20G")
    finding = found(tmp_path, "settings")
    assert finding.grade is Grade.REFUSED
    assert "KVSTORE_RAM" in finding.value
    assert "20GiB" in finding.advice


def test_another_users_store_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user takes root")
    os.chown(tmp_path, 12345, -1)
    finding = found(tmp_path, "owner")
    assert finding.grade is Grade.REFUSED
    assert "12345" in finding.value


def test_what_lies_at_the_path_is_told_and_a_foreign_folder_is_refused(made: Any, tmp_path: Path) -> None:
    assert "format 1" in found(made.path, "store").value
    assert found(made.path, "in use").value.startswith("by 0 ")
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB"):
        assert found(made.path, "in use").value.startswith("by 1 ")
    (made.path / "STORE").write_bytes(b"KVSTORE\n" + bytes(32))
    assert found(made.path, "store").grade is Grade.REFUSED
    assert found(tmp_path, "store").grade is Grade.REFUSED
    assert "not made yet" in found(tmp_path / "new", "store").value


def test_memory_of_stores_that_are_gone_is_found(made: Any) -> None:
    assert not [finding for finding in examine(made.path) if finding.subject == "orphaned memory"]
    shutil.rmtree(made.path)
    assert found(made.path, "orphaned memory").grade is Grade.NOTE


def test_a_budget_that_the_host_could_not_give_is_told_with_the_reason(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = found(made.path, "budgets in force")
    assert (told.grade, told.value) == (Grade.OK, "ram 8 MiB, nvme 16 MiB: what was asked for")
    with monkeypatch.context() as small:
        small.setattr(assembly, "ram_cap", lambda asked, directory, there: Cap(12 << 20, "the host is small"))
        kvstore.open(made.path, ram="64MiB", nvme="16MiB").close()
    for _ in range(2):  # looking at it changes nothing
        ram = json.loads(CliRunner().invoke(app, ["stats", "--path", str(made.path), "--json"]).stdout)["tiers"][0]
        assert (ram["budget_bytes"], ram["asked_bytes"], ram["capped"]) == (12 << 20, 64 << 20, "the host is small")
    told = found(made.path, "budgets in force")
    assert (told.grade, told.value) == (Grade.NOTE, "ram: 12 MiB instead of 64 MiB: the host is small")
    for words in (["stats"], ["top", "--every", "0.1", "--count", "1"]):
        text = CliRunner().invoke(app, [*words, "--path", str(made.path)]).stdout
        assert "ram has less than was asked for: the host is small" in text
    kvstore.open(made.path, ram="16MiB", nvme="16MiB").close()
    assert found(made.path, "budgets in force").value == "ram 16 MiB, nvme 16 MiB: what was asked for"


def test_an_index_that_cannot_be_read_is_told_as_refused(made: Any) -> None:
    index = made.path / "nvme" / "index" / "data.mdb"
    index.write_bytes(index.read_bytes()[:5000])
    assert found(made.path, "budgets in force").grade is Grade.REFUSED
    assert CliRunner().invoke(app, ["doctor", "--path", str(made.path)]).exit_code == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [(["stats"], OwnershipError.exit_code), (["evict", "--all", "--yes"], OwnershipError.exit_code), (["doctor"], 1)],
)
def test_a_store_of_another_user_has_its_own_exit_code(words: list[str], code: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can try to be somebody else")
    with tempfile.TemporaryDirectory() as common:
        path = Path(common) / "store"
        kvstore.open(path, ram="8MiB", nvme=0).close()
        Path(common).chmod(0o755)
        CliRunner().invoke(app, [*words, "--path", str(path)])  # what is imported late, somebody else may not read
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            done = CliRunner().invoke(app, [*words, "--path", str(path)])
            os._exit(99 if "Traceback" in done.output else done.exit_code)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == code


@pytest.mark.parametrize("place", ["/proc", "/proc/foo", "/proc/not/there", "/sys", "/dev/pts/x"])
def test_on_a_filesystem_of_the_kernel_the_filesystem_is_what_is_refused(place: str) -> None:
    rows = {row.subject: row for row in examine(Path(place))}
    with pytest.raises(FilesystemError) as refused:
        kvstore.open(place, ram="8MiB", nvme="16MiB")
    assert (rows["filesystem"].grade, rows["filesystem"].value) == (Grade.REFUSED, refused.value.problem)
    assert not {"owner", "O_DIRECT", "nvme budget"} & rows.keys()


@pytest.mark.parametrize("place", ["/dev/shm", "/proc", "/proc/not/there", "/sys", "/dev/null"])
def test_what_cannot_be_a_store_is_refused_as_opening_it_would_be(place: str) -> None:
    path = Path(place)
    refused = [finding for finding in examine(path) if finding.grade is Grade.REFUSED]
    with pytest.raises(KVStoreError):
        kvstore.open(path, ram="8MiB", nvme="16MiB")
    assert refused


def test_json_is_one_object_and_the_exit_code_says_whether_anything_is_refused(tmp_path: Path) -> None:
    clean = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path), "--json"])
    assert clean.exit_code == 0
    assert json.loads(clean.stdout)["ok"] is True
    refused = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path), "--json"], env={"KVSTORE_NVME": "4000PiB"})
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["ok"] is False


def test_a_file_is_not_a_place_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        (found,) = [finding for finding in examine(path) if finding.subject == "store"]
        assert found.grade is Grade.REFUSED
        assert found.value.endswith("file is not a directory")


@pytest.mark.parametrize("subject", LOOKS)
def test_a_subject_keeps_its_name_when_the_look_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: str
) -> None:
    own = {finding.subject for finding in LOOKS[subject](Settings.resolve(tmp_path))}
    assert not own or subject in own

    def fails(settings: Settings) -> Any:
        raise PathError("it cannot be looked at", "look again")

    monkeypatch.setitem(LOOKS, subject, fails)  # type: ignore[arg-type]
    assert found(tmp_path, subject).grade is Grade.REFUSED


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    code = f"{sys.executable} -m kvstore.tools.cli doctor --path {tmp_path} --json | true"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_allocated_bytes_counts_blocks_not_lengths(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert allocated_bytes(tmp_path) < 1 << 20
    assert allocated_bytes(tmp_path / "absent") == 0
