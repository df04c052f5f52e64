"""Exports carry stored prefixes to another store, whole or not at all; and their KV is the same there."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_kv import NARROW, PARTED, Speaker, load, open_small
from stores import came_to_rest
from typer.testing import CliRunner

import kvstore
from kvstore.errors import DamagedError, KVStoreError, LayoutError, NoSpaceError
from kvstore.identity import salt_digest
from kvstore.kv import HostKV
from kvstore.layout import LayerShape, Layout
from kvstore.tools.bundle import Bundle, BundleWriter, Manifest, pack, unpack
from kvstore.tools.cli import app
from kvstore.tools.transfer import cut, export, restore


def run(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.stdout


def run_json(*words: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json", code=code))
    return found


@pytest.fixture
def away(tmp_path: Path, made: Any) -> Path:
    """Another, empty store."""
    path = tmp_path / "away"
    kvstore.open(path, ram="8MiB", nvme="16MiB").close()
    return path


def held(path: Path, layout: Layout, ids: list[int], salt: str = "") -> np.ndarray[Any, Any]:
    """The KV that a store has of some tokens."""
    with kvstore.open(path, ram="8MiB", nvme="16MiB") as store:
        match = store.match(store.namespace(layout, salt=salt), ids)
        buffer = np.zeros((2, 2, 2, match.tokens, 16), np.uint32)
        assert store.load(match, HostKV.stacked(layout, buffer)).tokens == match.tokens
    return buffer


@pytest.mark.parametrize("level", ["0", "1", "3"])
def test_a_namespace_is_the_same_in_another_store(made: Any, away: Path, tmp_path: Path, level: str) -> None:
    file = tmp_path / "first.safetensors"
    told = run_json("export", file, "--namespace", "first", "--level", level, "--path", made.path)
    assert (told["sequences"], told["tokens"], told["blocks"]) == (2, 47, 4)
    there = run_json("import", file, "--salt", "other", "--label", "guest", "--path", away)
    assert (there["new_blocks"], there["sequences"], there["label"]) == (4, 2, "guest")
    for length in made.lengths["first"]:
        home = held(made.path, made.layout, made.tokens(length), "first")
        assert home.shape[3] == length
        assert np.array_equal(held(away, made.layout, made.tokens(length), "other"), home)
    assert held(away, made.layout, made.tokens(40)).shape[3] == 0
    assert run_json("verify", "--path", away)["ok"]


def test_a_name_goes_alone_and_keeps_its_name(made: Any, away: Path, tmp_path: Path) -> None:
    file = tmp_path / "greeting.safetensors"
    run("export", file, "--prompt", "greeting", "--path", made.path)
    run("import", file, "--unsalted", "--name", "hello", "--path", away)
    assert held(away, made.layout, made.tokens(40)).shape[3] == 40
    assert held(away, made.layout, made.tokens(7)).shape[3] == 0
    assert [one["name"] for one in run_json("names", "--path", away)["names"]] == ["hello"]


def test_a_prefix_that_ends_within_a_block_is_cut(made: Any, away: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.safetensors"
    run("export", file, "--prompt", ",".join(map(str, made.tokens(40)[:21])), "--path", made.path)
    run("import", file, "--unsalted", "--path", away)
    found = held(away, made.layout, made.tokens(40))
    assert found.shape[3] == 21
    assert np.array_equal(found, held(made.path, made.layout, made.tokens(40), "first")[..., :21, :])


def test_importing_twice_finds_everything_there(made: Any, away: Path, tmp_path: Path) -> None:
    file = tmp_path / "first.safetensors"
    run("export", file, "--namespace", "first", "--path", made.path)
    run("import", file, "--unsalted", "--path", away)
    again = run_json("import", file, "--unsalted", "--path", away)
    assert (again["new_blocks"], again["payload_bytes"]) == (0, 0)


def test_what_lies_only_on_disk_is_exported_and_stays_there(made: Any, tmp_path: Path) -> None:
    run("evict", "--tier", "ram", "--yes", "--path", made.path)
    run("export", tmp_path / "x.safetensors", "--namespace", "second", "--path", made.path)
    assert made.held("second", 64) == {"nvme": 64}


@pytest.mark.parametrize("layout", [NARROW, PARTED], ids=["different dims", "groups and shards"])
def test_every_part_of_a_block_goes_over(tmp_path: Path, own_settings: Path, layout: Layout) -> None:
    speaker, ids = Speaker(layout), np.arange(3 * layout.block_tokens + 5, dtype=np.uint32)
    file = tmp_path / "x.safetensors"
    with open_small(tmp_path / "a", own_settings) as store:
        space = store.namespace(layout)
        store.save(space, ids, speaker.made(ids.tolist()))
        match = store.match(space, ids)
        pieces = sum(map(len, match.pieces.values()))
        with BundleWriter(file, pieces) as writer:
            moved = export(store, [match], writer, 1, lambda done, total: None)
            writer.finish(Manifest(layout.to_json(), "", False, None, "zstd-planes", moved.blocks, moved.tokens))
    with open_small(tmp_path / "b", own_settings) as store, Bundle(file) as bundle:
        restore(store, bundle, store.namespace(bundle.layout), lambda done, total: None)
        loaded, wrong = load(store, speaker, ids.tolist())
        assert (loaded.tokens, wrong) == (len(ids), 0)


def test_the_file_is_safetensors_without_key_or_salt(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "first.safetensors"
    told = run_json("export", file, "--namespace", "first", "--level", "0", "--path", made.path)
    assert file.stat().st_mode & 0o777 == 0o600
    raw = file.read_bytes()
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(made.layout, salt="first")
        chain = store.match(space, made.tokens(40)).chain
    for secret in (*chain.keys, space.root, salt_digest("first"), b"first\0"):
        assert secret not in raw
        assert secret.hex().encode() not in raw
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(file)
    assert sum(tensors["tree"][1]) == len(tensors["tokens"]) == told["tokens"]
    kv = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("kv."))
    assert kv == 47 * made.layout.token_bytes()
    run("export", file, "--namespace", "first", "--with-salt", "--force", "--path", made.path)
    assert salt_digest("first").hex().encode() in file.read_bytes()


def test_a_salt_is_asked_for_and_compared(made: Any, away: Path, tmp_path: Path) -> None:
    file = tmp_path / "first.safetensors"
    run("export", file, "--namespace", "first", "--with-salt", "--path", made.path)
    run("import", file, "--path", away, code=2)
    run("import", file, "--salt", "another", "--path", away, code=2)
    run("import", file, "--salt", "first", "--unsalted", "--path", away, code=2)
    run("import", file, "--salt", "first", "--path", away)
    assert held(away, made.layout, made.tokens(40), "first").shape[3] == 40


@pytest.mark.parametrize("at", [0, 3, 40, 9000, -100, -20_000])
def test_a_changed_byte_is_refused_and_nothing_is_imported(made: Any, away: Path, tmp_path: Path, at: int) -> None:
    file = tmp_path / "first.safetensors"
    run("export", file, "--namespace", "first", "--level", "0", "--path", made.path)
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    done = CliRunner().invoke(app, ["import", str(file), "--unsalted", "--path", str(away)])
    if done.exit_code == 0:  # spaces that pad the header tell nothing
        assert raw[at] ^ 1 == ord(" ")
        return
    assert done.exit_code in (7, 8, 11), done.output
    assert "Traceback" not in done.output
    assert run_json("stats", "--path", away)["tiers"][0]["blocks"] == 0


@given(st.data())
def test_any_truncation_or_damage_is_one_of_our_errors(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("bundle")
    file, layout = folder / "x", Layout.uniform(layers=1, heads=1, k_dim=2, block_tokens=2)
    with BundleWriter(file, 3) as writer:
        parent = -1
        for at in range(3):
            payload = {part: pack(np.full(layout.payload_bytes(), at, np.uint8), 4, 1) for part in layout.parts()}
            parent = writer.add(parent, np.array([at, 7], np.uint32), payload)
        writer.finish(Manifest(layout.to_json(), "x", False, None, "zstd-planes", 3, 6))
    raw = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        at = data.draw(st.integers(0, len(raw) - 1))
        if raw[at] == ord(" "):
            return
        raw[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    with pytest.raises(KVStoreError), Bundle(file) as bundle:
        bundle.verify(lambda done, total: None)


def test_another_layout_is_refused_with_the_difference_named(made: Any, away: Path, tmp_path: Path) -> None:
    file = tmp_path / "first.safetensors"
    run("export", file, "--namespace", "first", "--path", made.path)
    other = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16, dtype="float16", traits={"weights": "w2"})
    for label in ("first", "mine"):
        with kvstore.open(away, ram="8MiB", nvme="16MiB") as store:
            space = store.namespace(other, label=label)
            store.save(space, [1, 2], HostKV.stacked(other, np.zeros((2, 2, 2, 2, 16), np.float16)))
        words = ["--namespace", label] if label == "mine" else []
        done = CliRunner().invoke(app, ["import", str(file), "--unsalted", *words, "--path", str(away)])
        assert done.exit_code == 11, done.output
        told = " ".join(done.stderr.split())
        assert "dtype is float32 in the export, float16 in" in told
        assert "weights is none in the export, w2 in" in told


def test_what_does_not_fit_is_said_and_what_did_is_right(made: Any, tmp_path: Path, own_settings: Path) -> None:
    file, ids = tmp_path / "x.safetensors", list(range(20_000))
    with kvstore.open(made.path, ram="32MiB", nvme="64MiB") as store:
        space = store.namespace(made.layout, label="large")
        kv = np.random.default_rng(1).integers(0, 2**32, (2, 2, 2, len(ids), 16), np.uint32)
        store.save(space, ids, HostKV.stacked(made.layout, kv))
        assert came_to_rest(store)  # `nvme` does not take all of it either
    run("export", file, "--namespace", "large", "--path", made.path)
    with open_small(tmp_path / "tight", own_settings, nvme="0") as store, Bundle(file) as bundle:
        with pytest.raises(NoSpaceError, match="tokens of a sequence found room"):
            restore(store, bundle, store.namespace(bundle.layout), lambda done, total: None)
        assert store.verify().ok


def test_a_sequence_larger_than_ram_goes_to_disk_piece_by_piece(tmp_path: Path, own_settings: Path) -> None:
    layout = Layout.uniform(layers=8, heads=4, k_dim=256, block_tokens=16)
    file, ids = tmp_path / "x.safetensors", list(range(16 * 24))
    kv = np.random.default_rng(1).integers(0, 2**32, (8, 2, 4, len(ids), 256), np.uint32)
    small = {"nvme_segment_bytes": "16MiB", "ram_segment_bytes": "4MiB"}
    with kvstore.open(tmp_path / "home", ram="64MiB", nvme="64MiB", **small) as store:
        store.save(store.namespace(layout, label="large"), ids, HostKV.stacked(layout, kv))
        assert store.flush(30)
    run("export", file, "--namespace", "large", "--path", tmp_path / "home")
    away = tmp_path / "away"
    kvstore.open(away, ram="8MiB", nvme="64MiB", **small).close()
    told = run_json("import", file, "--path", away)
    assert (told["tokens"], told["new_blocks"]) == (len(ids), 24)
    with kvstore.open(away, ram="64MiB", nvme="64MiB", **small) as store:
        match = store.match(store.namespace(layout, label="large"), ids)
        buffer = np.zeros_like(kv)
        assert store.load(match, HostKV.stacked(layout, buffer)).tokens == len(ids)
    np.testing.assert_array_equal(buffer, kv)
    kvstore.open(tmp_path / "tight", ram="8MiB", nvme="0", **small).close()
    refused = CliRunner().invoke(app, ["import", str(file), "--path", str(tmp_path / "tight")])
    assert refused.exit_code == NoSpaceError.exit_code
    assert "this sequence alone takes 24.09 MiB" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["export", "{tmp}/x", "--namespace", "third"], 13),
        (["export", "{tmp}/x"], 14),
        (["export", "{tmp}/x", "--prompt", "nothing"], 13),
        (["export", "{tmp}/x", "--prompt", "40,100,9"], 13),
        (["export", "{tmp}/no/x", "--namespace", "first"], 3),
        (["export", "{tmp}/there", "--namespace", "first"], 3),
        (["import", "{tmp}/absent"], 3),
        (["import", "{tmp}/there"], 7),
    ],
)
def test_what_cannot_be_carried_is_one_message_and_nothing_is_left(
    made: Any, tmp_path: Path, words: list[str], code: int
) -> None:
    (tmp_path / "there").write_bytes(b"something")
    before = sorted(tmp_path.iterdir())
    assert run(*(word.format(tmp=tmp_path) for word in words), "--path", made.path, code=code) == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_writes_and_imports_nothing(made: Any, away: Path, tmp_path: Path) -> None:
    file = tmp_path / "first.safetensors"
    told = run_json("export", file, "--namespace", "first", "--dry-run", "--path", made.path)
    assert told["payload_bytes"] == 47 * made.layout.token_bytes()
    assert not file.exists()
    told = run_json("export", file, "--namespace", "first", "--path", made.path)
    assert run_json("import", file, "--unsalted", "--dry-run", "--path", away)["tokens"] == 47
    assert held(away, made.layout, made.tokens(40)).shape[3] == 0
    run("import", file, "--unsalted", "--sha256", "0" * 64, "--path", away, code=8)
    run("import", file, "--unsalted", "--sha256", told["sha256"], "--path", away)


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "x", 1) as writer:
        writer.add(-1, np.array([1], np.uint32), {})
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_bounded_whatever_is_carried(tmp_path: Path, own_settings: Path) -> None:
    """Many blocks of 1 MiB; what lies in shared memory is not the process's own."""
    layout = Layout.uniform(layers=4, heads=8, k_dim=64, block_tokens=64)
    ids = np.arange(40 * 64, dtype=np.uint32)
    file = tmp_path / "x.safetensors"
    settings: dict[str, Any] = {"ram": "64MiB", "nvme": 0, "ram_segment_bytes": "8MiB", "ram_directory": own_settings}
    with kvstore.open(tmp_path / "a", **settings) as store:
        space = store.namespace(layout)
        kv = np.zeros((4, 2, 8, len(ids), 64), np.float32)
        kv[:] = np.random.default_rng(0).standard_normal((4, 2, 8, 1, 64), np.float32)
        store.save(space, ids, HostKV.stacked(layout, kv))
        del kv
        match = store.match(space, ids)
        assert match.tokens == len(ids)
        with BundleWriter(file, 40) as writer, traced() as peak:
            moved = export(store, [match], writer, 1, lambda done, total: None)
            writer.finish(Manifest(layout.to_json(), "", False, None, "zstd-planes", moved.blocks, moved.tokens))
        assert peak() < 8 << 20
    with kvstore.open(tmp_path / "b", **settings) as store, Bundle(file) as bundle:
        with traced() as peak:
            bundle.verify(lambda done, total: None)
            restore(store, bundle, store.namespace(layout), lambda done, total: None)
        assert peak() < 16 << 20
        assert store.match(store.namespace(layout), ids).tokens == len(ids)


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """The most memory that was taken meanwhile, in bytes."""
    found = [0]
    tracemalloc.start()
    try:
        yield lambda: found[0]
    finally:
        found[0] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@given(st.binary(min_size=8, max_size=400), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1]))
