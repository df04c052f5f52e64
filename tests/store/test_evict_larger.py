"""Sequences of more than a size go, and nothing that a smaller one uses or a pin keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_kv import PARTED, PLAIN, SPEAKERS, Speaker, open_small, save, shm

from kvstore.errors import SettingsError
from kvstore.store import Store

Reopen = Callable[..., Store]
RUNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from((5, 16, 40))), min_size=1, max_size=5)
"""Tokens as runs of one id, so that sequences often begin alike and part at any token."""
SAVES = st.lists(st.tuples(st.sampled_from(SPEAKERS), RUNS), min_size=1, max_size=7)


def stored(store: Store, speaker: Speaker, tokens: list[int]) -> int:
    """How many of some tokens are stored, in all parts."""
    return store.match(store.namespace(speaker.layout, salt=speaker.salt), tokens).tokens


def last_key(store: Store, speaker: Speaker, tokens: list[int]) -> bytes:
    """What `sizes` would have a sequence by."""
    space = store.namespace(speaker.layout, salt=speaker.salt)
    return space.root + store.match(space, tokens).chain.keys[-1]


def sizes(store: Store) -> dict[bytes, int]:
    """Bytes of every stored sequence, by its namespace's root and its key."""
    return {
        use.record.root + one.key: use.layout.sequence_bytes(one.tokens)
        for use in store.namespaces()
        for one in store.prefixes(use.record.root)
    }


@settings(max_examples=20, deadline=None)
@given(saves=SAVES, dropped=st.integers(0, 7), share=st.floats(0, 1))
def test_what_goes_is_what_only_larger_sequences_use(
    saves: list[tuple[Speaker, list[tuple[int, int]]]], dropped: int, share: float
) -> None:
    """dropped: after so many saves all copies in `ram` go. share: of the largest size, where the limit is."""
    with tempfile.TemporaryDirectory(dir=shm()) as folder:
        (memory := Path(folder) / "ram").mkdir()
        with open_small(Path(folder) / "kv", memory, ram="8MiB", nvme="8MiB") as store:
            talked = [(speaker, [token for token, count in runs for _ in range(count)]) for speaker, runs in saves]
            for at, (speaker, tokens) in enumerate(talked):
                if at == dropped:
                    assert store.flush(60)
                    store.evict(everything=True, tier="ram")
                save(store, speaker, tokens)
            assert store.flush(60)
            before = sizes(store)
            listed = [one for one in talked if last_key(store, *one) in before and stored(store, *one) == len(one[1])]
            limit = int(max(before.values()) * share)
            would = store.evict(larger=limit, dry_run=True)
            assert sizes(store) == before
            assert store.evict(larger=limit) == would
            assert sizes(store) == {key: size for key, size in before.items() if size <= limit}
            assert not any(store.evict(larger=limit, dry_run=True).values())
            for speaker, tokens in listed:
                if speaker.layout.sequence_bytes(len(tokens)) <= limit:
                    assert stored(store, speaker, tokens) == len(tokens)
            assert store.verify().problems == []


def test_every_part_counts_and_every_part_goes(reopen: Reopen) -> None:
    store = reopen()
    parted, plain = Speaker(PARTED), Speaker(PLAIN)
    assert PARTED.sequence_bytes(40) == sum(PARTED.payload_bytes(part.group, 40) for part in PARTED.parts())
    save(store, parted, range(40))
    save(store, plain, range(40))
    assert store.flush(60)
    assert store.evict(larger=PARTED.sequence_bytes(40), dry_run=True)["ram"] == 3, "the other one's"
    assert store.evict(larger=PARTED.sequence_bytes(40) - 1) == {"ram": 3 + 3 * 4, "nvme": 3 + 3 * 4}
    assert stored(store, parted, list(range(40))) == 0


def test_what_is_pinned_stays(reopen: Reopen) -> None:
    store = reopen()
    rules, longer = list(range(32)), list(range(90))
    save(store, Speaker(PLAIN), longer)
    save(store, Speaker(PLAIN), [7, *longer])
    store.pin("rules", store.namespace(PLAIN), rules)
    store.evict(larger=0)
    assert stored(store, Speaker(PLAIN), longer) == len(rules)
    assert stored(store, Speaker(PLAIN), [7, *longer]) == 0


def test_in_one_tier_only_its_copies_go(reopen: Reopen) -> None:
    store = reopen()
    tokens = np.arange(64).tolist()
    save(store, Speaker(PLAIN), tokens)
    assert store.flush(60)
    assert store.evict(larger=0, tier="ram") == {"ram": 4}
    assert store.match(store.namespace(PLAIN), tokens).by_tier == {"nvme": 64}


def test_a_size_and_something_else_are_refused(reopen: Reopen) -> None:
    with pytest.raises(SettingsError, match="exactly one"):
        reopen().evict(larger=1, unused_s=1)
