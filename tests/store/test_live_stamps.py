"""Stamps change while they are looked at: other threads and processes use, evict and purge blocks at any moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_kv import SPEAKERS, load, save

from kvstore.store import Store
from kvstore.tiers import opening
from kvstore.tiers.arrays import ArrayFiles, SlotArrays

Reopen = Callable[..., Store]


class Cleared(np.ndarray[Any, np.dtype[np.uint64]]):
    """Stamps that somebody clears as soon as a question has been asked of them."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(one) if isinstance(one, Cleared) else one for one in inputs]
        answer = getattr(ufunc, method)(*plain, **options)
        for one in inputs:
            if isinstance(one, Cleared):
                np.asarray(one)[...] = 0
        return answer


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ArrayFiles.of

    def of(files: ArrayFiles, segment: int) -> SlotArrays:
        arrays = real(files, segment)
        return replace(arrays, stamps=arrays.stamps.view(Cleared))

    monkeypatch.setattr(ArrayFiles, "of", of)


def test_the_array_that_stands_for_others_changes_between_two_questions() -> None:
    stamps = np.ones(3, np.uint64).view(Cleared)
    assert stamps.any()
    assert not stamps.any()


@pytest.mark.usefixtures("cleared")
def test_room_is_made_while_others_clear_the_stamps(reopen: Reopen) -> None:
    store = reopen(nvme="0")
    plain, narrow = SPEAKERS[0], SPEAKERS[3]
    for first in range(0, 3000, 300):  # more than there is room for, in slots of two sizes: segments are recut
        save(store, plain, range(first, first + 300))
        save(store, narrow, range(first, first + 640))
    tokens = range(50_000, 50_064)
    assert save(store, narrow, tokens).new_blocks == 1
    assert load(store, narrow, tokens)[1] == 0
    assert store.verify().problems == []


@pytest.mark.usefixtures("cleared")
def test_a_tier_shrinks_and_lets_go_while_others_clear_the_stamps(reopen: Reopen, tmp_path: Path) -> None:
    store = reopen(nvme="0")
    for first in range(0, 1200, 300):
        save(store, SPEAKERS[1], range(first, first + 300))
    ram = store._core.ram
    assert [opening._warmth(ram, segment) >= 0 for segment in ram.segment_list()]
    store.set_quota(SPEAKERS[1].salt, ram=64 << 10)
    store.evict(unused_s=0.0)
    assert store.verify().problems == []
    store.close()
    again = reopen(nvme="0", ram="1664KiB")
    assert save(again, SPEAKERS[0], range(64)).new_blocks > 0
