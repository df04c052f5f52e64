"""A process that only resumes does not fault the same pages in again for every layer."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from kvstore.adapters.transformers.pool import keep_temporaries

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(19 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

cold = faults()
keep_temporaries()
faults()
print(cold, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives large blocks back at once")
def test_large_temporaries_are_reused_after_warming() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    cold, warm = (int(word) for word in done.stdout.split())
    pages = 20 * (19 << 20) // 4096
    assert warm < pages // 10
    assert warm <= cold
