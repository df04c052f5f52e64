"""Pages on a device, here the CPU: what went into the store by way of `hbm` comes back to other pages, byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvstore  # noqa: E402
from kvstore.adapters.vllm.arrangement import Arrangement, planes  # noqa: E402
from kvstore.adapters.vllm.paged_device import PagedDeviceKV, device_planes  # noqa: E402
from kvstore.errors import LayoutError  # noqa: E402
from kvstore.layout import LayerShape, Layout  # noqa: E402

HEADS, DIM, LAYERS, PAGE, PAGES = 2, 8, 2, 4, 40
LAYOUT = Layout("bfloat16", ((LayerShape(HEADS, DIM, DIM),) * LAYERS,), 16)


def pages(seed: int | None) -> list[Any]:
    """Page tensors of every layer; zeros without a seed."""
    shape = (PAGES, HEADS, PAGE, 2 * DIM)
    if seed is None:
        return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]


def buffer(tensors: list[Any], arrangement: Arrangement, blocks: list[int], first: int = 0) -> PagedDeviceKV:
    pairs = [planes(tensor, arrangement, DIM) for tensor in tensors]
    by_dim = arrangement is Arrangement.COLUMNS
    return PagedDeviceKV(LAYOUT, device_planes(LAYOUT, pairs, by_dim=by_dim), blocks, first=first)


def tokens_at(tensors: list[Any], arrangement: Arrangement, blocks: list[int]) -> Any:
    """``[sides, heads, tokens, dim]`` of a sequence."""
    sides = [side for tensor in tensors for side in planes(tensor, arrangement, DIM)]
    return torch.stack([torch.cat([side[block] for block in blocks], dim=1) for side in sides])


@pytest.mark.parametrize("arrangement", list(Arrangement))
@pytest.mark.parametrize("first", [0, 24])
def test_pages_come_back_by_way_of_hbm(tmp_path: Path, shm: Path, arrangement: Arrangement, first: int) -> None:
    order = np.random.default_rng(4).permutation(PAGES)
    source, target = pages(1), pages(None)
    here, there = order[:20].tolist(), order[20:].tolist()
    ids = np.arange(77, dtype=np.uint32)
    settings: dict[str, Any] = {"ram": "8MiB", "nvme": 0, "ram_segment_bytes": "1MiB", "ram_directory": shm}
    with kvstore.open(tmp_path / "store", hbm="8MiB", device="cpu", **settings) as store:
        space = store.namespace(LAYOUT)
        assert store.save(space, ids, buffer(source, arrangement, here)).new_blocks == 5
        for tier in ("hbm", "ram"):
            match = store.match(space, ids, limit=70)
            loaded = store.load(match, buffer(target, arrangement, there, first), first=first)
            assert loaded.tokens == 70
            assert loaded.by_tier == {tier: 70 - first}
            got, sent = tokens_at(target, arrangement, there), tokens_at(source, arrangement, here)
            assert torch.equal(got[:, :, first:70], sent[:, :, first:70])
            assert not got[:, :, :first].any()
            assert not got[:, :, 70:].any()
            for tensor in target:
                tensor.zero_()
            store._core.hbm.drop(everything=True)


def test_pages_that_are_not_there_are_refused() -> None:
    with pytest.raises(LayoutError):
        buffer(pages(None), Arrangement.SIDES, [PAGES])
