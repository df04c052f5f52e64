"""Settings come from where they were set, in order, and every wrong one is refused with its source and a remedy."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import SettingsError
from kvstore.settings import Settings

NAMES = [entry.name for entry in dataclasses.fields(Settings)]
GIB = 1 << 30

# For every setting, three values as a user may write them, and what each means.
WRITTEN: dict[str, list[tuple[str, object]]] = {
    "path": [("/a", Path("/a")), ("/b/../c", Path("/c")), ("/d e", Path("/d e"))],
    "ram": [("1GiB", GIB), ("500MB", 500_000_000), ("1", 1)],
    "nvme": [("1GiB", GIB), ("1.5 GiB", 3 * GIB // 2), ("4096", 4096)],
    "hbm": [("1GiB", GIB), ("0", 0), ("2 KiB", 2048)],
    "device": [("cuda", "cuda"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
    "ram_directory": [("/dev/shm", Path("/dev/shm")), ("/x", Path("/x")), ("/y/", Path("/y"))],
    "ram_segment_bytes": [("64MiB", 64 << 20), ("4096", 4096), ("1MiB", 1 << 20)],
    "nvme_segment_bytes": [("64MiB", 64 << 20), ("4KiB", 4096), ("1MiB", 1 << 20)],
    "copy_threads": [("1", 1), ("2", 2), ("16", 16)],
    "io_threads": [("1", 1), ("2", 2), ("64", 64)],
    "verify_share": [("1", 1), ("64", 64), ("1000000", 1_000_000)],
    "lock_timeout_s": [("0", 0.0), ("0.25", 0.25), ("3", 3.0)],
    "lease_s": [("1", 1.0), ("0.25", 0.25), ("1e3", 1000.0)],
    "mover_batch_bytes": [("16MiB", 16 << 20), ("4KiB", 4096), ("20MB", 20_000_000)],
    "mover_queue_bytes": [("64MiB", 64 << 20), ("1GiB", GIB), ("2GB", 2_000_000_000)],
    "dead_owner_grace_s": [("0", 0.0), ("10", 10.0), ("0.5", 0.5)],
    "direct_io": [("auto", "auto"), ("on", "on"), ("off", "off")],
}


def resolve(path: str | None = "/store", /, **environ: str) -> Settings:
    return Settings.resolve(path, environ=environ)


def test_defaults_are_ceilings_that_a_laptop_can_bear() -> None:
    got = resolve()
    assert (got.ram, got.nvme, got.hbm, got.device) == (2 * GIB, 20 * GIB, 0, None)
    assert (got.ram_directory, got.ram_segment_bytes, got.nvme_segment_bytes) == (Path("/dev/shm"), 64 << 20, 256 << 20)
    assert 2 <= got.copy_threads <= 4
    assert (got.io_threads, got.verify_share, got.lock_timeout_s, got.lease_s) == (4, 64, 0.5, 60.0)
    assert (got.mover_batch_bytes, got.mover_queue_bytes, got.dead_owner_grace_s) == (64 << 20, GIB, 10.0)
    assert got.direct_io == "auto"


def test_every_setting_is_covered_here_and_documented() -> None:
    source = Path(__file__).parents[1].joinpath("kvstore", "settings.py").read_text()
    assert sorted(WRITTEN) == sorted(NAMES)
    for name in NAMES:
        line = source.index(f"\n    {name}: ")
        assert source[line + 1 :].splitlines()[1].strip().startswith('"""'), name


