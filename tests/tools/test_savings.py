"""Savings: counted by namespace and day, kept across restarts, and honest about what was loaded for nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvstore
from kvstore.days import DAY_S, OTHERS, Day, DayBook
from kvstore.events import Cause, Event, Hit, Miss, Moved, Prefilled, Saved
from kvstore.index import Index
from kvstore.kv import HostKV
from kvstore.tools.cli import app
from kvstore.tools.worth import Prices, measured_rate, storage, total, worth
from kvstore.transaction import Database

ROOTS = [bytes([number]) * 32 for number in range(1, 6)]
TODAY = 20_000


def run(*words: str | Path, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["savings", *map(str, words), "--json"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout) if code == 0 else {}
    return found


def ask(made: Any, label: str, length: int, tier: str | None = None) -> None:
    """One request for a stored sequence, out of one tier where one is named."""
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        if tier == "nvme":
            store.evict(everything=True, tier="ram")
        space = store.namespace(made.layout, salt=label, label=label)
        match = store.match(space, [*made.tokens(length), 1, 2, 3])
        store.load(match, HostKV.stacked(made.layout, np.zeros((2, 2, 2, length, 16), np.uint32)))


def test_savings_are_told_by_namespace_and_survive_the_process(made: Any) -> None:
    ask(made, "first", 40)
    ask(made, "first", 40, "nvme")
    ask(made, "second", 64)
    told = run("--path", made.path)
    found = {line["label"]: line for line in told["days"]}
    assert set(found) == {"first", "second"}
    assert found["first"]["served_tokens"] == {"hbm": 0, "ram": 40, "nvme": 40}
    assert (found["first"]["asked_tokens"], found["second"]["asked_tokens"]) == (86, 67)
    assert (found["first"]["reused_tokens"], found["first"]["written_tokens"]) == (80, 6)
    assert found["first"]["saved_bytes"] == 47 * made.layout.token_bytes()
    assert found["first"]["nvme_written_bytes"] > 0
    assert found["first"]["seconds_saved"] is None, "nobody measured a prefill"
    assert told["total"]["asked_tokens"] == 153
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        counters = store.stats()
    assert counters.asked_tokens == 153, "days and counters tell the same"


def test_one_namespace_and_some_days_can_be_chosen(made: Any) -> None:
    ask(made, "first", 40)
    ask(made, "second", 64)
    assert {line["label"] for line in run("--namespace", "second", "--path", made.path)["days"]} == {"second"}
    run("--namespace", "third", "--path", made.path, code=13)
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        book = store._core.days
        book._clock = lambda: time.time() - 9 * DAY_S
        book(Miss(Cause.ABSENT, 1000, store.namespaces()[0].record.root))
    assert run("--days", "9", "--path", made.path)["total"]["asked_tokens"] == 43 + 67
    assert run("--days", "0", "--path", made.path)["total"]["asked_tokens"] == 43 + 67 + 1000


def test_money_follows_the_factors_and_the_store_has_its_price(made: Any) -> None:
    ask(made, "first", 40)
    told = run("--price", "1000000", "--prefill", "10", "--disk-price", "1e9", "--path", made.path)
    whole = told["total"]
    assert whole["money_without"] == 43
    assert whole["money_with"] == pytest.approx(40 * 0.1 + 3 * 1.25)
    assert whole["prefill_s_not_repeated"] == pytest.approx(4.0)
    assert whole["seconds_saved"] == pytest.approx(4.0 - whole["load_s"])
    assert told["cost"]["storage_money"] == pytest.approx(told["cost"]["allocated_bytes"]["nvme"] / 30)
    assert told["money_left"] < 0
    shown = CliRunner().invoke(app, ["savings", "--price", "1e6", "--prefill", "10", "--path", str(made.path)])
    assert "less in all" in shown.stdout
    assert "instead of 43.0000" in shown.stdout


def test_a_real_model_is_measured_and_a_failed_load_is_told(tiny_model: Path, tmp_path: Path) -> None:
    """A row that was loaded whole, and cut to what another row has, is not called saved."""
    import torch

    from kvstore.adapters.transformers import attach
    from kvstore.tools import model as models

    model, _ = models.load(tiny_model)
    rows = torch.tensor([[5, *range(100, 227)], [6, *range(100, 227)]])
    path = tmp_path / "store"
    seen: list[Event] = []
    with (
        kvstore.open(path, ram="64MiB", nvme="128MiB", observers=[seen.append]) as store,
        attach(model, store, label="tiny", block_tokens=16) as kv,
    ):
        for row in rows:
            generate(model, row[None])
            assert kv.flush(30)
        second = store.match(kv.namespace(), rows[1].tolist())
        piece = next(iter(second.pieces.values()))[4]
        (entry,) = store._core.ram.find([piece.name])
        assert entry is not None
        slot = store._core.ram.slot(entry.ref, 4096 + kv.namespace().layout.payload_bytes())
        slot[:4096] = 0
        generate(model, rows)
        assert kv.total.reused_tokens == 2 * 64
    told = run("--path", path)["total"]
    assert told["served_tokens"]["ram"] == 127 + 64
    assert (told["recomputed_tokens"], told["reused_tokens"]) == (63, 128)
    assert [event.whole for event in seen if isinstance(event, Prefilled)] == [True, True, False]
    line = run("--path", path)["days"][0]
    assert line["label"] == "tiny"
    assert line["prefill_s_not_repeated"] == pytest.approx(128 / line["prefill_tokens_a_second"])


def generate(model: Any, rows: Any) -> None:
    import torch

    model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=1, do_sample=False, pad_token_id=0)


def test_no_request_waits_for_the_book(made: Any) -> None:
    """The disk's index is locked for as long as requests run; what they count is written afterwards."""
    free = threading.Event()
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        held = store._core.lowest.index.submit(lambda txn: free.wait(60))
        space = store.namespace(made.layout, salt="first", label="first")
        for _ in range(3):
            match = store.match(space, made.tokens(40))
            buffer = HostKV.stacked(made.layout, np.zeros((2, 2, 2, 40, 16), np.uint32))
            assert store.load(match, buffer).tokens == 40
        assert not held.done()
        free.set()
        assert held.result(30)
    assert run("--path", made.path)["total"]["asked_tokens"] == 120


