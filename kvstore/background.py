"""Threads that nobody waits for, and their place behind those that compute.

A save, a move to disk or a new segment is not urgent; a forward that loses its core to one of them for a moment waits
at its next barrier with all its threads. Threads step back once, when they start, since an ordinary user may lower a
priority and never raise it again. Must not know what the threads do.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

NICENESS = 19
"""The lowest: what is left of a core beside a thread that computes without pause, and the whole of an idle one."""

_this = threading.local()


def step_back() -> None:
    """From now on the calling thread runs where others leave a core to it; so does what it has copied for it.

    Only on Linux: elsewhere a priority belongs to a process.
    """
    _this.stepped_back = True
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it: then it competes with the others
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def stepped_back() -> bool:
    """Whether the calling thread has."""
    return getattr(_this, "stepped_back", False)
