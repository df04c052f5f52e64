"""The contract of the `hbm` tier, on the CPU and, where there is one, on a CUDA device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import BudgetError, ClosedError, LayoutError, UnsupportedError
from kvstore.events import Event, Events, Evicted, Fault, Notice
from kvstore.header import slot_bytes
from kvstore.kv import Bytes, HostKV, Run
from kvstore.layout import Layout
from kvstore.tiers.device import DeviceItem, Load, Transfer, open_device_tier
from kvstore.tiers.devicekv import DeviceKV
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.lanes import HostLanes, Lane

BLOCK = 4
PLAIN = Layout.uniform(layers=2, heads=2, k_dim=8, dtype="bfloat16", block_tokens=BLOCK)
MLA = Layout.uniform(layers=3, heads=1, k_dim=16, v_dim=4, dtype="float16", block_tokens=BLOCK)
LARGE = Layout.uniform(layers=2, heads=2, k_dim=128, dtype="float32", block_tokens=BLOCK)
STRIDE = slot_bytes(PLAIN.payload_bytes())
ROOT, OTHER_ROOT = b"r" * 32, b"o" * 32


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(key: bytes, size: int) -> Bytes:
    """The payload that belongs to a key."""
    return np.random.default_rng(int.from_bytes(key, "big")).integers(0, 256, size, np.uint8)


class Bench:
    """A tier, tensors of an engine, and a host segment of slots as the `ram` tier has them."""

    def __init__(self, device: str, slots: int, layout: Layout = PLAIN, **options: object) -> None:
        self.layout, self.device = layout, device
        self.stride = slot_bytes(layout.payload_bytes())
        self.told: list[Event] = []
        events = Events([self.told.append])
        self.tier = HbmTier(slots * self.stride, device, events=events, **options)  # type: ignore[arg-type]
        self.tensors, self.kv = self.make_buffer(64 * BLOCK)
        self.segment = np.zeros(64 * self.stride, np.uint8)

    def make_buffer(self, tokens: int) -> tuple[list[torch.Tensor], DeviceKV]:
        shape, dtype = self.layout.groups[0][0], getattr(torch, self.layout.dtype)
        layers = len(self.layout.groups[0])
        if shape.k_dim == shape.v_dim:
            stacked = torch.zeros(layers, 2, shape.heads, tokens, shape.k_dim, dtype=dtype, device=self.device)
            return [stacked], DeviceKV.stacked(self.layout, stacked)
        pair = [
            torch.zeros(layers, shape.heads, tokens, dim, dtype=dtype, device=self.device)
            for dim in (shape.k_dim, shape.v_dim)
        ]
        return pair, DeviceKV.paired(self.layout, pair[0], pair[1])

    def run(self, slot: int, tokens: int = BLOCK) -> Run:
        return Run(self.segment, slot * self.stride + 4096, self.stride, 1, tokens, tokens)

    def items(
        self, numbers: Sequence[int], *, host: bool = True, last: int = BLOCK, root: bytes = ROOT
    ) -> list[DeviceItem]:
        """Blocks of one sequence, from token 0 on; the last may be partial. Host slots in order, from 0 on."""
        found = []
        for at, number in enumerate(numbers):
            tokens = last if at == len(numbers) - 1 else BLOCK
            run = self.run(at, tokens) if host else None
            found.append(DeviceItem(key_of(number), root, at * BLOCK, tokens, tokens, run))
        return found

    def put_host(self, items: Sequence[DeviceItem]) -> None:
        """Host slots hold what belongs to the keys, and headers hold junk."""
        self.segment[:] = 0xEE
        for item in items:
            assert item.host is not None
            size = self.layout.payload_bytes(0, item.tokens)
            item.host.payload(0, size)[:] = content(item.key, size)

    def put_engine(self, items: Sequence[DeviceItem]) -> None:
        """The engine's tensors hold what belongs to the keys."""
        arrays = [torch.zeros_like(tensor, device="cpu") for tensor in self.tensors]
        host = self.host_view(arrays)
        for item in items:
            size = self.layout.payload_bytes(0, item.tokens)
            host.scatter(item.start, Run(content(item.key, size), 0, size, 1, item.tokens, item.tokens))
        for tensor, array in zip(self.tensors, arrays, strict=True):
            tensor.copy_(array)

    def host_view(self, arrays: Sequence[torch.Tensor]) -> HostKV:
        raw = [array.view(torch.int16 if self.layout.itemsize == 2 else torch.int32).numpy() for array in arrays]
        return HostKV.stacked(self.layout, raw[0]) if len(raw) == 1 else HostKV.paired(self.layout, raw[0], raw[1])

    def assert_engine(self, items: Sequence[DeviceItem], tensors: list[torch.Tensor] | None = None) -> None:
        """The engine's tensors hold the first ``take`` tokens of every item."""
        host = self.host_view([tensor.cpu() for tensor in tensors or self.tensors])
        for item in items:
            size = self.layout.payload_bytes(0, item.take)
            found = np.zeros(size, np.uint8)
            host.gather(item.start, Run(found, 0, size, 1, item.take, item.take))
            whole = content(item.key, self.layout.payload_bytes(0, item.tokens))
            assert np.array_equal(found, front(whole, self.layout, item.tokens, item.take)), item.key.hex()

    def assert_host(self, items: Sequence[DeviceItem]) -> None:
        for item in items:
            assert item.host is not None
            size = self.layout.payload_bytes(0, item.tokens)
            assert np.array_equal(item.host.payload(0, size), content(item.key, size)), item.key.hex()

    def clear(self) -> None:
        self.segment[:] = 0
        for tensor in self.tensors:
            tensor.zero_()

    def save(self, items: Sequence[DeviceItem]) -> Transfer:
        self.put_engine(items)
        saved: Transfer = self.tier.save(self.kv, items)
        assert saved.wait()
        return saved

    def load(self, items: Sequence[DeviceItem]) -> Load:
        loaded: Load = self.tier.load(self.kv, items)
        assert loaded.wait()
        return loaded

    def resident(self, numbers: Sequence[int]) -> list[bool]:
        return self.tier.lookup([key_of(number) for number in numbers])

    def close(self) -> None:
        assert self.tier.check_integrity() == []
        self.tier.close()


