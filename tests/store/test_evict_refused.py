"""An eviction that is refused has changed nothing: no block is gone, and no name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from known_kv import PLAIN, Speaker, save, slots_of

from kvstore.errors import SettingsError
from kvstore.store import Store

Reopen = Callable[..., Store]
ME = Speaker(PLAIN)


@pytest.fixture
def named(reopen: Reopen) -> Store:
    """A store with one conversation in both tiers, and its beginning under a name."""
    store = reopen()
    save(store, ME, range(50))
    assert store.flush(60)
    store.pin("rules", store.namespace(PLAIN), list(range(32)))
    return store


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("tier", ["rma", "ram", "nvme"])
def test_names_are_not_forgotten_where_one_tier_is_emptied(named: Store, tier: str, dry_run: bool) -> None:
    """What a name keeps may be in another tier."""
    held = slots_of(named)
    with pytest.raises(SettingsError, match="forget_names") as caught:
        named.evict(everything=True, tier=tier, forget_names=True, dry_run=dry_run)
    assert "leave tier out" in caught.value.remedy
    assert (list(named.names()), slots_of(named)) == (["rules"], held)


def test_a_tier_that_is_not_there_changes_nothing(named: Store) -> None:
    held = slots_of(named)
    with pytest.raises(SettingsError, match="there is no tier 'rma'"):
        named.evict(everything=True, tier="rma")
    assert (list(named.names()), slots_of(named)) == (["rules"], held)


def test_names_are_forgotten_where_every_tier_is_emptied(named: Store) -> None:
    assert named.evict(everything=True, forget_names=True, dry_run=True) == slots_of(named)
    assert list(named.names()) == ["rules"]
    named.evict(everything=True, forget_names=True)
    assert (named.names(), slots_of(named)) == ({}, {"ram": 0, "nvme": 0})
