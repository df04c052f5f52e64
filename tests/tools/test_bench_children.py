"""Processes that a benchmark starts are gone when it goes on, and so is what they have started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvstore.tools.served import child

WRITES = "import sys, time\nwhile True: open(sys.argv[1], 'a').write('x'); time.sleep(0.01)"
STARTS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WRITES!r}, sys.argv[1]])"


def test_what_a_child_has_started_writes_no_more_when_the_child_is_ended(tmp_path: Path) -> None:
    written = tmp_path / "written"
    with child([sys.executable, "-c", STARTS, str(written)]) as process:
        while not written.exists() or not written.stat().st_size:
            time.sleep(0.01)
    assert process.returncode is not None
    before = written.stat().st_size
    time.sleep(0.2)
    assert written.stat().st_size == before


def test_a_child_that_has_ended_by_itself_is_ended(tmp_path: Path) -> None:
    with child([sys.executable, "-c", "pass"]) as process:
        process.wait()
    assert process.returncode == 0
