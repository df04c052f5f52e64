"""A fresh engine answers from what an earlier one left, the same as without a store, whatever becomes of the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, Engine, Place, prompt, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

LONG = prompt(2000, 1)
OTHERS = [prompt(300 + 37 * at, 10 + at) for at in range(6)]


@pytest.fixture(scope="module")
def left(tiny: Path, place: Place) -> Place:
    """A store that an engine left behind; it ended in order."""
    with Engine(tiny, place.settings) as engine:
        assert engine.generate(LONG, tokens=24)[0]["cached"] == 0
        engine.generate(*OTHERS)
        engine.generate(LONG, salts=["a"])
        engine.generate(prompt(20, 98))  # another step, in which the end of the one before is saved
        assert engine.end() == 0
    return place


@pytest.fixture(scope="module", params=["one process", "processes"])
def mode(request: pytest.FixtureRequest) -> str:
    """How vLLM runs: all in one process, or front end, engine core and worker apart."""
    return str(request.param)


@pytest.fixture(scope="module")
def fresh(mode: str, tiny: Path, left: Place) -> Iterator[Engine]:
    """Another engine over it."""
    with Engine(tiny, left.settings, processes=mode == "processes") as engine:
        yield engine


@pytest.fixture(scope="module")
def seed(mode: str) -> int:
    """Both modes share a store: what must not be in it yet is made from this."""
    return {"one process": 1000, "processes": 2000}[mode]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> dict[str, Any]:
    """The answer without a store, and its five best first tokens."""
    answer: dict[str, Any] = plain.generate(LONG, tokens=24, top=5)[0]
    return answer


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_a_long_prompt_is_answered_from_the_store(
    fresh: Engine, left: Place, expected: dict[str, Any], tier: str
) -> None:
    if tier == "nvme":
        left.drop("ram")
    else:
        left.bring(LONG)  # tests before may have ended a load in the middle
    fresh.do("reset")
    before = left.counters().get(f"hit.{tier}.tokens", 0)
    answer = fresh.generate(LONG, tokens=24, top=5)[0]
    assert answer["cached"] == len(LONG) - 1
    assert answer["ids"] == expected["ids"]
    assert answer["top"].keys() == expected["top"].keys()
    assert all(abs(answer["top"][token] - expected["top"][token]) < 1e-3 for token in answer["top"])
    fresh.generate(prompt(20, 99))  # another step, after which the counters of this one are shared
    wait_for(lambda: left.counters().get(f"hit.{tier}.tokens", 0) - before >= len(LONG) - 1)


def test_the_answer_of_the_last_turn_is_there_in_the_next(fresh: Engine, left: Place, seed: int) -> None:
    asked = prompt(500, seed)
    said = fresh.generate(asked, tokens=24)[0]["ids"]
    settle(fresh, left, [*asked, *said[:-1]])
    fresh.do("reset")
    # the last token of an answer was never run through the model
    assert fresh.generate([*asked, *said, *prompt(20, seed + 2)])[0]["cached"] == len(asked) + len(said) - 1


def test_what_diverges_inside_a_block_is_used_to_the_token(fresh: Engine, plain: Engine, seed: int) -> None:
    fresh.do("reset")
    asked = [*LONG[:1000], *prompt(50, seed + 3)]
    answer = fresh.generate(asked)[0]
    assert answer["cached"] == 1000
    assert answer["ids"] == plain.generate(asked)[0]["ids"]


def test_salts_do_not_see_each_other(fresh: Engine, left: Place, seed: int) -> None:
    fresh.do("reset")
    before = left.holders(LONG)
    assert fresh.generate(LONG, salts=[f"b {seed}"])[0]["cached"] == 0
    settle(fresh, left, LONG, before + 1)
    fresh.do("reset")
    assert [fresh.generate(LONG, salts=[salt])[0]["cached"] for salt in (f"b {seed}", "a")] == [len(LONG) - 1] * 2


@pytest.mark.parametrize("block", [0, 7])
def test_a_damaged_block_is_recomputed(fresh: Engine, left: Place, expected: dict[str, Any], block: int) -> None:
    before, holders = left.counters().get("miss.checksum.tokens", 0), left.holders(LONG)
    left.damage(LONG, block)
    fresh.do("reset")
    answer = fresh.generate(LONG, tokens=24)[0]
    assert answer["ids"] == expected["ids"]
    wait_for(lambda: left.counters().get("miss.checksum.tokens", 0) > before)
    fresh.do("reset")
    again = fresh.generate(LONG, tokens=24)[0]
    assert again["ids"] == expected["ids"]
    assert again["cached"] >= 128 * block
    with left.open() as store:  # a copy that no load came by is still damaged, and kept the right one from being saved
        store.verify(repair=True)
    fresh.do("reset")
    fresh.generate(LONG)
    settle(fresh, left, LONG, holders)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_requests_aborted_on_their_way_leave_nothing(fresh: Engine, left: Place, plain: Engine, steps: int) -> None:
    left.drop("ram")
    fresh.do("reset")
    fresh.do("aborted", prompts=[LONG, *OTHERS[:2]], steps=steps)
    fresh.do("reset")
    answers = fresh.generate(*OTHERS)
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in plain.generate(*OTHERS)]
    with left.open() as store:
        assert store.verify().problems == []


def test_metrics_tell_hits_by_tier(fresh: Engine) -> None:
    metrics = fresh.do("metrics")
    assert metrics["vllm:external_prefix_cache_hits"] > 0
    assert metrics["vllm:kvstore_hit_tokens{tier=ram}"] > 0
    assert metrics["vllm:kvstore_asked_tokens"] >= metrics["vllm:kvstore_hit_tokens{tier=ram}"]


TRANSFORMERS = """
import json, sys
import torch
from transformers import LlamaForCausalLM
import kvstore
from kvstore.adapters.transformers import attach