@given(st.data(), st.sampled_from(NAMES), st.sets(st.sampled_from(["argument", "environment", "file"])))
def test_the_first_source_that_names_a_setting_wins(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str, sources: set[str]
) -> None:
    texts = dict(zip(("argument", "environment", "file"), data.draw(st.permutations(WRITTEN[name])), strict=True))
    config = tmp_path_factory.getbasetemp() / "any.toml"
    config.write_text(f"{name} = {json.dumps(texts['file'][0])}\n" if "file" in sources else "")
    environ = {"KVSTORE_CONFIG": str(config), "KVSTORE_PATH": "/elsewhere"}
    if "environment" in sources:
        environ[f"KVSTORE_{name.upper()}"] = texts["environment"][0]
    elif name == "path":
        del environ["KVSTORE_PATH"]
    arguments: dict[str, object] = {name: texts["argument"][0]} if "argument" in sources else {name: None}
    if name == "path" and not sources:
        with pytest.raises(SettingsError, match="no store was named"):
            Settings.resolve(environ=environ, **arguments)
        return
    got = getattr(Settings.resolve(environ=environ, **arguments), name)
    for source in ("argument", "environment", "file"):
        if source in sources:
            assert got == texts[source][1]
            return
    assert got == getattr(resolve(), name)


def test_the_store_s_own_file_is_read_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "kvstore.toml").write_text('ram = "3GiB"\nverify_share = 1\n')
    named = tmp_path / "named.toml"
    named.write_text("io_threads = 4")
    assert (resolve(str(tmp_path)).ram, resolve(str(tmp_path)).verify_share) == (3 * GIB, 1)
    assert resolve(None, KVSTORE_PATH=str(tmp_path)).ram == 3 * GIB
    got = resolve(str(tmp_path), KVSTORE_CONFIG=str(named))
    assert (got.ram, got.io_threads) == (2 * GIB, 4)
    assert resolve(str(tmp_path / "kvstore.toml")).ram == 2 * GIB  # no directory: opening it will say so


def test_the_store_s_own_file_cannot_move_the_store(tmp_path: Path) -> None:
    (tmp_path / "kvstore.toml").write_text('path = "/elsewhere"')
    with pytest.raises(SettingsError, match="take that line out"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ram = ", "is not TOML"),
        (b"ram = 2GiB", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"rma = 3", "rma is not a setting"),
        (b"[ram]\nx = 1", "kvstore.toml: ram: .* is not a size"),
        (b"ram = -1", "kvstore.toml: ram: -1"),
        (b"ram = 1.5", 'write whole bytes, or a string with a unit: "1.5GiB"'),
        (b"ram = true", "True is not a size"),
        (b"copy_threads = 2.0", "not a whole number"),
        (b"lease_s = inf", "not a number of seconds"),
        (b"device = 1", "not a device"),
        (b"path = 1", "path: 1 is not a path"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=message) as caught:
        resolve(KVSTORE_CONFIG=str(file))
    assert str(file) in caught.value.problem
    assert caught.value.remedy
    with pytest.raises(SettingsError, match=re.escape(str(file))):
        resolve(str(tmp_path))  # as the store's own file


def test_a_named_file_must_be_there_and_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="which is not there"):
        resolve(KVSTORE_CONFIG=str(tmp_path / "none.toml"))
    with pytest.raises(SettingsError, match="cannot read"):
        resolve(KVSTORE_CONFIG=str(tmp_path))


