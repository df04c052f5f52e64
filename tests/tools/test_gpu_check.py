"""`tools/gpu_check` measures what it says, finds wrong bytes, and says when there is nothing to check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstore.tools import gpu

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_it_says_so_and_exits_with_77() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "tools/gpu_check", "--json"], capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert done.returncode == 77
    assert "there is no CUDA device" in done.stderr
    assert json.loads(done.stdout) == {"checked": False, "reason": "there is no CUDA device"}


def test_the_same_measurement_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--size", "4", "--pairs", "5", "--no-tests", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_right"] is True
    assert report["bytes"] == 4 << 20
    for name in ("h2d", "d2h", "resident"):
        assert len(report[name]["ours_s"]) == len(report[name]["limit_s"]) == 5
        ratios = [limit / ours for ours, limit in zip(report[name]["ours_s"], report[name]["limit_s"], strict=True)]
        assert report[name]["ratio"]["samples"] == pytest.approx(ratios)


def test_wrong_bytes_fail_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = gpu.Bench.load

    def damaged(bench: gpu.Bench) -> float:
        bench.memory[4096 + 100] ^= 1
        return real(bench)

    monkeypatch.setattr(gpu.Bench, "load", damaged)
    assert gpu.main(["--device", "cpu", "--size", "2", "--pairs", "5", "--no-tests"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_too_few_pairs_for_a_spread_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--pairs", "2"])
    assert "at least" in capsys.readouterr().err