def front(payload: Bytes, layout: Layout, tokens: int, take: int) -> Bytes:
    """The payload of the first ``take`` of ``tokens`` tokens."""
    shape, size = layout.groups[0][0], layout.itemsize
    whole = layout.token_bytes(0) * tokens
    parts, at = [], 0
    for _ in layout.groups[0]:
        for dim in (shape.k_dim, shape.v_dim):
            length = shape.heads * tokens * dim * size
            part = payload[at : at + length].reshape(shape.heads, tokens, dim * size)
            parts.append(part[:, :take].reshape(-1))
            at += length
    assert at == whole
    return np.concatenate(parts)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return name


@pytest.fixture
def bench(device: str) -> Iterator[Bench]:
    made = Bench(device, 8)
    yield made
    made.close()


@pytest.mark.parametrize("layout", [PLAIN, MLA], ids=["stacked", "paired"])
@pytest.mark.parametrize("last", [BLOCK, 1, 3])
def test_saved_blocks_come_back_from_the_device_and_from_the_host(device: str, layout: Layout, last: int) -> None:
    bench = Bench(device, 8, layout)
    items = bench.items([1, 2, 3, 4, 5], last=last)
    saved = bench.save(items)
    assert saved.taken == (True,) * 5
    assert saved.size == layout.token_bytes() * (4 * BLOCK + last)
    bench.assert_host(items)
    bench.clear()
    loaded = bench.load([replace(item, host=None) for item in items])
    assert loaded.taken == (True,) * 5
    assert loaded.size == 0
    bench.assert_engine(items)

    bench.tier.drop(everything=True)
    bench.put_host(items)
    loaded = bench.load(items)
    assert loaded.size == saved.size
    bench.assert_engine(items)
    bench.close()


