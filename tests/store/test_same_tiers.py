"""All that have a store open at once agree on its lowest tier, where names, pins, quotas and tombstones are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from known_kv import open_small

PROGRAM = """
import sys
from pathlib import Path
from known_kv import open_small
from kvstore.errors import SettingsError

try:
    open_small(Path(sys.argv[1]), Path(sys.argv[2]), nvme=sys.argv[3]).close()
except SettingsError as error:
    print(error.problem)
"""


@pytest.mark.parametrize(("here", "there"), [("16MiB", "0"), ("0", "16MiB")])
def test_a_second_process_with_other_tiers_is_refused_by_name(
    tmp_path: Path, memory: Path, here: str, there: str
) -> None:
    def join(nvme: str) -> str:
        words = [sys.executable, "-c", PROGRAM, str(tmp_path / "kv"), str(memory), nvme]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=env)
        return done.stdout

    with open_small(tmp_path / "kv", memory, nvme=here):
        assert "nvme is" in join(there)
        assert join(here) == ""
    assert join(there) == "", "alone, it may be turned on or off"
