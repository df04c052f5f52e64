"""An eviction that is refused has changed nothing: no block is gone, and no name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from known_kv import PLAIN, Speaker, save, slots_of

from kvstore.errors import SettingsError
from kvstore.eviction import Selection
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


SELECTORS: dict[str, Callable[[Store], object]] = {
    "everything": lambda store: True,
    "namespace": lambda store: store.namespace(PLAIN).root,
    "salt": lambda store: "",
    "prefix": lambda store: store.match(store.namespace(PLAIN), list(range(50))),
    "name": lambda store: "rules",
    "unused_s": lambda store: 0.0,
    "larger": lambda store: 0,
}


def selected(store: Store, *names: str) -> Any:
    return {name: SELECTORS[name](store) for name in names}


def test_every_selector_is_tried_here_and_can_be_used(named: Store) -> None:
    assert sorted(SELECTORS) == sorted(Selection.__annotations__)
    for name in SELECTORS:
        named.evict(**selected(named, name), dry_run=True)
        named.losing(**selected(named, name))


@pytest.mark.parametrize("names", [(), *itertools.combinations(SELECTORS, 2), tuple(SELECTORS)], ids=" and ".join)
def test_any_other_number_of_selectors_than_one_is_refused_and_they_are_named(
    named: Store, names: tuple[str, ...]
) -> None:
    held, told = slots_of(named), ", ".join(names) or "none"
    for call in (named.evict, named.losing):
        with pytest.raises(SettingsError, match=f"exactly one of everything, .*; given: {told}\n"):
            call(**selected(named, *names))
    assert (list(named.names()), slots_of(named)) == (["rules"], held)


def test_a_selector_that_is_none_is_refused(named: Store) -> None:
    with pytest.raises(TypeError, match="'every' selects nothing"):
        named.evict(every=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'tier' selects nothing"):
        named.losing(everything=True, tier="ram")  # type: ignore[call-arg]


def test_names_are_forgotten_where_every_tier_is_emptied(named: Store) -> None:
    assert named.evict(everything=True, forget_names=True, dry_run=True) == slots_of(named)
    assert list(named.names()) == ["rules"]
    named.evict(everything=True, forget_names=True)
    assert (named.names(), slots_of(named)) == ({}, {"ram": 0, "nvme": 0})
