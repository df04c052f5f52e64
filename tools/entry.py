"""The console script ``kvstore``, and what Ctrl-C means in it: from the first moment on, never a traceback.

While modules are imported and arguments are read nothing is open, and the process ends at once. A command makes Ctrl-C
a KeyboardInterrupt, which it ends by itself. After it only the interpreter is left to end, silently. Must import
nothing that takes time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """The entry point of the console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _end_at_once)
    from kvstore.tools.cli import main as run

    run()


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C within is a KeyboardInterrupt, and after it the end, where this process is the console script's."""
    if signal.getsignal(signal.SIGINT) is not _end_at_once:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    # No exception: raised within an import it can be taken for the module's own failure.
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
