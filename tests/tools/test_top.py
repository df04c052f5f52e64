"""`kvstore top` tells what happened since the last look, and pressure in sentences."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.statistics import Stats, TierStats
from kvstore.tools import top as looking
from kvstore.tools.cli import app
from kvstore.tools.show import SKIPS
from kvstore.tools.watching import REMEDIES, between, pressure

RAM = TierStats("ram", 100, 50, 10, 5, 1, 100, 90, 10, 10)
QUIET = Stats("store", (RAM,), 0, {}, {}, {}, 0, 0, False, 1, 1, 0)


def after(**counters: int) -> Stats:
    return replace(QUIET, counters={name.replace("__", "."): amount for name, amount in counters.items()})


def test_an_interval_is_what_was_counted_in_it() -> None:
    before = after(asked__tokens=100, hit__ram__tokens=50, hit__ram__bytes=1000)
    now = after(
        asked__tokens=400,
        hit__ram__tokens=250,
        hit__ram__bytes=5000,
        miss__absent__tokens=100,
        save__ram__bytes=800,
        move__ram__nvme__bytes=600,
    )
    found = between(before, now, 2.0)
    assert (found.asked, found.hits, found.misses) == (300, {"ram": 200}, {"absent": 100})
    assert found.rates == {"load from ram": 2000, "save to ram": 400, "move ram to nvme": 300}
    assert pressure(now, found) == ["No pressure."]


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (replace(QUIET, mover_paused=True), "nvme is not written at present"),
        (after(fault__nvme__write=3), "3 faults of nvme: write"),
        (after(skip__ram__full__blocks=7), "Not saved to ram (full): 7 blocks."),
        (replace(QUIET, mover_bytes=1 << 30), "1 GiB wait for nvme"),
        (after(asked__tokens=5000, hit__ram__tokens=100), "Only 2% of the tokens"),
        (replace(QUIET, tiers=(replace(RAM, allocated_bytes=100, free_slots=0),)), "ram is full: what is saved next"),
        (
            replace(after(evict__ram__lru__blocks=4), tiers=(replace(RAM, allocated_bytes=100, free_slots=1),)),
            "ram is full: 4 blocks had to make room",
        ),
    ],
)
def test_pressure_is_told_in_sentences(now: Stats, says: str) -> None:
    assert says in " ".join(pressure(now, between(QUIET, now, 1.0)))


def test_every_reason_for_which_blocks_are_not_saved_has_a_remedy() -> None:
    assert REMEDIES.keys() == SKIPS.keys()
    for reason, remedy in REMEDIES.items():
        (told,) = pressure(QUIET, between(QUIET, after(**{f"skip__nvme__{reason}__blocks": 1}), 1.0))
        assert told == f"Not saved to nvme ({reason}): 1 block. {remedy}"


def test_a_look_at_a_store(made: Any) -> None:
    done = CliRunner().invoke(app, ["top", "--every", "0.1", "--json", "--path", str(made.path)])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [one["tokens"] for one in told["biggest"]] == [64, 40, 9, 7]
    assert told["pressure"] == ["No pressure."]
    assert told["stats"]["tiers"][0]["blocks"] == 9


def test_as_many_looks_as_asked_for(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    view = looking._view
    monkeypatch.setattr(looking, "_view", lambda *given: looks.append(given) or view(*given))  # type: ignore[func-returns-value]
    done = CliRunner().invoke(app, ["top", "--every", "0.1", "--count", "2", "--path", str(made.path)])
    assert done.exit_code == 0, done.output
    assert len(looks) == 2
    assert "biggest" in done.stdout
    assert done.stdout.count("No pressure.\n") == 2


def test_a_reader_of_a_pipe_gets_each_look_as_it_is_taken(made: Any) -> None:
    command = [sys.executable, "-m", "kvstore.tools.cli", "top", "--every", "0.1", "--path", str(made.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        looks = [line for line in iter(child.stdout.readline, "No pressure.\n") if line.strip()]
        child.stdout.close()  # and it ends by itself, since nobody reads any more
        assert child.wait(60) == 128 + signal.SIGPIPE
        assert child.stderr.read() == ""
    assert len(looks) > 4


def test_no_store_is_one_message(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["top", "--path", str(tmp_path / "absent")]).exit_code == 13
