"""Tests are called the same wherever they are collected: pytest-xdist's workers run nothing where two differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
THIS = "tests/test_collection.py::test_names_do_not_depend_on_clocks_or_hashes"

CLOCKS = """
import os, time
boottime, calendar, ahead = time.clock_gettime_ns, time.time, float(os.environ["AHEAD_S"])
start = boottime(time.CLOCK_BOOTTIME)
time.clock_gettime_ns = lambda clock: boottime(clock) - start + round(ahead * 1e9)
time.time = lambda: calendar() + ahead
"""
"""A plugin of pytest: the host started ``AHEAD_S`` ago, and its calendar is ahead by as much."""


def collecting(folder: Path, ahead_s: float, seed: int) -> subprocess.Popen[str]:
    """A process that prints the names of all tests."""
    seen = os.pathsep.join([str(folder), str(ROOT), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "clocks", "-p", "no:cacheprovider", "--collect-only", "-q", "tests"],
        cwd=ROOT,
        env={**os.environ, "AHEAD_S": str(ahead_s), "PYTHONHASHSEED": str(seed), "PYTHONPATH": seen},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_names_do_not_depend_on_clocks_or_hashes(tmp_path: Path) -> None:
    (tmp_path / "clocks.py").write_text(CLOCKS)
    young, old = collecting(tmp_path, 40, 1), collecting(tmp_path, 4e6, 2)
    names, others = ([line for line in one.communicate()[0].splitlines() if "::" in line] for one in (young, old))
    assert young.returncode == old.returncode == 0
    assert THIS in names
    assert names == others
