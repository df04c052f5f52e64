"""`kvstore serve` as a process of its own, for benchmarks that ask it. Must not know what is asked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import MissingExtraError

END_S = 10.0
"""After so long a process, and what it started, is killed."""


@contextlib.contextmanager
def served(store: Path) -> Iterator[str]:
    """The address of a server of a store, which ends with the block. Raises MissingExtraError without what serves."""
    with child([sys.executable, "-m", "kvstore.tools.cli", "serve", "--port", "0", "--path", str(store)]) as server:
        yield first_line(server).strip()


@contextlib.contextmanager
def child(line: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with the block, and all that it started. Its output is empty unless it speaks to us."""
    with subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started, and wait for all of them: a browser's helpers write to its profile to the
    last."""
    until = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        while _lives(process.pid) and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)


def _lives(group: int) -> bool:
    """Whether a process of a group is alive: a zombie that nobody waits for is not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its = status.read_text().rpartition(")")[2].split()[:3]
            if int(its) == group and state != "Z":
                return True
    return False


def first_line(process: subprocess.Popen[str]) -> str:
    """What a child says first. Raises MissingExtraError where it ended instead."""
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise MissingExtraError(
            "kvstore serve did not start", 'see why with kvstore serve; it needs the extra: pip install ".[serve]"'
        )
    return said
