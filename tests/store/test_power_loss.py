"""Power failures: of what was not synced, any 4 KiB page may have reached the disk or not.

A `Platter` watches a store: it keeps the image of every segment as of its last sync, and of the index as of its last
two commits. An image of what a failure may leave is put together from those, page by page at random, under the rules
that hold on a disk: what was synced is there. LMDB syncs a commit's pages before it writes the page that makes them
valid, and that page only with the next commit. The mapped arrays are never synced: any page of them may be of any age.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_kv import NARROW, PLAIN, Array, Speaker, load, open_small, save

import kvstore.assembly
import kvstore.index
from kvstore.kv import Bytes
from kvstore.store import Store
from kvstore.tiers.medium import Medium, segment_path

PAGE = 4096
SPEAKERS = (Speaker(PLAIN), Speaker(PLAIN, "a"), Speaker(NARROW))
FEW = [list(range(first, first + 70)) for first in range(0, 5000, 1000)]
"""Talks that all fit; the index of a small store has room for about a hundred blocks."""
MANY = [list(range(first, first + 150)) for first in range(0, 12_000, 1000)]


def pages(file: Path) -> Array:
    raw = np.fromfile(file, np.uint8)
    return raw[: len(raw) // PAGE * PAGE].reshape(-1, PAGE)


class Platter:
    """What of a store's `nvme` part is certainly on the disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.RLock()
        self.synced: dict[int, Array] = {}
        self.commits: list[Array] = []
        self.arrays: dict[str, Array] = {}

    def segment_is_synced(self, segment: int) -> None:
        with self.lock:
            self.synced[segment] = pages(segment_path(self.directory, segment))

    def index_is_committed(self) -> None:
        """After each commit: all its pages are on the disk, but perhaps not the one that makes it valid."""
        with self.lock:
            self.commits = [*self.commits[-2:], pages(self.directory / "index" / "data.mdb")]
            if len(self.commits) % 3 == 0:
                self.arrays |= {file.name: pages(file) for file in self.directory.glob("*.slots")}

    def failure(self, target: Path, random: np.random.Generator) -> None:
        """Write an image of what a failure at this moment may leave."""
        with self.lock:
            # Not the lock: to read and close it here would drop LMDB's own lock on it.
            shutil.copytree(self.directory.parent, target, ignore=shutil.ignore_patterns("lock.mdb"))
            for segment, old in self.synced.items():
                file = segment_path(target / "nvme", segment)
                if file.exists():
                    mix(file, old, random)
            for name, old in self.arrays.items():
                mix(target / "nvme" / name, old, random)
            self._index(target / "nvme" / "index" / "data.mdb", random)

    def _index(self, file: Path, random: np.random.Generator) -> None:
        """A commit, valid or not yet, and perhaps some pages of the next one, which was under way."""
        before, last, following = self.commits if random.random() < 0.5 else [*self.commits[1:], self.commits[-1]]
        image = last.copy()
        if random.random() < 0.5:
            image[:2] = before[:2]
        fresh = np.flatnonzero((following[2:] != last[2:]).any(axis=1)) + 2
        chosen = fresh[random.random(len(fresh)) < 0.5]
        image[chosen] = following[chosen]
        image.tofile(file)


def mix(file: Path, old: Array, random: np.random.Generator) -> None:
    """Of the pages that changed since ``old``, some are as they were."""
    new = pages(file)
    changed = np.flatnonzero((new != old).any(axis=1))
    reverted = changed[random.random(len(changed)) < random.random()]
    new[reverted] = old[reverted]
    new.tofile(file)


class WatchedMedium:
    """The `nvme` medium; the platter hears of every sync, and the test may stop it before one."""

    def __init__(self, inner: Medium, platter: Platter, at_write: Callable[[], None]) -> None:
        self._inner, self._platter, self._at_write = inner, platter, at_write
        self.name = inner.name

    def write(self, segment: int, offset: int, data: Sequence[Bytes]) -> None:
        self._inner.write(segment, offset, data)
        self._at_write()

    def sync(self, segments: Iterable[int]) -> None:
        named = list(segments)
        self._inner.sync(named)
        for segment in named:
            self._platter.segment_is_synced(segment)

    def prepare(self, segment: int, size: int) -> None:
        self._inner.prepare(segment, size)
        self._platter.segment_is_synced(segment)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def platter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platter:
    made = Platter(tmp_path / "kv" / "nvme")
    real = kvstore.index.Index._group

    def group(index: kvstore.index.Index, job: Any) -> bool:
        if index.name != "nvme":
            return real(index, job)
        with made.lock:
            answer = real(index, job)
            made.index_is_committed()
        return answer

    monkeypatch.setattr(kvstore.index.Index, "_group", group)
    return made


