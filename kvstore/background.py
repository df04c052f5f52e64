"""A thread that steps back behind those that compute on the same cores.

An engine on the CPU splits each operation over all cores; where one is taken for a moment, all wait. Its saves are not
urgent, and a thread that makes them may step back: once, when it starts, since an ordinary user may lower a priority
and never raise it again. Only for work whose end nobody waits for: what holds Python's lock, or any other, while it
waits for a core holds up those who need it. Must not know what the threads do.
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
