"""Many chats in little memory, engines that are killed, stores that are full, read-only or on a failing disk."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Place, prompt, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CHATS = 8
FEW_PAGES = 20
ASKED = [prompt(900, 200 + at) for at in range(16)]
BLOCKS = len(ASKED) * 4
"""Blocks of 256 tokens in them."""


@pytest.fixture(scope="module")
def killed(tiny: Path, place: Place) -> Place:
    """A store whose engine was killed while it saved what it had been asked."""
    with Engine(tiny, place.settings, processes=True) as engine:
        engine.tell("generate", prompts=ASKED, tokens=64)
        with place.open() as store:
            until = time.monotonic() + 120
            while not store.stats().tiers[0].blocks:
                assert time.monotonic() < until, engine.log()[-4000:]
                time.sleep(0.001)
        engine.kill()
    return place


@pytest.fixture(scope="module")
def survivor(tiny: Path, killed: Place) -> Iterator[Engine]:
    """An engine over that store, with little memory, whose media fail when told to."""
    few = {"num_gpu_blocks_override": FEW_PAGES, "max_num_seqs": CHATS}
    with Engine(tiny, killed.settings, faulty=True, **few) as engine:
        yield engine


def test_an_engine_killed_while_saving_leaves_a_sound_store_with_hits(
    killed: Place, survivor: Engine, plain: Engine
) -> None:
    with killed.open() as store:
        assert store.verify().problems == []
        assert 0 < store.stats().tiers[0].blocks < BLOCKS
    answers = [survivor.generate(ids)[0] for ids in ASKED]
    assert any(answer["cached"] for answer in answers)
    assert [answer["ids"] for answer in answers] == [plain.generate(ids)[0]["ids"] for ids in ASKED]


def chats(engine: Engine, turns: int) -> list[list[int]]:
    """Eight chats at once, turn by turn; every question and answer in order."""
    told = [prompt(200 + 11 * at, 20 + at) for at in range(CHATS)]
    for turn in range(turns):
        answers = engine.generate(*told, tokens=40)
        told = [
            [*ids, *answer["ids"], *prompt(30, 100 * turn + at)]
            for at, (ids, answer) in enumerate(zip(told, answers, strict=True))
        ]
    return told


def test_chats_in_little_memory_say_what_they_would_without_a_store(
    survivor: Engine, killed: Place, plain: Engine
) -> None:
    before = survivor.do("metrics")
    got = chats(survivor, 4)
    metrics = survivor.do("metrics")
    for name in ("vllm:num_preemptions", "vllm:external_prefix_cache_hits"):
        assert metrics[name] > before.get(name, 0), name
    assert got == chats(plain, 4)
    with killed.open() as store:
        assert store.verify().problems == []


NO_SPACE = {"ram": [["ALLOCATE", "ENOSPC"]], "nvme": [["ALLOCATE", "ENOSPC"], ["WRITE", "ENOSPC"]]}
FAILING = {"nvme": [["READ", "EIO"], ["WRITE", "EIO"], ["SYNC", "EIO"]]}
LYING = {"nvme": [["READ", "FLIP"]]}


@pytest.mark.parametrize(
    ("faults", "counted"),
    [(NO_SPACE, None), (FAILING, "miss.io.tokens"), (LYING, "miss.checksum.tokens")],
    ids=["full", "failing", "lying"],
)
def test_an_engine_serves_on_while_its_media_fail(
    survivor: Engine, killed: Place, plain: Engine, faults: dict[str, Any], counted: str | None
) -> None:
    known = [prompt(700, 300 + at) for at in range(3)]
    fresh = [prompt(700, 400 + at) for at in range(12)]
    survivor.generate(*known)
    survivor.generate(prompt(20, 9))
    before = killed.counters()
    killed.drop("ram")
    survivor.do("reset")
    injected = survivor.do("inject", **faults)
    try:
        answers = survivor.generate(*known, *fresh)
    finally:
        injected = survivor.do("inject") - injected
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in plain.generate(*known, *fresh)]
    assert injected > 0
    if counted is not None:
        wait_for(lambda: killed.counters().get(counted, 0) > before.get(counted, 0))
    with killed.open() as store:
        assert store.verify().problems == []


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def test_an_engine_serves_on_where_the_store_is_read_only(tiny: Path, plain: Engine, place: Place) -> None:
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespaces, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not to be had here")
    place.open().close()
    asked = [prompt(700, 500 + at) for at in range(2)]
    with Engine(tiny, place.settings, within=[*namespaces, "sh", "-c", READ_ONLY, str(place.path)]) as engine:
        answers = engine.generate(*asked)
        assert "uncached (store)" in engine.log()
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in plain.generate(*asked)]
    assert [answer["cached"] for answer in answers] == [0, 0]
