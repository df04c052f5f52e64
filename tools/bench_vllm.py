"""What the vLLM connector gains and costs: first tokens cold, from the engine's own cache, from `ram` and from `nvme`.

The limit is the engine's own cache, plus the loaded bytes at the rate of memcpy or of the raw disk in the same run. All
sides alternate. Must not know vLLM: engines run in processes of their own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

import kvstore
from kvstore.adapters.temporaries import KEEP_BYTES, MAPPED_BYTES
from kvstore.errors import KVStoreError, MissingExtraError, NotFoundError
from kvstore.kv import HostKV
from kvstore.layout import DTYPE_BYTES, Layout
from kvstore.rescan import unwritten
from kvstore.settings import Settings
from kvstore.sizes import MIB
from kvstore.store import Store
from kvstore.tools.bench_tiers import SETTLE_S
from kvstore.tools.bench_vllm_worker import MARK, Connector
from kvstore.tools.media import Media
from kvstore.tools.ratios import Figure, Target, alternate, figure
from kvstore.tools.scratch import scratch_folder

TOKENS = 15 * 128 + 1
"""Whole pages and one token: with a longer rest to run, the rest is what is measured."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 192, 4
GROWING_PAIRS = 3
MISS_TIMES = 2
"""So many more pairs of throughput than asked for: the margin is a hundredth, and engines waver by two."""
RAM, NVME = Target(1.25, at_most=True), Target(1.4, at_most=True)
EXAMPLE, MISS = Target(1.0, at_most=True), Target(0.03, at_most=True)
FLUSH_S, FILL_BLOCKS = 120.0, 16
KEPT = {"GLIBC_TUNABLES": f"glibc.malloc.trim_threshold={KEEP_BYTES}:glibc.malloc.mmap_threshold={MAPPED_BYTES}"}
"""Every engine keeps its temporaries, as the connector arranges it where nobody else did: by chance some would, and the
difference would be the allocator's."""
Pairs: TypeAlias = tuple[list[float], list[float]]
"""Seconds with the store, and without."""
Step = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """model: a folder. folder: on the disk to be measured; nothing stays there. rounds: of first tokens. pairs: of
    throughput with and without the connector."""

    model: Path
    folder: Path
    rounds: int
    pairs: int


class Engine:
    """A worker process. Raises KVStoreError when it does not come up, with the end of what it said."""

    def __init__(self, model: Path, connector: Connector, extra: dict[str, Any], folder: Path) -> None:
        self.name, self.cached = connector, 0
        self._log = (folder / f"{connector}.log").open("w+")
        given = {"model": str(model), "connector": connector, "extra": extra, "longest": TOKENS + 127}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "kvstore.tools.bench_vllm_worker", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**KEPT, **os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            cwd=folder,
        )
        self._answer()

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int = 1) -> float:
        """Seconds until all are answered; ``cached`` then says how many of their tokens were not computed."""
        answer = self._do("ask", prompts=[list(ids) for ids in prompts], new_tokens=new_tokens)
        self.cached = int(sum(answer["cached"]))
        return float(answer["seconds"])

    def reused(self, ids: Sequence[int]) -> float:
        """Seconds until a prompt is answered whose whole pages are there. Raises KVStoreError if they are not."""
        seconds = self.ask([ids])
        if self.cached != TOKENS - 1:
            told = f"{self.name}: {self.cached} of {len(ids)} tokens were reused"
            raise KVStoreError(told, "run it again with nothing else running; should it stay so, report it")
        return seconds

    def reset(self) -> None:
        """Empty the engine's own cache."""
        self._do("reset")

    def _do(self, verb: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self._log.seek(0)
        raise KVStoreError(f"the engine ended: {self._log.read()[-2000:]}", "run it where vLLM works")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._log.close()


@dataclass(slots=True)
class Samples:
    """Seconds of every round."""

    cold: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    ram: list[float] = field(default_factory=list)
    nvme: list[float] = field(default_factory=list)
    example: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    raw_read: list[float] = field(default_factory=list)


def require_vllm() -> None:
    """Raises MissingExtraError where vLLM is not installed."""
    found = find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name is found too, without an origin
        raise MissingExtraError("vLLM is not installed here", "run it from .venv-vllm, which tools/test --vllm makes")


def measure(plan: Plan, step: Step) -> dict[str, Any]:
    """All figures. Raises MissingExtraError without vLLM, NotFoundError without the model."""
    require_vllm()
    vocabulary = _vocabulary(plan.model)
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(plan.folder))
        settings = Settings.resolve(scratch / "store", ram=1024 * MIB, nvme=2048 * MIB, hbm=0)
        store = stack.enter_context(kvstore.open(settings=settings))
        extra = {"path": str(settings.path), "ram": settings.ram, "nvme": settings.nvme, "gate": False}
        ours = stack.enter_context(Engine(plan.model, "kvstore", extra, scratch))
        example = {"shared_storage_path": str(scratch / "example")}
        with Engine(plan.model, "example", example, scratch) as other:
            samples, size = _first_tokens(ours, other, store, vocabulary, plan.rounds, step)
        with Engine(plan.model, "none", {}, scratch) as bare:
            prompts = _prompts(vocabulary)
            growing = _misses(ours, bare, prompts, GROWING_PAIRS, step)
            _fill(store, step)
            missed = _misses(ours, bare, prompts, MISS_TIMES * plan.pairs, step)
    return _figures(samples, growing, missed, size)


