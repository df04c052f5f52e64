"""Quotas are kept from the moment they are set; TTLs can be taken off; namespaces without blocks can be forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import came_to_rest
from typer.testing import CliRunner

import kvstore
from kvstore import keeper, tenants
from kvstore.errors import NotFoundError, SettingsError, TokenError
from kvstore.host import boottime_ns
from kvstore.identity import Extra
from kvstore.kv import HostKV
from kvstore.match import Namespace
from kvstore.records import BlockName
from kvstore.store import Store
from kvstore.tools.cli import app

SLOT = 12288


def run(*words: str | Path, code: int = 0, answer: str | None = None) -> Any:
    done = CliRunner().invoke(app, [*map(str, words), "--json"], input=answer)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return json.loads(done.stdout) if done.stdout else {}


def opened(made: Any) -> Store:
    return kvstore.open(made.path, ram="8MiB", nvme="16MiB")


def save(store: Store, made: Any, salt: str, ids: Any, label: str = "") -> Any:
    space = store.namespace(made.layout, salt=salt, label=label)
    kv = np.zeros((2, 2, 2, len(ids), 16), np.uint32)
    return store.save(space, ids, HostKV.stacked(made.layout, kv))


def names(store: Store, space: Namespace, ids: Any) -> list[BlockName]:
    """Of the blocks that are stored of a sequence."""
    return [piece.name for pieces in store.match(space, ids).pieces.values() for piece in pieces]


def test_lowering_a_quota_evicts_down_to_it_and_nobody_else(made: Any) -> None:
    run("unpin", "greeting", "--path", made.path)
    would = run("quota", "first", "--ram", 2 * SLOT, "--dry-run", "--path", made.path)
    assert (would["evicted"], would["changed"], would["quotas"]) == ({"ram": 2}, False, [])
    told = run("quota", "first", "--ram", 2 * SLOT, "--yes", "--path", made.path)
    assert told["evicted"] == {"ram": 2}
    assert [(one["tier"], one["limit_bytes"], one["used_bytes"]) for one in told["quotas"]] == [
        ("ram", 2 * SLOT, 2 * SLOT)
    ]
    assert told["quotas"][0]["labels"] == "first"
    assert made.held("second", 64) == {"ram": 64}
    assert made.held("first", 40).keys() >= {"nvme"}, "the copies on disk stay"


def test_a_quota_is_kept_by_later_saves_and_can_be_taken_off(made: Any) -> None:
    run("quota", "first", "--ram", "1MiB", "--nvme", 4 * SLOT, "--path", made.path)
    with opened(made) as store:
        save(store, made, "first", np.arange(5000, 5160))
        assert came_to_rest(store)
        (nvme,) = (use for use in store.quotas() if use.tier == "nvme")
        assert nvme.used <= nvme.limit == 4 * SLOT
    assert run("quota", "first", "--nvme", "off", "--path", made.path)["quotas"][0]["tier"] == "ram"
    assert len(run("quota", "--path", made.path)["quotas"]) == 1
    run("quota", "first", "--ram", "off", "--path", made.path)
    assert run("quota", "--path", made.path)["quotas"] == []


def test_a_salt_under_which_nothing_is_stored_is_asked_about(made: Any) -> None:
    assert run("quota", "frist", "--nvme", "1MiB", "--path", made.path, code=1)["quotas"] == []
    assert run("quota", "--path", made.path)["quotas"] == []
    would = run("quota", "later", "--nvme", "1MiB", "--dry-run", "--path", made.path)
    assert (would["changed"], would["quotas"]) == (False, [])
    (kept,) = run("quota", "later", "--nvme", "1MiB", "--yes", "--path", made.path)["quotas"]
    assert (kept["labels"], kept["used_bytes"]) == ("", 0)
    run("quota", "later", "--nvme", "2MiB", "--path", made.path)  # known by now
    assert run("quota", "later", "--nvme", "off", "--path", made.path)["quotas"] == []
    run("quota", "later", "--path", made.path, code=NotFoundError.exit_code)
    assert run("quota", "--path", made.path)["quotas"] == []


def test_a_listing_tells_when_blocks_expire_and_what_a_prompt_takes(made: Any) -> None:
    run("namespace", "first", "--ttl", "86400", "--path", made.path)
    done = CliRunner().invoke(app, ["ls", "--path", str(made.path)])
    (first,) = (line for line in done.stdout.splitlines() if "first" in line)
    (second,) = (line for line in done.stdout.splitlines() if "second" in line)
    assert "86,400 s unused" in first
    assert "unused" not in second
    assert "4,096 tokens take" in done.stdout
    assert f"{made.layout.token_bytes() * 4096 >> 20} MiB" in second


def test_pinned_blocks_stay_below_any_quota(made: Any) -> None:
    run("quota", "first", "--ram", "0", "--yes", "--path", made.path)
    assert made.held("first", 40) == {"ram": 40}
    assert made.held("first", 7) == {"nvme": 7}


def test_without_an_answer_nothing_is_evicted(made: Any) -> None:
    run("unpin", "greeting", "--path", made.path)
    told = run("quota", "first", "--ram", "0", "--path", made.path, code=1, answer="n\n")
    assert (told["changed"], told["quotas"]) == (False, [])
    assert made.held("first", 40) == {"ram": 40}


def test_a_ttl_is_set_and_taken_off_in_every_tier(made: Any) -> None:
    assert run("namespace", "first", "--ttl", "3600", "--path", made.path)["ttl"] == 3600
    with opened(made) as store:
        assert store.namespace_at(made.layout.root("first")).record.ttl == 3600
    assert run("namespace", "first", "--no-ttl", "--path", made.path)["ttl"] == 0
    with opened(made) as store:
        for tier in store._core.tiers:
            with tier.index.read() as txn:
                records = list(tenants.namespaces.listing(txn))
            assert all(record.ttl == 0 for _, record in records)
        assert store._core.keeper.expire() == 0
        with pytest.raises(SettingsError):
            store.set_ttl(made.layout.root("first"), -1)


def test_a_ttl_evicts_what_was_not_used_for_so_long_and_is_not_pinned(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "EXPIRY_PERIOD_S", float("inf"))  # only this test looks for what is old
    ttl = max(1, round(min(600.0, boottime_ns() / 2e9) / 2))  # no stamp is from before the host started
    with opened(made) as store:
        limited, unlimited = (store.namespace(made.layout, salt=salt, label=salt) for salt in ("second", "first"))
        store.pin("kept", limited, made.tokens(9))
        whole = names(store, limited, made.tokens(64))
        pinned, others = names(store, limited, made.tokens(9)), names(store, unlimited, made.tokens(7))
        for tier in store._core.tiers:
            refs = [entry.ref for entry in tier.find([*whole[2:], *pinned, *others]) if entry is not None]
            assert len(refs) == 4
            tier.touch(refs, [0] * len(refs), boottime_ns() - round(1.5e9 * ttl))
        store.set_ttl(limited.root, ttl)
        assert store._core.keeper.expire() == 4
        for tier in store._core.tiers:
            left = [entry is not None for entry in tier.find([*whole, *pinned, *others])]
            assert left == [True, True, False, False, True, True], tier.name
        assert store._core.keeper.expire() == 0
        assert store.verify().problems == []


def test_a_namespace_without_blocks_is_dropped_and_comes_back_when_something_is_saved(made: Any) -> None:
    run("evict", "--namespace", "second", "--yes", "--path", made.path)
    assert run("namespace", "--drop-empty", "--dry-run", "--path", made.path)["namespaces"][0]["label"] == "second"
    assert run("namespace", "--drop-empty", "--path", made.path, code=1, answer="n\n")["dropped"] is False
    assert run("namespace", "--drop-empty", "--yes", "--path", made.path)["dropped"] is True
    with opened(made) as store:
        space = store.namespace(made.layout, salt="second", label="second")
        assert save(store, made, "second", [9], "second").new_blocks == 1  # so that this process knows its number
        assert store.flush(30)
        store.evict(namespace=space.root)
        assert [record.label for record in store.drop_empty(dry_run=True)] == ["second"]
        assert [record.label for record in store.drop_empty()] == ["second"]
        assert [use.record.label for use in store.namespaces()] == ["first"]
        save(store, made, "second", made.tokens(64), "second")
        assert store.flush(30)
        assert store.match(space, made.tokens(64)).tokens == 64
        assert store.verify().problems == []
        assert sorted(use.record.label for use in store.namespaces()) == ["first", "second"]
        assert store.evict(salt="second") == {"ram": 4, "nvme": 4}
    assert made.held("first", 40) == {"ram": 40}


def test_numbers_are_not_used_twice(made: Any) -> None:
    """A process that knows a dropped namespace by its number must not write into another one's."""
    with opened(made) as store:
        save(store, made, "third", [1, 2, 3], "third")
        assert store.flush(30)
        store.evict(salt="third")
        assert [record.label for record in store.drop_empty()] == ["third"]
        save(store, made, "fourth", [4, 5, 6], "fourth")
        save(store, made, "third", [7, 8, 9], "third")
        assert store.flush(30)
        for tier in store._core.tiers:
            with tier.index.read() as txn:
                found = {record.label: number for number, record in tenants.namespaces.listing(txn)}
            assert len(set(found.values())) == len(found) == 4
        assert store.evict(salt="fourth") == {"ram": 1, "nvme": 1}
        assert store.verify().problems == []


