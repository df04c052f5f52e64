"""What only a CUDA device can show: streams, page-locked memory and bandwidth. Skipped without one.

The contract of `test_hbm.py` runs on the device too; these tests make the device late on purpose.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore.header import HEADER_BYTES, slot_bytes
from kvstore.kv import Bytes, Run
from kvstore.layout import Layout
from kvstore.tiers.device import DeviceItem
from kvstore.tiers.devicekv import DeviceKV
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.pagelock import PageLock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

DEVICE = "cuda:0"
BLOCK, BLOCKS = 64, 24
LAYOUT = Layout.uniform(layers=4, heads=2, k_dim=64, dtype="bfloat16", block_tokens=BLOCK)
STRIDE = slot_bytes(LAYOUT.payload_bytes())
LATE_CYCLES = 600_000_000
"""What `torch.cuda._sleep` keeps a stream busy for: about a third of a second."""


def segment(slots: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, slots * STRIDE), np.uint8)


class Rig:
    def __init__(self, *, locked: bool, slots: int = 32) -> None:
        self.memory = segment(BLOCKS)
        self.pagelock = PageLock.for_device(1 << 30 if locked else 0, DEVICE)
        self.pagelock.add([self.memory])
        assert self.pagelock.wait(60)
        assert self.pagelock.covers(self.memory) == locked
        self.tier = HbmTier(slots * STRIDE, DEVICE, pagelock=self.pagelock, batch_bytes=4 * STRIDE)
        self.tensor = torch.zeros(4, 2, 2, BLOCKS * BLOCK, 64, dtype=torch.bfloat16, device=DEVICE)
        self.kv = DeviceKV.stacked(LAYOUT, self.tensor)
        self.payload = LAYOUT.payload_bytes()
        self.warm_up()

    def warm_up(self) -> None:
        """Load every kernel: loading one later may wait for the device, which these tests keep busy."""
        torch.cuda._sleep(1000)
        items = self.items()
        for chosen in (items, items[::2]):
            saved = self.tier.save(self.kv, chosen)
            assert saved.wait()
        self.tier.load(self.kv, items).wait()
        scattered = [replace(item, host=None, start=at * BLOCK) for at, item in enumerate(items[::-2])]
        self.tier.load(self.kv, scattered).wait()
        self.tensor.copy_(self.tensor.clone().fill_(1.0))
        self.tier.drop(everything=True)
        torch.cuda.synchronize()

    def items(self, first: int = 0) -> list[DeviceItem]:
        return [
            DeviceItem(
                (first + at).to_bytes(32, "big"),
                b"r" * 32,
                at * BLOCK,
                BLOCK,
                BLOCK,
                Run(self.memory, at * STRIDE + HEADER_BYTES, STRIDE, 1, BLOCK, BLOCK),
            )
            for at in range(BLOCKS)
        ]

    def random(self, seed: int) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        bits = rng.integers(0, 256, self.tensor.numel() * 2, np.uint8)
        return torch.from_numpy(bits).view(torch.bfloat16).view(self.tensor.shape)

    def payloads(self, items: list[DeviceItem]) -> Bytes:
        return np.concatenate([item.host.payload(0, self.payload) for item in items if item.host is not None])

    def expected(self, whole: torch.Tensor) -> Bytes:
        """Payloads of all blocks of a tensor on the host."""
        blocks = whole.view(torch.int16).view(4, 2, 2, BLOCKS, BLOCK, 64).permute(3, 0, 1, 2, 4, 5)
        return blocks.contiguous().view(-1).numpy().view(np.uint8)

    def same(self, whole: torch.Tensor) -> bool:
        return torch.equal(self.tensor.cpu().view(torch.int16), whole.view(torch.int16))

    def close(self) -> None:
        assert self.tier.check_integrity() == []
        self.tier.close()
        self.pagelock.close()


@pytest.fixture(params=[True, False], ids=["page-locked", "through the ring"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(locked=request.param)
    yield made
    made.close()


def late() -> None:
    torch.cuda._sleep(LATE_CYCLES)


def test_a_save_sees_what_a_slow_kernel_before_it_wrote_and_nothing_later(rig: Rig) -> None:
    whole = rig.random(1)
    source = whole.to(DEVICE)
    items = rig.items()
    torch.cuda.synchronize()
    late()
    rig.tensor.copy_(source)
    saved = rig.tier.save(rig.kv, items)
    rig.tensor.fill_(5.0)
    assert not saved.done(), "save returned before the slow kernel was done"
    assert saved.wait()
    assert all(saved.taken)
    assert np.array_equal(rig.payloads(items), rig.expected(whole))


def test_a_load_waits_for_slow_kernels_that_use_the_tensors_and_later_ones_wait_for_it(rig: Rig) -> None:
    whole = rig.random(2)
    items = rig.items()
    for item, part in zip(items, rig.expected(whole).reshape(BLOCKS, -1), strict=True):
        assert item.host is not None
        item.host.payload(0, rig.payload)[:] = part
    before = torch.empty_like(rig.tensor)
    rig.tensor.fill_(7.0)
    torch.cuda.synchronize()
    late()
    before.copy_(rig.tensor)
    loaded = rig.tier.load(rig.kv, items)
    after = rig.tensor.clone()
    rig.tensor.fill_(9.0)
    assert loaded.wait()
    rig.memory[:] = 0
    assert bool((before == 7.0).all())
    assert torch.equal(after.cpu().view(torch.int16), whole.view(torch.int16))
    assert loaded.keep() == BLOCKS
    rig.tier.load(rig.kv, [replace(item, host=None) for item in items])
    assert rig.same(whole)


def test_streams_other_than_the_buffer_s_own_are_ordered_too(rig: Rig) -> None:
    whole = rig.random(3)
    source = whole.to(DEVICE)
    items = rig.items()
    side = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late()
        rig.tensor.copy_(source)
        saved = rig.tier.save(rig.kv, items)
        rig.tensor.fill_(5.0)
        assert saved.wait()
    assert np.array_equal(rig.payloads(items), rig.expected(whole))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late()
        loaded = rig.tier.load(rig.kv, [replace(item, host=None) for item in items])
        seen = rig.tensor.clone()
    assert loaded.wait()
    side.synchronize()
    assert torch.equal(seen.cpu().view(torch.int16), whole.view(torch.int16))


def test_a_resident_block_can_be_loaded_while_its_gather_is_still_queued(rig: Rig) -> None:
    whole = rig.random(4)
    source = whole.to(DEVICE)
    items = [replace(item, host=None) for item in rig.items()]
    other = torch.zeros_like(rig.tensor)
    side = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side):
        reader = DeviceKV.stacked(LAYOUT, other)
    torch.cuda.synchronize()
    late()
    rig.tensor.copy_(source)
    rig.tier.save(rig.kv, items)
    with torch.cuda.stream(side):
        loaded = rig.tier.load(reader, items)
    assert all(loaded.taken)
    side.synchronize()
    assert torch.equal(other.cpu().view(torch.int16), whole.view(torch.int16))


def test_slots_that_late_copies_use_are_not_given_to_others() -> None:
    small = Rig(locked=True, slots=BLOCKS)
    whole = small.random(5)
    items = small.items()
    small.tensor.copy_(whole)
    torch.cuda.synchronize()
    late()
    first = small.tier.save(small.kv, items)
    second = small.tier.save(small.kv, small.items(first=100))
    assert (all(first.taken), any(second.taken)) == (True, False)
    assert first.wait()
    assert np.array_equal(small.payloads(items), small.expected(whole))
    assert all(small.tier.save(small.kv, small.items(first=100)).taken)
    torch.cuda.synchronize()
    small.close()


def test_tensors_that_the_engine_frees_early_are_not_reused_under_a_copy(rig: Rig) -> None:
    whole = rig.random(6)
    source = whole.to(DEVICE)
    items = rig.items()
    side = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    tensor = source.clone()
    kv = DeviceKV.stacked(LAYOUT, tensor)
    side.wait_stream(torch.cuda.current_stream())
    kv.lane = side
    with torch.cuda.stream(side):
        late()
        saved = rig.tier.save(kv, items)
    del tensor, kv
    torch.empty_like(source).fill_(3.0)
    assert saved.wait()
    assert np.array_equal(rig.payloads(items), rig.expected(whole))


def test_pageable_runs_go_through_the_buffer_itself(rig: Rig) -> None:
    whole = rig.random(7)
    rig.tensor.copy_(whole)
    memory = np.zeros(BLOCKS * STRIDE, np.uint8)
    run = Run(memory, HEADER_BYTES, STRIDE, BLOCKS, BLOCK, BLOCK)
    rig.kv.gather(0, run)
    found = np.concatenate([run.payload(at, rig.payload) for at in range(BLOCKS)])
    assert np.array_equal(found, rig.expected(whole))
    rig.tensor.zero_()
    done = threading.Thread(target=rig.kv.scatter, args=(0, run))
    done.start()
    done.join()
    assert rig.same(whole)


def test_page_locked_segments_are_pinned_memory_to_torch() -> None:
    memory = segment(4)
    pagelock = PageLock.for_device(1 << 30, DEVICE)
    pagelock.add([memory])
    assert pagelock.wait(60)
    assert torch.from_numpy(memory).is_pinned()
    pagelock.close()
    assert not torch.from_numpy(memory).is_pinned()


def test_a_budget_larger_than_the_device_is_refused() -> None:
    from kvstore.errors import BudgetError

    with pytest.raises(BudgetError, match="out of memory"):
        HbmTier(1 << 50, DEVICE)
