"""`tools/gpu_check`: the tests that need a CUDA device, and the `hbm` tier's copies beside plain pinned ones.

Both sides of a ratio move the same bytes of the same page-locked, touched memory and end with the device idle; ours
also gathers or scatters them between blocks and the engine's layout. Exit codes: 0 all well; 1 a test failed, or bytes
came back wrong; 77 nothing could be checked, since there is no torch or no CUDA device. Must not know the store.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.header import HEADER_BYTES, slot_bytes
from kvstore.kv import Run
from kvstore.layout import Layout
from kvstore.sizes import MIB, format_size
from kvstore.tools.ratios import PAIRS_MIN, Paired, alternate, paired

PASSED, FAILED, NOTHING_TO_CHECK = 0, 1, 77

TESTS = ("tests/tiers",)
TEST_SECONDS = 200

EXAMPLE = """\
examples:
  tools/gpu_check                       every test that needs a GPU, then bandwidths
  tools/gpu_check --json --no-tests     bandwidths alone, one JSON object on standard output
  tools/gpu_check --device cpu --size 8 the same code without a GPU, to try the script

exit codes: 0 all well, 1 something failed, 77 no GPU to check
"""


class Bench:
    """A tier with room for ``blocks`` blocks of 2 MiB, an engine's tensor full of random bits, and a host segment."""

    def __init__(self, device: str, size: int) -> None:
        import torch

        from kvstore.tiers.device import DeviceItem
        from kvstore.tiers.devicekv import DeviceKV
        from kvstore.tiers.hbm import HbmTier
        from kvstore.tiers.pagelock import PageLock

        self.torch: Any = torch
        self.device = device
        self.layout = Layout.uniform(layers=32, heads=8, k_dim=128, dtype="bfloat16", block_tokens=16)
        payload, stride = self.layout.payload_bytes(), slot_bytes(self.layout.payload_bytes())
        blocks = max(1, size // payload)
        self.bytes = blocks * payload
        self.memory = np.frombuffer(mmap.mmap(-1, blocks * stride), np.uint8)
        self.memory[:] = 1
        self.pagelock = PageLock.for_device(len(self.memory), device)
        self.pagelock.add([self.memory])
        self.pagelock.wait(120)
        self.tier = HbmTier(blocks * stride, device, pagelock=self.pagelock)
        shape = (32, 2, 8, blocks * 16, 128)
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
        self.source: Any = bits.to(device).view(torch.bfloat16)
        self.target: Any = torch.zeros_like(self.source)
        self.sources = DeviceKV.stacked(self.layout, self.source)
        self.targets = DeviceKV.stacked(self.layout, self.target)
        self.flat: Any = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self.host: Any = torch.from_numpy(self.memory)[: self.bytes]
        self.items = [
            DeviceItem(
                at.to_bytes(32, "big"),
                b"r" * 32,
                at * 16,
                16,
                16,
                Run(self.memory, at * stride + HEADER_BYTES, stride, 1, 16, 16),
            )
            for at in range(blocks)
        ]

    def seconds(self, work: Callable[[], object]) -> float:
        """From an idle device to an idle device."""
        self.settle()
        began = time.perf_counter()
        work()
        self.settle()
        return time.perf_counter() - began

    def settle(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def save(self) -> float:
        self.tier.drop(everything=True)
        return self.seconds(lambda: self.tier.save(self.sources, self.items).wait())

    def load(self) -> float:
        self.tier.drop(everything=True)
        return self.seconds(lambda: self.tier.load(self.targets, self.items).wait())

    def load_resident(self) -> float:
        items = [replace(item, host=None) for item in self.items]
        return self.seconds(lambda: self.tier.load(self.targets, items).wait())

    def to_device(self) -> float:
        return self.seconds(lambda: self.flat.copy_(self.host, non_blocking=True))

    def to_host(self) -> float:
        return self.seconds(lambda: self.host.copy_(self.flat, non_blocking=True))

    def on_device(self) -> float:
        flat = self.source.view(self.torch.uint8).view(-1)
        return self.seconds(lambda: self.flat.copy_(flat))

    def right(self) -> bool:
        """Whether bytes saved, and loaded from the host and from the device, are those of the source."""
        self.save()
        if not self._fresh(self.load_resident):
            return False
        return self._fresh(self.load)

    def _fresh(self, load: Callable[[], float]) -> bool:
        self.target.zero_()
        load()
        source, target = (tensor.view(self.torch.int16) for tensor in (self.source, self.target))
        return bool(self.torch.equal(source, target))

    def close(self) -> None:
        self.tier.close()
        self.pagelock.close()


def measure(device: str, size: int, pairs: int) -> dict[str, Any]:
    """Ratios of the tier's copies to plain ones of ``size`` bytes: medians, spreads and all samples."""
    bench = Bench(device, size)
    try:
        right = bench.right()
        limits: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            "h2d": (bench.load, bench.to_device),
            "d2h": (bench.save, bench.to_host),
        }
        found = {name: paired(*alternate(ours, limit, pairs)) for name, (ours, limit) in limits.items()}
        bench.save()
        found["resident"] = paired(*alternate(bench.load_resident, bench.on_device, pairs))
        return {
            "device": device,
            "name": bench.torch.cuda.get_device_name(device) if device != "cpu" else "cpu",
            "bytes": bench.bytes,
            "block_bytes": bench.layout.payload_bytes(),
            "bytes_right": right and not bench.tier.check_integrity(),
            "pagelock": bench.pagelock.stats().to_dict(),
            **{name: _described(result, bench.bytes) for name, result in found.items()},
        }
    finally:
        bench.close()


def _described(result: Paired, size: int) -> dict[str, Any]:
    rates = {
        f"{side}_gbps": size / sorted(seconds)[len(seconds) // 2] / 1e9
        for side, seconds in (("ours", result.ours), ("limit", result.limit))
    }
    return {**rates, **result.to_dict()}


def run_tests(root: Path) -> dict[str, Any]:
    """Every test marked ``gpu``, in a process of its own; its output goes to standard error."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider", *TESTS]
    try:
        done = subprocess.run(command, cwd=root, stdout=sys.stderr, check=False, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return {"ran": " ".join(command[1:]), "exit_code": None, "passed": False}
    return {"ran": " ".join(command[1:]), "exit_code": done.returncode, "passed": done.returncode == 0}


def missing() -> str | None:
    """Why there is nothing to check, or None."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "there is no CUDA device"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        "gpu_check", description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:0, cuda:1, …; cpu tries the script without a GPU")
    parser.add_argument("--size", type=int, default=512, metavar="MIB", help="what each copy moves (512)")
    parser.add_argument("--pairs", type=int, default=15, help=f"measurements of each ratio, at least {PAIRS_MIN} (15)")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--json", action="store_true", help="one JSON object with all samples on standard output")
    options = parser.parse_args(arguments)
    if options.size < 2 or options.pairs < PAIRS_MIN:
        parser.error(f"--size is at least 2, --pairs at least {PAIRS_MIN}")
    reason = missing() if options.device != "cpu" else None
    if reason is not None:
        print(f"gpu_check: {reason}: nothing was checked", file=sys.stderr)
        if options.json:
            print(json.dumps({"checked": False, "reason": reason}))
        return NOTHING_TO_CHECK
    report: dict[str, Any] = {"checked": True}
    if not options.no_tests:
        report["tests"] = run_tests(Path(__file__).resolve().parent.parent)
    report |= measure(options.device, options.size * MIB, options.pairs)
    print(json.dumps(report, indent=2) if options.json else table(report))
    tests_passed = options.no_tests or report["tests"]["passed"]
    return PASSED if tests_passed and report["bytes_right"] else FAILED


def table(report: dict[str, Any]) -> str:
    """The report for people: ratios with the interval that holds their median, and rates."""
    lines = [f"{report['name']}, {format_size(report['bytes'])} in blocks of {format_size(report['block_bytes'])}"]
    if "tests" in report:
        lines.append(f"tests: {'passed' if report['tests']['passed'] else 'FAILED'}")
    lines.append(f"bytes: {'right' if report['bytes_right'] else 'WRONG'}")
    locked = report["pagelock"]
    lines.append(
        f"page-locked: {format_size(locked['locked_bytes'])}{locked['reason'] and ' (' + locked['reason'] + ')'}"
    )
    for name, what in (("h2d", "host to device"), ("d2h", "device to host"), ("resident", "resident to engine")):
        row, ratio = report[name], report[name]["ratio"]
        lines.append(
            f"{what:>18}: {ratio['median']:.2f} of a plain copy ({ratio['low']:.2f}…{ratio['high']:.2f}), "
            f"{row['ours_gbps']:.1f} of {row['limit_gbps']:.1f} GB/s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
