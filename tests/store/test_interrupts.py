"""Ctrl-C in the middle of a copy or a read: the caller hears of it when nothing is written for it any more."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, ModuleType
from typing import Any

import pytest
from known_kv import PLAIN, SPEAKERS, load, save

from kvstore import loading, saving
from kvstore.copying import CopyThreads, Job, wait_all
from kvstore.errors import BusyError, LayoutError
from kvstore.kv import Bytes, Gathering, Run, Told
from kvstore.layout import Layout
from kvstore.store import Store
from kvstore.tiers import medium, reservation, segments
from kvstore.tiers.medium import Medium
from kvstore.transaction import Database

SPEAKER = SPEAKERS[0]


class CtrlC:
    """Sends this process SIGINT, and returns when the main thread was interrupted by it."""

    def __init__(self) -> None:
        self._seen = threading.Event()

    def __call__(self) -> None:
        self._seen.clear()
        for _ in range(100):  # one that comes just before the main thread begins to wait does not wake it
            os.kill(os.getpid(), signal.SIGINT)
            if self._seen.wait(0.3):
                return
        raise AssertionError("the main thread was never interrupted")

    def arrived(self, number: int, frame: FrameType | None) -> None:
        self._seen.set()
        raise KeyboardInterrupt


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    sender = CtrlC()
    before = signal.signal(signal.SIGINT, sender.arrived)
    yield sender
    signal.signal(signal.SIGINT, before)


class Interrupted:
    """A medium whose next read is under way while the main thread is interrupted. ended: whether it came to its end."""

    def __init__(self, inner: Medium, ctrl_c: CtrlC) -> None:
        self._inner, self._ctrl_c, self.name = inner, ctrl_c, inner.name
        self.armed = self.ended = False
        self.waited_for = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, segment: int, offset: int, into: Sequence[Bytes]) -> None:
        armed, self.armed = self.armed, False
        if armed:
            assert self.waited_for.wait(30)
            self._ctrl_c()
            self._ctrl_c()
        self._inner.read(segment, offset, into)
        self.ended = self.ended or armed


class Jobs(list[Job[Any]]):
    """Jobs that tell when somebody begins to look at them."""

    def __init__(self, jobs: Sequence[Job[Any]], looked: threading.Event) -> None:
        super().__init__(jobs)
        self._looked = looked

    def __iter__(self) -> Iterator[Job[Any]]:
        self._looked.set()
        return super().__iter__()


def test_a_load_that_is_interrupted_ends_when_its_reads_have(
    reopen: Callable[..., Store], ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `ram` slots are given back then: a read that went on would write into somebody else's block."""
    media: dict[str, Interrupted] = {}

    def wrap(medium: Medium) -> Medium:
        return media.setdefault(medium.name, Interrupted(medium, ctrl_c))

    store = reopen(wrap=wrap)
    save(store, SPEAKER, range(48))
    assert store.flush(60)
    store.evict(everything=True, tier="ram")
    nvme = media["nvme"]
    nvme.armed = True

    def waiting(jobs: Sequence[Job[Any]], *, help_out: bool = True) -> list[Any]:
        return wait_all(Jobs(jobs, nvme.waited_for), help_out=help_out) if jobs else []

    monkeypatch.setattr(loading, "wait_all", waiting)
    with pytest.raises(KeyboardInterrupt):
        load(store, SPEAKER, range(48))
    assert nvme.ended
    others = [range(first, first + 48) for first in range(1000, 1200, 50)]
    for tokens in others:
        save(store, SPEAKER, tokens)
    for tokens in (range(48), *others):
        loaded, wrong = load(store, SPEAKER, list(tokens))
        assert (loaded.tokens, wrong) == (48, 0)
    assert store.verify().problems == []


@pytest.mark.parametrize(
    ("module", "name"), [(reservation, "reserve"), (segments, "plan_growth"), (medium, "allocate_file")]
)
def test_a_save_that_is_interrupted_leaves_nothing_reserved(
    reopen: Callable[..., Store], ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """What its transaction reserved is given back, though nobody waits for it any more: else nobody could save it."""
    store = reopen(nvme=None)
    ram = store._core.ram
    save(store, SPEAKER, range(16))
    ram._grower.close()
    kv = SPEAKER.made(range(640))
    real, armed = getattr(module, name), [True]

    def interrupted(*arguments: Any) -> Any:
        if armed and threading.current_thread().name in ("kvstore-ram-writer", "MainThread"):
            armed.clear()
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)
            ctrl_c()
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, interrupted)
        patched.setattr(ram._grower, "ahead", lambda slot_bytes: None)
        with pytest.raises(KeyboardInterrupt):
            store.save(store.namespace(SPEAKER.layout), range(640), kv)
        assert not armed
        for _ in range(2):  # behind the interrupted transaction, then behind what gives back
            ram.index.write(lambda txn: None)
    with ram.index.read() as txn:
        assert txn.count(Database.WRITING) == 0
    assert not [segment for segment in ram.segment_list() if segment.allocating]
    assert store.save(store.namespace(SPEAKER.layout), range(640), kv).skipped_blocks == 0
    loaded, wrong = load(store, SPEAKER, list(range(640)))
    assert (loaded.tokens, wrong) == (640, 0)
    assert store.verify().problems == []


