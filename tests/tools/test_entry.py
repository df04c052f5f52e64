"""Ctrl-C from the first moment of a command on: one line and its exit code, whatever is being imported or read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEN_IMPORTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder
class Interrupt(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
WHEN_CALLED = """
import os, signal, sys
def interrupt(frame, event, argument):
    if event == "call" and frame.f_code.co_name == {at!r}:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
sys.setprofile(interrupt)
"""
RUN = """
sys.argv[1:] = ["doctor", "--json"]
from kvstore.tools.entry import main
main()
"""


def run(program: str, **more: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, **more)  # type: ignore[call-overload]


@pytest.mark.parametrize("at", ["kvstore.tools.cli", "typer", "rich.console", "numpy", "kvstore.store", "lmdb"])
def test_while_modules_are_imported(at: str) -> None:
    done = run(WHEN_IMPORTED.format(at=at) + RUN)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


@pytest.mark.parametrize("at", ["prepare", "get_command", "parse_args", "guarded", "examine", "print_json"])
def test_while_arguments_are_read_and_while_it_runs(at: str) -> None:
    done = run(WHEN_CALLED.format(at=at) + RUN)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_when_all_is_done_it_ends_without_a_word() -> None:
    end = "import atexit; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    done = run("import os, signal, sys\n" + end + RUN)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert '"findings"' in done.stdout


def test_a_command_in_the_background_goes_on_where_the_shell_has_it_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the child
    try:
        done = run(WHEN_CALLED.format(at="examine") + RUN)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stderr == ""
    assert '"findings"' in done.stdout


def test_nothing_that_takes_time_is_imported_before_it_stands() -> None:
    program = "import sys, kvstore.tools.entry; print(*sys.modules)"
    loaded = set(run(program).stdout.split())
    assert "kvstore.tools.entry" in loaded
    assert not loaded & {"numpy", "typer", "rich", "lmdb", "torch", "kvstore.store", "kvstore.settings"}
