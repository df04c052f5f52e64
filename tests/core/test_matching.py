"""Matching to the token, against a dictionary: whole blocks, then the child that goes on longest with the same tokens.

Blocks here differ, if at all, only in tokens that do not fit an index key, which is where an index by keys goes wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import TierBench, shm_directory

from kvstore.events import Cause
from kvstore.header import slot_bytes
from kvstore.identity import Chain, Extra, chain
from kvstore.layout import Layout, Part
from kvstore.match import Match, Namespace, match
from kvstore.records import KEY_TOKENS, block_names
from kvstore.tiers.null import NullMedium
from kvstore.tiers.nvme import NvmeTier

LONG = Layout.uniform(layers=1, heads=1, k_dim=1, block_tokens=256, dtype="float8_e5m2", shards=2)
SHORT = Layout.uniform(layers=1, heads=1, k_dim=8, block_tokens=16, dtype="float8_e5m2")
Tokens = npt.NDArray[np.uint32]
DIVERGE_AFTER = 200


@pytest.fixture(scope="module")
def bench() -> Iterator[TierBench]:
    """One tier with an index only, emptied between examples."""
    with shm_directory() as shm:
        opened = TierBench(
            NvmeTier,
            shm / "tier",
            NullMedium(),
            budget=64 << 20,
            segment_bytes=1 << 20,
            index_bytes=4 << 20,
            keeps_bytes=False,
        )
        yield opened
        assert opened.problems() == []
        opened.close()


def space_of(layout: Layout, salt: str = "") -> Namespace:
    """A namespace as `match` takes it."""
    from stores import record_of

    record = record_of(layout, salt)
    return Namespace(layout, record.root, record)


class Stored:
    """A tier and the dictionary it is compared with: (root, part) → sequences that were stored in it, whole."""

    def __init__(self, bench: TierBench, layout: Layout) -> None:
        self.bench, self.layout = bench, layout
        self.sequences: dict[tuple[str, Part], list[Tokens]] = {}
        self.empty()

    def empty(self) -> None:
        from kvstore.transaction import Database

        with self.bench.index.read() as txn:
            victims = [(key, value[:32]) for key, value in txn.scan(Database.BLOCKS)]
        self.bench.tier.remove(victims, "evict")

    def store(self, tokens: Tokens, part: Part, salt: str = "") -> None:
        linked = chain(self.layout.root(salt), tokens, self.layout.block_tokens)
        self.publish(linked, part, salt)
        self.sequences.setdefault((salt, part), []).append(tokens)

    def publish(self, linked: Chain, part: Part, salt: str = "") -> None:
        names = block_names(linked, part)
        space = self.bench.space(self.layout, salt)
        size = slot_bytes(self.layout.payload_bytes())
        reserved = self.bench.tier.reserve(names, space, size, 0, 10.0, now=self.bench.now())
        assert not reserved.left
        done = [(placement, bytes(16)) for placement in reserved.placed]
        self.bench.tier.publish(done, now=self.bench.now())

    def expected(self, tokens: Tokens, part: Part, limit: int, salt: str = "") -> int:
        """The longest prefix of the tokens that some stored sequence begins with."""
        best = 0
        for known in self.sequences.get((salt, part), []):
            size = min(len(known), len(tokens), limit)
            differs = np.flatnonzero(known[:size] != tokens[:size])
            best = max(best, int(differs[0]) if len(differs) else size)
        return best

    def match(self, tokens: Tokens, limit: int, salt: str = "", extras: tuple[Extra, ...] = ()) -> Match:
        space = space_of(self.layout, salt)
        linked = chain(space.root, tokens, self.layout.block_tokens, extras)
        return match([self.bench.tier], space, linked, limit, 0)


@st.composite
def families(draw: st.DrawFn) -> list[tuple[Tokens, str, int]]:
    """Sequences that all begin alike and differ in a few places past the index key's cut, or end early."""
    length = draw(st.integers(1, 3)) * 256
    base = np.arange(length, dtype=np.uint32)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = base.copy()
        for _ in range(draw(st.integers(0, 3))):
            block = draw(st.integers(0, length // 256 - 1))
            tokens[block * 256 + draw(st.integers(DIVERGE_AFTER, 255))] = draw(st.integers(0, 3))
        if draw(st.booleans()):
            tokens = tokens[: draw(st.integers(1, length))]
        found.append((tokens, draw(st.sampled_from(["", "salt"])), draw(st.integers(0, 1))))
    return found


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=families(), asked=families(), data=st.data())
def test_matching_equals_a_search_of_everything_stored(
    bench: TierBench, stored: list[tuple[Tokens, str, int]], asked: list[tuple[Tokens, str, int]], data: st.DataObject
) -> None:
    assert DIVERGE_AFTER > KEY_TOKENS
    model = Stored(bench, LONG)
    for tokens, salt, shard in stored:
        model.store(tokens, Part(0, shard), salt)
    for tokens, salt, _ in asked + stored:
        limit = data.draw(st.integers(0, len(tokens)) | st.just(len(tokens)))
        found = model.match(tokens, limit, salt)
        wanted = min(model.expected(tokens, part, limit, salt) for part in LONG.parts())
        assert found.tokens == wanted, "a hit is what every part has"
        for part, pieces in found.pieces.items():
            assert sum(piece.take for piece in pieces) == wanted
            assert [piece.start for piece in pieces] == [256 * at for at in range(len(pieces))]
            assert all(piece.name.part == part for piece in pieces)
            assert all(piece.take == 256 for piece in pieces[:-1])
        assert (found.stop is Cause.LIMIT) == (wanted == limit)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_short_blocks_with_many_siblings_match_to_the_token(bench: TierBench, data: st.DataObject) -> None:
    model = Stored(bench, SHORT)
    token = st.integers(0, 2)
    sequence = st.lists(token, min_size=1, max_size=40).map(lambda ids: np.array(ids, np.uint32))
    for tokens in data.draw(st.lists(sequence, min_size=1, max_size=12)):
        model.store(tokens, Part())
    for tokens in data.draw(st.lists(sequence, min_size=1, max_size=6)):
        limit = data.draw(st.integers(0, len(tokens)))
        assert model.match(tokens, limit).tokens == model.expected(tokens, Part(), limit)


def test_the_best_of_very_many_siblings_is_found(bench: TierBench) -> None:
    model = Stored(bench, SHORT)
    random = np.random.default_rng(3)
    rows = random.integers(0, 40, (700, 16)).astype(np.uint32)
    for row in rows:
        model.store(row, Part())
    for asked in random.integers(0, 40, (100, 16)).astype(np.uint32):
        assert model.match(asked, 16).tokens == model.expected(asked, Part(), 16)
    for row in rows[:50]:
        cut = row.copy()
        cut[11:] = 99
        assert model.match(cut, 16).tokens == model.expected(cut, Part(), 16) >= 11


def test_siblings_equal_up_to_the_keys_cut_are_told_apart_by_the_rest(bench: TierBench) -> None:
    model = Stored(bench, Layout.uniform(layers=1, heads=1, k_dim=1, block_tokens=256, dtype="float8_e5m2"))
    base = np.arange(256, dtype=np.uint32)
    for at in range(KEY_TOKENS, 256):
        tokens = base.copy()
        tokens[at] = 7000 + at
        model.store(tokens, Part())
    for at in range(KEY_TOKENS, 256, 9):
        asked = base.copy()
        asked[at] = 7000 + at
        asked[at + 1 :] = 1
        assert model.match(asked, 256).tokens == at + 1


def test_neighbours_that_are_being_written_are_passed_over(bench: TierBench) -> None:
    model = Stored(bench, SHORT)
    base = np.full(16, 50, np.uint32)
    good = base.copy()
    good[10:] = 49
    model.store(good, Part())
    names = []
    for near in range(5):
        tokens = base.copy()
        tokens[15] = 40 + near
        names += block_names(chain(SHORT.root(), tokens, 16), Part())
    size = slot_bytes(SHORT.payload_bytes())
    reserved = bench.tier.reserve(names, bench.space(SHORT), size, 0, 10.0, now=bench.now())
    assert len(reserved.placed) == 5
    found = model.match(base, 16)
    assert found.tokens == 10
    bench.tier.publish([(placement, bytes(16)) for placement in reserved.placed], now=bench.now())
    assert model.match(base, 16).tokens == 15


def test_a_block_that_is_being_written_ends_the_match_with_its_cause(bench: TierBench) -> None:
    model = Stored(bench, SHORT)
    tokens = np.arange(48, dtype=np.uint32)
    names = block_names(chain(SHORT.root(), tokens, 16), Part())
    size = slot_bytes(SHORT.payload_bytes())
    placed = bench.tier.reserve(names, bench.space(SHORT), size, 0, 10.0, now=bench.now()).placed
    bench.tier.publish([(placed[0], bytes(16))], now=bench.now())
    found = model.match(tokens, 48)
    assert (found.tokens, found.stop) == (16, Cause.WRITING)
    bench.tier.abandon(placed[1:])
    bench.settle()
    assert model.match(tokens, 48).stop is Cause.ABSENT


def test_an_extra_hides_a_block_from_who_has_another_one(bench: TierBench) -> None:
    model = Stored(bench, SHORT)
    tokens = np.arange(40, dtype=np.uint32)
    image = Extra(1, b"one image")
    model.publish(chain(SHORT.root(), tokens, 16, [image]), Part())
    assert model.match(tokens, 40, extras=(image,)).tokens == 40
    assert model.match(tokens, 40).tokens == 16
    assert model.match(tokens, 40, extras=(Extra(1, b"another image"),)).tokens == 16


@pytest.mark.parametrize("limit", [0, 1, 15, 16, 17, 31, 40])
def test_a_limit_inside_a_block_cuts_there(bench: TierBench, limit: int) -> None:
    model = Stored(bench, SHORT)
    tokens = np.arange(40, dtype=np.uint32)
    model.store(tokens, Part())
    found = model.match(tokens, limit)
    assert (found.tokens, found.stop, found.asked) == (limit, Cause.LIMIT, 40)
    assert sum(found.by_tier.values()) == limit


def test_two_tiers_serve_one_prefix_together(bench: TierBench, shm: Path) -> None:
    other = TierBench(
        NvmeTier, shm / "low", NullMedium("low"), budget=8 << 20, segment_bytes=1 << 20, keeps_bytes=False
    )
    upper, lower = Stored(bench, SHORT), Stored(other, SHORT)
    tokens = np.arange(64, dtype=np.uint32)
    upper.store(tokens[:32], Part())
    lower.store(tokens, Part())
    space = space_of(SHORT)
    found = match([bench.tier, other.tier], space, chain(space.root, tokens, 16), 64, 0)
    assert found.by_tier == {"null": 32, "low": 32}
    assert other.problems() == []
    other.close()