def test_a_save_writes_payloads_and_nothing_around_them(bench: Bench) -> None:
    items = bench.items([1, 2, 3], last=2)
    bench.segment[:] = content(key_of(99), len(bench.segment))
    before = bench.segment.copy()
    bench.save(items)
    bench.assert_host(items)
    untouched = np.ones(len(bench.segment), np.bool_)
    for item in items:
        assert item.host is not None
        untouched[item.host.offset : item.host.offset + PLAIN.payload_bytes(0, item.tokens)] = False
    assert np.array_equal(bench.segment[untouched], before[untouched])


def test_the_engine_may_reuse_its_memory_once_save_has_returned(bench: Bench) -> None:
    items = bench.items([1, 2, 3])
    bench.put_engine(items)
    saved = bench.tier.save(bench.kv, items)
    for tensor in bench.tensors:
        tensor.fill_(7)
    assert saved.wait()
    bench.assert_host(items)


def test_part_of_a_block_can_be_taken(bench: Bench) -> None:
    items = bench.items([1, 2, 3])
    bench.put_host(items)
    items[2] = replace(items[2], take=3)
    bench.load(items).keep()
    bench.assert_engine(items)
    bench.clear()
    items[2] = replace(items[2], take=1, host=None)
    assert bench.load(items).taken == (True, True, True)
    bench.assert_engine(items)


def test_blocks_from_the_host_become_resident_only_when_kept(bench: Bench) -> None:
    items = bench.items([1, 2, 3])
    bench.put_host(items)
    loaded = bench.load(items)
    assert bench.resident([1, 2, 3]) == [False] * 3
    assert loaded.keep([key_of(1), key_of(3), key_of(99)]) == 2
    assert loaded.keep() == 0, "a second call changes nothing"
    assert bench.resident([1, 2, 3]) == [True, False, True]
    assert bench.tier.stats().free == 6


def test_a_block_dropped_during_its_load_stays_dropped(bench: Bench) -> None:
    items = bench.items([1, 2, 3])
    bench.put_host(items)
    loaded = bench.load(items)
    assert bench.tier.drop([key_of(2)]) == 0, "it was not resident"
    assert loaded.keep() == 2
    assert bench.resident([1, 2, 3]) == [True, False, True]
    loaded = bench.load(bench.items([7, 8], root=OTHER_ROOT))
    bench.tier.drop(root=OTHER_ROOT)
    assert loaded.keep() == 0


def test_a_block_loaded_twice_at_once_takes_one_slot_in_the_end(bench: Bench) -> None:
    items = bench.items([1, 2])
    bench.put_host(items)
    first, second = bench.load(items), bench.load(items)
    assert (first.keep(), second.keep()) == (2, 0)
    stats = bench.tier.stats()
    assert (stats.resident, stats.staged, stats.free) == (2, 0, 6)


def test_an_item_that_is_nowhere_is_not_taken(bench: Bench) -> None:
    items = bench.items([1, 2, 3])
    bench.put_host(items)
    items[1] = replace(items[1], host=None)
    assert bench.load(items).taken == (True, False, True)
    bench.assert_engine([items[0], items[2]])


def test_a_resident_block_of_another_length_is_not_served(bench: Bench) -> None:
    bench.save(bench.items([1], last=2))
    whole = bench.items([1], host=False)
    assert bench.load(whole).taken == (False,)


def test_the_least_recently_used_goes_first_and_a_prefix_outlives_its_continuation(bench: Bench) -> None:
    bench.save(bench.items([1, 2, 3, 4], host=False))
    bench.save(bench.items([5, 6, 7, 8], host=False))
    bench.tier.acquire([key_of(1), key_of(2)]).release()
    bench.save(bench.items([9, 10, 11], host=False))
    assert bench.resident(range(1, 12)) == [True, True, False, False, True, True, True, False, True, True, True]
    assert bench.told == [Evicted("hbm", "lru", 3)]


def test_looking_up_is_not_using(bench: Bench) -> None:
    bench.save(bench.items([1], host=False))
    bench.save(bench.items([2, 3, 4, 5, 6, 7, 8], host=False))
    assert bench.resident([1]) == [True]
    bench.save(bench.items([9], host=False))
    assert bench.resident([1]) == [False]


