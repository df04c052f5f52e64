"""What was named wrongly is called what it is: a folder is not a missing file, a salt is not a namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.errors import NotFoundError, SettingsError
from kvstore.tools.cli import app


def refused(*words: str | Path, code: int) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("words", [["explain", "a", "--against"], ["warm", "--model", "m"]])
def test_a_folder_is_not_a_missing_file(made: Any, tmp_path: Path, words: list[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adir").mkdir()
    Path("a").write_text("1, 2, 3")
    path = ["--path", made.path]
    assert "'adir' is a folder" in refused(*words, "adir", *path, code=NotFoundError.exit_code)
    assert "there is no file 'absent'" in refused(*words, "absent", *path, code=NotFoundError.exit_code)


def test_a_file_is_not_a_missing_store(tmp_path: Path) -> None:
    (tmp_path / "chat.py").touch()
    for command in ("stats", "ls", "verify"):
        assert "chat.py is not a folder" in refused(command, "--path", tmp_path / "chat.py", code=13)
        assert "there is no store at" in refused(command, "--path", tmp_path / "absent", code=13)


@pytest.mark.parametrize("words", [["evict", "--yes"], ["ls"]])
def test_a_salt_that_nothing_is_stored_under_is_called_a_salt(made: Any, words: list[str]) -> None:
    told = refused(*words, "--salt", "zzz", "--path", made.path, code=NotFoundError.exit_code)
    assert "nothing is stored under the salt 'zzz'" in told


def test_a_line_that_is_not_json_has_one_number(made: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"role": "user", "content": "a"}\n{"role": "user" oops}\n')
    told = refused("explain", bad, "--path", made.path, code=SettingsError.exit_code)
    assert "is not JSON: Expecting ',' delimiter (column 17)" in told
    assert told.count("line ") == 1
