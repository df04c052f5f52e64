"""A process that holds a prefix in `hbm` (on the CPU) and in `ram`, and asks for it each time it is told a line.

Run as ``python -m holding PATH``; ``KVSTORE_RAM_DIRECTORY`` says where `ram` is. Writes what each load found, as JSON.
With ``slow``, `nvme` is a medium throttled to a megabyte a second, and every line saves something new as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import kvstore
from kvstore.events import Event, Skipped
from kvstore.layout import Layout
from kvstore.tiers.devicekv import DeviceKV
from kvstore.tiers.medium import Medium
from kvstore.tiers.throttle import ThrottleMedium

LAYOUT = Layout.uniform(layers=2, heads=2, k_dim=16, block_tokens=16)
TOKENS = list(range(100, 180))


def slowed(medium: Medium) -> Medium:
    return ThrottleMedium(medium, 1e6, 0.02) if medium.name == "nvme" else medium


def main(path: str, manner: str = "") -> None:
    torch.set_num_threads(1)
    wrap = slowed if manner == "slow" else lambda medium: medium
    skipped: list[str] = []

    def watch(event: Event) -> None:
        if isinstance(event, Skipped):
            skipped.append(f"{event.tier}: {event.reason}")

    with kvstore.open(
        Path(path), ram="8MiB", nvme="16MiB", hbm="4MiB", device="cpu", wrap=wrap, observers=[watch]
    ) as store:
        space = store.namespace(LAYOUT, salt="held", label="held")

        def buffer(tokens: int) -> DeviceKV:
            return DeviceKV.stacked(LAYOUT, torch.from_numpy(np.ones((2, 2, 2, tokens, 16), np.float32)))

        store.save(space, TOKENS, buffer(len(TOKENS)))
        if manner != "slow":
            store.flush(60)
        print(json.dumps("open"), flush=True)
        for number, _ in enumerate(sys.stdin):
            loaded = store.load(store.match(space, TOKENS), buffer(len(TOKENS)))
            saved = 0
            if manner == "slow":
                new = [5000 + number, *range(200, 231)]
                saved = store.save(space, new, buffer(len(new))).new_blocks
            told = {"tokens": loaded.tokens, "by_tier": dict(loaded.by_tier), "saved": saved, "skipped": skipped}
            print(json.dumps(told | {"waiting": store.stats().mover_blocks}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
