"""How close a resumed request comes to its limit, and what the adapter costs where it does not help.

One process, one model: requests resumed from `ram` and from `nvme` beside the same request with the cache live in the
process; decoding with our growing cache layers beside stock ones; cold requests with the adapter beside cold ones
without it. Must not know how results are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvstore.errors import KVStoreError
from kvstore.events import Event, Saved
from kvstore.tools.media import Media
from kvstore.tools.ratios import Figure, Paired, Target, alternate, figure, paired
from kvstore.tools.scratch import scratch_store

if TYPE_CHECKING:
    from kvstore.tools.resume import Bench

OVERHEAD_TIMES = 8
"""So many more pairs of cold requests: the bound is three hundredths, and computing wavers by more than that."""
DECODE_TIMES = 3
"""So many more pairs of decoded answers, for the same reason."""
DECODE_TOKENS = 16
COLD_TOKENS = 1024
COLD_ANSWER = 16
RAM, NVME = Target(1.15, at_most=True), Target(1.25, at_most=True)
DECODE, OVERHEAD = Target(1.0, at_most=True), Target(0.03, at_most=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """model: folder or name. cold_tokens: length of the requests on which the overhead of saving is measured."""

    model: str
    folder: Path
    tokens: int
    new_tokens: int
    pairs: int
    threads: int
    cold_tokens: int = COLD_TOKENS


def measure(plan: Plan, step: Callable[[str, int, int | None], None]) -> dict[str, Any]:
    """All figures."""
    from kvstore.tools.resume import Bench

    step("load the model", 0, None)
    with (
        scratch_store(plan.folder) as path,
        Bench(plan.model, path, plan.tokens, plan.new_tokens, plan.threads) as bench,
    ):
        bench.attach()
        step("load the model", 1, 1)
        step("first turn", 0, None)
        history = bench.begin()
        bench.settle()
        step("first turn", 1, 1)
        with Media(bench.settings, bench.layout, bench.kv_bytes) as media:
            resumed = _resumed(bench, media, history, plan.pairs, step)
        decode = _decode(bench, history, plan.pairs, step)
        overhead = _overhead(bench, plan, step)
        return {
            "prompt_tokens": plan.tokens,
            "new_tokens": plan.new_tokens,
            "kv_bytes": bench.kv_bytes,
            "threads": plan.threads,
            "pairs": plan.pairs,
            **resumed,
            **decode,
            **overhead,
        }


def _resumed(bench: Bench, media: Media, history: list[int], pairs: int, step: Any) -> dict[str, Any]:
    """Resumed beside hot; the limit of a pair is its hot request plus its bytes at the medium's rate just then."""
    variants, reused = count(), []
    ids = bench.talk.request(history)
    live = bench.live(ids)

    def resume() -> float:
        answer = bench.request(bench.talk.request(history, next(variants)))
        reused.append(answer.reused)
        bench.settle()
        return answer.seconds

    def from_nvme() -> float:
        bench.empty_ram()
        return resume()

    def compare(name: str, ours: Callable[[], float], move: Callable[[], float], target: Target) -> Paired:
        limits: list[float] = []

        def limit() -> float:
            limits.append(move())
            return bench.hot(ids, live) + limits[-1]

        return paired(*alternate(ours, limit, pairs, lambda done: step(name, done, pairs)), target, rate=False)

    ram = compare("resume from ram", resume, media.copy_out, RAM)
    from_nvme()
    bench.rest()
    nvme = compare("resume from nvme", from_nvme, media.raw_read, NVME)
    return {
        "reused_tokens": min(reused),
        **_named("ram_over_limit", ram),
        **_named("nvme_over_limit", nvme),
    }


def _decode(bench: Bench, history: list[int], pairs: int, step: Any) -> dict[str, Any]:
    """A step of decoding: ours with growing layers against stock layers filled with the same KV."""
    from transformers import DynamicCache

    ids = bench.talk.request(history)
    live = bench.live(ids)
    live.crop(bench.tokens - live.get_seq_length())
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in live.layers]

    def steps(one: Callable[[int], float]) -> float:
        return (one(DECODE_TOKENS + 1) - one(1)) / DECODE_TOKENS

    def stock(new: int) -> float:
        cache = DynamicCache()
        for index, (keys, values) in enumerate(kept):
            cache.update(keys.clone(), values.clone(), index)
        return bench.request(ids, new, cache).seconds

    count = DECODE_TIMES * pairs
    both = paired(
        *alternate(
            lambda: steps(lambda new: bench.hot(ids, live, new)),
            lambda: steps(stock),
            count,
            lambda done: step("decode", done, count),
        ),
        DECODE,
        rate=False,
    )
    return _named("decode_over_stock", both)


def _overhead(bench: Bench, plan: Plan, step: Any) -> dict[str, Any]:
    """Cold requests, whole answers: attached (nothing found, all saved) against the plain model."""
    variants = iter(range(1, 1 << 20))
    inside: list[float] = []
    count = OVERHEAD_TIMES * plan.pairs

    def cold() -> float:
        spare = bench.talk.spare
        second, first = divmod(next(variants), len(spare))
        head = spare[first], spare[second % len(spare)]
        return bench.request([*head, *bench.talk.prompt[2 : plan.cold_tokens]], COLD_ANSWER).seconds

    def with_adapter() -> float:
        if not bench.attached:
            bench.attach()
        spent: list[float] = []
        stop = bench.store.events.subscribe(lambda event: _note(event, spent))
        seconds = cold()
        bench.settle()
        stop()
        if not spent:
            raise KVStoreError("nothing was saved", "this is a defect of the benchmark: report it")
        inside.append(sum(spent) / seconds)
        return seconds

    def without() -> float:
        bench.detach()
        return cold()

    both = paired(
        *alternate(with_adapter, without, count, lambda done: step("cold, with and without", done, count)),
        rate=False,
    )
    over = figure([ratio - 1 for ratio in both.ratio.samples], OVERHEAD)
    saves: Figure = figure(inside[1:], OVERHEAD)
    return {
        "save_overhead": over.median,
        "save_overhead_verdict": str(over.verdict),
        "save_overhead_samples": over.to_dict() | {"with_s": list(both.ours), "without_s": list(both.limit)},
        "save_call_share": saves.median,
        "save_call_share_verdict": str(saves.verdict),
        "save_call_share_samples": saves.to_dict(),
        "cold_tokens": plan.cold_tokens,
        "cold_answer_tokens": COLD_ANSWER,
    }


def _note(event: Event, spent: list[float]) -> None:
    if isinstance(event, Saved) and event.tier == "ram":
        spent.append(event.seconds)


def _named(name: str, both: Paired) -> dict[str, Any]:
    return {
        name: both.ratio.median,
        f"{name}_verdict": str(both.ratio.verdict),
        f"{name}_samples": both.to_dict() | {"median_ours_s": median(both.ours), "median_limit_s": median(both.limit)},
    }
