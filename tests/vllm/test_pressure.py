"""Many chats in little memory, engines that are killed, stores that are full, read-only or on a failing disk."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine, Place, prompt, wait_for

from kvstore.rescan import dirty_moves

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
            while store.stats().tiers[0].blocks < 3 * BLOCKS // len(ASKED):
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


FAULTS = {
    "lying": {"nvme": [["READ", "FLIP"]]},
    "full": {"ram": [["ALLOCATE", "ENOSPC"]], "nvme": [["ALLOCATE", "ENOSPC"], ["WRITE", "ENOSPC"]]},
    "failing": {"nvme": [["READ", "EIO"], ["WRITE", "EIO"], ["SYNC", "EIO"]]},
}
COUNTED = {"lying": "miss.checksum.tokens", "failing": "miss.io.tokens"}
KNOWN = {name: [prompt(700, 300 + 10 * at + one) for one in range(3)] for at, name in enumerate(FAULTS)}


@pytest.fixture(scope="module")
def on_disk(survivor: Engine, killed: Place) -> None:
    """What the tests of faults ask for is in `nvme`: after faults nothing is written there for a while."""
    for prompts in KNOWN.values():
        survivor.generate(*prompts)
    survivor.generate(prompt(20, 9))
    with killed.open() as store:
        wait_for(lambda: not dirty_moves(store._core.ram, 1))


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_serves_on_while_its_media_fail(survivor: Engine, killed: Place, plain: Engine, fault: str) -> None:
    asked = [*KNOWN[fault], *(prompt(700, 400 + at) for at in range(12))]
    before = killed.counters()
    with killed.open() as store:
        store.evict(everything=True, tier="ram")
    survivor.do("reset")
    injected = survivor.do("injected")
    survivor.do("inject", **FAULTS[fault])
    answers = survivor.generate(*asked)
    wait_for(lambda: survivor.do("injected") > injected)
    survivor.do("inject")
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in plain.generate(*asked)]
    if fault in COUNTED:
        wait_for(lambda: killed.counters().get(COUNTED[fault], 0) > before.get(COUNTED[fault], 0))
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