def test_held_blocks_are_not_evicted_and_what_finds_no_slot_is_not_saved(bench: Bench) -> None:
    first = bench.items(range(1, 7), host=False)
    bench.save(first)
    with bench.tier.acquire([item.key for item in first] + [key_of(99)]) as held:
        assert held.found == (True,) * 6 + (False,)
        saved = bench.save(bench.items([11, 12, 13, 14], host=False))
        assert saved.taken == (True, True, False, False), "the front of a sequence is worth more than its end"
        assert bench.resident(range(1, 7)) == [True] * 6
    bench.save(bench.items([21, 22, 23, 24], host=False))
    assert bench.resident([11, 12, 1]) == [True, True, True]
    assert bench.tier.stats().not_taken == 2


def test_what_is_dropped_while_held_keeps_its_bytes_until_released(bench: Bench) -> None:
    bench.save(bench.items([1, 2], host=False))
    held = bench.tier.acquire([key_of(1)])
    assert bench.tier.drop(everything=True) == 2
    assert bench.resident([1, 2]) == [False, False]
    stats = bench.tier.stats()
    assert (stats.free, stats.staged, stats.in_use) == (7, 1, 1)
    held.release()
    held.release()
    assert bench.tier.stats().free == 8


@pytest.mark.parametrize("batch_bytes", [STRIDE, 2 * STRIDE, 1 << 20])
def test_a_load_larger_than_the_arena_goes_through_and_its_head_stays(device: str, batch_bytes: int) -> None:
    bench = Bench(device, 5, batch_bytes=batch_bytes)
    items = bench.items(range(1, 31), last=2)
    bench.put_host(items)
    loaded = bench.load(items)
    assert all(loaded.taken)
    bench.assert_engine(items)
    kept = loaded.keep()
    assert bench.resident(range(1, 31)) == [True] * kept + [False] * (30 - kept)
    assert kept == {STRIDE: 3, 2 * STRIDE: 1}.get(batch_bytes, 0)
    assert bench.tier.stats().passed_through == 30 - kept
    bench.close()


def test_a_load_goes_through_when_every_slot_is_in_use(bench: Bench) -> None:
    bench.save(bench.items(range(1, 9), host=False))
    items = bench.items(range(11, 16), last=3)
    bench.put_host(items)
    items[-1] = replace(items[-1], take=2)
    with bench.tier.acquire([key_of(number) for number in range(1, 9)]):
        loaded = bench.load(items)
        assert loaded.taken == (True,) * 5
        bench.assert_engine(items)
    assert loaded.keep() == 0
    assert bench.tier.stats().direct == 5
    assert bench.resident(range(1, 9)) == [True] * 8


