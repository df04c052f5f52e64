"""A budget holds to the byte, across restarts, layouts and smaller budgets; a medium that is too small is no crash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stores import LAYOUT, WIDE, StoreBench, StoreMaker, tokens_of, tree_bytes

from kvstore.events import Evicted
from kvstore.layout import Layout
from kvstore.sizes import parse_size

TINY = Layout.uniform(layers=1, heads=1, k_dim=16, block_tokens=16)
LAYOUTS = (LAYOUT, WIDE, TINY)


def taken(bench: StoreBench) -> dict[str, tuple[int, int]]:
    """For each tier the bytes of its files, and its budget, at this moment."""
    return {tier.name: (tree_bytes(tier.directory), tier.budget()) for tier in bench.store._core.tiers}


def held(bench: StoreBench) -> dict[str, tuple[int, int]]:
    """The same when nothing is under way: then what is counted is what is there, in pages."""
    bench.settle()
    for tier in bench.store._core.tiers:
        with tier._grower._under_way:  # type: ignore[attr-defined]
            assert 0 <= tier.allocated() - tree_bytes(tier.directory) < 4096
    return taken(bench)


@pytest.mark.parametrize("seed", range(2))
def test_files_never_take_more_than_the_budget(make_store: StoreMaker, seed: int) -> None:
    bench, random = make_store(), np.random.default_rng(seed)
    budgets = ["8MiB", "3MiB", "6500000", "2MiB", "5MiB"]
    for turn, budget in enumerate(budgets):
        bench.settings |= {"ram": budget, "nvme": budgets[-1 - turn]}
        for _ in range(12):
            layout = LAYOUTS[int(random.integers(0, 3))]
            bench.save(tokens_of(int(random.integers(0, 30)), int(random.integers(1, 700))), layout)
            bench.load(tokens_of(int(random.integers(0, 30)), 700), layout)
            for have, most in taken(bench).values():
                assert have <= most
        after = held(bench)
        assert after["ram"][1] == parse_size(budget)
        assert bench.store.verify().problems == []
        bench.close()
        nvme = tree_bytes(bench.path / "nvme")
        assert nvme == after["nvme"][0]
    assert tree_bytes(bench.path / "nvme") <= parse_size(budgets[0])


def test_a_budget_that_shrinks_costs_the_coldest_blocks_first(make_store: StoreMaker) -> None:
    bench = make_store(nvme="6MiB", nvme_segment_bytes="512KiB")
    old, young = tokens_of(1, 40 * 16), tokens_of(2, 40 * 16)
    for tokens in (old, young):
        bench.save(tokens)
        bench.settle()
    bench.drop("ram")
    bench.close()
    bench.settings |= {"nvme": "1800KiB", "ram": "8MiB"}
    assert all(have <= most for have, most in held(bench).values())
    assert bench.of(Evicted, reason="shrink")
    assert bench.load(old).tokens < bench.load(young).tokens
    assert bench.store.verify().ok


def test_a_tmpfs_that_fills_up_under_an_open_store_costs_saves_only(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    place = tmp_path / "small"
    place.mkdir()
    tree = Path(__file__).resolve().parents[2]
    told = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", SMALL, str(tree), str(tree / "tests"), str(place), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if told.stderr.startswith("unshare:") or "mount:" in told.stderr:
        pytest.skip(f"no mount of one's own here: {told.stderr.strip()}")
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == ["ram", "disk"], told.stderr


SMALL = """
import pathlib, shutil, subprocess, sys, time
sys.path[:0] = sys.argv[1:3]
from stores import StoreBench, tokens_of
from kvstore.events import Fault
place, other = pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], check=True)
(place / "shm").mkdir()
(other / "shm").mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", other / "shm"], check=True)
for kind, path, shm, tier in (
    ("ram", other / "store", place / "shm", "ram"),
    ("disk", place / "store", other / "shm", "nvme"),
):
    bench = StoreBench(path, shm, ram="5MiB", nvme="5MiB", ram_segment_bytes="512KiB", nvme_segment_bytes="512KiB")
    assert bench.save(tokens_of(1, 160)).new_blocks == 10
    bench.settle()
    (place / "ballast").write_bytes(b"x" * shutil.disk_usage(place).free)
    for seed in range(2, 30):
        saved = bench.save(tokens_of(seed, 320))
        assert saved.new_blocks + saved.skipped_blocks == 20
        bench.load(tokens_of(seed, 320))
    bench.settle()
    assert bench.of(Fault, tier=tier, what="grow"), "it wanted to grow, and could not"
    assert bench.load(tokens_of(29, 320)).tokens, "and evicts instead"
    assert bench.store.verify().problems == []
    (place / "ballast").unlink()
    time.sleep(1.0)
    for seed in range(30, 34):
        assert bench.save(tokens_of(seed, 320)).new_blocks == 20
    bench.settle()
    assert bench.store.verify().problems == []
    bench.close()
    print(kind)
"""
