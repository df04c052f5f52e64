"""Many chats in little memory, engines that are killed, stores that are full, gone or on a failing disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Place, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CHATS = 8
FEW_PAGES = 20


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


def test_chats_in_little_memory_say_what_they_would_without_a_store(tiny: Path, plain: Engine, place: Place) -> None:
    with Engine(tiny, place.settings, num_gpu_blocks_override=FEW_PAGES, max_num_seqs=CHATS) as engine:
        got = chats(engine, 4)
        metrics = engine.do("metrics")
        assert engine.end() == 0
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:external_prefix_cache_hits"] > 0
    assert got == chats(plain, 4)
    with place.open() as store:
        assert store.verify().problems == []


def test_an_engine_killed_while_saving_leaves_a_sound_store(tiny: Path, plain: Engine, place: Place) -> None:
    asked = [prompt(900, 200 + at) for at in range(8)]
    with Engine(tiny, place.settings, processes=True) as engine:
        engine.tell("generate", prompts=asked, tokens=64)
        time.sleep(2.0)
        engine.kill()
    with place.open() as store:
        assert store.verify().problems == []
    with Engine(tiny, place.settings) as engine:
        answers = engine.generate(*asked)
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in plain.generate(*asked)]


@pytest.mark.parametrize("trouble", ["full", "not a store"])
def test_an_engine_serves_on_without_room(
    tiny: Path, plain: Engine, place: Place, tmp_path: Path, trouble: str
) -> None:
    settings: dict[str, Any] = {**place.settings, "path": str(tmp_path / "store")}
    if trouble == "full":
        settings |= {"ram": "9MiB", "nvme": 0, "ram_segment_bytes": "4MiB"}
    else:
        (tmp_path / "store").write_text("a file where the store should be")
    asked = [prompt(700, 300 + at) for at in range(6)]
    with Engine(tiny, settings) as engine:
        answers = engine.generate(*asked)
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in plain.generate(*asked)]