def test_another_layout_gets_the_arena_when_nothing_is_in_use(bench: Bench) -> None:
    bench.save(bench.items([1, 2], host=False))
    other = Bench(bench.device, 8, LARGE)
    items = other.items([3, 4], last=1)
    other.put_engine(items)
    held = bench.tier.acquire([key_of(1)])
    assert bench.tier.save(other.kv, items).taken == (False, False)
    other.put_host(items)
    loaded = bench.tier.load(other.kv, items)
    assert loaded.taken == (True, True), "it goes through without the arena"
    assert loaded.wait()
    other.assert_engine(items)
    assert bench.resident([1, 2]) == [True, True]
    held.release()

    saved = bench.tier.save(other.kv, items)
    assert saved.taken == (True, True)
    assert saved.wait()
    other.assert_host(items)
    assert bench.resident([1, 2, 3, 4]) == [False, False, True, True]
    assert bench.tier.check_integrity() == []
    assert (bench.tier.stats().recuts, bench.tier.stats().slots) == (1, 8 * STRIDE // other.stride)
    assert Evicted("hbm", "recut", 2) in bench.told
    other.close()


def test_a_budget_smaller_than_a_block_is_said_once_and_loads_still_work(device: str) -> None:
    bench = Bench(device, 8, LARGE)
    small_told: list[Event] = []
    tier = HbmTier(8192, device, events=Events([small_told.append]))
    items = bench.items([1, 2])
    bench.put_engine(items)
    assert tier.save(bench.kv, items).taken == (False, False)
    assert tier.save(bench.kv, items).taken == (False, False)
    assert [type(event) for event in small_told] == [Notice]
    bench.put_host(items)
    assert tier.load(bench.kv, items).wait()
    bench.assert_engine(items)
    tier.close()
    bench.close()


def test_blocks_are_dropped_by_key_by_root_and_all(bench: Bench) -> None:
    bench.save(bench.items([1, 2, 3], host=False))
    bench.save(bench.items([4, 5], host=False, root=OTHER_ROOT))
    assert bench.tier.drop([key_of(1), key_of(1), key_of(77)]) == 1
    assert bench.tier.drop(root=OTHER_ROOT) == 2
    assert bench.resident([1, 2, 3, 4, 5]) == [False, True, True, False, False]
    assert bench.tier.discard([key_of(2)]) == 1
    assert bench.tier.drop() == 0
    assert bench.tier.drop(everything=True) == 1
    assert bench.tier.stats().free == 8
    assert bench.told == [Evicted("hbm", r, n) for r, n in [("evict", 1), ("evict", 2), ("corrupt", 1), ("evict", 1)]]


def test_resident_blocks_are_copied_out_for_the_tier_below(bench: Bench) -> None:
    items = bench.items([1, 2, 3], last=2)
    bench.save([replace(item, host=None) for item in items])
    wanted = [
        items[2],
        replace(items[0], key=key_of(55)),
        items[1],
        replace(items[0], tokens=1, take=1, host=bench.run(9, 1)),
    ]
    out = bench.tier.copy_out(wanted)
    assert out.taken == (True, False, True, False)
    assert out.wait()
    bench.assert_host([items[2], items[1]])
    assert (bench.segment[bench.run(9).offset : bench.run(10).offset] == 0).all()
    assert bench.tier.stats().copied_out == 2


def test_blocks_next_in_line_are_offered_once_while_they_are_still_there(device: str) -> None:
    offered: list[bytes] = []
    tier: list[HbmTier] = []

    def demote(keys: Sequence[bytes]) -> None:
        assert tier[0].lookup(keys) == [True] * len(keys)
        offered.extend(keys)

    bench = Bench(device, 32, demote=demote)
    tier.append(bench.tier)
    bench.save(bench.items(range(1, 31), host=False))
    assert offered == [], "as long as slots are free, nobody is next in line"
    bench.save(bench.items([31], host=False))
    assert offered == [key_of(30), key_of(29)]
    bench.tier.acquire([key_of(30)]).release()
    bench.save(bench.items([32], host=False))
    assert offered == [key_of(30), key_of(29), key_of(28)]
    bench.save(bench.items([33, 34], host=False))
    assert bench.resident([30, 29, 28, 27]) == [True, False, False, True]
    bench.close()


def test_an_offer_that_fails_is_told_and_the_save_goes_on(device: str) -> None:
    def demote(keys: Sequence[bytes]) -> None:
        raise ValueError("no mover")

    bench = Bench(device, 2, demote=demote)
    bench.save(bench.items([1], host=False))
    bench.save(bench.items([2], host=False))
    assert bench.resident([1, 2]) == [True, True]
    assert bench.told == [Fault("hbm", "demote", "ValueError('no mover')")]
    bench.close()


def test_an_interrupted_load_gives_its_slots_back() -> None:
    class Interrupting(HostLanes):
        armed = False

        def submit(self, lane: Lane, work: Callable[[], object]) -> None:
            if self.armed:
                raise KeyboardInterrupt
            super().submit(lane, work)

    lanes = Interrupting()
    bench = Bench("cpu", 4, lanes=lanes)
    lanes.armed = True
    with pytest.raises(KeyboardInterrupt):
        bench.tier.load(bench.kv, bench.items([1, 2, 3]))
    lanes.armed = False
    stats = bench.tier.stats()
    assert (stats.free, stats.staged, stats.transfers) == (4, 0, 0)
    bench.close()


def test_a_handle_that_is_thrown_away_gives_its_slots_back(bench: Bench) -> None:
    items = bench.items([1, 2, 3])
    bench.put_host(items)
    bench.tier.load(bench.kv, items)
    bench.save(bench.items([4], host=False))
    bench.tier.acquire([key_of(4)])
    gc.collect()
    if bench.device != "cpu":
        torch.cuda.synchronize()
    stats = bench.tier.stats()
    assert (stats.staged, stats.resident, stats.in_use, stats.transfers) == (0, 1, 0, 0)


BAD_ITEMS = {
    "short key": {"key": b"short"},
    "no tokens": {"tokens": 0, "take": 0},
    "more than a block": {"tokens": BLOCK + 1},
    "more than there is": {"tokens": 2, "take": 3},
    "before the buffer": {"start": -1},
    "past the buffer": {"start": 64 * BLOCK - 1},
    "several payloads": {"host": Run(np.zeros(9999, np.uint8), 0, 512, 2, BLOCK, BLOCK)},
    "payload of other tokens": {"host": Run(np.zeros(9999, np.uint8), 0, 512, 1, 1, 1)},
    "payload past the memory": {"host": Run(np.zeros(500, np.uint8), 0, 512, 1, BLOCK, BLOCK)},
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_impossible_items_are_refused_before_anything_happens(bench: Bench, name: str) -> None:
    good = bench.items([1, 2])
    bad = [good[0], replace(good[1], **BAD_ITEMS[name])]  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="make items"):
        bench.tier.load(bench.kv, bad)
    with pytest.raises(LayoutError):
        bench.tier.save(bench.kv, bad)
    assert bench.tier.stats().transfers == 0


def test_a_save_of_a_part_of_a_payload_is_refused(bench: Bench) -> None:
    with pytest.raises(LayoutError, match="take equals tokens"):
        bench.tier.save(bench.kv, [replace(bench.items([1])[0], take=2)])


def test_buffers_of_the_host_or_of_another_device_are_refused(bench: Bench) -> None:
    host = HostKV.stacked(PLAIN, np.zeros((2, 2, 2, 8, 8), np.uint16))
    with pytest.raises(UnsupportedError, match="HostKV on the host"):
        bench.tier.load(host, [])
    other = Layout.uniform(layers=1, heads=1, k_dim=2, dtype="float32", block_tokens=4)
    meta = torch.zeros(1, 2, 1, 8, 2, device="meta")
    with pytest.raises(UnsupportedError, match="meta"):
        bench.tier.load(DeviceKV.stacked(other, meta), [])


def test_a_closed_tier_says_so_and_its_handles_stay_harmless(device: str) -> None:
    bench = Bench(device, 4)
    items = bench.items([1, 2])
    bench.put_host(items)
    loaded = bench.tier.load(bench.kv, items)
    held = bench.tier.acquire([key_of(1)])
    bench.tier.close()
    bench.tier.close()
    assert loaded.wait()
    assert loaded.keep() == 0
    held.release()
    for call in (bench.tier.lookup, bench.tier.acquire, bench.tier.discard, bench.tier.copy_out):
        with pytest.raises(ClosedError):
            call([])
    for call in (bench.tier.stats, bench.tier.check_integrity, bench.tier.drop):
        with pytest.raises(ClosedError):
            call()


def test_a_budget_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(BudgetError, match="cannot take"):
        HbmTier(1 << 60, "cpu")
    with pytest.raises(BudgetError):
        HbmTier(4096, "cpu")


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="cuda:99"):
        open_device_tier(1 << 20, "cuda:99")
    tier = open_device_tier(1 << 20, "cpu")
    assert tier.stats().device == "cpu"
    assert tier.stats().to_dict()["budget"] == 1 << 20
    tier.close()


