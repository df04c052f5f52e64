"""`kvstore serve` as a process of its own, for benchmarks that ask it. Must not know what is asked."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import MissingExtraError


@contextlib.contextmanager
def served(store: Path) -> Iterator[str]:
    """The address of a server of a store, which ends with the block. Raises MissingExtraError without what serves."""
    with child([sys.executable, "-m", "kvstore.tools.cli", "serve", "--port", "0", "--path", str(store)]) as server:
        yield first_line(server).strip()


@contextlib.contextmanager
def child(line: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with the block. Its output is empty unless it speaks to us."""
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def first_line(process: subprocess.Popen[str]) -> str:
    """What a child says first. Raises MissingExtraError where it ended instead."""
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise MissingExtraError(
            "kvstore serve did not start", 'see why with kvstore serve; it needs the extra: pip install ".[serve]"'
        )
    return said
