"""What a page that somebody watches costs the engine beside it: resumed requests with `kvstore serve` and a page open,
beside the same without either.

One process, one model; server and page are processes of their own. A sample is a round of requests that takes longer
than the page waits between its slowest calls. Must not know how results are shown.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from kvstore.errors import KVStoreError, MissingExtraError
from kvstore.tools.ratios import Target, alternate, paired
from kvstore.tools.remote import Remote
from kvstore.tools.scratch import scratch_store
from kvstore.tools.served import child, first_line, served

COST = Target(1.03, at_most=True)
PROBES = 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPEN_S, LOOK_S = 60.0, 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """model: folder or name. seconds: what a round takes at least. browser: a real one opens the page."""

    model: str
    folder: Path
    tokens: int
    new_tokens: int
    pairs: int
    threads: int
    seconds: float
    browser: bool


def measure(plan: Plan, step: Callable[[str, int, int | None], None]) -> dict[str, Any]:
    """All figures. Raises MissingExtraError without what serves, KVStoreError where nothing was reused."""
    from kvstore.tools.resume import Bench

    browser = _browser() if plan.browser else None
    step("load the model", 0, None)
    with (
        scratch_store(plan.folder) as path,
        Bench(plan.model, path, plan.tokens, plan.new_tokens, plan.threads) as bench,
    ):
        bench.attach()
        step("load the model", 1, 1)
        step("first turn", 0, None)
        history = bench.begin()
        step("first turn", 1, 1)
        variants, reused = count(), []
        seen: list[dict[str, int]] = []

        def resumed(requests: int = 1) -> float:
            spent = 0.0
            for _ in range(requests):
                answer = bench.request(bench.talk.request(history, next(variants)))
                reused.append(answer.reused)
                bench.settle()
                spent += answer.seconds
            return spent

        a_round = max(1, math.ceil(plan.seconds / median(resumed() for _ in range(PROBES))))

        def watched() -> float:
            with _watched(path, browser) as page:
                spent = resumed(a_round)
            seen.append(page)
            return spent

        samples = alternate(
            watched, lambda: resumed(a_round), plan.pairs, lambda done: step("rounds", done, plan.pairs)
        )
        if min(reused) < plan.tokens:
            raise KVStoreError(
                f"of {plan.tokens} tokens only {min(reused)} were resumed", "the machine is too busy: try again later"
            )
        both = paired(*samples, COST, rate=False)
        return {
            "prompt_tokens": plan.tokens,
            "threads": plan.threads,
            "pairs": plan.pairs,
            "requests_a_round": a_round,
            "browser": browser,
            "page": {name: min(one[name] for one in seen) for name in seen[0]},
            "page_over_none": both.ratio.median,
            "page_over_none_verdict": str(both.ratio.verdict),
            "page_over_none_samples": both.to_dict(),
        }


@contextlib.contextmanager
def _watched(store: Path, browser: str | None) -> Iterator[dict[str, int]]:
    """A server of the store, and a page of it that is open. What is given gets the page's counts at the end."""
    counts: dict[str, int] = {}
    with served(store) as url:
        if browser is not None:
            with TemporaryDirectory(ignore_cleanup_errors=True) as folder, child(_opened(browser, folder, url)):
                counts["streams"] = _followed(url)
                yield counts
            return
        with child([sys.executable, "-m", "kvstore.tools.bench_page_worker", url]) as page:
            first_line(page)
            yield counts
            told, _ = page.communicate("")
            counts.update(json.loads(told.strip().splitlines()[-1]))


def _followed(url: str) -> int:
    """Streams that are open, once there is one: so far a browser has come when it has the page. Raises KVStoreError."""
    server, until = Remote(url), time.monotonic() + OPEN_S
    while not (streams := int(server.get("/v1/server")["streams"])):
        if time.monotonic() > until:
            raise KVStoreError("the browser did not open the page", "try it by hand, or leave --browser out")
        time.sleep(LOOK_S)
    return streams


def _opened(browser: str, folder: str, url: str) -> list[str]:
    quiet = ["--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-background-networking"]
    return [browser, "--headless=new", *quiet, f"--user-data-dir={folder}", "--remote-debugging-port=0", url]


def _browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise MissingExtraError(
            "there is no Chromium", "install one (apt-get install chromium), or leave --browser out"
        )
    return found
