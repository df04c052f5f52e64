"""The commands that look after a store: what they print, what they change, and how they fail."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.events import Cause, Skipped, SkipReason
from kvstore.kv import HostKV
from kvstore.tools import standing
from kvstore.tools.cli import app
from kvstore.tools.show import CAUSES, SKIPS


def run(*words: str | Path, code: int = 0, answer: str | None = None) -> str:
    done = CliRunner().invoke(app, list(map(str, words)), input=answer)
    assert done.exit_code == code, done.output
    return done.stdout


def run_json(*words: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json", code=code))
    return found


def test_stats_counts_what_is_stored(made: Any) -> None:
    tiers = {tier["name"]: tier for tier in run_json("stats", "--path", made.path)["tiers"]}
    blocks = sum(-(-length // made.layout.block_tokens) for lengths in made.lengths.values() for length in lengths)
    assert tiers["nvme"]["blocks"] == tiers["ram"]["blocks"] == blocks
    assert "nvme" in run("stats", "--path", made.path)


def test_stats_says_why_tokens_missed(made: Any) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(made.layout, salt="first", label="first")
        store.load(store.match(space, [1, 2, 3]), HostKV.stacked(made.layout, np.zeros((2, 2, 2, 3, 16), np.uint32)))
        store.events.emit(Skipped("nvme", "queue full", 5))
    text = run("stats", "--path", made.path)
    assert "never stored, or pushed out since" in text
    assert "nvme is slower than what is saved" in text


def test_every_cause_and_reason_is_explained() -> None:
    assert set(CAUSES) == {cause.value for cause in Cause}
    assert set(SKIPS) == {reason.value for reason in SkipReason}


@pytest.mark.parametrize("words", [["ls", "first"], ["evict", "--all", "--dry-run"], ["show", "40,100"]])
def test_what_reads_a_large_index_says_so(made: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    assert "read the index" not in CliRunner().invoke(app, [*words, "--path", str(made.path)]).stderr
    monkeypatch.setattr(standing, "MANY_BLOCKS", 1)
    assert "read the index" in CliRunner().invoke(app, [*words, "--path", str(made.path)]).stderr


def test_looking_keeps_the_budgets_a_store_was_given(made: Any) -> None:
    budgets = {tier["name"]: tier["budget_bytes"] for tier in run_json("stats", "--path", made.path)["tiers"]}
    assert budgets == {"ram": 8 << 20, "nvme": 16 << 20}
    run("verify", "--path", made.path)
    run("ls", "--path", made.path)
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        assert {tier.name: tier.budget_bytes for tier in store.stats().tiers} == budgets


def test_ls_lists_namespaces_then_their_sequences_with_first_tokens(made: Any) -> None:
    listed = run_json("ls", "--path", made.path)["namespaces"]
    assert [entry["label"] for entry in listed] == list(made.lengths)
    for entry in listed:
        found = run_json("ls", entry["label"], "--path", made.path)
        lengths = {prefix["tokens"]: prefix["first_tokens"] for prefix in found["prefixes"]}
        assert set(lengths) == set(made.lengths[entry["label"]])
        for length, first in lengths.items():
            assert first == made.tokens(length)[: len(first)]
            assert first
        by_root = run_json("ls", entry["root"][:12], "--path", made.path)
        assert by_root["namespace"] == found["namespace"]
    text = run("ls", "first", "--path", made.path)
    assert "40,100,101" in text


def test_evicting_one_tier_leaves_the_other(made: Any) -> None:
    assert made.held("first", 40) == {"ram": 40}
    run("evict", "--tier", "ram", "--yes", "--path", made.path)
    assert made.held("first", 40) == {"nvme": 40}


def test_evicting_a_namespace_leaves_the_others(made: Any) -> None:
    counts = run_json("evict", "--namespace", "first", "--yes", "--path", made.path)
    assert counts["blocks"] == {"ram": 4, "nvme": 4}
    assert made.held("first", 40) == {}
    assert made.held("second", 64) == {"ram": 64}


@pytest.mark.parametrize("by", ["tokens", "key"])
def test_evicting_a_prefix_leaves_its_neighbours(made: Any, by: str) -> None:
    name = "40,100,101"
    if by == "key":
        found = run_json("ls", "first", "--path", made.path)["prefixes"]
        name = next(prefix["key"][:12] for prefix in found if prefix["tokens"] == 40)
    run("evict", "--namespace", "first", "--prefix", name, "--yes", "--path", made.path)
    assert made.held("first", 40) == {}
    assert made.held("first", 7) == {"ram": 7}
    assert made.held("second", 64) == {"ram": 64}


def test_a_dry_run_and_a_no_change_nothing(made: Any) -> None:
    would = run_json("evict", "--all", "--dry-run", "--path", made.path)
    assert would == {
        "dry_run": True,
        "evicted": False,
        "blocks": {"ram": 9, "nvme": 9},
        "names": ["greeting"],
        "forgotten": [],
    }
    run("evict", "--all", "--path", made.path, code=1, answer="n\n")
    assert made.held("second", 64) == {"ram": 64}
    assert run_json("evict", "--all", "--yes", "--path", made.path)["blocks"] == would["blocks"]
    assert made.held("second", 64) == {}


def test_a_wipe_leaves_nothing_to_be_read(made: Any, own_settings: Path) -> None:
    def traces() -> int:
        raw = np.array(made.tokens(40)[:16], ">u4").tobytes()
        files = [file for place in (made.path, own_settings) for file in place.rglob("*") if file.is_file()]
        return sum(raw in file.read_bytes() for file in files)

    assert traces() == 2
    assert "wiped" not in run_json("evict", "--wipe", "--namespace", "first", "--dry-run", "--path", made.path)
    told = run_json("evict", "--wipe", "--namespace", "first", "--yes", "--path", made.path)
    assert traces() == 0
    assert (told["blocks"], told["wiped"]["unconfirmed"]) == ({"ram": 4, "nvme": 4}, 0)
    assert run_json("names", "--path", made.path)["names"] == []
    assert made.held("second", 64) == {"ram": 64}
    run("evict", "--namespace", "second", "--yes", "--path", made.path)
    assert "Wiped" in run("evict", "--wipe", "--yes", "--path", made.path)
    run("evict", "--wipe", "--tier", "ram", "--path", made.path, code=2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["evict"], "nothing was named"),
        (["evict", "--all", "--namespace", "first"], "exclude one another"),
        (["evict", "--prefix", "1,2"], "--prefix needs the namespace"),
        (["evict", "--namespace", "third"], "no namespace 'third'"),
        (["evict", "--namespace", "first", "--prefix", "9,9"], "only 0 of these 2 tokens"),
        (["evict", "--namespace", "first", "--prefix", "x,y"], "not a list of token ids"),
        (["evict", "--namespace", "first", "--prefix", "zz"], "no stored sequence"),
        (["evict", "--tier", "tape"], "there is no tier 'tape' choose one of ram, nvme"),
        (["ls", "third"], "no namespace 'third'"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_a_code(made: Any, words: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, [*words, "--path", str(made.path)])
    assert done.exit_code > 0
    assert problem in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert "Traceback" not in done.output


def test_an_ambiguous_name_lists_what_it_could_mean(made: Any) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(made.layout, salt="another", label="first")
        store.save(space, [1, 2, 3, 4], HostKV.stacked(made.layout, np.zeros((2, 2, 2, 4, 16), np.uint32)))
    done = CliRunner().invoke(app, ["ls", "first", "--path", str(made.path)])
    assert done.exit_code == 14
    assert "names 2 namespaces" in done.stderr


@pytest.mark.parametrize("command", ["stats", "ls", "verify", "evict"])
def test_no_command_makes_a_store(tmp_path: Path, own_settings: Path, command: str) -> None:
    for path, code in ((tmp_path / "absent", 13), (tmp_path, 7)):
        done = CliRunner().invoke(app, [command, "--path", str(path)])
        assert done.exit_code == code
        assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == list(own_settings.iterdir()) == []
    assert CliRunner().invoke(app, [command]).exit_code == 2  # no store named at all


def test_a_path_from_the_environment_is_used(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_PATH", str(made.path))
    assert len(run_json("ls")["namespaces"]) == 2


def flip(path: Path, where: int) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)
        file.seek(where)
        file.write(bytes([byte[0] ^ 1]))


def test_verify_finds_a_flipped_byte_and_repair_mends_it(made: Any) -> None:
    clean = run_json("verify", "--path", made.path)
    assert clean == {"ok": True, "checked": 18, "repaired": 0, "problems": []}
    segment = next((made.path / "nvme").glob("*.seg"))
    flip(segment, 4096)
    found = run_json("verify", "--path", made.path, code=1)
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith("nvme")
    assert run_json("verify", "--books-only", "--path", made.path)["ok"]
    assert run_json("verify", "--repair", "--path", made.path, code=1)["repaired"] == 1
    assert run_json("verify", "--path", made.path)["checked"] == 17


@pytest.mark.parametrize("suffix", [".seg", ".slots"])
@pytest.mark.parametrize(("command", "code"), [("verify", 1), ("stats", 0)])
def test_what_opening_found_lost_is_said_and_verify_does_not_call_it_well(
    made: Any, command: str, code: int, suffix: str
) -> None:
    for file in (made.path / "nvme").glob(f"*{suffix}"):
        os.truncate(file, 100)
    done = CliRunner().invoke(app, [command, "--json", "--path", str(made.path)])
    assert done.exit_code == code, done.output
    assert "segments dropped: nvme" in done.stderr
    assert "9 blocks lost" in done.stderr
    if command == "verify":
        (problem,) = json.loads(done.stdout)["problems"]
        assert problem in done.stderr
    assert run_json("verify", "--path", made.path)["ok"], "said once: what is lost is gone"


def test_a_foreign_superblock_is_one_message(made: Any) -> None:
    (made.path / "STORE").write_bytes(b"something else")
    done = CliRunner().invoke(app, ["stats", "--path", str(made.path)])
    assert done.exit_code == 7
    assert "STORE" in done.stderr


def command_line(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "kvstore.tools.cli", *map(str, words)]


@pytest.mark.parametrize("command", ["doctor", "stats", "ls", "verify"])
@pytest.mark.parametrize("way", [">/dev/full", ">&-", "--json >/dev/full"])
def test_output_that_cannot_be_written_is_one_message_and_a_code(made: Any, command: str, way: str) -> None:
    line = shlex.join(command_line(command, "--path", made.path)) + f" {way}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 21, done.stderr
    why = "it is closed" if way == ">&-" else "No space"
    assert f"error: standard output cannot be written: {why}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_closed_descriptors_never_become_files_of_the_store(made: Any) -> None:
    line = shlex.join(command_line("evict", "--all", "--yes", "--path", made.path)) + " <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", line], check=False)
    assert done.returncode == 21
    assert run_json("verify", "--path", made.path) == {"ok": True, "checked": 0, "repaired": 0, "problems": []}


def test_a_closed_pipe_is_not_an_error(made: Any) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command_line("ls", "--path", made.path), stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.3])
def test_ctrl_c_ends_with_one_word_and_code_130(tmp_path: Path, after_s: float) -> None:
    """While a benchmark runs: it leaves neither a store nor shared memory behind."""
    child = subprocess.Popen(
        command_line("bench", "tiers", "--tokens", "512", "--pairs", "64", "--path", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    assert "…" in child.stderr.readline()
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == list(Path(os.environ["KVSTORE_RAM_DIRECTORY"]).iterdir()) == []
