"""A wipe leaves no token id and no payload byte of what was deleted, in any file; proved by searching them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread, Timer, current_thread
from typing import Any

import numpy as np
import pytest
from children import Child
from known_kv import SPEAKERS, Speaker, load, save
from stores import came_to_rest

from kvstore.errors import BusyError, ClosedError
from kvstore.kv import Bytes
from kvstore.layout import Layout
from kvstore.store import Store
from kvstore.tiers import wiping
from kvstore.tiers.medium import Medium
from kvstore.transaction import Database

SECRET = SPEAKERS[1]
"""The speaker with the salt "a"."""
OTHER = SPEAKERS[2]
MORE = {"ram": "8MiB", "nvme": "24MiB", "ram_segment_bytes": 1 << 20, "nvme_segment_bytes": 2 << 20}


def secret(seed: int, length: int = 200) -> list[int]:
    """Token ids that nobody else has."""
    return np.random.default_rng(1000 + seed).integers(1 << 24, 1 << 31, length).tolist()


def plain(seed: int, length: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


class Search:
    """Looks for what was saved of some tokens, two ids or eight bytes of payload at a time, in a store's files."""

    def __init__(self, path: Path, memory: Path, *sequences: list[int]) -> None:
        self.places = path, memory
        marks: list[bytes] = []
        for tokens in sequences:
            for kind in ("<u4", ">u4"):
                raw = np.array(tokens, kind).tobytes()
                marks += [raw[at : at + 8] for at in range(0, len(raw) - 8, 4)]
            for part in SECRET.layout.parts():
                planes = [plane for pair in SECRET._layers(tokens, part) for plane in pair]
                marks += [row.tobytes()[:8] for plane in planes for row in plane.reshape(-1, plane.shape[-1])]
        self._marks = np.unique(np.frombuffer(b"".join(marks), np.uint64))
        self._seen = np.zeros(1 << 24, np.bool_)
        self._seen[self._marks & np.uint64(0xFFFFFF)] = True

    def __call__(self) -> list[str]:
        """Files that have something of it."""
        files = [file for place in self.places for file in sorted(place.rglob("*")) if file.is_file()]
        return [file.name for file in files if self._in(file.read_bytes())]

    def _in(self, raw: bytes) -> bool:
        pages = np.frombuffer(raw.ljust(-(-len(raw) // 4096) * 4096, b"\0"), np.uint8).reshape(-1, 4096)
        used = pages[pages.any(axis=1)].tobytes() + bytes(8)
        for shift in range(8):
            values = np.frombuffer(used, np.uint64, (len(used) - 8) // 8, shift)
            likely = values[self._seen[values & np.uint64(0xFFFFFF)]]
            if np.isin(likely, self._marks).any():
                return True
        return False


Opened = Callable[..., Store]


@pytest.fixture
def places(tmp_path: Path, memory: Path) -> tuple[Path, Path]:
    return tmp_path / "kv", memory


def wiped(store: Store, **target: Any) -> Any:
    if target:
        store.evict(**target, forget_names=True)
    return store.wipe()


def test_of_a_wiped_salt_nothing_can_be_found_and_the_rest_stays(reopen: Opened, places: Any) -> None:
    store = reopen(**MORE)
    tokens = [secret(seed) for seed in range(6)]
    kept = [plain(seed) for seed in range(6)]
    for mine, others in zip(tokens, kept, strict=True):
        save(store, SECRET, mine)
        save(store, OTHER, others)
    store.pin("mine", store.namespace(SECRET.layout, salt=SECRET.salt), tokens[0])
    store.pin("others", store.namespace(OTHER.layout, salt=OTHER.salt), kept[0])
    assert store.flush(60)
    search = Search(*places, *tokens)
    assert len(search()) >= 4, "both indexes and a segment of both tiers have it before"
    done = wiped(store, salt=SECRET.salt)
    assert search() == []
    assert (done.unconfirmed, done.left) == (0, 0)
    assert min(done.slots.values()) > 0
    assert set(store.names()) == {"others"}
    for one in kept:
        loaded, wrong = load(store, OTHER, one)
        assert (loaded.tokens, wrong) == (len(one), 0)
    assert store.verify().problems == []
    store.close()
    assert search() == []
    assert reopen(**MORE).verify().problems == []


def test_what_was_pushed_out_long_ago_is_wiped_too(reopen: Opened, places: Any) -> None:
    store = reopen()
    tokens = [secret(seed) for seed in range(4)]
    for one in tokens:
        save(store, SECRET, one)
    store.flush(60)
    store.evict(salt=SECRET.salt)
    search = Search(*places, *tokens)
    assert search() != [], "an eviction alone leaves the bytes where they were"
    for seed in range(3):
        save(store, SPEAKERS[4], plain(seed, 37))  # other slot sizes: segments are recut
        save(store, SPEAKERS[3], plain(seed, 101))
    store.flush(60)
    store.wipe()
    assert search() == []
    assert store.verify().problems == []


def test_an_index_with_many_pages_keeps_no_separator(reopen: Opened, places: Any) -> None:
    """Keys of deleted records live on as separators in branch pages."""
    store = reopen(ram="1GiB", nvme="1GiB", ram_segment_bytes=4 << 20, nvme_segment_bytes=4 << 20)
    tokens = []
    for seed in range(60):
        tokens.append(secret(seed, 160))
        save(store, SECRET, tokens[-1])
        save(store, OTHER, plain(seed, 160))
    assert store.flush(120)
    search = Search(*places, *tokens[::10])
    assert search() != []
    wiped(store, salt=SECRET.salt)
    assert search() == []
    assert load(store, OTHER, plain(7, 160))[0].tokens == 160


def test_everything_can_be_wiped(reopen: Opened, places: Any) -> None:
    store = reopen()
    save(store, SECRET, secret(1))
    assert store.flush(60)
    search = Search(*places, secret(1))
    wiped(store, everything=True)
    assert search() == []
    save(store, SECRET, secret(2))
    assert load(store, SECRET, secret(2))[0].tokens == len(secret(2))


def test_a_short_block_leaves_nothing_of_what_its_slot_held_before(reopen: Opened, places: Any) -> None:
    store = reopen()
    for seed in range(16):
        save(store, SECRET, secret(seed, 160))
    assert came_to_rest(store)
    search = Search(*places, *(secret(seed, 160) for seed in range(16)))
    store.evict(salt=SECRET.salt)
    for seed in range(60):
        save(store, OTHER, plain(seed, 3))
    assert came_to_rest(store)
    store.wipe()
    assert search() == []
    assert load(store, OTHER, plain(59, 3))[0].tokens == 3


def test_a_process_that_saved_it_writes_none_of_it_again(reopen: Opened, places: Any) -> None:
    """Its index keeps dirty pages, whose gaps would come back with the next thing it saves."""
    store = reopen(**MORE)
    with Child(*places, settings=MORE) as child:
        for seed in range(8):
            child.do("save", speaker=1, tokens=secret(seed))
        assert child.do("flush")
        search = Search(*places, *(secret(seed) for seed in range(8)))
        assert search() != []
        done = wiped(store, salt=SECRET.salt)
        assert (search(), done.unconfirmed) == ([], 0)
        assert child.do("load", speaker=1, tokens=secret(0))[0] == 0
        for seed in range(8):
            child.do("save", speaker=2, tokens=plain(seed, 150))
            save(store, OTHER, plain(100 + seed, 150))
        assert child.do("flush")
        assert search() == []
        assert child.do("load", speaker=2, tokens=plain(3, 150))[:2] == [150, 0]
        assert child.end() == 0
    assert search() == []


def test_engines_go_on_while_a_store_is_wiped(reopen: Opened, places: Any) -> None:
    store = reopen(**MORE)
    tokens = [secret(seed) for seed in range(4)]
    for one in tokens:
        save(store, SECRET, one)
    assert store.flush(60)
    search = Search(*places, *tokens)
    with Child(*places, settings={**MORE, "churn": [5, 4.0]}) as child:
        for _ in range(2):
            wiped(store, salt=SECRET.salt)
        counts = child.answer()
    assert counts["wrong"] == 0
    assert counts["loaded"] > 0
    assert search() == []
    assert store.verify().problems == []


def test_a_process_that_dies_while_it_wipes_leaves_sound_books(reopen: Opened, places: Any) -> None:
    store = reopen(**MORE)
    save(store, SECRET, secret(1))
    assert store.flush(60)
    tier = store._core.ram
    segment = tier.segment_list()[0]
    taken = tier.take_free(segment, 0, 5)
    assert len(taken) == 5
    assert store.verify().problems == []
    freed = tier.take_back(tier.owner)
    assert freed == 5
    assert store.verify().problems == []
    assert not tier.index.write(lambda txn: wiping.take_uncut(txn, tier.owner, segment.number))


def test_a_reader_that_does_not_end_is_told(reopen: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore import scrubbing

    monkeypatch.setattr(scrubbing, "READER_WAIT_S", 0.2)
    store = reopen()
    save(store, SECRET, secret(1))
    with store._core.ram.index.read() as txn:
        assert txn.count(Database.BLOCKS) > 0
        with pytest.raises(BusyError, match="has read the ram index"):
            store.wipe()
    assert store.wipe().left == 0


def test_segments_that_are_cut_otherwise_under_a_wipe_keep_their_blocks(reopen: Opened, places: Any) -> None:
    """Zeros over a slot of the old size would lie over several blocks of the new one."""
    store = reopen(nvme=None, ram="3MiB")
    wide = Speaker(Layout.uniform(layers=2, heads=8, k_dim=16, block_tokens=16), SECRET.salt)
    for seed in range(40):
        save(store, wide, secret(seed, 64))
    for seed in range(3):
        save(store, SECRET, secret(100 + seed, 40))
    search = Search(*places, *(secret(100 + seed, 40) for seed in range(3)))
    assert search() != []
    store.evict(salt=SECRET.salt)
    kept: list[list[int]] = []

    def recut(what: str, at: int, total: int) -> None:
        if what != "ram" or at % 3 or len(kept) > 60:
            return
        for seed in range(len(kept), len(kept) + 20):
            kept.append(plain(seed, 32))
            save(store, OTHER, kept[-1])
        for one in kept[-20::4]:
            store.evict(prefix=store.match(store.namespace(OTHER.layout, salt=OTHER.salt), one))

    assert store.wipe(recut).left == 0
    assert len(kept) > 60
    assert search() == []
    for at, one in enumerate(kept[-20:]):
        if at % 4:
            loaded, wrong = load(store, OTHER, one)
            assert (loaded.tokens, wrong) == (32, 0)
    assert store.verify().problems == []


class Held:
    """A medium that holds its next write back until it is let go. reached: set when there is one."""

    def __init__(self, inner: Medium) -> None:
        self._inner, self.name = inner, inner.name
        self.armed = False
        self.reached, self.go = Event(), Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        if self.armed:
            self.armed = False
            self.reached.set()
            assert self.go.wait(30)
        self._inner.write(segment, offset, data)


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_closing_waits_until_nothing_is_written_over_any_more(reopen: Opened, places: Any, tier: str) -> None:
    """The slots that a wipe has taken are others' when it is closed; what it had not begun it leaves, and says so."""
    entered, go, touched = Event(), Event(), 0

    class Slow:
        def __init__(self, inner: Medium) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
            nonlocal touched
            if current_thread().name == "wipes":
                touched += 1
                entered.set()
                assert go.wait(30)
            self.inner.write(segment, offset, data)

    store = reopen(**MORE, wrap=lambda medium: Slow(medium) if medium.name == tier else medium)
    for seed in range(3):
        save(store, SECRET, secret(seed))
    assert store.flush(60)
    store.evict(everything=True)
    raised: list[Exception] = []

    def wipe() -> None:
        try:
            store.wipe()
        except ClosedError as error:
            raised.append(error)

    wiping_thread, closing = Thread(target=wipe, name="wipes"), Thread(target=store.close)
    wiping_thread.start()
    assert entered.wait(30)
    closing.start()
    closing.join(0.3)
    waited = closing.is_alive()
    before = touched
    go.set()
    closing.join(30)
    wiping_thread.join(30)
    assert waited
    assert (len(raised), touched > before) == (1, True)
    again = reopen(**MORE)
    assert again.stats().processes == 1
    assert again.verify().problems == []
    assert again.wipe().left == 0


def test_what_the_mover_was_writing_is_wiped_too(reopen: Opened, places: Any) -> None:
    """Evicted while this process's own mover wrote it: its slot is free only when that write has ended."""
    media: dict[str, Held] = {}

    def wrap(medium: Medium) -> Medium:
        return media.setdefault(medium.name, Held(medium))

    store = reopen(wrap=wrap)
    nvme = media["nvme"]
    save(store, OTHER, plain(1))
    assert store.flush(60)
    nvme.armed = True
    save(store, SECRET, secret(1))
    assert nvme.reached.wait(30)
    waiting: list[Timer] = []

    def let_go(what: str, at: int, total: int) -> None:
        if what == "nvme" and not waiting:
            waiting.append(Timer(0.3, nvme.go.set))
            waiting[0].start()

    store.evict(salt=SECRET.salt)
    done = store.wipe(let_go)
    waiting[0].join()
    assert store.flush(60)
    assert Search(*places, secret(1))() == []
    assert done.left == 0
    assert load(store, OTHER, plain(1))[0].tokens == 100