class FailingLanes(HostLanes):
    """A device that refuses work from the ``after``-th on, once."""

    def __init__(self, after: int) -> None:
        self.left = after

    def submit(self, lane: Lane, work: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("CUDA error: out of something\nmore words")
        super().submit(lane, work)  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_load_that_the_device_refuses_is_told_and_not_believed(after: int) -> None:
    lanes = FailingLanes(10**9)
    bench = Bench("cpu", 8, lanes=lanes, batch_bytes=2 * STRIDE)
    items = bench.items([1, 2, 3, 4])
    bench.put_host(items)
    lanes.left = after  # two batches, each an upload and a scatter
    loaded = bench.tier.load(bench.kv, items)
    assert loaded.taken == (after > 2,) * 2 + (False,) * 2
    assert bench.told == [Fault("hbm", "load", "CUDA error: out of something")]
    bench.assert_engine(items[: sum(loaded.taken)])
    assert loaded.keep() == sum(loaded.taken)
    assert bench.tier.stats().free == 8 - sum(loaded.taken)
    bench.close()


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_save_that_the_device_refuses_is_told_and_not_believed(after: int) -> None:
    lanes = FailingLanes(10**9)
    bench = Bench("cpu", 8, lanes=lanes, batch_bytes=2 * STRIDE)
    items = bench.items([1, 2, 3, 4])
    bench.put_engine(items)
    lanes.left = after  # two gathers, then two downloads
    saved = bench.tier.save(bench.kv, items)
    assert saved.taken == (after == 4,) * 2 + (False,) * 2
    assert bench.resident([1, 2, 3, 4]) == list(saved.taken)
    assert saved.wait()
    bench.assert_host(items[: sum(saved.taken)])
    assert bench.tier.stats().free == 8 - sum(saved.taken)
    bench.close()


def test_a_save_keeps_its_slots_until_they_are_published(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its copies are done, and another thread takes up what is done meanwhile: that would free them."""
    bench = Bench(device, 4)
    items, attempt = bench.items(range(1, 4)), bench.tier._attempt

    def attempted(*given: Any) -> None:
        attempt(*given)
        other = threading.Thread(target=bench.tier.lookup, args=([],))
        other.start()
        other.join()

    bench.put_engine(items)
    with monkeypatch.context() as patched:
        patched.setattr(bench.tier, "_attempt", attempted)
        saved = bench.tier.save(bench.kv, items)
    assert saved.wait()
    assert saved.taken == (True,) * 3
    assert bench.tier.lookup([item.key for item in items]) == [True] * 3
    assert bench.tier._arena.problems() == []
    bench.close()


def test_threads_that_load_and_save_while_blocks_are_evicted_see_the_right_bytes(device: str) -> None:
    bench = Bench(device, 24)
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        own = Bench.__new__(Bench)
        own.__dict__.update(bench.__dict__)
        own.segment = np.zeros(64 * STRIDE, np.uint8)
        own.tensors, own.kv = bench.make_buffer(64 * BLOCK)
        try:
            for _ in range(40):
                first = int(rng.integers(1, 60))
                items = own.items(range(first, first + int(rng.integers(1, 9))))
                keys = [item.key for item in items]
                if rng.random() < 0.4:
                    own.put_engine(items)
                    saved = bench.tier.save(own.kv, items)
                    for tensor in own.tensors:
                        tensor.fill_(3)
                    assert saved.wait()
                    own.assert_host([item for item, ok in zip(items, saved.taken, strict=True) if ok])
                    continue
                own.clear()
                own.put_host(items)
                with bench.tier.acquire(keys) as held:
                    some = [replace(i, host=None) if there else i for i, there in zip(items, held.found, strict=True)]
                    loaded = bench.tier.load(own.kv, some)
                    assert all(loaded.taken)
                assert loaded.wait()
                own.assert_engine(items)
                own.segment[:] = 0
                loaded.keep(keys[: int(rng.integers(0, 9))])
                if rng.random() < 0.1:
                    bench.tier.drop(keys[:2])
        except BaseException as error:  # noqa: BLE001  told by the test's own thread
            problems.append(f"{seed}: {error!r}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    stats = bench.tier.stats()
    assert (stats.staged, stats.in_use, stats.transfers) == (0, 0, 0)
    assert stats.evicted > 0
    bench.close()
