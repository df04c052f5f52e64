"""How the whole suite runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from stores import StoreBench, StoreMaker, shm_directory

# A deadline would make the suite fail on a busy machine, not on a wrong program.
settings.register_profile("kvstore", deadline=None)
settings.load_profile("kvstore")

# A shell that puts a job into the background lets it ignore Ctrl-C, and all that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory on tmpfs, gone afterwards."""
    with shm_directory() as path:
        yield path


@pytest.fixture
def make_store(tmp_path: Path, shm: Path) -> Iterator[StoreMaker]:
    """Makes small stores, and closes them afterwards."""
    made: list[StoreBench] = []

    def make(name: str = "store", **settings: object) -> StoreBench:
        made.append(StoreBench(tmp_path / name, shm, **settings))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
