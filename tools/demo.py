"""``kvstore demo``: a conversation with a real model, ended and resumed by other processes, timed beside its limits.

Each turn runs in a process of its own, which loads the model and opens the store anew. This module starts the
processes, in an order in which a drift of the machine hits all kinds alike, and makes the figures. Must not import
torch: the model's memory belongs to the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any

import typer

from kvstore import errors
from kvstore.errors import KVStoreError
from kvstore.sizes import format_size
from kvstore.tools import model as models
from kvstore.tools import terminal
from kvstore.tools.demo_worker import Job, Role
from kvstore.tools.scratch import folder_on_disk, remove_store, scratch_folder

ROUNDS_MIN = 3
PAIRS_A_PROCESS = 2
ANSWER = 16
GB = 1e9


@dataclass(frozen=True, slots=True)
class Plan:
    """model: folder or name. folder: where the temporary store is made."""

    model: str
    folder: Path
    tokens: int
    new_tokens: int
    rounds: int
    threads: int


def demo(
    tokens: Annotated[int, typer.Option(help="Tokens that are stored and resumed.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="Tokens that the second request adds.")] = 16,
    rounds: Annotated[int, typer.Option(help="Processes of each kind.", min=ROUNDS_MIN)] = ROUNDS_MIN,
    model: Annotated[str | None, typer.Option(help="A folder, or a name on the hub.", show_default=False)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the model.", min=1, show_default=False)] = None,
    path: Annotated[
        Path | None, typer.Option(help="Folder for the temporary store; not on tmpfs.", show_default=False)
    ] = None,
    as_json: terminal.JsonOption = False,
) -> None:
    """End a chat with a real model, go on with it in new processes, and compare: cold, from ram, from nvme, and hot.

    The first run on a machine fetches and converts the model (SmolLM2-135M-Instruct). Takes two to three minutes.

    Example:

        kvstore demo --tokens 4096 --json
    """
    with terminal.progress() as step:
        chosen = model or str(models.obtain(step))
        plan = Plan(chosen, folder_on_disk(path), tokens, new_tokens, rounds, threads or len(os.sched_getaffinity(0)))
        figures = run(plan, step)
    if as_json:
        terminal.print_json(figures)
    else:
        show(figures)


def run(plan: Plan, step: terminal.Step) -> dict[str, Any]:
    """All processes, one after the other; returns the figures under the keys of the demo's JSON."""
    kinds: list[Role] = ["cold", "ram", "nvme"]
    total = 1 + plan.rounds * len(kinds)
    results: dict[Role, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with scratch_folder(plan.folder) as work:
        store, done = work / "store", 0

        def process(role: Role, path: Path, **more: Any) -> dict[str, Any]:
            nonlocal done
            job = Job(role, plan.model, str(path), plan.tokens, plan.new_tokens, plan.threads, **more)
            result = _process(job, work / "log", lambda text: step(f"demo: {role}, {text}", done, total))
            done += 1
            step("demo: done" if done == total else f"demo: {role} ended", done, total)
            return result

        begun = process("begin", store)
        history = tuple(begun["history"])
        for index in range(plan.rounds):
            for kind in kinds if index % 2 == 0 else reversed(kinds):
                more: dict[str, Any] = {"history": history, "answer": 0 if index else ANSWER}
                path = store
                if kind == "cold":
                    path = work / f"cold-{index}"
                else:
                    variants = plan.rounds * (PAIRS_A_PROCESS + 1)
                    first = index * (PAIRS_A_PROCESS + 1) + (variants if kind == "nvme" else 0)
                    more |= {"first": first, "pairs": PAIRS_A_PROCESS}
                results[kind].append(process(kind, path, **more))
                if kind == "cold":
                    remove_store(path)
    return figures_of(plan, results, begun)


def figures_of(plan: Plan, results: dict[Role, list[dict[str, Any]]], begun: dict[str, Any]) -> dict[str, Any]:
    """Medians, and each beside its limit: the hot request, plus moving the bytes at the medium's own rate."""
    kv_bytes: int = begun["kv_bytes"]
    cold, ram, nvme = (results[kind] for kind in ("cold", "ram", "nvme"))

    def middle(found: list[dict[str, Any]], key: str) -> float:
        return float(median(value for one in found for value in one[key]))

    hot = middle([*ram, *nvme], "hot_s")
    cold_s, ram_s, nvme_s = (middle(found, "ttft_s") for found in (cold, ram, nvme))
    memcpy_s, raw_s = middle(ram, "medium_s"), middle(nvme, "medium_s")
    answers = [found[0]["answer"] for found in (cold, ram, nvme)]
    return {
        "prompt_tokens": plan.tokens,
        "new_tokens": plan.new_tokens,
        "reused_tokens": min(value for one in (*ram, *nvme) for value in one["reused"]),
        "first_request_s": median(one["first_s"] for one in (*ram, *nvme)),
        "cold_ttft_s": cold_s,
        "hot_ttft_s": hot,
        "ram_ttft_s": ram_s,
        "nvme_ttft_s": nvme_s,
        "ram_over_limit": ram_s / (hot + memcpy_s),
        "nvme_over_limit": nvme_s / (hot + raw_s),
        "speedup_ram": cold_s / ram_s,
        "speedup_nvme": cold_s / nvme_s,
        "identical": all(len(answer) == ANSWER for answer in answers) and answers[0] == answers[1] == answers[2],
        "kv_bytes": kv_bytes,
        "store_bytes": begun["store_bytes"],
        "memcpy_gbps": kv_bytes / memcpy_s / GB,
        "raw_read_gbps": kv_bytes / raw_s / GB,
    }


def show(figures: dict[str, Any]) -> None:
    """The table for people."""

    def row(name: str, key: str, over: str, speedup: str) -> tuple[str, ...]:
        limit = f"{figures[over]:.2f} × its limit" if over else ""
        gain = f"{figures[speedup]:.0f} ×" if speedup else ""
        return name, f"{figures[key]:.3f} s", gain, limit

    rows = [
        row("cold: everything prefilled", "cold_ttft_s", "", ""),
        row("resumed from nvme", "nvme_ttft_s", "nvme_over_limit", "speedup_nvme"),
        row("resumed from ram", "ram_ttft_s", "ram_over_limit", "speedup_ram"),
        row("hot: the cache still live in the process", "hot_ttft_s", "", ""),
    ]
    title = f"Time to first token: {figures['prompt_tokens']} stored tokens and {figures['new_tokens']} new ones"
    out = terminal.console()
    out.print(terminal.table(title, ("", "median", "faster than cold", "compared"), rows, right=(1, 2)))
    out.print(f"Reused tokens: {figures['reused_tokens']} of {figures['prompt_tokens']}")
    same = "the same" if figures["identical"] else "DIFFERENT"
    out.print(f"Greedy answers of cold, ram and nvme: {same}")
    out.print(f"First request of a process: {figures['first_request_s']:.3f} s")
    size, kept = format_size(figures["kv_bytes"]), format_size(figures["store_bytes"])
    out.print(f"KV: {size}; in the store: {kept}")
    rates = figures["memcpy_gbps"], figures["raw_read_gbps"]
    out.print(f"This machine copies {rates[0]:.1f} GB/s in memory and reads {rates[1]:.1f} GB/s from this disk")


def _process(job: Job, log: Path, step: Any) -> dict[str, Any]:
    """Run one job. Raises what it raised, or KVStoreError with its last words when it died."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | (
        {"HF_HUB_OFFLINE": "1"} if Path(job.model).is_dir() else {}
    )
    with log.open("wb+") as errors_of_child:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvstore.tools.demo_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors_of_child,
            text=True,
            env=environment,
        )
        assert child.stdin is not None  # both are pipes
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(job.to_json())
                child.stdin.close()
            result = _read(child.stdout, step)
            child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            child.stdout.close()
        if result is not None:
            return result
        errors_of_child.seek(0)
        last = errors_of_child.read().decode(errors="replace").strip().splitlines()[-5:]
    raise KVStoreError(
        f"the demo's process {job.role!r} ended with code {child.returncode}: " + "\n".join(last),
        "kvstore doctor tells what this machine lacks; with less memory, use fewer --tokens",
    )


def _read(lines: IO[str], step: Any) -> dict[str, Any] | None:
    for line in lines:
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if "step" in said:
                step(said["step"])
            elif "error" in said:
                raise _raised(said["error"])
            elif "result" in said:
                found: dict[str, Any] = said["result"]
                return found
    return None


def _raised(said: dict[str, str]) -> KVStoreError:
    kind = getattr(errors, said["kind"], KVStoreError)
    made: KVStoreError = kind(said["problem"], said["remedy"])
    return made