def test_packing_is_undone_by_unpacking(raw: bytes, itemsize: int, level: int) -> None:
    payload = np.frombuffer(raw[: len(raw) // itemsize * itemsize], np.uint8)
    stored = pack(payload, itemsize, level)
    codec = "zstd-planes" if level else "raw"
    assert np.array_equal(unpack(stored, itemsize, len(payload), codec), payload)
    with pytest.raises(DamagedError):
        unpack(stored, itemsize, len(payload) + itemsize, codec)


def test_a_payload_is_cut_as_its_layers_lie() -> None:
    shapes = (LayerShape(2, 3, 5), LayerShape(1, 4, 4))
    planes = [
        np.arange(heads * 7 * dim, dtype=np.uint16).reshape(heads, 7, dim)
        for heads, dim in ((2, 3), (2, 5), (1, 4), (1, 4))
    ]
    payload = np.concatenate([plane.reshape(-1) for plane in planes]).view(np.uint8)
    wanted = np.concatenate([plane[:, :4].reshape(-1) for plane in planes]).view(np.uint8)
    assert np.array_equal(cut(payload, shapes, 2, 7, 4), wanted)
    assert cut(payload, shapes, 2, 7, 7) is payload


def test_layouts_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    from kvstore.tools.transfer import refuse_other_layout

    refuse_other_layout(NARROW, NARROW, "here")
    with pytest.raises(LayoutError, match="block_tokens is 64 in the export, 16 in here"):
        refuse_other_layout(NARROW, PARTED, "here")