NOT_SIZES, NOT_COUNTS, NOT_SECONDS = "20G -1 lots 1e9 9999PiB", "0 -1 two 1.5 ²", "-1 nan inf 5s"
WRONG = {
    "ram": f"{NOT_SIZES} 0 0GiB",
    "nvme": NOT_SIZES,
    "hbm": NOT_SIZES,
    "ram_segment_bytes": f"{NOT_SIZES} 0 4095 5000 1MB",
    "nvme_segment_bytes": f"{NOT_SIZES} 0 4095 5000 1MB",
    "mover_batch_bytes": f"{NOT_SIZES} 1",
    "mover_queue_bytes": f"{NOT_SIZES} 1",
    "copy_threads": f"{NOT_COUNTS} 17",
    "io_threads": f"{NOT_COUNTS} 65",
    "verify_share": NOT_COUNTS,
    "lock_timeout_s": NOT_SECONDS,
    "lease_s": f"{NOT_SECONDS} 0",
    "dead_owner_grace_s": NOT_SECONDS,
    "device": "GPU0 cuda:x cuda:",
    "direct_io": "yes AUTO",
    "path": "a\0b",
    "ram_directory": "a\0b",
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values.split()]
)
def test_a_wrong_value_is_refused_wherever_it_comes_from(tmp_path: Path, name: str, value: str) -> None:
    variable = f"KVSTORE_{name.upper()}"
    store = None if name == "path" else "/store"
    with pytest.raises(SettingsError, match=f"the environment variable {variable}") as by_environment:
        resolve(store, **{variable: value})
    with pytest.raises(SettingsError, match=f"the argument {name}") as by_argument:
        Settings.resolve(environ={}, **{"path": store, name: value})  # type: ignore[arg-type]
    file = tmp_path / "bad.toml"
    file.write_text(f"{name} = {json.dumps(value)}")
    with pytest.raises(SettingsError) as by_file:
        resolve(store, KVSTORE_CONFIG=str(file))
    assert f"{file}: {name}" in by_file.value.problem
    with pytest.raises(SettingsError, match=f"the settings {name}"):
        dataclasses.replace(resolve(), **{name: value})  # type: ignore[arg-type]
    assert by_environment.value.remedy == by_argument.value.remedy == by_file.value.remedy != ""


def test_a_name_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match=r"KVSTORE_RAMM is not a setting\n.*KVSTORE_RAM\?"):
        resolve(KVSTORE_RAMM="1GiB")
    with pytest.raises(SettingsError, match=r"the argument io_thread is not a setting\n.*io_threads\?"):
        Settings.resolve("/store", environ={}, io_thread=3)
    with pytest.raises(SettingsError, match="KVSTORE_Ram is not a setting"):
        resolve(KVSTORE_Ram="1GiB")
    with pytest.raises(SettingsError, match=r"settings are copy_threads, dead_owner_grace_s, .*verify_share"):
        Settings.resolve("/store", environ={}, zzzzz=3)


def test_what_an_orchestrator_sets_for_a_service_named_kvstore_is_not_ours() -> None:
    linked = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_SERVICE_PORT": "80",
        "KVSTORE_SERVICE_PORT_HTTP": "80",
        "KVSTORE_PORT": "tcp://10.0.0.1:80",
        "KVSTORE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVSTORE_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert Settings.resolve("/store", environ=linked) == resolve()


def test_an_empty_variable_counts_as_unset() -> None:
    assert resolve(KVSTORE_RAM="", KVSTORE_CONFIG="", KVSTORE_DEVICE="") == resolve()


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingsError, match="as large as mover_batch_bytes"):
        Settings.resolve("/store", environ={}, mover_batch_bytes="2MiB", mover_queue_bytes="1MiB")


@pytest.mark.parametrize("others", [{}, {"nvme": 0}, {"nvme": 0, "hbm": "1GiB"}])
def test_no_memory_at_all_is_refused_whatever_the_other_budgets_are(others: dict[str, object]) -> None:
    for ram in (0, "0 B"):
        with pytest.raises(SettingsError, match=r"the argument ram: .*every block passes through it\n.*64MiB"):
            Settings.resolve("/store", environ={}, ram=ram, **others)
    assert Settings.resolve("/store", environ={}, ram=1, nvme=0).nvme == 0


def test_paths_are_absolute_and_know_the_user_s_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve("~/store").path == resolve("store").path == tmp_path / "store"
    assert resolve(KVSTORE_RAM_DIRECTORY="~/shm").ram_directory == tmp_path / "shm"


def test_the_process_s_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_RAM", "3GiB")
    assert Settings.resolve("/store").ram == 3 * GIB


def test_settings_are_frozen_and_can_be_told_as_json() -> None:
    got = resolve()
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.ram = 1  # type: ignore[misc]
    told = json.loads(json.dumps(got.to_dict()))
    assert Settings.resolve(environ={}, **told) == got
