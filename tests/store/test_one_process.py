"""A store inside one process: threads, several handles, closing while others work, forked children."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from children import Child, conversations
from known_kv import PLAIN, SPEAKERS, Speaker, load, load_match, open_small, save

from kvstore.errors import BusyError, ClosedError, StorageError
from kvstore.keeper import Keeper
from kvstore.store import Store

Reopen = Callable[..., Store]
ME = Speaker(PLAIN)
STEPS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "users": lambda core: (core, "_wait_for_users"),
    "prefetches": lambda core: (core.prefetches, "close"),
    "queue": lambda core: (core.mover, "flush"),
    "mover": lambda core: (core.mover._thread, "join"),
    "keeper": lambda core: (core.keeper._thread, "join"),
    "threads": lambda core: (core.threads._read, "shutdown"),
    "growth": lambda core: (core.ram._grower, "close"),
    "writes": lambda core: (core.nvme.index, "write"),
    "index": lambda core: (core.ram.index._thread, "join"),
    "medium": lambda core: (core.ram.medium, "close"),
}
"""What closing waits for: an object of a core, and the method that waits."""


def test_threads_on_the_same_and_on_different_chains_never_mix_bytes(reopen: Reopen) -> None:
    store = reopen(verify_share=64)

    def work(seed: int) -> tuple[int, int, int]:
        draw, asked, loaded, bad = conversations(seed // 2), 0, 0, 0  # two threads each draw the same
        for turn in range(60):
            speaker, tokens = SPEAKERS[(seed // 2 + turn) % len(SPEAKERS)], draw()
            save(store, speaker, tokens)
            got, wrong = load(store, speaker, tokens)
            asked, loaded, bad = asked + len(tokens), loaded + got.tokens, bad + wrong
        return asked, loaded, bad

    with ThreadPoolExecutor(6) as pool:
        asked, loaded, bad = (sum(column) for column in zip(*pool.map(work, range(6)), strict=True))
    assert bad == 0
    assert loaded > asked // 4
    stats = store.stats()
    assert stats.asked_tokens == asked == sum(stats.hit_tokens.values()) + sum(stats.miss_tokens.values())
    assert sum(stats.hit_tokens.values()) == loaded
    assert store.verify().problems == []


def test_handles_share_a_core_and_the_last_one_closes_it(reopen: Reopen) -> None:
    first, second = reopen(), reopen()
    assert first._core is second._core
    save(first, ME, range(50))
    first.close()
    first.close()
    with pytest.raises(ClosedError):
        first.stats()
    assert load(second, ME, list(range(50)))[0].tokens == 50
    second.close()
    third = reopen()
    assert third._core is not second._core
    assert load(third, ME, list(range(50)))[0].tokens == 50


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_store_whose_closing_is_interrupted_is_closed_all_the_same(reopen: Reopen, step: str, after: bool) -> None:
    """Else this process could never open it again."""
    store = reopen()
    save(store, ME, range(50))
    assert store.flush(60)
    whose, name = STEPS[step](store._core)
    real, left = getattr(whose, name), [KeyboardInterrupt(), SystemExit(1)]

    def interrupted(*given: object, **more: object) -> object:
        if left and not after:
            raise left.pop()
        answer = real(*given, **more)
        if left:
            raise left.pop()
        return answer

    setattr(whose, name, interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        store.close()
    assert not left
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")]
    again = reopen()
    assert again.stats().processes == 1
    assert load(again, ME, list(range(50)))[0].tokens == 50
    assert again.verify().problems == []


def test_closing_waits_for_loads_and_saves_and_leaks_nothing(reopen: Reopen, memory: Path) -> None:
    for round_ in range(8):
        store = reopen()
        started = threading.Barrier(4)

        def work(seed: int, store: Store = store, started: threading.Barrier = started) -> int:
            draw, bad = conversations(seed), 0
            started.wait(60)
            try:
                while True:
                    tokens = draw()
                    save(store, ME, tokens)
                    bad += load(store, ME, tokens)[1]
                    store.prefetch(store.match(store.namespace(PLAIN), tokens))
            except ClosedError:
                return bad

        with ThreadPoolExecutor(3) as pool:
            working = [pool.submit(work, round_ * 3 + at) for at in range(3)]
            started.wait(60)
            threading.Event().wait(0.01 * (round_ + 1))
            store.close()
            assert [one.result() for one in working] == [0, 0, 0]
        assert reopen().verify().problems == []


def test_opening_while_another_thread_closes_gives_a_working_store(tmp_path: Path, memory: Path) -> None:
    def work(seed: int) -> int:
        bad = 0
        for turn in range(25):
            with open_small(tmp_path / "kv", memory) as store:
                save(store, ME, range(seed * 100, seed * 100 + turn))
                bad += load(store, ME, list(range(seed * 100, seed * 100 + turn)))[1]
        return bad

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(work, range(3))) == 0
    with open_small(tmp_path / "kv", memory) as store:
        assert store.verify().problems == []
        assert store.stats().processes == 1


def in_a_fork(work: Callable[[], bool]) -> bool:
    """What ``work`` says in a forked child, which then leaves at once."""
    pid = os.fork()
    if pid == 0:
        answer = 1
        try:
            answer = 0 if work() else 1
        finally:
            os._exit(answer)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_is_refused_and_leaves_the_parent_unharmed(reopen: Reopen, tmp_path: Path, memory: Path) -> None:
    store = reopen()
    tokens = list(range(100))
    save(store, ME, tokens)
    space = store.namespace(PLAIN)
    match = store.match(space, tokens)
    refused: list[Callable[[], object]] = [
        lambda: store.match(space, tokens),
        lambda: load_match(store, ME, tokens, match),
        lambda: save(store, ME, tokens),
        lambda: store.evict(everything=True),
        lambda: store.pin("x", space, tokens),
        store.stats,
        store.verify,
        store.flush,
    ]

    def child() -> bool:
        for call in refused:
            try:
                call()
            except ClosedError:
                continue
            return False
        store.close()
        try:
            open_small(tmp_path / "kv", memory)
        except ClosedError:
            with open_small(tmp_path / "other", memory) as own:
                return bool(save(own, ME, tokens).new_blocks == 7 and load(own, ME, tokens)[1] == 0)
        return False

    assert in_a_fork(child)
    assert in_a_fork(lambda: True)
    with Child(tmp_path / "kv", memory) as other:
        assert other.do("processes") == 2, "the parent's lock went with its child"
        assert other.do("save", speaker=1, tokens=tokens) == 7
        assert load(store, SPEAKERS[1], tokens)[0].tokens == 100
        other.do("flush")  # or the kill leaves what its mover was writing
    save(store, ME, [9, *tokens])
    got, wrong = load(store, ME, [9, *tokens])
    assert (got.tokens, wrong) == (101, 0)
    assert store.flush(60)
    assert store.verify().problems == []


def test_spawned_children_share_what_the_parent_saved(reopen: Reopen, tmp_path: Path, memory: Path) -> None:
    store = reopen()
    tokens = list(range(100))
    save(store, ME, tokens)
    with Child(tmp_path / "kv", memory) as one, Child(tmp_path / "kv", memory) as two:
        assert one.do("load", tokens=tokens)[:2] == [100, 0]
        assert two.do("save", tokens=[1, *tokens]) == 7
        assert one.do("load", tokens=[1, *tokens])[:2] == [101, 0]
        assert one.do("processes") == 3
        assert two.do("verify") == []
    assert load(store, ME, [1, *tokens])[0].tokens == 101


def test_counts_do_not_go_missing_while_they_are_being_shared(reopen: Reopen) -> None:
    store = reopen()
    keeper, tokens = store._core.keeper, list(range(10))
    stop = threading.Event()

    def share() -> None:
        while not stop.is_set():
            keeper.flush_counters()

    with ThreadPoolExecutor(1) as pool:
        sharing = pool.submit(share)
        try:
            for turn in range(1, 300):
                load(store, ME, tokens)
                assert store.stats().asked_tokens == 10 * turn
        finally:
            stop.set()
        sharing.result()


@pytest.mark.parametrize("thread", ["nvme-writer", "ram-writer", "mover", "prefetch", "populate", "keeper", "pages"])
def test_a_store_that_could_not_start_a_thread_can_be_opened_again(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """A process at its limit of threads: nothing stays open, and the next attempt finds the store as it was."""
    store = reopen()
    save(store, ME, range(48))
    assert store.flush(60)
    store.close()
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name.startswith(f"kvstore-{thread}"):
            raise RuntimeError("can't start new thread")
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        if thread in ("prefetch", "pages"):  # begun later, or done without
            reopen().close()
        else:
            with pytest.raises(BusyError, match="can't start"):
                reopen()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("kvstore")]
    store = reopen()
    assert load(store, ME, list(range(48)))[0].tokens == 48
    assert store.verify().problems == []


def test_a_store_whose_housekeeping_fails_at_the_start_can_be_opened_again(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Keeper) -> int:
        raise StorageError("the disk", "check it")

    with monkeypatch.context() as patched:
        patched.setattr(Keeper, "take_back_the_dead", fail)
        with pytest.raises(StorageError, match="the disk"):
            reopen()
    save(reopen(), ME, range(48))
    assert load(reopen(), ME, list(range(48)))[0].tokens == 48