class Outage:
    """Lets the power fail now and then while a store is written; the images, each with what was durable before."""

    def __init__(self, tmp_path: Path, platter: Platter, seed: int, most: int = 10) -> None:
        self.random = np.random.default_rng(seed)
        self.images: list[tuple[Path, tuple[tuple[int, int], ...]]] = []
        self.durable: tuple[tuple[int, int], ...] = ()
        self._path, self._platter, self._most = tmp_path, platter, most

    def wrap(self, medium: Medium) -> Medium:
        return WatchedMedium(medium, self._platter, self._maybe) if medium.name == "nvme" else medium

    def _maybe(self) -> None:
        if len(self.images) < self._most and len(self._platter.commits) == 3 and self.random.random() < 0.3:
            image = self._path / f"image{len(self.images)}"
            self._platter.failure(image, self.random)
            self.images.append((image, self.durable))

    def write(self, store: Store, talks: Sequence[Sequence[int]], rounds: int = 1) -> None:
        """Save every talk of every speaker, in some order; flush now and then, and only then call it durable."""
        saved: list[tuple[int, int]] = []
        whole = True
        for which in np.concatenate([self.random.permutation(len(talks) * len(SPEAKERS)) for _ in range(rounds)]):
            who, talk = divmod(int(which), len(talks))
            save(store, SPEAKERS[who], talks[talk])
            saved.append((who, talk))
            if self.random.random() < 0.3:
                whole = store.flush(60) and whole
                store.set_quota("nobody", nvme=int(which))  # two further commits make the last batch durable
                self.durable = tuple(saved) if whole else self.durable


@contextmanager
def power_is_back(image: Path, memory: Path, **over: Any) -> Iterator[Store]:
    """The image, opened under another boot with an empty `ram`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvstore.assembly, "boot_id", lambda: b"the next boot id")
        with open_small(image, memory, **over) as store:
            yield store


def missing(store: Store, talks: Sequence[Sequence[int]], durable: Collection[tuple[int, int]]) -> int:
    """Tokens of durable talks that are not there, after checking that nothing that is there is wrong."""
    lost = 0
    for who, speaker in enumerate(SPEAKERS):
        for which, tokens in enumerate(talks):
            got, wrong = load(store, speaker, tokens)
            assert wrong == 0
            lost += len(tokens) - got.tokens if (who, which) in durable else 0
    return lost


ROOMY: dict[str, Any] = {"ram": "8MiB", "nvme": "8MiB", "nvme_segment_bytes": 128 << 10}


@pytest.mark.parametrize("seed", range(3))
def test_what_was_durable_is_there_after_a_power_failure(
    seed: int, tmp_path: Path, memory: Path, platter: Platter
) -> None:
    outage = Outage(tmp_path, platter, seed)
    with open_small(tmp_path / "kv", memory, wrap=outage.wrap, **ROOMY) as store:
        outage.write(store, FEW)
        evicted = {name: count for name, count in store.stats().counters.items() if name.startswith("evict.")}
        assert evicted == {}, "not roomy"
    assert outage.images
    assert any(durable for _, durable in outage.images)
    for image, durable in outage.images:
        with power_is_back(image, memory, **ROOMY) as store:
            assert store.verify().problems == []
            assert missing(store, FEW, durable) == 0
            assert save(store, SPEAKERS[0], range(90_000, 90_100)).new_blocks == 7
            assert store.flush(60)
            assert store.verify().problems == []


@pytest.mark.parametrize("seed", range(3))
def test_slots_reused_before_a_power_failure_give_misses_and_can_be_mended(
    seed: int, tmp_path: Path, memory: Path, platter: Platter
) -> None:
    """Tight: the index may come back older than the slots, whose blocks were evicted and written over."""
    outage = Outage(tmp_path, platter, 100 + seed)
    with open_small(tmp_path / "kv", memory, wrap=outage.wrap) as store:
        outage.write(store, MANY, rounds=2)
        assert store.stats().counters["evict.nvme.lru.blocks"] > 0
    assert outage.images
    for image, _ in outage.images:
        with power_is_back(image, memory) as store:
            assert store.verify(payloads=False).problems == []
            missing(store, MANY, ())
            store.verify(repair=True)
            assert store.verify().problems == []
