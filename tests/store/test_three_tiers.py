"""Promotion and eviction through all three tiers, with tensors on a device; ``cpu`` runs the code of a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import UnsupportedError
from kvstore.events import Cause, Miss
from kvstore.kv import HostKV
from kvstore.layout import Layout
from kvstore.store import Store

torch = pytest.importorskip("torch")
from kvstore.tiers.devicekv import DeviceKV  # noqa: E402  needs torch

LAYOUT = Layout.uniform(layers=3, heads=2, k_dim=16, block_tokens=16)
BLOCKS, TOKENS = 20, 20 * 16 + 5


def open_store(path: Path, memory: Path, hbm: int | str) -> Store:
    return kvstore.open(
        path / "store",
        ram="8MiB",
        nvme="16MiB",
        hbm=hbm,
        device="cpu",
        ram_directory=memory,
        ram_segment_bytes="1MiB",
        nvme_segment_bytes="2MiB",
        verify_share=1,
    )


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "mps"])
def test_a_device_that_is_not_there_is_refused_and_the_store_can_be_opened_without(
    tmp_path: Path, memory: Path, device: str
) -> None:
    sizes = {"ram": "8MiB", "nvme": "16MiB", "ram_segment_bytes": "1MiB", "nvme_segment_bytes": "2MiB"}
    with pytest.raises(UnsupportedError, match="hbm"):
        kvstore.open(tmp_path / "store", ram_directory=memory, hbm="1MiB", device=device, **sizes)
    open_store(tmp_path, memory, 0).close()


def random_kv(seed: int, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 2, 2, tokens, 16)).astype(np.float32)


def on_device(array: np.ndarray) -> DeviceKV:
    return DeviceKV.stacked(LAYOUT, torch.from_numpy(array))


def ids(seed: int, tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens)


def test_a_block_saved_from_a_device_is_served_by_each_tier_in_turn(tmp_path: Path, memory: Path) -> None:
    kv = random_kv(1)
    with open_store(tmp_path, memory, "4MiB") as store:
        space = store.namespace(LAYOUT)
        saved = store.save(space, ids(1), on_device(kv))
        assert (saved.new_blocks, saved.skipped_blocks) == (BLOCKS + 1, 0)
        assert store.flush(10)
        served = []
        for forget in ((), ("hbm",), ("hbm", "ram")):
            if "hbm" in forget:
                store._core.hbm.drop(everything=True)  # type: ignore[union-attr]
            if "ram" in forget:
                store.evict(everything=True, tier="ram")
            target = np.zeros_like(kv)
            loaded = store.load(store.match(space, ids(1)), on_device(target))
            assert loaded.tokens == TOKENS
            np.testing.assert_array_equal(target, kv)
            served.append(dict(loaded.by_tier))
        assert served == [{"hbm": TOKENS}, {"ram": TOKENS}, {"nvme": TOKENS}]
        again = store.load(store.match(space, ids(1)), on_device(np.zeros_like(kv)))
        assert again.by_tier == {"hbm": TOKENS}, "what was promoted stays on the device"
        assert store.verify().ok
        assert store._core.hbm.check_integrity() == []  # type: ignore[union-attr]


def test_hbm_smaller_than_the_prefix_still_serves_all_of_it(tmp_path: Path, memory: Path) -> None:
    kv = random_kv(2)
    with open_store(tmp_path, memory, "64KiB") as store:
        space = store.namespace(LAYOUT)
        store.save(space, ids(2), HostKV.stacked(LAYOUT, kv))
        target = np.zeros_like(kv)
        assert store.load(store.match(space, ids(2)), on_device(target)).tokens == TOKENS
        np.testing.assert_array_equal(target, kv)


def test_an_explicit_eviction_reaches_the_device(tmp_path: Path, memory: Path) -> None:
    kv = random_kv(3)
    with open_store(tmp_path, memory, "4MiB") as store:
        space = store.namespace(LAYOUT)
        store.save(space, ids(3), on_device(kv))
        match = store.match(space, ids(3))
        store.evict(namespace=space.root)
        misses: list[Miss] = []
        store.events.subscribe(lambda event: misses.append(event) if isinstance(event, Miss) else None)
        assert store.load(match, on_device(np.zeros_like(kv))).tokens == 0
        assert misses == [Miss(Cause.PURGED, TOKENS, match.space.root)]
        assert store._core.hbm.stats().resident == 0  # type: ignore[union-attr]


def test_a_damaged_ram_slot_is_never_believed_on_the_device(tmp_path: Path, memory: Path) -> None:
    kv = random_kv(4)
    with open_store(tmp_path, memory, "4MiB") as store:
        space = store.namespace(LAYOUT)
        store.save(space, ids(4), HostKV.stacked(LAYOUT, kv))
        match = store.match(space, ids(4))
        piece = next(iter(match.pieces.values()))[7]
        ram = store._core.ram
        ram.slot(piece.entry.ref, 4096 + LAYOUT.payload_bytes())[5000] ^= 1
        target = np.zeros_like(kv)
        loaded = store.load(match, on_device(target))
        assert loaded.tokens == 7 * 16
        np.testing.assert_array_equal(target[:, :, :, : loaded.tokens], kv[:, :, :, : loaded.tokens])
        assert store._core.hbm.lookup([piece.name.key]) == [False]  # type: ignore[union-attr]


def test_device_tensors_without_hbm_are_refused_by_name(tmp_path: Path, memory: Path) -> None:
    kv = random_kv(5)
    with open_store(tmp_path, memory, 0) as store:
        space = store.namespace(LAYOUT)
        with pytest.raises(UnsupportedError, match="hbm"):
            store.save(space, ids(5), on_device(kv))
        assert store.verify().ok
