"""The `hbm` tier against a dictionary, and the arithmetic of its copies against plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvstore.header import slot_bytes
from kvstore.kv import Bytes, HostKV, Run
from kvstore.layout import Layout
from kvstore.tiers.arena import Arena, Entry
from kvstore.tiers.batches import Batch, spans
from kvstore.tiers.device import DeviceItem, Held, Load
from kvstore.tiers.devicekv import DeviceKV
from kvstore.tiers.hbm import HbmTier

BLOCK, SLOTS, PLACES = 3, 6, 10
LAYOUT = Layout.uniform(layers=2, heads=1, k_dim=2, dtype="float16", block_tokens=BLOCK)
STRIDE = slot_bytes(LAYOUT.payload_bytes())
ROOTS = (b"a" * 32, b"b" * 32)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def tokens_of(number: int) -> int:
    """Every third block is partial."""
    return BLOCK if number % 3 else 1 + number % 2


def root_of(number: int) -> bytes:
    return ROOTS[number % 2]


def content(number: int) -> Bytes:
    size = LAYOUT.payload_bytes(0, tokens_of(number))
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


numbers = st.lists(st.integers(0, 19), min_size=1, max_size=PLACES, unique=True)


class HbmAgainstDict(RuleBasedStateMachine):
    """model: blocks that were saved or kept and not dropped since; the tier may hold fewer, since it evicts."""

    loads = Bundle("loads")
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.tier = HbmTier(SLOTS * STRIDE, "cpu", batch_bytes=2 * STRIDE)
        self.model: set[int] = set()
        self.held: list[tuple[Held, list[int]]] = []
        self.evicted = 0

    def buffer(self) -> tuple[DeviceKV, HostKV]:
        tensor = torch.zeros(2, 2, 1, PLACES * BLOCK, 2, dtype=torch.float16)
        return DeviceKV.stacked(LAYOUT, tensor), HostKV.stacked(
            LAYOUT, tensor.view(torch.int16).numpy().view(np.uint16)
        )

    def items(self, chosen: list[int], host: list[bool]) -> tuple[list[DeviceItem], Bytes]:
        segment = np.zeros(PLACES * STRIDE, np.uint8)
        items = []
        for at, (number, there) in enumerate(zip(chosen, host, strict=True)):
            tokens = tokens_of(number)
            run = Run(segment, at * STRIDE + 4096, STRIDE, 1, tokens, tokens) if there else None
            items.append(DeviceItem(key_of(number), root_of(number), at * BLOCK, tokens, tokens, run))
        return items, segment

    def resident(self) -> set[int]:
        return {number for number, there in enumerate(self.tier.lookup([key_of(n) for n in range(20)])) if there}

    @rule(chosen=numbers, host=st.lists(st.booleans(), min_size=PLACES, max_size=PLACES))
    def save(self, chosen: list[int], host: list[bool]) -> None:
        items, _ = self.items(chosen, host[: len(chosen)])
        kv, view = self.buffer()
        for item, number in zip(items, chosen, strict=True):
            data = content(number)
            view.scatter(item.start, Run(data, 0, len(data), 1, item.tokens, item.tokens))
        saved = self.tier.save(kv, items)
        assert saved.wait()
        for item, number, taken in zip(items, chosen, saved.taken, strict=True):
            if taken:
                self.model.add(number)
                if item.host is not None:
                    assert np.array_equal(item.host.payload(0, len(content(number))), content(number))

    @rule(target=loads, chosen=numbers, host=st.lists(st.booleans(), min_size=PLACES, max_size=PLACES), data=st.data())
    def load(self, chosen: list[int], host: list[bool], data: st.DataObject) -> tuple[Load, list[int]]:
        before = self.resident()
        items, segment = self.items(chosen, host[: len(chosen)])
        for item, number in zip(items, chosen, strict=True):
            if item.host is not None:
                item.host.payload(0, len(content(number)))[:] = content(number)
        takes = [data.draw(st.integers(1, item.tokens)) for item in items]
        items = [replace(item, take=take) for item, take in zip(items, takes, strict=True)]
        kv, view = self.buffer()
        loaded = self.tier.load(kv, items)
        assert loaded.wait()
        segment[:] = 0xEE
        for item, number, taken in zip(items, chosen, loaded.taken, strict=True):
            assert taken == (item.host is not None or number in before)
            if taken:
                whole = np.zeros_like(content(number))
                view.gather(item.start, Run(whole, 0, len(whole), 1, item.tokens, item.take))
                expected = HostKV.stacked(LAYOUT, np.zeros((2, 2, 1, BLOCK, 2), np.uint16))
                expected.scatter(0, Run(content(number), 0, len(whole), 1, item.tokens, item.take))
                wanted = np.zeros_like(whole)
                expected.gather(0, Run(wanted, 0, len(whole), 1, item.tokens, item.take))
                assert np.array_equal(whole, wanted)
        return loaded, chosen

    @rule(loaded=consumes(loads), share=st.integers(0, PLACES))
    def keep(self, loaded: tuple[Load, list[int]], share: int) -> None:
        handle, chosen = loaded
        before = self.resident()
        handle.keep([key_of(number) for number in chosen[:share]])
        new = self.resident() - before
        assert new <= set(chosen[:share])
        self.model |= new

    @rule(target=holds, chosen=numbers)
    def hold(self, chosen: list[int]) -> object:
        held = self.tier.acquire([key_of(number) for number in chosen])
        found = [number for number, ok in zip(chosen, held.found, strict=True) if ok]
        if not found:
            held.release()
            return multiple()
        self.held.append((held, found))
        return held

    @rule(held=consumes(holds))
    def release(self, held: Held) -> None:
        held.release()
        self.held = [(other, found) for other, found in self.held if other is not held]

    @rule(chosen=numbers, damaged=st.booleans())
    def drop(self, chosen: list[int], damaged: bool) -> None:
        there = self.resident() & set(chosen)
        keys = [key_of(number) for number in chosen]
        assert (self.tier.discard(keys) if damaged else self.tier.drop(keys)) == len(there)
        self.forget(set(chosen))

    @rule(root=st.sampled_from([*ROOTS, None]))
    def drop_many(self, root: bytes | None) -> None:
        gone = {number for number in range(20) if root in (None, root_of(number))}
        there = self.resident() & gone
        assert self.tier.drop(root=root, everything=root is None) == len(there)
        self.forget(gone)

    def forget(self, gone: set[int]) -> None:
        self.model -= gone
        self.held = [(held, [number for number in found if number not in gone]) for held, found in self.held]

    @invariant()
    def the_tier_knows_what_the_model_knows(self) -> None:
        resident, stats = self.resident(), self.tier.stats()
        assert resident <= self.model
        if stats.evicted == self.evicted:
            assert resident == self.model, "nothing may get lost but by eviction"
        self.model, self.evicted = resident, stats.evicted
        for _, found in self.held:
            assert set(found) <= resident, "held blocks stay"
        assert stats.resident == len(resident)
        assert stats.free + stats.staged + stats.resident == stats.slots or not stats.slots
        assert self.tier.check_integrity() == []

    def teardown(self) -> None:
        self.tier.close()


TestHbmAgainstDict = HbmAgainstDict.TestCase
TestHbmAgainstDict.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(st.data())
def test_spans_copy_every_payload_and_never_a_foreign_slot(data: st.DataObject) -> None:
    stride, token_bytes = 64, 5
    count = data.draw(st.integers(1, 8))
    arena_slots = data.draw(st.permutations(range(8)))[:count]
    host_slots = data.draw(st.permutations(range(8)))[:count]
    if data.draw(st.booleans()):
        arena_slots, host_slots = sorted(arena_slots), sorted(host_slots)
    memories = [np.arange(8 * stride, dtype=np.uint8), np.arange(8 * stride, dtype=np.uint8)[::-1].copy()]
    batch, payloads = Batch([], [], [], True), []
    for at, (arena_slot, host_slot) in enumerate(zip(arena_slots, host_slots, strict=True)):
        tokens = data.draw(st.integers(1, 9))
        memory = memories[0 if data.draw(st.integers(0, 3)) else 1]
        run = Run(memory, host_slot * stride + 8, stride, 1, tokens, tokens)
        batch.indices.append(at)
        batch.items.append(DeviceItem(key_of(at), ROOTS[0], at, tokens, tokens, run))
        batch.entries.append(Entry(arena_slot, key_of(at), ROOTS[0], tokens))
        payloads.append((arena_slot * stride, memory, host_slot * stride + 8, tokens * token_bytes))

    toward_host = spans(batch, stride, token_bytes, over_gaps=False)
    assert sorted(byte for s in toward_host for byte in range(s.at, s.at + s.length)) == sorted(
        byte for at, _, _, size in payloads for byte in range(at, at + size)
    ), "toward the host, payloads and nothing else"

    toward_arena = spans(batch, stride, token_bytes, over_gaps=True)
    assert len(toward_arena) <= len(toward_host)
    own = {byte for slot in arena_slots for byte in range(slot * stride, (slot + 1) * stride)}
    for found in (toward_host, toward_arena):
        arena = np.zeros(8 * stride, np.uint8)
        for span in found:
            assert set(range(span.at, span.at + span.length)) <= own
            arena[span.at : span.at + span.length] = span.host()
        for at, memory, offset, size in payloads:
            assert np.array_equal(arena[at : at + size], memory[offset : offset + size])


def test_consecutive_payloads_come_over_by_one_copy() -> None:
    memory = np.zeros(8 * STRIDE, np.uint8)
    batch = Batch([], [], [], True)
    for at in range(5):
        run = Run(memory, at * STRIDE + 4096, STRIDE, 1, BLOCK, BLOCK)
        batch.items.append(DeviceItem(key_of(at), ROOTS[0], at * BLOCK, BLOCK, BLOCK, run))
        batch.entries.append(Entry(at + 2, key_of(at), ROOTS[0], BLOCK))
    token_bytes = LAYOUT.token_bytes()
    (span,) = spans(batch, STRIDE, token_bytes, over_gaps=True)
    assert (span.at, span.offset, span.length) == (2 * STRIDE, 4096, 4 * STRIDE + LAYOUT.payload_bytes())
    assert len(spans(batch, STRIDE, token_bytes, over_gaps=False)) == 5


def test_contradictions_in_the_books_are_found() -> None:
    def booked() -> tuple[Arena, list[Entry]]:
        arena = Arena(4)
        entries, _ = arena.stage([(key_of(n), ROOTS[0], BLOCK) for n in range(3)])
        arena.publish(entries[:2])
        arena.release(entries[:2])
        assert arena.problems() == []
        return arena, entries

    arena, entries = booked()
    entries[0].slot = entries[1].slot
    assert "twice: [1], slots lost: [0]" in arena.problems()[0]
    arena, entries = booked()
    entries[0].uses = -1
    assert len(arena.problems()) == 1
    arena, entries = booked()
    entries[1].resident = False
    assert len(arena.problems()) == 1
    arena, entries = booked()
    entries[2].uses = 0
    assert "is staged, but says" in arena.problems()[0]
