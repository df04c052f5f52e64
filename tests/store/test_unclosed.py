"""A program that ends without closing its store loses nothing that was saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import kvstore
from kvstore.layout import Layout

PROGRAM = """
import sys
import numpy as np
import kvstore
from kvstore.kv import HostKV
from kvstore.layout import Layout

store = kvstore.open(
    sys.argv[1], ram="8MiB", nvme="16MiB", ram_directory=sys.argv[2],
    ram_segment_bytes="1MiB", nvme_segment_bytes="2MiB", mover_batch_bytes="32KiB",
)
layout = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
kv = np.random.default_rng(1).standard_normal((2, 2, 2, 1600, 16)).astype(np.float32)
print(store.save(store.namespace(layout), np.arange(1600), HostKV.stacked(layout, kv)).new_blocks)
"""


def test_what_waits_for_nvme_is_written_at_the_end_of_the_program(tmp_path: Path, memory: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "100", "")
    layout = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
    with kvstore.open(
        tmp_path / "store", ram="8MiB", nvme="16MiB", ram_directory=memory, ram_segment_bytes="1MiB"
    ) as store:
        assert store.stats().processes == 1
        store.evict(everything=True, tier="ram")
        assert store.match(store.namespace(layout), np.arange(1600)).by_tier == {"nvme": 1600}
