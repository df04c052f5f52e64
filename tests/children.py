"""Processes that have the test's store open: told what to do, line by line, or left to churn until they are killed.

Run as ``python -m children PATH RAM_DIRECTORY``. Each line in is ``["verb", {arguments}]`` as JSON, each
line out the answer. Imports no torch and no pytest: a child is there in a quarter of a second.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from known_kv import SPEAKERS, Speaker, load, load_match, open_small, save

from kvstore.errors import KVStoreError
from kvstore.events import Event, Miss
from kvstore.kv import Gathering, HostKV, Run
from kvstore.store import Store

ROOT = Path(__file__).resolve().parents[1]


class Child:
    """A process with the store open. python: what to run instead of a plain interpreter (``unshare … python``)."""

    def __init__(
        self,
        path: Path,
        memory: Path,
        *,
        python: tuple[str, ...] = (sys.executable,),
        settings: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> None:
        seen = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": seen}
        self.process = subprocess.Popen(
            [*python, "-m", "children", str(path), str(memory), json.dumps(dict(settings or {}))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        if wait:
            assert self.answer() == "open"

    def tell(self, verb: str, **arguments: Any) -> None:
        """Send a command and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next answer. Raises EOFError when the child has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the child ended with {self.end()}")
        return json.loads(line)

    def do(self, verb: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer."""
        self.tell(verb, **arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Close its input, which makes it close the store, and wait."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # it was killed with a command unread
        return self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def conversations(seed: int, trunks: int = 4, length: int = 240, tail: int = 64) -> Callable[[], list[int]]:
    """Draws token sequences that share one of a few beginnings, the same in every process, and go on at random."""
    shared = np.random.default_rng(99).integers(0, 50, (trunks, length))
    random = np.random.default_rng(seed)

    def draw() -> list[int]:
        cut = int(random.integers(1, length))
        own = random.integers(0, 50, int(random.integers(0, tail))).tolist()
        return [*shared[int(random.integers(trunks))][:cut].tolist(), *own]

    return draw


def churn(path: Path, memory: Path, seed: int, seconds: float, settings: Mapping[str, Any]) -> dict[str, int]:
    """Save, load, prefetch and evict at random; what was counted. Ends early only by being killed."""
    changed = 0

    def watch(event: Event) -> None:
        nonlocal changed
        changed += event.tokens if isinstance(event, Miss) and event.cause == "changed" else 0

    draw, random = conversations(seed), np.random.default_rng(seed)
    counts = {"wrong": 0, "loaded": 0, "saved": 0, "evicted": 0, "asked": 0}
    with open_small(path, memory, observers=[watch], **settings) as store:
        print(json.dumps("open"), flush=True)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            speaker, tokens = SPEAKERS[int(random.integers(len(SPEAKERS)))], draw()
            dice = random.random()
            if dice < 0.45:
                counts["saved"] += save(store, speaker, tokens).new_blocks
            elif dice < 0.92:
                got, wrong = load(store, speaker, tokens)
                counts["asked"] += len(tokens)
                counts["loaded"] += got.tokens
                counts["wrong"] += wrong
            elif dice < 0.96:
                store.prefetch(store.match(store.namespace(speaker.layout, salt=speaker.salt), tokens))
            elif dice < 0.99:
                match = store.match(store.namespace(speaker.layout, salt=speaker.salt), tokens)
                counts["evicted"] += sum(store.evict(prefix=match).values())
            else:
                counts["evicted"] += sum(store.evict(everything=True, tier="ram").values())
        store.flush(60)
    return {**counts, "changed": changed}


KILLED = 42
"""Exit status of a child that died where it was told to."""


def die_at(target: str, when: str, tier: str | None, nth: int) -> None:
    """Let this process die at the ``nth`` call of ``module:attribute``, "before" or "after" it.

    tier: only calls whose first argument has this name.
    """
    module_name, path = target.split(":")
    *outer, last = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), itertools.count(1)

    @functools.wraps(real)
    def dying(*arguments: Any, **named: Any) -> Any:
        chosen = (tier is None or getattr(arguments[0], "name", None) == tier) and next(calls) == nth
        if chosen and when == "before":
            os._exit(KILLED)
        answer = real(*arguments, **named)
        if chosen:
            os._exit(KILLED)
        return answer

    setattr(owner, last, dying)


def die_when_files_change(places: list[Path], nth: int) -> None:
    """Let this process die at the ``nth`` call of the system's after which something in these places has changed."""
    last, seen = files_in(places), 0

    def watch(_frame: FrameType, event: str, called: Any) -> None:
        nonlocal last, seen
        if event != "c_return" or called.__name__ in ("fspath", "stat", "lstat"):
            return
        if (getattr(called, "__module__", None) or type(called.__self__).__module__) in ("posix", "io", "_io"):
            now = files_in(places)
            if now != last:
                last, seen = now, seen + 1
                if seen == nth:
                    os._exit(KILLED)

    sys.setprofile(watch)


def files_in(places: list[Path]) -> dict[str, tuple[int, int, int]]:
    """Every file and directory there: its mode, size and allocated blocks."""
    found: dict[str, tuple[int, int, int]] = {}
    waiting = [os.fspath(place) for place in places]
    while waiting:
        directory = waiting.pop()
        try:
            entries = list(os.scandir(directory))
        except FileNotFoundError:
            continue
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            found[entry.path] = (status.st_mode, status.st_size, status.st_blocks)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
    return found


def live(store: Store) -> None:
    """A life that comes by every place where a process can die."""
    plain, narrow = SPEAKERS[0], SPEAKERS[3]
    for first in range(0, 10_000, 1000):
        save(store, plain, range(first, first + 180))
        store.flush(60)
    store.evict(everything=True, tier="ram")
    match = store.match(store.namespace(plain.layout), range(9000, 9180))
    load_match(store, plain, list(range(9000, 9180)), match)
    for first in range(20_000, 30_000, 1000):
        save(store, narrow, range(first, first + 700))
        store.flush(60)
    store.evict(prefix=store.match(store.namespace(narrow.layout, salt="a"), range(29_000, 29_100)))
    save(store, plain, range(40_000, 40_100))
    store.pin("x", store.namespace(plain.layout), range(40_000, 40_100))
    store.flush(60)


class Nursery:
    """A process that has imported kvstore and opened nothing; it forks writers, so that hundreds are cheap."""

    def __init__(self) -> None:
        self._child = Child(Path(), Path(), settings={"nursery": True}, wait=False)

    def writer(self, path: Path, memory: Path, seed: int, **settings: Any) -> int:
        """The process id of a new writer, which opens the store and churns until it is killed."""
        return int(self._child.do("writer", path=str(path), memory=str(memory), seed=seed, settings=settings))

    def kill(self, pid: int) -> None:
        """SIGKILL, and wait until it is gone."""
        self._child.do("kill", pid=pid)

    def death(self, path: Path, memory: Path, point: tuple[str, str, str | None, int]) -> int:
        """The exit status of a process that lives until it comes to a point of `die_at`."""
        return int(self._child.do("die", path=str(path), memory=str(memory), point=point))

    def death_in_opening(self, path: Path, memory: Path, nth: int, **settings: Any) -> int:
        """The exit status of a process that opens and closes, and dies after so many changes of the store's files."""
        return int(self._child.do("die opening", path=str(path), memory=str(memory), nth=nth, settings=settings))

    def close(self) -> None:
        """End the nursery."""
        self._child.end()


def nurse() -> None:
    """The nursery's own loop."""
    for line in sys.stdin:
        verb, given = json.loads(line)
        if verb == "kill":
            os.kill(given["pid"], signal.SIGKILL)
            os.waitpid(given["pid"], 0)
            print("null", flush=True)
            continue
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            path, memory = Path(given["path"]), Path(given["memory"])
            if verb == "die":
                die_at(*given["point"])
                with open_small(path, memory) as store:
                    live(store)
            elif verb == "die opening":
                die_when_files_change([path, memory], given["nth"])
                open_small(path, memory, **given["settings"]).close()
            else:
                churn(path, memory, given["seed"], 600.0, given["settings"])
            os._exit(0)
        answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if verb.startswith("die") else pid
        print(json.dumps(answer), flush=True)


class SlowKV(HostKV):
    """A source that says when it is read from a token on, and waits for a line."""

    at: int
    waited = False

    def gathering(self, start: int, run: Run) -> Gathering:
        if start >= self.at and not self.waited:
            self.waited = True
            print(json.dumps("reached"), flush=True)
            sys.stdin.readline()
        return super().gathering(start, run)


def save_slowly(store: Store, speaker: Speaker, tokens: list[int], at: int) -> Any:
    """Save, and wait at a token."""
    source = SlowKV.layered(speaker.layout, speaker._layers(tokens, next(iter(speaker.layout.parts()))))
    assert isinstance(source, SlowKV)
    source.at = at
    return store.save(store.namespace(speaker.layout, salt=speaker.salt), tokens, source)


def main(path: Path, memory: Path, settings: dict[str, Any]) -> None:
    """Open, then do as told until the input ends."""
    if "nursery" in settings:
        nurse()
        return
    if "churn" in settings:
        seed, seconds = settings.pop("churn")
        print(json.dumps(churn(path, memory, seed, seconds, settings)), flush=True)
        return
    try:
        store = open_small(path, memory, **settings)
    except KVStoreError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
        return
    print(json.dumps("open"), flush=True)
    held: Any = None
    with store:
        for line in sys.stdin:
            verb, given = json.loads(line)
            speaker, tokens = SPEAKERS[given.get("speaker", 0)], given.get("tokens", [])
            space = store.namespace(speaker.layout, salt=speaker.salt)
            answer: Any = None
            match verb:
                case "save":
                    answer = save(store, speaker, tokens).new_blocks
                case "save slowly":
                    answer = save_slowly(store, speaker, tokens, given["at"]).new_blocks
                case "load":
                    got, wrong = load(store, speaker, tokens)
                    answer = [got.tokens, wrong, got.stop]
                case "match":
                    held = store.match(space, tokens)
                    answer = held.tokens
                case "load match":
                    got, wrong = load_match(store, speaker, tokens, held)
                    answer = [got.tokens, wrong, got.stop]
                case "lease":
                    answer = store.lease(held).tokens
                case "evict":
                    answer = store.evict(everything=True)
                case "flush":
                    answer = store.flush(60)
                case "processes":
                    answer = store.stats().processes
                case "die":
                    die_at(*given["point"])
                case "verify":
                    answer = store.verify().problems
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
