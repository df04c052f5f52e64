"""Mappings of tmpfs files: aligned for huge pages, which are joined behind everybody's back and change no byte."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.kv import Bytes, HostKV
from kvstore.layout import Layout
from kvstore.tiers import mapping
from kvstore.tiers.mapping import HUGE_PAGE, HugePages, huge_pieces, join_pages, map_file
from kvstore.tiers.medium import MappedMedium, allocate_file


def mapped(directory: Path, pieces: int, *, seed: int = 0) -> Bytes:
    """A mapping of a new tmpfs file of random bytes."""
    path = directory / f"{seed}.bin"
    allocate_file(path, pieces * HUGE_PAGE, "ram")
    memory = map_file(path, pieces * HUGE_PAGE)
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), np.uint8)
    return memory


def joined(memory: Bytes) -> int:
    """How many of a mapping's pieces could be made huge pages. Skips where the kernel never does it."""
    try:
        return sum(join_pages(piece) for piece in huge_pieces(memory))
    except OSError as error:
        pytest.skip(f"this kernel joins no pages of tmpfs: {error}")


def huge_bytes(memory: Bytes) -> int:
    """Bytes of a mapping that huge pages hold, as the kernel has it."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split(" ", 1)[0]:
            first, _, last = line.split(" ", 1)[0].partition("-")
            inside = int(first, 16) <= memory.ctypes.data < int(last, 16)
        elif inside and name == "ShmemPmdMapped":
            found += int(value.split()[0]) << 10
    return found


class Told:
    """Notes of which mappings it is told."""

    def __init__(self) -> None:
        self.mappings: list[Bytes] = []
        self.event = threading.Event()

    def __call__(self, memory: Bytes) -> None:
        self.mappings.append(memory)
        self.event.set()


def test_a_large_mapping_begins_where_a_huge_page_can_lie_and_is_shared(shm: Path) -> None:
    first = mapped(shm, 3)
    again = map_file(shm / "0.bin", len(first))
    assert first.ctypes.data % HUGE_PAGE == again.ctypes.data % HUGE_PAGE == 0
    assert [len(piece) for piece in huge_pieces(first)] == [HUGE_PAGE] * 3
    again[5] = first[5] ^ 0xFF
    np.testing.assert_array_equal(first, again)


def test_a_mapping_of_odd_length_has_its_whole_pieces(shm: Path) -> None:
    allocate_file(shm / "odd", 2 * HUGE_PAGE + 4096, "ram")
    memory = map_file(shm / "odd", 2 * HUGE_PAGE + 4096)
    memory[-1] = 7
    assert len(memory) == 2 * HUGE_PAGE + 4096
    assert len(huge_pieces(memory)) == 2
    assert huge_pieces(memory[4096:])[0].ctypes.data == memory.ctypes.data + HUGE_PAGE


def test_mappings_leave_no_address_space_behind(shm: Path) -> None:
    allocate_file(shm / "seg", HUGE_PAGE, "ram")

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    map_file(shm / "seg", HUGE_PAGE)
    before = mappings()
    for _ in range(50):
        map_file(shm / "seg", HUGE_PAGE)
    assert mappings() < before + 25


def test_joined_pages_hold_the_same_bytes_in_every_mapping_while_they_are_used(shm: Path) -> None:
    memory = mapped(shm, 4, seed=1)
    other = map_file(shm / "1.bin", len(memory))
    expected = memory.copy()
    stop = threading.Event()
    wrong: list[int] = []

    def write_and_read() -> None:
        number = 0
        while not stop.is_set():
            number = (number + 1) % 256
            memory[:4096] = number
            if not (other[:4096] == number).all() or not np.array_equal(other[4096:], expected[4096:]):
                wrong.append(number)

    user = threading.Thread(target=write_and_read)
    user.start()
    try:
        count = joined(memory)
    finally:
        stop.set()
        user.join()
    assert not wrong
    np.testing.assert_array_equal(memory[4096:], expected[4096:])
    assert huge_bytes(memory) == count * HUGE_PAGE


def test_a_medium_joins_the_pages_of_what_it_maps(shm: Path) -> None:
    joined(mapped(shm, 1, seed=2))
    told = Told()
    medium = MappedMedium(shm, mapped=told, join_first=True)
    medium.allocate(0, 2 * HUGE_PAGE)
    medium.prepare(0, 2 * HUGE_PAGE)
    assert told.event.wait(30)
    window = medium.window(0, 2 * HUGE_PAGE)
    assert told.mappings[0] is window
    assert huge_bytes(window) > 0  # all of it, unless memory is in pieces
    medium.close()


def test_pages_are_joined_where_a_disk_will_read_and_only_there(shm: Path) -> None:
    joined(mapped(shm, 1, seed=2))
    told = Told()
    medium = MappedMedium(shm, mapped=told)
    for segment in (0, 1):
        medium.allocate(segment, 2 * HUGE_PAGE)
        medium.prepare(segment, 2 * HUGE_PAGE)
    windows = [medium.window(segment, 2 * HUGE_PAGE) for segment in (0, 1)]
    assert len(told.mappings) == 2  # at once
    medium.join(1)
    medium.join(1)
    medium.join(7)  # not mapped here: nothing to do
    deadline = time.monotonic() + 30
    while not huge_bytes(windows[1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert huge_bytes(windows[1]) > 0
    assert huge_bytes(windows[0]) == 0
    medium.close()


def test_what_the_kernel_refuses_stays_as_it_is_and_is_told_of(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Bytes] = []

    def refuse(piece: Bytes) -> bool:
        tried.append(piece)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mapping, "join_pages", refuse)
    told = Told()
    pages = HugePages(told)
    for seed in (3, 4):
        told.event.clear()
        pages.add(mapped(shm, 2, seed=seed))
        assert told.event.wait(30)
    pages.close()
    assert (len(tried), len(told.mappings)) == (1, 2)  # asked once, never again


def test_pieces_in_use_are_tried_again_and_only_they(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, tried = mapped(shm, 3, seed=5), []
    monkeypatch.setattr(mapping, "PAUSES_S", (0.0, 0.0, 0.0))

    def busy(piece: Bytes) -> bool:
        tried.append((piece.ctypes.data - memory.ctypes.data) // HUGE_PAGE)
        return tried.count(1) > 1 or tried[-1] != 1

    monkeypatch.setattr(mapping, "join_pages", busy)
    told = Told()
    pages = HugePages(told)
    pages.add(memory)
    assert told.event.wait(30)
    pages.close()
    assert tried == [0, 1, 2, 1]


def test_an_error_of_who_is_told_ends_in_no_wait(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, heard = [], threading.Event()

    def hook(error: threading.ExceptHookArgs) -> None:
        said.append(error.exc_type)
        heard.set()

    def told(memory: Bytes) -> None:
        raise ValueError("not now")

    monkeypatch.setattr(threading, "excepthook", hook)
    pages = HugePages(told)
    pages.add(mapped(shm, 1, seed=9))
    assert heard.wait(30)
    assert said == [ValueError]
    closing = threading.Thread(target=pages.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("started", [True, False])
def test_a_ctrl_c_while_the_thread_is_started_ends_in_no_wait(
    shm: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    told = Told()
    pages, start = HugePages(told), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pages.add(mapped(shm, 1, seed=9))
    pages.add(mapped(shm, 1, seed=10))
    assert told.event.wait(30)
    closing = threading.Thread(target=pages.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_what_is_withdrawn_or_closed_meanwhile_is_told_to_nobody(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(piece: Bytes) -> bool:
        entered.set()
        return go.wait(30)

    monkeypatch.setattr(mapping, "join_pages", slow)
    told = Told()
    pages = HugePages(told)
    under_way, waiting, last = (mapped(shm, 1, seed=seed) for seed in (6, 7, 8))
    for memory in (under_way, waiting, last):
        pages.add(memory)
    assert entered.wait(30)
    pages.withdraw(under_way)
    pages.withdraw(waiting)
    go.set()
    assert told.event.wait(30)
    pages.close()
    assert len(told.mappings) == 1
    assert told.mappings[0] is last
    pages.add(under_way)  # after the end: nothing happens
    assert len(told.mappings) == 1


def test_what_is_loaded_from_memory_is_joined_and_what_is_only_saved_is_not(shm: Path, tmp_path: Path) -> None:
    joined(mapped(shm, 1, seed=2))
    layout = Layout.uniform(layers=2, heads=4, k_dim=64, block_tokens=256)
    sizes = {"ram": "64MiB", "nvme": 0, "ram_directory": shm, "ram_segment_bytes": 8 << 20}
    with kvstore.open(tmp_path / "store", **sizes) as store:
        space, tokens = store.namespace(layout), np.arange(1024, dtype=np.uint32)
        array = np.ones((2, 2, 4, 1024, 64), np.float32)
        assert store.save(space, tokens, HostKV.stacked(layout, array)).new_blocks == 4
        ram = store._core.ram
        windows = [ram.medium.window(known.number, known.size) for known in ram.segment_list() if known.slots]
        assert sum(map(huge_bytes, windows)) == 0
        assert store.load(store.match(space, tokens), HostKV.stacked(layout, np.zeros_like(array))).tokens == 1024
        deadline = time.monotonic() + 30
        while not sum(map(huge_bytes, windows)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sum(map(huge_bytes, windows)) > 0
        again = np.zeros_like(array)
        assert store.load(store.match(space, tokens), HostKV.stacked(layout, again)).tokens == 1024
        np.testing.assert_array_equal(again, array)