class Failing:
    """A buffer whose first block cannot be read, while the next is being read. ready: when it may be interrupted."""

    capacity, device = 1 << 20, None

    def fits(self, layout: Layout, group: int) -> bool:
        return True

    def __init__(self, ctrl_c: CtrlC) -> None:
        self._ctrl_c = ctrl_c
        self.begun, self.ready, self.ended = threading.Event(), threading.Event(), False

    def gather(self, start: int, run: Run) -> None:
        raise AssertionError("a save gathers payload by payload")

    scatter = gather

    def gathering(self, start: int, run: Run) -> Gathering:
        def gather(at: int, told: Told) -> None:
            if start:
                self.begun.set()
                assert self.ready.wait(30)
                self._ctrl_c()
                self.ended = True
            else:
                raise LayoutError("the engine's memory is gone", "try again")

        return gather


def test_a_ctrl_c_while_a_failed_save_gives_back_leaves_nothing_reserved(
    reopen: Callable[..., Store], ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once nothing is written any more: else nobody could save these blocks until the process ended."""
    store, buffer = reopen(nvme=None), Failing(ctrl_c)
    monkeypatch.setattr(saving, "FIRST_BATCH", 1)
    monkeypatch.setattr(saving, "BATCH", 1)
    saver = store._core.saver
    real = saver._give_up

    def give_up(under_way: Any) -> None:
        if len(under_way) > 1:
            assert buffer.begun.wait(30)
            buffer.ready.set()
        real(under_way)

    monkeypatch.setattr(saver, "_give_up", give_up)
    with pytest.raises(KeyboardInterrupt):
        store.save(store.namespace(SPEAKER.layout), range(48), buffer)
    assert buffer.ended
    ram = store._core.ram
    ram.index.write(lambda txn: None)
    with ram.index.read() as txn:
        assert txn.count(Database.WRITING) == 0


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("what", ["save", "load from ram", "load from nvme"])
def test_a_ctrl_c_while_work_is_handed_to_a_thread_waits_for_that_work(
    reopen: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, what: str, begun: bool
) -> None:
    """Whether or not the thread has begun it: it would go on in slots that are others', or in the engine's memory."""
    store = reopen()
    save(store, SPEAKER, range(48))
    assert store.flush(60)
    if what == "load from nvme":
        store.evict(everything=True, tier="ram")
    running: list[object] = []
    started, submit, init, armed = threading.Event(), ThreadPoolExecutor.submit, Job.__init__, [True]

    def slowly(job: Job[Any], work: Callable[[], Any]) -> None:
        def run() -> Any:
            running.append(job)
            started.set()
            time.sleep(0.2)
            try:
                return work()
            finally:
                running.remove(job)

        init(job, run)

    def interrupted(pool: ThreadPoolExecutor, *work: Any) -> Any:
        if begun:
            submit(pool, *work)
        if armed and (not begun or started.wait(30)):
            armed.clear()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Job, "__init__", slowly)
        patched.setattr(ThreadPoolExecutor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(store, SPEAKER, range(100, 148)) if what == "save" else load(store, SPEAKER, range(48))
        assert running == []
    for tokens in (range(48), range(100, 148), range(200, 248)):
        save(store, SPEAKER, tokens)
        loaded, wrong = load(store, SPEAKER, list(tokens))
        assert (loaded.tokens, wrong) == (48, 0)
    assert store.verify().problems == []


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_an_opening_that_ends_at_any_of_its_threads_leaves_none(
    reopen: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, error: BaseException, started: bool
) -> None:
    """And the store can be opened. A thread that is not to be had is an error of the store's."""
    start, expected = threading.Thread.start, BusyError if isinstance(error, RuntimeError) else KeyboardInterrupt
    for number in range(30):
        left = number

        def interrupted(thread: threading.Thread) -> None:
            nonlocal left
            left -= 1
            if left != -1 or started:
                start(thread)
            if left == -1:
                raise error

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            try:
                reopen().close()
            except expected:
                pass
            else:
                assert number > 3
                break
        for thread in [thread for thread in threading.enumerate() if thread.name.startswith("kvstore")]:
            thread.join(10)
            assert not thread.is_alive(), thread.name
    store = reopen()
    assert store.stats().processes == 1
    save(store, SPEAKER, range(48))
    assert load(store, SPEAKER, range(48))[0].tokens == 48


class Entered:
    """A condition; who enters it for the nth time is interrupted just before."""

    def __init__(self, condition: threading.Condition, left: int) -> None:
        self._condition, self._left = condition, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._condition, name)

    def __enter__(self) -> bool:
        if threading.current_thread() is threading.main_thread():
            self._left -= 1
            if self._left == -1:
                raise KeyboardInterrupt
        return self._condition.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._condition.__exit__(*error)


