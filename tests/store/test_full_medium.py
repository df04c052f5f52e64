"""On a full medium a store is refused by an error that says what is full, and opens again with a little room."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from known_kv import SPEAKERS, load, open_small, save
from typer.testing import CliRunner

import kvstore
from kvstore.errors import BudgetError, FullError
from kvstore.host import OPENING_BYTES, free_bytes
from kvstore.tools.cli import app
from kvstore.tools.doctor import Grade, examine

TOKENS = list(range(150))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB of its own."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting takes root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    fd = os.open(place / "fill", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(4096))
    os.close(fd)
    assert free_bytes(place) == 0


def free(place: Path, size: int) -> None:
    os.truncate(place / "fill", (place / "fill").stat().st_size - size)


def test_every_command_says_what_is_full_and_works_again_with_what_the_message_asks_for(
    small: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_RAM_DIRECTORY", str(memory))
    path = small / "kv"
    with open_small(path, memory, nvme="6MiB") as store:
        save(store, SPEAKERS[0], TOKENS)
        assert store.flush(60)
    fill(small)
    commands = (["stats"], ["ls"], ["verify"], ["evict", "--all", "--yes"])
    for words in commands:
        done = CliRunner().invoke(app, [*words, "--path", str(path)])
        assert done.exit_code == FullError.exit_code
        told = str(done.exception) + done.output
        assert "is full: nothing stored is lost, but opening writes up to 64 KiB there" in " ".join(told.split())
    rows = {row.subject: row for row in examine(path)}
    assert rows["O_DIRECT"].grade is Grade.REFUSED
    assert "is full" in rows["O_DIRECT"].value
    free(small, OPENING_BYTES)
    with open_small(path, memory, nvme="6MiB") as store:
        loaded, wrong = load(store, SPEAKERS[0], TOKENS)
        assert loaded.tokens > 0
        assert wrong == 0
    for words in commands:
        assert CliRunner().invoke(app, [*words, "--path", str(path)]).exit_code == 0


def test_a_larger_budget_is_refused_with_the_figure_that_doctor_gives(
    small: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_RAM_DIRECTORY", str(memory))
    for path in (small / "kv", small / "new"):
        if path.name == "kv":
            open_small(path, memory, nvme="4MiB").close()
        with pytest.raises(BudgetError) as refused:
            open_small(path, memory, nvme="1GiB")
        with monkeypatch.context() as large:
            large.setenv("KVSTORE_NVME", "1GiB")
            (row,) = [row for row in examine(path) if row.subject == "nvme budget"]
        assert (row.grade, row.advice) == (Grade.REFUSED, refused.value.remedy)
        most = refused.value.remedy.partition("nvme=")[2].partition(" or less")[0]
        open_small(path, memory, nvme=most).close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("standing", [False, True])
def test_no_room_is_told_by_name_and_leaves_nothing_new(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, number: int, standing: bool
) -> None:
    path = tmp_path / "kv"
    if standing:
        open_small(path, memory).close()
    before = sorted(tmp_path.rglob("*"))

    def full(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(FullError) as refused:
            kvstore.open(path, ram="2MiB", nvme="3MiB", ram_directory=memory)
    assert ("quota" in refused.value.problem) == (number == errno.EDQUOT)
    assert str(refused.value).count(str(path)) <= 1
    assert sorted(tmp_path.rglob("*")) == before
    open_small(path, memory).close()
