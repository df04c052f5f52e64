"""The demo: real processes of a real, tiny model, and figures under exactly the promised keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import KVStoreError, NotFoundError, PathError, SettingsError
from kvstore.tools import demo, demo_worker
from kvstore.tools.demo_worker import Job, Result
from kvstore.tools.scratch import folder_on_disk, remove_store, scratch_store
from kvstore.tools.terminal import undisturbed

KEYS = [
    "prompt_tokens",
    "new_tokens",
    "reused_tokens",
    "first_request_s",
    "cold_ttft_s",
    "hot_ttft_s",
    "ram_ttft_s",
    "nvme_ttft_s",
    "ram_over_limit",
    "nvme_over_limit",
    "speedup_ram",
    "speedup_nvme",
    "identical",
    "kv_bytes",
    "store_bytes",
    "memcpy_gbps",
    "raw_read_gbps",
]
TOKENS, NEW = 200, 16


def job(role: demo_worker.Role, model: Path, path: Path, **more: Any) -> Job:
    return Job(role, str(model), str(path), TOKENS, NEW, 1, **more)


@pytest.fixture
def quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """Worker processes talk on standard output."""


def test_each_process_reuses_what_it_should_and_answers_alike(tiny_model: Path, tmp_path: Path, quiet: None) -> None:
    with scratch_store(tmp_path) as path:
        begun = demo_worker.run(job("begin", tiny_model, path))
        history = tuple(begun.history)
        assert len(history) == TOKENS + 1
        assert begun.kv_bytes == TOKENS * 2 * 2 * 2 * 16 * 4
        assert begun.store_bytes >= begun.kv_bytes
        more: dict[str, Any] = {"history": history, "answer": 8}
        cold = demo_worker.run(job("cold", tiny_model, path.with_name("cold"), **more))
        ram = demo_worker.run(job("ram", tiny_model, path, pairs=2, **more))
        nvme = demo_worker.run(job("nvme", tiny_model, path, pairs=2, first=3, **more))
    assert ram.reused == nvme.reused == [TOKENS] * 3
    assert len(cold.answer) == 8
    assert cold.answer == ram.answer == nvme.answer
    assert (len(cold.ttft_s), len(ram.ttft_s), len(nvme.hot_s), len(nvme.medium_s)) == (1, 2, 2, 2)
    assert list(tmp_path.iterdir()) == list(Path(os.environ["KVSTORE_RAM_DIRECTORY"]).iterdir()) == []


def result(seconds: float, reused: int = TOKENS, answer: tuple[int, ...] = tuple(range(demo.ANSWER))) -> dict[str, Any]:
    return demo_worker.asdict(
        Result(first_s=9.0, ttft_s=[seconds], hot_s=[0.5], medium_s=[0.1], reused=[reused], answer=list(answer))
    )


def figures(**changed: list[dict[str, Any]]) -> dict[str, Any]:
    plan = demo.Plan("model", Path(), TOKENS, NEW, 3, 1)
    found: dict[Any, Any] = {
        "cold": [result(float(n)) for n in (12, 10, 11)],
        "ram": [result(n) for n in (0.6, 0.5, 0.9)],
        "nvme": [result(n) for n in (1.1, 0.9, 1.0)],
    }
    begun = demo_worker.asdict(Result(kv_bytes=10**9, store_bytes=2 * 10**9))
    return demo.figures_of(plan, found | changed, begun)


def test_figures_have_exactly_the_promised_keys_and_are_medians_beside_their_limits() -> None:
    made = figures()
    assert list(made) == KEYS
    assert made["cold_ttft_s"] == 11
    assert made["ram_over_limit"] == pytest.approx(0.6 / 0.6)
    assert made["nvme_over_limit"] == pytest.approx(1.0 / 0.6)
    assert made["speedup_nvme"] == pytest.approx(11)
    assert made["memcpy_gbps"] == made["raw_read_gbps"] == pytest.approx(10)
    assert made["identical"] is True
    assert made["reused_tokens"] == TOKENS


def test_one_other_token_or_one_token_less_shows() -> None:
    other = result(0.6, answer=(*range(demo.ANSWER - 1), 99))
    assert figures(nvme=[other])["identical"] is False
    assert figures(ram=[result(0.6, answer=())])["identical"] is False
    assert figures(ram=[result(0.6), result(0.6, reused=TOKENS - 1)])["reused_tokens"] == TOKENS - 1


def test_an_error_of_a_process_is_raised_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no model could be loaded"):
        demo._process(job("begin", tmp_path, tmp_path / "store"), tmp_path / "log", lambda text: None)


def test_a_process_that_dies_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\necho its last words >&2\nkill -9 $$\n")
    dying.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(dying))
    with pytest.raises(KVStoreError, match="its last words"):
        demo._process(job("begin", tmp_path, tmp_path / "store"), tmp_path / "log", lambda text: None)


def test_a_job_comes_back_as_it_was() -> None:
    one = job("nvme", Path("/m"), Path("/s"), history=(1, 2, 3), first=4, pairs=5, answer=6)
    assert Job.from_json(one.to_json()) == one


def test_a_conversation_longer_than_the_context_says_how_long_it_may_be(tiny_model: Path, tmp_path: Path) -> None:
    long = Job("begin", str(tiny_model), str(tmp_path / "store"), 1024, NEW, 1)
    with pytest.raises(SettingsError, match="context") as caught:
        demo_worker.run(long)
    assert f"--tokens {1024 - NEW - 16}" in caught.value.remedy


def test_stores_are_not_measured_in_memory(tmp_path: Path) -> None:
    assert folder_on_disk(tmp_path) == tmp_path
    with pytest.raises(SettingsError, match="memory"):
        folder_on_disk(Path("/dev/shm"))
    with pytest.raises(PathError, match="not a folder"):
        folder_on_disk(tmp_path / "absent")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_cleaning_up_waits_until_all_is_clean(tmp_path: Path, number: signal.Signals) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda it, _: came.append(it))
    try:
        with undisturbed():
            signal.raise_signal(number)
            assert came == []
        assert came == [number]
        with scratch_store(tmp_path) as path:
            path.mkdir()
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(number) is not before
    finally:
        signal.signal(number, before)


def test_what_a_killed_process_leaves_in_a_checkout_is_ignored(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with scratch_store(tmp_path) as path:
        path.mkdir()
        (path / "segment").write_bytes(b"large")
        status = subprocess.run(["git", "-C", str(tmp_path), "status", "--porcelain"], capture_output=True, check=True)
    assert status.stdout == b""


def test_removing_what_is_no_store_removes_the_folder_alone(tmp_path: Path, own_settings: Path) -> None:
    (own_settings / "other").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "STORE").write_bytes(b"nothing of ours")
    remove_store(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
    assert [path.name for path in own_settings.iterdir()] == ["other"]
