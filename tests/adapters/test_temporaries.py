"""Large temporaries of a forward reuse memory that the process has, whatever lies behind them on the heap."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from kvstore.adapters.temporaries import KEEP_BYTES

PROGRAM = """
import resource, sys, torch
from kvstore.adapters.temporaries import keep_temporaries

def forwards(held):
    for _ in range(20):
        parts = [torch.empty(size, dtype=torch.uint8).fill_(1) for size in SIZES]
        small = [torch.empty(4096, dtype=torch.uint8) for _ in range(10)]
        del parts
        held[:] = [] if held else small

def faults():
    held, seen = [], []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        forwards(held)
        seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(seen[1:])

SIZES = [int(size) << 20 for size in sys.argv[1].split(",")]
before, arranged = faults(), keep_temporaries()
print(before, arranged, faults())
"""
GLIBC = platform.libc_ver()[0] == "glibc"


def _run(sizes: list[int], **environment: str) -> tuple[int, bool, int]:
    """Faults of 20 forwards with such temporaries (MiB), settled: before, whether it was arranged, after."""
    command = [sys.executable, "-c", PROGRAM, ",".join(map(str, sizes))]
    given = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=given)
    before, arranged, after = done.stdout.split()
    return int(before), arranged == "True", int(after)


@pytest.mark.skipif(not GLIBC, reason="it is glibc that gives large blocks back at once")
@pytest.mark.parametrize("sizes", [[19], [9, 25], [19, 19, 19, 19], [31, 31, 31, 31, 31]])
def test_temporaries_are_reused_after_it_though_they_are_more_than_glibc_keeps_by_itself(sizes: list[int]) -> None:
    assert sum(sizes) << 20 < KEEP_BYTES
    _, arranged, after = _run(sizes)
    pages = 20 * (sum(sizes) << 20) // 4096
    assert arranged
    assert after < pages // 50


@pytest.mark.parametrize(
    "chosen",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"},
        {"GLIBC_TUNABLES": "glibc.cpu.x=1:glibc.malloc.mmap_threshold=1000000"},
        {"MALLOC_TRIM_THRESHOLD_": "1000000"},
        {"MALLOC_MMAP_THRESHOLD_": "1000000"},
    ],
)
def test_who_tells_the_allocator_what_to_do_is_not_overruled(chosen: dict[str, str]) -> None:
    _, arranged, _ = _run([2], **chosen)
    assert not arranged
