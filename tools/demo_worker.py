"""One process of the demo: reads a job, runs its requests on a fresh model and store, and prints what it measured.

Every line on standard output is one JSON object: ``{"step": …}`` while it works, ``{"result": …}`` or
``{"error": …}`` at the end. Must not know what the other processes do.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvstore.errors import KVStoreError

Role: TypeAlias = Literal["begin", "cold", "ram", "nvme"]


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does.

    role: ``begin`` has the first turn of the conversation and stores it; ``cold`` runs the second request without
    anything stored; ``ram`` and ``nvme`` resume it. first: number of this process's first variant. pairs: how often
    each measurement is taken. answer: tokens of an answer to compare, 0 for none.
    """

    role: Role
    model: str
    path: str
    tokens: int
    new_tokens: int
    threads: int
    history: tuple[int, ...] = ()
    first: int = 0
    pairs: int = 1
    answer: int = 0

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Raises ValueError or TypeError for anything else than a job."""
        values = json.loads(text)
        return cls(**{**values, "history": tuple(values["history"])})


@dataclass(slots=True)
class Result:
    """What one process measured: seconds, the reused tokens of every resumed request, and an answer to compare.

    kv_bytes: of the conversation's KV. store_bytes: of the slots that hold it on `nvme`.
    """

    first_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    hot_s: list[float] = field(default_factory=list)
    medium_s: list[float] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    kv_bytes: int = 0
    store_bytes: int = 0


def say(**line: Any) -> None:
    """One line to the process that started this one."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def run(job: Job) -> Result:
    """Do the job. Raises KVStoreError."""
    from kvstore.tools.resume import Bench

    say(step="load the model")
    with Bench(job.model, Path(job.path), job.tokens, job.new_tokens, job.threads) as bench:
        result = Result(kv_bytes=bench.kv_bytes)
        bench.attach()
        if job.role == "begin":
            say(step="first turn")
            result.history = bench.begin()
            bench.settle()
            result.store_bytes = sum(tier.used_bytes for tier in bench.store.stats().tiers if tier.name == "nvme")
        elif job.role == "cold":
            _cold(bench, job, result)
        else:
            _resumed(bench, job, result)
    return result


def _cold(bench: Any, job: Job, result: Result) -> None:
    result.first_s = bench.warm()
    bench.settle()
    say(step="request")
    answer = bench.request(bench.talk.request(job.history))
    result.ttft_s.append(answer.seconds)
    bench.detach()
    if job.answer:
        say(step="answer")
        result.answer = list(bench.request(bench.talk.request(job.history), job.answer).tokens)


def _resumed(bench: Any, job: Job, result: Result) -> None:
    """First request apart; then resumed and hot in turn, and the medium's own rate beside each pair."""
    from kvstore.tools.media import Media

    variant = iter(range(job.first, job.first + job.pairs + 1))

    def resumed() -> Any:
        bench.settle()
        if job.role == "nvme":
            bench.empty_ram()
        return bench.request(bench.talk.request(job.history, next(variant)))

    with Media(bench.settings, bench.layout, bench.kv_bytes) as media:
        limit = media.copy_out if job.role == "ram" else media.raw_read
        limit()
        say(step="first request")
        first = resumed()
        result.first_s = first.seconds
        bench.rest()
        hot_ids = bench.talk.request(job.history)
        live = bench.live(hot_ids)
        bench.hot(hot_ids, live)
        for index in range(job.pairs):
            say(step="request")
            if index % 2:
                result.hot_s.append(bench.hot(hot_ids, live))
            answer = resumed()
            if index % 2 == 0:
                result.hot_s.append(bench.hot(hot_ids, live))
            result.ttft_s.append(answer.seconds)
            result.reused.append(answer.reused)
            bench.settle()
            result.medium_s.append(limit())
        if job.answer:
            if job.role == "nvme":
                bench.empty_ram()
            answer = bench.request(hot_ids, job.answer)
            result.answer = list(answer.tokens)
            result.reused.append(answer.reused)
            bench.forget(hot_ids)


def main() -> None:
    """Read the job from standard input."""
    warnings.simplefilter("ignore")
    job = Job.from_json(sys.stdin.read())
    try:
        say(result=asdict(run(job)))
    except KVStoreError as error:
        say(error={"kind": type(error).__name__, "problem": error.problem, "remedy": error.remedy})
        sys.exit(error.exit_code)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
