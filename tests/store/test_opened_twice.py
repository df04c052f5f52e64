"""What `kvstore.open` is given has an effect, or is refused by name: beside settings, and in a store that is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from known_kv import SMALL, open_small

import kvstore
from kvstore import assembly
from kvstore.errors import SettingsError
from kvstore.host import Cap
from kvstore.settings import Settings
from kvstore.store import Store
from kvstore.tiers.medium import Medium


@pytest.mark.parametrize("beside", [{"path": "x"}, {"ram": "4GiB"}, {"path": "x", "nvme": 0}], ids=" and ".join)
def test_settings_with_anything_beside_them_are_refused(tmp_path: Path, memory: Path, beside: dict[str, Any]) -> None:
    settings = Settings.resolve(tmp_path / "kv", environ={}, ram_directory=memory, **SMALL)
    with pytest.raises(SettingsError, match=f"and {', '.join(beside)} beside them"):
        kvstore.open(settings=settings, **beside)
    assert list(tmp_path.iterdir()) == []
    with kvstore.open(None, settings=settings, ram=None) as store:
        assert store.settings == settings


OTHERS: dict[str, tuple[object, str]] = {
    "ram": ("8GiB", "ram is 2 MiB, asked for 8 GiB"),
    "nvme": (0, "nvme is 3 MiB, asked for 0 B"),
    "hbm": ("1GiB", "hbm is 0 B, asked for 1 GiB"),
    "device": ("cuda:1", "device is None, asked for cuda:1"),
    "ram_directory": ("/dev/shm", "ram_directory is .*, asked for /dev/shm"),
    "ram_segment_bytes": ("1MiB", "ram_segment_bytes is 256 KiB, asked for 1 MiB"),
    "nvme_segment_bytes": ("524288MiB", "nvme_segment_bytes is 512 KiB, asked for 512 GiB"),
    "copy_threads": (16, "copy_threads is [0-9]+, asked for 16"),
    "io_threads": (9, "io_threads is 4, asked for 9"),
    "verify_share": (64, "verify_share is 1, asked for 64"),
    "lock_timeout_s": (0.5, "lock_timeout_s is 30.0, asked for 0.5"),
    "lease_s": ("2", "lease_s is 60.0, asked for 2.0"),
    "mover_batch_bytes": (131073, "mover_batch_bytes is 131072, asked for 131073"),
    "mover_queue_bytes": ("1GiB", "mover_queue_bytes is 8 MiB, asked for 1 GiB"),
    "dead_owner_grace_s": (7, "dead_owner_grace_s is 0.0, asked for 7.0"),
    "direct_io": ("off", "direct_io is auto, asked for off"),
}
"""For every setting another value, and what is said of it."""


@pytest.fixture
def first(reopen: Callable[..., Store]) -> Store:
    return reopen()


def test_every_setting_but_the_path_is_tried_here() -> None:
    assert sorted(OTHERS) == sorted({field.name for field in fields(Settings)} - {"path"})


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_for_a_store_that_is_open_is_refused_by_name(first: Store, name: str) -> None:
    value, says = OTHERS[name]
    with pytest.raises(SettingsError, match=f"is open in this process with other settings: {says}\n") as caught:
        kvstore.open(first.settings.path, **{name: value})
    assert "close the other handles" in caught.value.remedy
    with pytest.raises(SettingsError, match=f"other settings: {says}\n"):
        kvstore.open(settings=replace(first.settings, **{name: value}))  # type: ignore[arg-type]
    first.close()
    with open_small(first.settings.path, first.settings.ram_directory) as again:
        assert again._core is not first._core, "what was refused held it open"


def test_all_that_differs_is_named(first: Store) -> None:
    with pytest.raises(SettingsError, match="io_threads is 4, asked for 9; nvme is 3 MiB, asked for 0 B"):
        kvstore.open(first.settings.path, nvme=0, ram="2048KiB", io_threads=9)


def test_its_path_alone_shares_a_store_whatever_the_environment_and_its_file_say(
    first: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_RAM", "8GiB")
    monkeypatch.setenv("KVSTORE_RAM_DIRECTORY", "/nowhere")
    (first.settings.path / "kvstore.toml").write_text("io_threads = 9\n")
    (tmp_path / "link").symlink_to(first.settings.path)
    for path in (first.settings.path, tmp_path / "link"):
        with kvstore.open(path) as second:
            assert second._core is first._core
            assert second.settings == first.settings
    monkeypatch.setenv("KVSTORE_PATH", str(first.settings.path))
    with kvstore.open() as second:
        assert second._core is first._core


def test_the_same_settings_share_it_however_they_are_written(first: Store, tmp_path: Path) -> None:
    (tmp_path / "memory").symlink_to(first.settings.ram_directory)
    same: dict[str, Any] = {**SMALL, "ram": 2 << 20, "nvme": "3072 KiB", "lock_timeout_s": "30"}
    with kvstore.open(first.settings.path, ram_directory=tmp_path / "memory", **same) as second:
        assert second._core is first._core
    with kvstore.open(settings=first.settings) as second:
        assert second._core is first._core


def test_a_budget_that_the_host_capped_may_be_asked_for_as_it_was_and_as_it_is(
    reopen: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "ram_cap", lambda *given: Cap(2 << 20, "little memory"))
    first = reopen(ram="1GiB")
    for ram in ("1GiB", "2MiB"):
        kvstore.open(first.settings.path, ram=ram).close()
    with pytest.raises(SettingsError, match="ram is 1 GiB, asked for 3 MiB"):
        kvstore.open(first.settings.path, ram="3MiB")


def test_who_wants_no_device_shares_a_store_that_has_one(reopen: Callable[..., Store]) -> None:
    """A scheduler of vLLM asks for none, and may live in the process of the worker that asks for one."""
    pytest.importorskip("torch")
    first = reopen(hbm="64KiB", device="cpu")
    for settings in ({"hbm": 0}, {"hbm": "64KiB", "device": "cpu"}):
        with kvstore.open(first.settings.path, **settings) as second:
            assert second._core is first._core
    with pytest.raises(SettingsError, match="device is cpu, asked for cuda:0; hbm is 64 KiB, asked for 1 GiB"):
        kvstore.open(first.settings.path, hbm="1GiB", device="cuda:0")


def test_another_wrap_is_refused_and_the_same_shares(tmp_path: Path, memory: Path) -> None:
    def wrap(medium: Medium) -> Medium:
        return medium

    def other(medium: Medium) -> Medium:
        return medium

    with open_small(tmp_path / "kv", memory, wrap=wrap) as first:
        for same in ({}, {"wrap": wrap}):
            with open_small(tmp_path / "kv", memory, **same) as second:
                assert second._core is first._core
        with pytest.raises(SettingsError, match="other settings: wrap is another"):
            open_small(tmp_path / "kv", memory, wrap=other)
    with open_small(tmp_path / "kv", memory), pytest.raises(SettingsError, match="wrap is another"):
        open_small(tmp_path / "kv", memory, wrap=wrap)