settings, model, ids = json.loads(sys.argv[1]), LlamaForCausalLM.from_pretrained(sys.argv[2]), json.loads(sys.argv[3])
with kvstore.open(**settings) as store, attach(model.eval(), store) as kv:
    model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    print(json.dumps(kv.last.reused_tokens))
"""


def transformers_reuse(tiny: Path, place: Place, ids: list[int]) -> int:
    """Tokens of a prompt that a new process with transformers did not have to compute."""
    told = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS, json.dumps(place.settings), str(tiny), json.dumps(ids)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    reused: int = json.loads(told.stdout.splitlines()[-1])
    return reused


def kvstore_tells(place: Place, command: str) -> dict[str, Any]:
    """What a command says of the store, as JSON."""
    told = subprocess.run(
        [sys.executable, "-m", "kvstore.tools.cli", command, "--path", str(place.path), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_RAM_DIRECTORY": str(place.shm)},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(told.stdout)
    return answer


def test_one_directory_serves_transformers_and_vllm_at_once(fresh: Engine, left: Place, tiny: Path, seed: int) -> None:
    ids = prompt(600, seed + 10)
    before = kvstore_tells(left, "stats")["hit_tokens"].get("ram", 0)
    assert fresh.generate(ids)[0]["cached"] == 0
    fresh.generate(prompt(20, seed + 11))
    assert transformers_reuse(tiny, left, ids) == 0, "their KV differs in its last bits, so it is not shared"
    fresh.do("reset")
    assert transformers_reuse(tiny, left, ids) == len(ids) - 1
    assert fresh.generate(ids)[0]["cached"] == len(ids) - 1
    fresh.generate(prompt(20, seed + 11))
    wait_for(lambda: kvstore_tells(left, "stats")["hit_tokens"].get("ram", 0) - before >= 2 * (len(ids) - 1))
    listed = kvstore_tells(left, "ls")["namespaces"]
    labels = {space["label"] for space in listed if space["tiers"]["ram"]["blocks"] and not space["salt"]}
    assert {tiny.name, f"{tiny.name} (vllm)"} <= labels


def test_after_a_reset_of_the_connector_nothing_older_is_used(fresh: Engine, left: Place) -> None:
    before = left.holders(LONG)
    assert fresh.do("reset", connector=True)
    assert fresh.generate(LONG)[0]["cached"] == 0
    settle(fresh, left, LONG, before + 1)
    fresh.do("reset")
    assert fresh.generate(LONG)[0]["cached"] == len(LONG) - 1


def settle(engine: Engine, place: Place, ids: list[int], holders: int = 1) -> None:
    """Let an engine save what its last requests left: in the step after them, and beside others."""
    engine.generate(prompt(20, 99))
    wait_for(lambda: place.holders(ids) >= holders)
