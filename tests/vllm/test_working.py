"""A worker's half where threads are not to be had: saves and loads are done all the same, each once."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from stores import BLOCK, LAYOUT, StoreBench, StoreMaker, kv_of, tokens_of

from kvstore.background import NICENESS
from kvstore.kv import HostKV

# What importing vLLM and torch's compiler warns of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


class Half:
    """A worker's half over a small store and pages of one request each."""

    def __init__(self, bench: StoreBench, patched: pytest.MonkeyPatch, on_host: bool = True) -> None:
        from kvstore.adapters.vllm import working

        self.bench, self.pages = bench, {}
        spaces = SimpleNamespace(of=lambda whose: bench.space())
        pages = SimpleNamespace(
            note_lane=lambda: None, buffer=lambda blocks, first=0: self.pages[blocks], on_host=on_host
        )
        patched.setattr(working, "Spaces", lambda store, engine: spaces)
        patched.setattr(working, "_Pages", lambda engine, tensors: pages)
        self.half = working.WorkerHalf(bench.store, SimpleNamespace(page=BLOCK), [], 0)  # type: ignore[arg-type]

    def holds(self, blocks: tuple[int, ...], kv: Any) -> None:
        """Have pages hold the KV of a request."""
        self.pages[blocks] = HostKV.stacked(LAYOUT, kv)


@pytest.fixture
def half(make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Half]:
    made = Half(make_store(nvme=0), monkeypatch)
    yield made
    made.half.close()


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_save_without_a_thread_is_done_at_once_and_never_again(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later its pages hold another request's KV, which would be stored under its tokens."""
    from kvstore.adapters.vllm.messages import Orders, Save, Whose

    first, second, pages = tokens_of(1, 64), tokens_of(2, 64), (0, 1, 2, 3)
    half.holds(pages, kv_of(first))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        half.half.begin(Orders(saves=[Save("one", Whose(), first, pages)]))
        half.half.end()
    half.bench.drop("ram")
    half.holds(pages, kv_of(second))
    half.half.begin(Orders(saves=[Save("two", Whose(), second, pages)]))
    half.half.before(Orders(fresh=frozenset(pages)))
    assert half.bench.load(first).tokens == 0
    assert half.bench.load(second).tokens == 64
    assert [name for name, _, fresh in half.half.answer().stored if fresh] == ["one", "two"]


def test_a_load_that_a_request_waits_for_is_done_without_a_thread(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from kvstore.adapters.vllm.messages import Load, Orders, Whose

    tokens, pages = tokens_of(3, 64), (4, 5, 6, 7)
    half.bench.save(tokens)
    empty = np.zeros_like(kv_of(tokens))
    half.holds(pages, empty)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        half.half.begin(Orders(later=[Load("one", Whose(), tokens, 0, pages)]))
        half.half.load()
    assert half.half.finished() == {"one"}
    assert half.half.bad_blocks() == set()
    assert np.array_equal(empty, kv_of(tokens))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority belongs to a process")
@pytest.mark.parametrize("on_host", [True, False])
def test_saves_step_back_where_the_engine_computes_on_the_cores_that_copy(
    make_store: StoreMaker, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    made = Half(make_store(nvme=0), monkeypatch, on_host)
    saver = made.half._saver.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(60)
    loader = made.half._loader.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(60)
    made.half.close()
    assert (saver, loader) == (max(mine, NICENESS) if on_host else mine, mine)