# -------------------------------------------------------------------- the book


@pytest.fixture
def index(tmp_path: Path) -> Any:
    made = Index(tmp_path / "index", 1 << 20, durable=False, name="test")
    yield made
    made.close()


ROOT = st.sampled_from([*ROOTS, b""])
AMOUNT = st.integers(0, 10**6)
COUNTED: st.SearchStrategy[Event] = st.one_of(
    st.builds(Hit, st.sampled_from(["hbm", "ram", "nvme"]), AMOUNT, AMOUNT, st.floats(0, 9), ROOT),
    st.builds(Miss, st.sampled_from(Cause), AMOUNT, ROOT),
    st.builds(Prefilled, st.just("test"), AMOUNT, AMOUNT, st.floats(0, 9), st.booleans(), ROOT),
    st.builds(Saved, st.just("ram"), AMOUNT, AMOUNT, st.floats(0, 9), ROOT),
    st.builds(Moved, st.just("ram"), st.just("nvme"), AMOUNT, AMOUNT, st.floats(0, 9), ROOT),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(happened=st.lists(st.tuples(COUNTED, st.integers(0, 5), st.booleans()), max_size=30))
def test_whatever_is_merged_and_whenever_it_is_written_the_sum_stays(
    index: Index, happened: list[tuple[Event, int, bool]]
) -> None:
    index.write(lambda txn: txn.clear(Database.DAYS))
    today = 0
    book, plain = DayBook(index, lambda: float(today * DAY_S)), DayBook(index, lambda: 0.0)
    book.most = 6
    for event, day, write in sorted(happened, key=lambda one: one[1]):
        today = day
        book(event)
        plain(event)
        if write:
            book.flush()
    wanted = sum(plain._fresh.values(), Day())
    assert sum(book.listing().values(), Day()) == wanted
    book.flush()
    assert sum(book.listing().values(), Day()) == wanted
    with index.read() as txn:
        assert txn.count(Database.DAYS) <= 6


def test_many_salts_fill_no_index_and_the_day_keeps_its_sum(index: Index) -> None:
    book = DayBook(index, lambda: float(TODAY * DAY_S))
    for number in range(3000):
        book(Miss(Cause.ABSENT, 1, number.to_bytes(32, "big")))
        if number % 50 == 0:
            book.flush()
    book.flush()
    with index.read() as txn:
        assert txn.count(Database.DAYS) <= book.most == 64
    found = book.listing()
    assert sum(found.values(), Day()).asked == 3000
    assert found[TODAY, OTHERS].asked > 2900


def test_the_oldest_days_are_the_first_to_be_forgotten(index: Index) -> None:
    now = [0.0]
    book = DayBook(index, lambda: now[0])
    for day in range(100):
        now[0] = float(day * DAY_S)
        book(Miss(Cause.ABSENT, 1, ROOTS[0]))
        book.flush()
    assert [day for day, _ in book.listing()] == list(range(36, 100))


def test_a_full_or_busy_index_loses_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    book = DayBook(index, lambda: float(TODAY * DAY_S))
    book(Miss(Cause.ABSENT, 5, ROOTS[0]))
    with monkeypatch.context() as patched:
        patched.setattr(index, "write", lambda *_, **__: (_ for _ in ()).throw(TimeoutError))
        with pytest.raises(TimeoutError):
            book.flush()
    book(Miss(Cause.ABSENT, 2, ROOTS[0]))
    book.flush()
    assert book.listing() == {(TODAY, ROOTS[0]): Day(asked=7)}


# -------------------------------------------------------------------- worth


def test_what_is_loaded_and_run_again_is_not_saved() -> None:
    day = Day(asked=1000, ram=600, rerun=200, load_us=2_000_000, cold=500, cold_us=5_000_000)
    found = worth(day, 100, measured_rate(day), Prices(input=1_000_000))
    assert (found.reused, found.tokens_a_second, found.prefill_s, found.saved_s) == (400, 100.0, 4.0, 2.0)
    assert found.money == pytest.approx(1000 - (400 * 0.1 + 600))


def test_without_a_measured_speed_seconds_are_unknown() -> None:
    unknown = worth(Day(asked=10, ram=10), None, measured_rate(Day()), Prices())
    assert (unknown.prefill_s, unknown.saved_s) == (None, None)
    known = worth(Day(asked=10, ram=10, load_us=1_000_000), None, 2.0, Prices())
    assert total([known, unknown]).prefill_s is None
    idle = worth(Day(asked=10), None, None, Prices())
    assert total([known, idle]).saved_s == 4.0
    assert total([]).money == 0


def test_storage_is_paid_by_the_day() -> None:
    assert storage({"ram": 10**9, "nvme": 2 * 10**9}, 15, Prices(ram=4, disk=1)) == pytest.approx(3)
