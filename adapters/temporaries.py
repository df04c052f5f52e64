"""Memory of a forward's large temporaries, kept for the next forward of the process.

glibc gives freed memory back to the system once more of it lies at the end of its heap than a threshold that it finds
by itself, 64 MiB at most. Where a step's temporaries happen to lie there, every layer faults the same pages in again;
whether they do depends on a few small blocks that outlive the step, such as an adapter allocates. Must not know torch,
engines or the store.
"""

from __future__ import annotations

import ctypes
import os
import platform

KEEP_BYTES = 256 << 20
"""Freed memory at the end of the heap that the process keeps."""
MAPPED_BYTES = 32 << 20
"""Larger blocks are mapped one by one: the most that glibc would come to by itself."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h."""
_CHOSEN = ("glibc.malloc.trim_threshold", "glibc.malloc.mmap_threshold")


def keep_temporaries() -> bool:
    """Let large temporaries reuse memory that is there; whether that could be arranged.

    Nothing is done where the C library isn't glibc, or the environment says how its allocator shall behave
    (GLIBC_TUNABLES, MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_). An allocator put in its place (tcmalloc,
    jemalloc) has thresholds of its own, which this does not touch.

    Measured: a request with 4,096 cached tokens took 0.35 s instead of 0.20 in a process that had run no long prefill
    (``hot_ttft_s`` of ``kvstore demo --json``); 32 prompts of 192 tokens took a vLLM engine on two cores 9 % to 17 %
    longer where its temporaries were faulted in again, which befell one with the connector as well as one without.
    """
    if platform.libc_ver()[0] != "glibc" or _chosen():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_TRIM_THRESHOLD, KEEP_BYTES))


def _chosen() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    named = "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ
    return named or any(name in tunables for name in _CHOSEN)