def test_a_named_namespace_is_kept(made: Any) -> None:
    with opened(made) as store:
        for tier in store._core.tiers:
            with tier.index.read() as txn:
                victims = [(key, tenants.Entry.unpack(raw).key) for key, raw in txn.scan(tenants.Database.BLOCKS)]
            tier.remove(victims, "test")
        assert [record.label for record in store.drop_empty()] == ["second"]


def test_many_salts_do_not_fill_the_index(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "EMPTY_KEPT", 8)
    with opened(made) as store:
        for number in range(30):
            save(store, made, f"tenant {number}", [1, 2, 3])
        assert store.flush(30)
        assert len(store.namespaces()) == 32
        for number in range(20):
            store.evict(salt=f"tenant {number}")
        store._core.keeper.drop_empty()
        assert len(store.namespaces()) == 12


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["quota", "--ram", "1GiB"], 2),
        (["quota", "", "--ram", "1GiB"], 2),
        (["quota", "first", "--ram", "much"], 2),
        (["quota", "first", "--ram", "-1"], 2),
        (["quota", "nobody"], 13),
        (["namespace"], 2),
        (["namespace", "first", "--drop-empty"], 2),
        (["namespace", "first", "--ttl", "5", "--no-ttl"], 2),
        (["namespace", "third", "--ttl", "5"], 13),
    ],
)
def test_what_cannot_be_set_is_one_message_and_a_code(made: Any, words: list[str], code: int) -> None:
    assert run(*words, "--path", made.path, code=code) == {}