@pytest.mark.parametrize("whose", ["store", "device"])
def test_a_ctrl_c_at_the_beginning_or_the_end_of_a_call_keeps_no_store_open(
    reopen: Callable[..., Store], whose: str
) -> None:
    torch = pytest.importorskip("torch")
    from kvstore.tiers.devicekv import DeviceKV

    store = reopen(hbm="4MiB", device="cpu")
    core, layout = store._core, PLAIN
    assert core.hbm is not None
    owner, name = (core, "_unused") if whose == "store" else (core.hbm, "_state")
    real = getattr(owner, name)
    layer = layout.groups[0][0]
    shape = (len(layout.groups[0]), 2, layer.heads, 48, layer.k_dim)
    tensor = torch.zeros(shape, dtype=getattr(torch, layout.dtype))
    store.save(store.namespace(layout), range(48), DeviceKV.stacked(layout, tensor))
    ended = 0
    for number in range(30):
        setattr(owner, name, Entered(real, number))
        try:
            store.load(store.match(store.namespace(layout), range(48)), DeviceKV.stacked(layout, tensor))
            ended += 1
        except KeyboardInterrupt:
            continue
        finally:
            setattr(owner, name, real)
    assert 0 < ended < 29
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("handed", [True, False])
def test_a_prefetch_whose_start_is_interrupted_is_over(
    reopen: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, handed: bool
) -> None:
    """Another one for the same blocks would join it, and wait for ever."""
    store = reopen()
    save(store, SPEAKER, range(48))
    assert store.flush(60)
    store.evict(everything=True, tier="ram")
    match, submit = store.match(store.namespace(SPEAKER.layout), range(48)), ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, *work: Any) -> Any:
        if handed:
            submit(pool, *work)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.prefetch(match)
    prefetch = store.prefetch(match)
    assert prefetch.wait(30)
    assert prefetch.tokens == 48


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BusyError("the ram index is locked", "try again")])
def test_a_lease_that_is_not_had_for_all_parts_keeps_none(
    reopen: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    store = reopen()
    speaker = next(one for one in SPEAKERS if len(list(one.layout.parts())) > 1)
    save(store, speaker, range(48))
    match = store.match(store.namespace(speaker.layout, salt=speaker.salt), range(48))
    ram = store._core.ram
    real, left = ram.index.write, [1]

    def write(*given: Any, **more: Any) -> Any:
        if left.pop() if left else False:
            return real(*given, **more)
        if isinstance(error, KeyboardInterrupt):  # done all the same, and nobody hears of it
            more["unheard"](real(*given, **more))
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ram.index, "write", write)
        with pytest.raises(type(error)):
            store.lease(match)
    ram.index.write(lambda txn: None)
    with ram.index.read() as txn:
        assert txn.count(Database.LEASES) == 0


@pytest.mark.parametrize("help_out", [True, False])
def test_an_interrupted_wait_ends_after_its_jobs(ctrl_c: CtrlC, help_out: bool) -> None:
    threads = CopyThreads(1, 1)
    began: threading.Event = threading.Event()
    ended: list[bool] = []

    def work() -> None:
        assert began.wait(30)
        ctrl_c()
        ctrl_c()
        ended.append(True)

    jobs: list[Job[None]] = []
    threads.copy(work, jobs)
    with pytest.raises(KeyboardInterrupt):
        wait_all(Jobs(jobs, began), help_out=help_out)
    assert ended == [True]
    threads.close()


def test_a_job_that_is_interrupted_anywhere_can_still_be_waited_for() -> None:
    """At every instruction of `Job.run` in turn: a job is done then, or free for another thread."""
    for instruction in range(1000):
        job = Job(lambda: 7)
        if not _interrupted_at(job, instruction):
            assert instruction > 20
            return
        with ThreadPoolExecutor(1) as another:
            another.submit(job.run).result(30)
        assert job.done(), f"interrupted at {instruction}"


def _interrupted_at(job: Job[int], instruction: int) -> bool:
    left = instruction

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code is not Job.run.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job.run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return left < 0
