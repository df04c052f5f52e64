"""A digest of weight files covers every byte, and is read again only when a file may have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.adapters.vllm import files
from kvstore.adapters.vllm.files import weights_digest
from kvstore.errors import UnsupportedError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of digests of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvstore" / "digests"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(b"a" * 1000)
    (directory / "b.safetensors").write_bytes(b"b" * 1000)
    (directory / "config.json").write_text("{}")
    return directory


def test_any_byte_counts(model: Path) -> None:
    before = weights_digest(model)
    with (model / "b.safetensors").open("r+b") as file:
        file.seek(500)
        file.write(b"x")
    assert weights_digest(model) != before


def test_files_that_are_not_weights_do_not_count(model: Path) -> None:
    before = weights_digest(model)
    (model / "config.json").write_text("{ }")
    assert weights_digest(model) == before


def test_a_copy_elsewhere_has_the_same_digest(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert weights_digest(other) == weights_digest(model)


def test_known_files_are_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights_digest(model)
    monkeypatch.setattr(files, "_read", lambda file: pytest.fail(f"{file} was read again"))
    assert weights_digest(model) == before


def test_a_file_put_in_its_place_with_the_same_times_is_read(model: Path) -> None:
    before, file = weights_digest(model), model / "a.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.unlink()
    file.write_bytes(b"c" * 1000)
    os.utime(file, ns=times)
    assert weights_digest(model) != before


def test_a_damaged_memory_is_read_past(model: Path, cache: Path) -> None:
    before = weights_digest(model)
    for known in cache.iterdir():
        known.write_text("nonsense")
    assert weights_digest(model) == before


def test_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no weight files"):
        weights_digest(tmp_path)


def test_a_file_beside_the_weights_counts_where_it_is_named(model: Path) -> None:
    before = weights_digest(model, also=["config.json"])
    (model / "config.json").write_text("{ }")
    assert weights_digest(model, also=["config.json"]) != before
    with pytest.raises(UnsupportedError):
        weights_digest(model, also=["missing.json"])