def test_numbers_that_cannot_be_kept_are_refused_by_name(made: Any) -> None:
    with opened(made) as store:
        space = store.namespace(made.layout, salt="first")
        match = store.match(space, made.tokens(40))
        for seconds in (float("inf"), float("nan"), 0.0, -1.0):
            with pytest.raises(SettingsError, match="a lease of"):
                store.lease(match, seconds)
        with store.lease(match, 5) as lease:
            assert lease.tokens == 40
        with pytest.raises(SettingsError, match="a priority of"):
            store.pin("x", space, made.tokens(40), priority=1 << 31)
        with pytest.raises(SettingsError, match="a ttl of"):
            store.pin("x", space, made.tokens(40), ttl=0)
        for quota in (-1, 1 << 63, 1.5):
            with pytest.raises(SettingsError, match="a quota of"):
                store.set_quota("first", ram=quota)  # type: ignore[arg-type]
        with pytest.raises(TokenError, match="two extras"):
            store.match(space, made.tokens(40), extras=[Extra(0, b"a"), Extra(0, b"b")])
        assert store.quotas() == []


@pytest.mark.parametrize(("salt", "limit"), [("first", 20), ("first", SLOT - 1), ("later", 1), ("later", 4096)])
def test_a_quota_that_holds_no_block_is_refused_unless_it_is_0(made: Any, salt: str, limit: int) -> None:
    words = ["quota", salt, "--nvme", str(limit), "--yes", "--path", str(made.path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == SettingsError.exit_code, done.output
    assert "less than one block" in str(done.output)
    assert run("quota", "--path", made.path)["quotas"] == []
    assert run("quota", salt, "--nvme", "0", "--yes", "--path", made.path)["changed"]
    assert run("quota", salt, "--nvme", SLOT, "--yes", "--path", made.path)["changed"]
