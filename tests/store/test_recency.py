"""What is used in `ram` is no colder on `nvme`; what `nvme` lost, or never got, is written to it while `ram` has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from children import KILLED, Child
from known_kv import open_small, slots_of
from stores import BLOCK, PART, StoreBench, StoreMaker, tokens_of

from kvstore.errors import BusyError
from kvstore.records import Entry, block_names
from kvstore.rescan import dirty_moves, unwritten
from kvstore.tiers import reservation

HOUR = 3600.0
Tokens = npt.NDArray[np.uint32]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def copies(bench: StoreBench, tokens: Tokens, salt: str = "") -> list[Entry]:
    """The entries of a sequence's blocks on `nvme`."""
    chain = bench.store.match(bench.space(salt=salt), tokens).chain
    return [entry for entry in bench.tier("nvme").find(block_names(chain, PART)) if entry is not None]


def carry(bench: StoreBench) -> None:
    bench.store._core.keeper._carry()


def busy(*given: object) -> None:
    raise BusyError("the index is locked", "try again")


# -------------------------------------------------------------------- what nvme never got


def test_a_writer_killed_while_it_publishes_keeps_nothing_from_nvme(tmp_path: Path, memory: Path) -> None:
    """Its second batch, of 128 blocks, has stamps and is not READY."""
    sizes = {"ram": "16MiB", "nvme": "32MiB"}
    with open_small(tmp_path / "kv", memory, **sizes) as store:
        with Child(tmp_path / "kv", memory, settings=sizes) as child:
            child.do("die", point=["kvstore.tiers.reservation:publish", "before", None, 2])
            child.tell("save", tokens=list(range(192 * 16)))
            assert child.end() == KILLED
        wait_for(lambda: slots_of(store) == {"ram": 64, "nvme": 64})
        assert unwritten(store._core.ram) == 0


def test_slots_given_up_while_publishing_keep_nothing_from_nvme(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_store()
    ram: Any = bench.tier("ram")
    with monkeypatch.context() as patch:
        patch.setattr(reservation, "publish", busy)
        assert bench.save(tokens_of(1, 192 * BLOCK)).skipped_blocks == 192
    bench.settle()
    tokens = tokens_of(2, 10 * BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(bench.store._core.mover, "submit", lambda moves: None)  # as a full queue does
        assert bench.save(tokens).new_blocks == 10
        stamped = sum(int(np.count_nonzero(ram.arrays.stamps(segment))) for segment in ram.segment_list())
        assert stamped == 74, "those that were given up have kept their stamps"
        assert unwritten(ram) == len(dirty_moves(ram, 64)) == 10
    wait_for(lambda: len(copies(bench, tokens)) == 10)
