"""vLLM engines in processes of their own, told what to do line by line.

Run as ``python -m engines SETTINGS``; each line in is ``["verb", {arguments}]`` as JSON, each line out that
begins with a mark the answer; all else that the engine prints goes to a log that a failed start is explained with.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import kvstore
from kvstore.layout import Part
from kvstore.match import Match
from kvstore.store import Store
from kvstore.tiers.fault import Effect, FaultMedium, FaultRule, Operation
from kvstore.tiers.medium import Medium

ROOT = Path(__file__).resolve().parents[1]
PAYLOAD_BYTE = 5000
"""Of a slot: past its header, within the payload of every block of these models."""
MARK = "\x02kvstore\x03"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
}


class Engine:
    """A process with one vLLM engine.

    store: what goes into ``kv_connector_extra_config``; None for no connector. Without a word of it, the gate is off:
    what a tiny model runs again in no time would not be loaded. faulty: its tiers' media follow `inject`. within: the
    command that starts it.
    """

    def __init__(
        self,
        model: Path,
        store: Mapping[str, Any] | None,
        *,
        processes: bool = False,
        environment: Mapping[str, str] | None = None,
        connector: Mapping[str, Any] | None = None,
        faulty: bool = False,
        within: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the engine
        given = {"model": str(model), "store": None if store is None else {"gate": False, **store}, "engine": settings}
        given |= {"connector": dict(connector or {}), "faulty": faulty}
        self.said: list[str] = []
        seen = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        mode = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}
        self.process = subprocess.Popen(
            [*within, sys.executable, "-u", "-m", "engines", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENVIRONMENT, **mode, "PYTHONPATH": seen, **(environment or {})},
            cwd=ROOT,
            start_new_session=True,
        )
        assert self.answer() == "up"

    def tell(self, verb: str, **arguments: Any) -> None:
        """Send a command and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next answer. Raises EOFError, with the end of the log, when the engine has died."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            self.said.append(line)
        raise EOFError(f"the engine ended with {self.process.wait()}:\n{self.log()[-4000:]}")

    def do(self, verb: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer."""
        self.tell(verb, **arguments)
        return self.answer()

    def log(self) -> str:
        """What the engine wrote, beside its answers."""
        self._log.seek(0)
        return "".join(self.said) + self._log.read()

    def generate(self, *prompts: Sequence[int], tokens: int = 8, **more: Any) -> list[Any]:
        """Answers to prompts of token ids: dictionaries with ``cached``, ``ids``, ``top``."""
        answers: list[Any] = self.do("generate", prompts=[list(ids) for ids in prompts], tokens=tokens, **more)
        return answers

    def kill(self) -> None:
        """SIGKILL to the engine and every process it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self._close()

    def end(self) -> int:
        """Close its input, which ends it in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(120)
        self._close()
        return code

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._log.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


@dataclass
class Place:
    """A store's directories and settings, as engines and tests open it."""

    path: Path
    shm: Path

    @property
    def settings(self) -> dict[str, Any]:
        """For ``kv_connector_extra_config`` and for `kvstore.open`."""
        return {
            "path": str(self.path),
            "ram_directory": str(self.shm),
            "ram": "96MiB",
            "nvme": "256MiB",
            "ram_segment_bytes": "8MiB",
            "nvme_segment_bytes": "16MiB",
            "verify_share": 1,
        }

    def open(self) -> Store:
        """The store, in the test's process."""
        return kvstore.open(**self.settings)

    def counters(self) -> dict[str, int]:
        """What all processes have counted."""
        with self.open() as store:
            return dict(store.stats().to_dict()["counters"])

    def drop(self, tier: str) -> None:
        """Empty a tier, once everything is in the other."""
        with self.open() as store:
            store.flush(60)
            store.evict(everything=True, tier=tier)

    def bring(self, ids: Sequence[int]) -> None:
        """Have what is stored of ``ids`` without a salt in `ram`, whatever became of it there."""
        with self.open() as store:
            for use in store.namespaces():
                if not use.record.salt:
                    assert store.prefetch(store.match(store.namespace_at(use.record.root), ids)).wait(60)

    def matches(self, ids: Sequence[int], store: Store) -> list[Match]:
        """The match of ``ids`` in every namespace."""
        return [store.match(store.namespace_at(use.record.root), ids) for use in store.namespaces()]

    def matched(self, ids: Sequence[int], store: Store) -> Match:
        """The longest match of ``ids`` in any namespace."""
        return max(self.matches(ids, store), key=lambda match: match.tokens)

    def holders(self, ids: Sequence[int]) -> int:
        """How many namespaces have all of ``ids``."""
        with self.open() as store:
            return sum(match.tokens == len(ids) for match in self.matches(ids, store))

    def damage(self, ids: Sequence[int], block: int) -> None:
        """Flip a bit of one block's payload, in `ram` and in `nvme`."""
        with self.open() as store:
            core = store._core
            store.flush(60)
            match = self.matched(ids, store)
            piece = match.pieces[Part()][block]
            for tier in core.tiers:
                (entry,) = tier.find([piece.name])
                assert entry is not None
                size = next(s.slot_bytes for s in tier.segment_list() if s.number == entry.ref.segment)
                if tier.name == "ram":
                    core.ram.slot(entry.ref, size)[PAYLOAD_BYTE] ^= 1
                else:
                    with (self.path / "nvme" / f"{entry.ref.segment:08x}.seg").open("r+b") as file:
                        file.seek(entry.ref.slot * size + PAYLOAD_BYTE)
                        (byte,) = file.read(1)
                        file.seek(-1, os.SEEK_CUR)
                        file.write(bytes([byte ^ 1]))


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids."""
    ids: list[int] = np.random.default_rng(seed).integers(3, 500, length).tolist()
    return ids


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds: counters are shared once a second. Raises AssertionError after half a minute."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.2)


class _Served:
    """The engine in its own process."""

    def __init__(self, given: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.media: list[FaultMedium] = []
        if given["faulty"]:  # the connector opens its store by this name
            vars(kvstore)["open"] = partial(kvstore.open, wrap=self._wrapped)
        transfer = None
        if given["store"] is not None:
            wanted = {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "kvstore.adapters.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": given["store"],
                **given["connector"],
            }
            transfer = KVTransferConfig(**wanted)
        settings: dict[str, Any] = {
            "enforce_eager": True,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 2304,
            "disable_log_stats": False,
            "seed": 0,
            **given["engine"],
        }
        self.llm: Any = LLM(model=given["model"], kv_transfer_config=transfer, **settings)

    def _wrapped(self, medium: Medium) -> Medium:
        self.media.append(FaultMedium(medium))
        return self.media[-1]

    def inject(self, **faults: list[list[str]]) -> None:
        """From now on these faults, ``[operation, effect]`` by tier, and no others."""
        for medium in self.media:
            rules = faults.get(medium.name, [])
            medium.inject(FaultRule(Operation[operation], Effect[effect]) for operation, effect in rules)

    def injected(self) -> int:
        """How many faults there have been."""
        return sum(medium.injected() for medium in self.media)

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salts: list[str] | None = None,
        lora: str | None = None,
        top: int | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """Greedy answers to all prompts at once."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        wanted: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        for prompt, salt in zip(wanted, salts or [], strict=False):
            prompt["cache_salt"] = salt
        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=top, **sampling
        )
        began = time.perf_counter()
        outputs = self.llm.generate(
            wanted,
            parameters,
            use_tqdm=False,
            lora_request=LoRARequest("adapter", 1, lora) if lora else None,
        )
        spent = time.perf_counter() - began
        return [_told(output, spent) for output in outputs]

    def aborted(self, prompts: list[list[int]], steps: int) -> int:
        """Add requests, step a few times, abort all; how many were unfinished then."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        names = [f"abort-{at}-{time.monotonic_ns()}" for at in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, parameters)
        for _ in range(steps):
            engine.step()
        left = int(engine.get_num_unfinished_requests())
        engine.abort_request(names)
        for _ in range(1000):
            if not engine.has_unfinished_requests():
                break
            engine.step()
        return left

    def reset(self, connector: bool = False) -> bool:
        """Empty the engine's own prefix cache."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        """Counters of vLLM's, by name and labels."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            labels = ",".join(f"{name}={value}" for name, value in sorted(metric.labels.items()) if name not in _PLAIN)
            name = f"{metric.name}{{{labels}}}" if labels else metric.name
            if hasattr(metric, "value"):
                found[name] = found.get(name, 0.0) + metric.value
        return found


_PLAIN = ("engine", "model_name")


def _told(output: Any, spent: float) -> dict[str, Any]:
    answer = output.outputs[0]
    first = answer.logprobs[0] if answer.logprobs else {}
    return {
        "cached": output.num_cached_tokens,
        "ids": list(answer.token_ids),
        "top": {str(token): entry.logprob for token, entry in first.items()},
        "seconds": spent,
    }


def main() -> None:
    """Serve until the input ends."""
    served = _Served(json.loads(sys.argv[1]))
    print(MARK + json.dumps("up"), flush=True)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        print(MARK + json.dumps(getattr(served, verb)(**arguments)), flush=True)
    served.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