def _first_tokens(
    ours: Engine, example: Engine, store: Store, vocabulary: int, rounds: int, step: Step
) -> tuple[Samples, int]:
    samples = Samples()
    media: Media | None = None
    size = 0
    with ExitStack() as stack:
        for index in range(rounds + 1):  # the first one is thrown away: memory is touched, files are open
            kept = samples if index else Samples()
            ids = _ids(index, TOKENS, vocabulary)
            _ours(kept, ours, store, ids)
            if media is None:
                layout = _layout_of(store)
                size = layout.token_bytes() * (TOKENS - 1)
                media = stack.enter_context(Media(store.settings, layout, size))
            kept.memcpy.append(media.copy_out())
            kept.raw_read.append(media.raw_read())
            # ExampleConnector rounds otherwise when it looks than when it saves: of whole pages and one it finds none.
            longer = [*ids, ids[0]]
            example.ask([longer])
            example.reset()
            kept.example.append(example.reused(longer))
            if not index:
                time.sleep(SETTLE_S)  # from the first load out of `nvme` on, the pages of `ram` are joined
            step("first tokens", index, rounds)
    return samples, size


def _ours(kept: Samples, engine: Engine, store: Store, ids: Sequence[int]) -> None:
    """One prompt: cold, from the engine's own cache, from `ram`, from `nvme`."""
    kept.cold.append(engine.ask([ids]))
    engine.ask([ids[:8]])  # one more step, in which what the last one left is saved
    _await(store, ids)
    kept.local.append(engine.reused(ids))
    engine.reset()
    kept.ram.append(engine.reused(ids))
    engine.reset()
    store.evict(everything=True, tier="ram")
    kept.nvme.append(engine.reused(ids))


def _await(store: Store, ids: Sequence[int]) -> None:
    """Until a prompt is stored, and in `nvme`. Raises KVStoreError when it takes too long."""
    until = time.monotonic() + FLUSH_S
    spaces = [store.namespace_at(use.record.root) for use in store.namespaces()]
    while all(store.match(space, ids).tokens < len(ids) for space in spaces) or unwritten(store._core.ram):
        if time.monotonic() > until:
            raise KVStoreError(f"a prompt was not stored in {FLUSH_S:.0f} s", "is the disk well? kvstore doctor tells")
        time.sleep(0.01)
        spaces = [store.namespace_at(use.record.root) for use in store.namespaces()]


def _prompts(vocabulary: int) -> Iterator[list[list[int]]]:
    """Batches of prompts that nobody asked before."""
    for batch in itertools.count(10_000):
        yield [_ids(PROMPTS * batch + at, PROMPT_TOKENS, vocabulary) for at in range(PROMPTS)]


def _misses(ours: Engine, bare: Engine, prompts: Iterator[list[list[int]]], pairs: int, step: Step) -> Pairs:
    """Seconds of every pair, with the store and without, for prompts that all miss."""

    def timed(engine: Engine) -> float:
        seconds = engine.ask(next(prompts), NEW_TOKENS)
        if engine.cached:
            raise KVStoreError(f"{engine.cached} tokens were not missed", "this is a defect: report it")
        return seconds

    return alternate(partial(timed, ours), partial(timed, bare), pairs, lambda done: step("misses", done, pairs))


def _fill(store: Store, step: Step) -> None:
    """Bring both tiers to their budgets, as those of a store in use are: growing costs more, and is told apart."""
    layout = _layout_of(store)
    space = store.namespace(layout, salt="filling")
    shape = layout.groups[0][0]
    tokens = layout.block_tokens * FILL_BLOCKS
    kv = np.zeros((len(layout.groups[0]), 2, shape.heads, tokens, shape.k_dim), f"u{DTYPE_BYTES[layout.dtype]}")
    times = -(-store.settings.nvme // (tokens * layout.token_bytes()))
    for index in range(times):
        store.save(space, np.arange(tokens) + index * tokens, HostKV.stacked(layout, kv))
        store.flush(FLUSH_S)
        step("filling", index + 1, times)


def _layout_of(store: Store) -> Layout:
    return max((use.layout for use in store.namespaces()), key=lambda layout: layout.token_bytes())


def _figures(samples: Samples, growing: Pairs, missed: Pairs, size: int) -> dict[str, Any]:
    compared: dict[str, Figure] = {
        "ram_over_limit": figure(_over(samples.ram, samples.local, samples.memcpy), RAM),
        "nvme_over_limit": figure(_over(samples.nvme, samples.local, samples.raw_read), NVME),
        "ram_over_example": figure(_over(samples.ram, samples.example), EXAMPLE),
        "miss_overhead": figure([took - 1 for took in _over(*missed)], MISS),
        "miss_overhead_growing": figure([took - 1 for took in _over(*growing)]),
    }
    seconds = {
        "cold_ttft_s": samples.cold,
        "local_cache_ttft_s": samples.local,
        "ram_ttft_s": samples.ram,
        "nvme_ttft_s": samples.nvme,
        "example_connector_ttft_s": samples.example,
        "memcpy_s": samples.memcpy,
        "raw_read_s": samples.raw_read,
        "misses_s": missed[0],
        "misses_without_store_s": missed[1],
    }
    figures = {**{name: figure(taken) for name, taken in seconds.items()}, **compared}
    return {
        **{name: found.median for name, found in figures.items()},
        "samples": {name: found.to_dict() for name, found in figures.items()},
        "tokens": TOKENS,
        "bytes": size,
    }


def _over(ours: Iterable[float], *limits: Iterable[float]) -> list[float]:
    """Ours over the sum of the limits, round by round."""
    return [took / sum(parts) for took, *parts in zip(ours, *limits, strict=True)]


def _vocabulary(model: Path) -> int:
    try:
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotFoundError(f"{model} has no config.json with a vocab_size", "name a model's folder") from error


def _ids(seed: int, count: int, vocabulary: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(vocabulary // 8, vocabulary, count).tolist()
    return ids
