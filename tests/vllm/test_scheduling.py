"""The scheduler's half: claims that can be made again and given up, and saves of nothing but what is final."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stores import LAYOUT, StoreBench, StoreMaker, kv_of, tokens_of

from kvstore.events import Prefilled
from kvstore.kv import HostKV
from kvstore.transaction import Database

# What importing vLLM and torch's compiler warns of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = 4


class Request:
    """A request as the scheduler has it, as far as the adapter looks."""

    def __init__(self, name: str, ids: Any, *, salt: str | None = None) -> None:
        self.request_id = name
        self.all_token_ids = [int(token) for token in ids]
        self.prompt_token_ids = list(self.all_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.prompt_embeds = self.lora_request = None
        self.mm_features: list[Any] = []
        self.skip_reading_prefix_cache = False
        self.cache_salt = salt
        self.status = SimpleNamespace(name="FINISHED_STOPPED")

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Bench:
    """A half over a small store, and steps as vLLM would make them."""

    def __init__(self, bench: StoreBench) -> None:
        from kvstore.adapters.vllm.arrangement import Arrangement
        from kvstore.adapters.vllm.layout import EngineLayout
        from kvstore.adapters.vllm.messages import Hello, Whose
        from kvstore.adapters.vllm.scheduling import SchedulerHalf
        from kvstore.gate import Gate

        self.bench, self.store = bench, bench.store
        self.engine = EngineLayout(LAYOUT.to_json(), Arrangement.SIDES, PAGE, "test")
        self.half = SchedulerHalf(self.store, Gate(), later_bytes=1 << 30, announce=True, say=lambda *said: None)
        self.half.greet([Hello(self.engine)])
        self.layout = self.engine.with_traits(Whose().traits())

    def keep(self, ids: Any, salt: str = "") -> None:
        """Have these tokens in the store."""
        space = self.store.namespace(self.layout, salt=salt)
        self.store.save(space, ids, HostKV.stacked(self.layout, kv_of(ids, self.layout)))

    def leases(self) -> int:
        """How many leases there are."""
        self.bench.settle()
        with self.bench.tier("ram").index.read() as txn:
            return sum(1 for _ in txn.scan(Database.LEASES))

    def step(
        self,
        new: dict[str, list[int]] | None = None,
        going: dict[str, list[int]] | None = None,
        preempted: tuple[str, ...] = (),
        computed: int = 0,
        run: int = 1,
    ) -> Any:
        """Orders of a step: pages by request that is new, or goes on; of each ``run`` tokens past ``computed`` run."""
        new, going = new or {}, going or {}
        return self.half.orders(
            SimpleNamespace(
                preempted_req_ids=set(preempted),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=name, block_ids=(ids,), num_computed_tokens=computed)
                    for name, ids in new.items()
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(going),
                    new_block_ids=[(ids,) for ids in going.values()],
                    num_computed_tokens=[computed for _ in going],
                    resumed_req_ids=set(),
                ),
                num_scheduled_tokens=dict.fromkeys((*new, *going), run),
                total_num_scheduled_tokens=run * len((*new, *going)),
            )
        )

    def answer(
        self,
        step: int,
        failed: tuple[str, ...] = (),
        bad: tuple[int, ...] = (),
        stored: tuple[Any, ...] = (),
        loads: tuple[Any, ...] = (),
    ) -> None:
        """The step's outcome."""
        from kvstore.adapters.vllm.messages import Answer

        self.half.answered(
            SimpleNamespace(
                kv_connector_worker_meta=Answer(step, frozenset(failed), loads, stored=stored),
                invalid_block_ids=set(bad),
                finished_recving=None,
            )
        )


@pytest.fixture
def bench(make_store: StoreMaker) -> Bench:
    return Bench(make_store())


def test_asking_again_and_giving_up_cost_one_lease_and_leave_none(bench: Bench) -> None:
    ids = tokens_of(1, 70)
    bench.keep(ids)
    request = Request("a", ids)
    assert {bench.half.match(request, 0) for _ in range(50)} == {(69, False)}
    assert bench.leases() == 1
    bench.half.finished(request, ([],))
    assert bench.leases() == 0


def test_what_the_engine_has_itself_is_not_claimed(bench: Bench) -> None:
    ids = tokens_of(1, 70)
    bench.keep(ids[:40])
    assert bench.half.match(Request("a", ids), 8) == (32, False)
    assert bench.half.match(Request("b", ids), 40) == (0, False)


def test_a_claim_on_disk_waits(bench: Bench) -> None:
    ids = tokens_of(1, 70)
    bench.keep(ids)
    bench.bench.settle()
    bench.bench.drop("ram")
    assert bench.half.match(Request("a", ids), 0) == (69, True)


def test_a_load_that_failed_is_not_claimed_again(bench: Bench) -> None:
    ids = tokens_of(1, 70)
    bench.keep(ids)
    request = Request("a", ids)
    bench.half.match(request, 0)
    bench.half.allocated(request, (list(range(18)),), 69)
    orders = bench.step(new={"a": list(range(18))})
    assert [(load.request, load.first, len(load.tokens)) for load in orders.loads] == [("a", 0, 69)]
    bench.answer(orders.step, failed=("a",), bad=(3,))
    assert bench.half.match(request, 0) == (0, False)
    assert bench.leases() == 0


def test_nothing_is_saved_before_the_outcome_of_its_step_is_known(bench: Bench) -> None:
    request = Request("a", tokens_of(2, 30))
    bench.half.match(request, 0)
    bench.half.allocated(request, (list(range(8)),), 0)
    first = bench.step(new={"a": list(range(8))})
    assert not first.saves
    request.num_computed_tokens, request.num_in_flight_tokens = 30, 30
    assert not bench.step(going={"a": []}).saves
    request.num_in_flight_tokens = 0
    assert not bench.step(going={"a": []}).saves, "the step's outcome has not been told"
    bench.answer(first.step)
    (save,) = bench.step(going={"a": []}).saves
    assert (len(save.tokens), save.blocks) == (16, (0, 1, 2, 3)), "whole blocks"
    assert not bench.step(going={"a": []}).saves, "saved once"
    bench.half.finished(request, (list(range(8)),))
    assert [len(save.tokens) for save in bench.step().before] == [30]


def test_an_answer_is_saved_block_by_block_and_its_end_when_it_ends(bench: Bench) -> None:
    request = Request("a", tokens_of(2, 30))
    bench.half.match(request, 0)
    bench.answer(bench.step(new={"a": list(range(8))}).step)
    saved = []
    for _ in range(20):
        request.all_token_ids.append(7)
        request.num_computed_tokens = request.num_tokens - 1
        going = {"a": [len(request.all_token_ids) // PAGE + 1] if request.num_tokens % PAGE == 0 else []}
        saved += [len(save.tokens) for save in bench.step(going=going).saves]
    assert saved == [16, 32, 48]
    bench.half.finished(request, (list(range(13)),))
    assert [len(save.tokens) for save in bench.step().before] == [49]


def test_pages_that_a_failed_load_may_have_spoilt_are_not_saved(bench: Bench) -> None:
    request = Request("b", tokens_of(3, 30))
    bench.half.match(request, 0)
    first = bench.step(new={"b": list(range(8))})
    bench.answer(first.step, failed=("a",), bad=(5,))
    request.num_computed_tokens = 30
    assert not bench.step(going={"b": []}).saves
    bench.half.finished(request, (list(range(8)),))
    assert not bench.step().before


def test_a_preempted_request_is_saved_before_its_pages_go(bench: Bench) -> None:
    request = Request("a", tokens_of(2, 30))
    bench.half.match(request, 0)
    bench.answer(bench.step(new={"a": list(range(8))}).step)
    request.num_computed_tokens = 20  # a chunk of the prompt
    bench.step(going={"a": []})
    request.num_computed_tokens = 0
    orders = bench.step(preempted=("a",))
    assert [len(save.tokens) for save in orders.before] == [20]


def test_a_step_names_the_pages_that_it_overwrites(bench: Bench) -> None:
    ids = tokens_of(1, 70)
    bench.keep(ids)
    first, second, third = Request("a", ids), Request("b", tokens_of(2, 30)), Request("c", ids)
    bench.half.match(first, 8)
    bench.half.allocated(first, (list(range(18)),), 61)
    bench.half.match(second, 20)
    bench.half.allocated(second, (list(range(30, 38)),), 0)
    orders = bench.step(new={"a": list(range(18)), "b": list(range(30, 38))}, computed=20)
    assert orders.fresh == {*range(2, 18), *range(35, 38)}, "pages of the engine's own cache stay as they are"
    assert bench.step(going={"b": [50]}, computed=31).fresh == {50}
    bench.bench.settle()
    bench.bench.drop("ram")
    assert bench.half.match(third, 0) == (69, True)
    bench.half.allocated(third, (list(range(60, 78)),), 69)
    assert bench.step().fresh == {*range(60, 78)}, "pages that are filled while the request waits"


def test_an_aborted_request_whose_step_is_not_settled_is_not_saved(bench: Bench) -> None:
    request = Request("a", tokens_of(2, 30))
    bench.half.match(request, 0)
    bench.step(new={"a": list(range(8))})
    request.num_computed_tokens = 30
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    bench.half.finished(request, (list(range(8)),))
    assert not bench.step().before


def test_salts_and_generations_keep_apart(bench: Bench) -> None:
    ids = tokens_of(1, 70)
    bench.keep(ids, salt="x")
    assert bench.half.match(Request("a", ids), 0)[0] == 0
    assert bench.half.match(Request("b", ids, salt="x"), 0)[0] == 69
    bench.half.forget()
    assert bench.half.match(Request("c", ids, salt="x"), 0)[0] == 0


@pytest.mark.parametrize("trait", ["mm_features", "prompt_embeds"])
def test_requests_that_tokens_do_not_describe_are_left_alone(bench: Bench, trait: str) -> None:
    ids = tokens_of(1, 70)
    bench.keep(ids)
    request = Request("a", ids)
    setattr(request, trait, [np.zeros(1)])
    assert bench.half.match(request, 0) == (0, False)


def test_ranks_that_disagree_are_refused(bench: Bench) -> None:
    from dataclasses import replace

    from kvstore.adapters.vllm.layout import Refused
    from kvstore.adapters.vllm.messages import Hello

    for other, reason in ((Hello(replace(bench.engine, page=8)), "layout"), (Hello(refused="dtype"), "dtype")):
        with pytest.raises(Refused) as refused:
            bench.half.greet([Hello(bench.engine), other])
        assert refused.value.reason == reason


def test_a_model_whose_blocks_do_not_fit_is_refused_at_the_start(bench: Bench) -> None:
    from dataclasses import replace

    from kvstore.adapters.vllm.layout import Refused
    from kvstore.adapters.vllm.messages import Hello

    large = replace(LAYOUT, block_tokens=4096).to_json()
    with pytest.raises(Refused, match="ram_segment_bytes") as refused:
        bench.half.greet([Hello(replace(bench.engine, layout=large))])
    assert refused.value.reason == "budget"


@pytest.mark.parametrize("position", [69, 48, 0])
def test_what_was_loaded_and_is_run_again_is_counted(bench: Bench, position: int) -> None:
    from kvstore.adapters.vllm.messages import Measured

    ids = tokens_of(1, 70)
    bench.keep(ids)
    request = Request("a", ids)
    bench.half.match(request, 0)
    bench.half.allocated(request, (list(range(18)),), 69)
    request.num_computed_tokens = 69
    orders = bench.step(new={"a": list(range(18))}, computed=69)
    bench.answer(orders.step, failed=("a",), loads=(Measured("a", 69, {"ram": 69}, 1000, 0.1),))
    request.num_computed_tokens = position
    orders = bench.step(going={"a": []}, computed=position, run=70 - position)
    bench.answer(orders.step)
    request.num_computed_tokens = 70
    bench.answer(bench.step(going={"a": []}, computed=70).step)
    counters = bench.store.stats().counters
    assert counters.get("prefill.vllm.rerun.tokens", 0) == 69 - position
    assert counters["prefill.vllm.tokens"] == 70 - position


def test_prompts_that_were_not_found_tell_how_fast_they_run(bench: Bench) -> None:
    happened: list[Any] = []
    bench.store.events.subscribe(happened.append)
    one, other = Request("a", tokens_of(2, 100)), Request("b", tokens_of(3, 300))
    for request in (one, other):
        bench.half.match(request, 0)
        bench.half.allocated(request, (list(range(75)),), 0)
    orders = bench.step(new={"a": list(range(75)), "b": list(range(75))}, run=100)
    one.num_computed_tokens = other.num_computed_tokens = 100
    time.sleep(0.02)
    bench.half.finished(one, (list(range(75)),))  # told before the outcome of the step in which it ended
    bench.answer(orders.step)
    orders = bench.step(going={"b": []}, computed=100, run=200)
    other.num_computed_tokens = 300
    bench.answer(orders.step)
    told = [event for event in happened if isinstance(event, Prefilled)]
    assert [(event.adapter, event.rerun, event.computed, event.whole) for event in told] == [
        ("vllm", 0, 100, True),
        ("vllm", 0, 300, True),
    ]
    assert 0.01 <= told[0].seconds <= told[1].seconds, "half of the first step each"
    assert bench.half.gate.decide({"ram": 64}, 1 << 20).why == "unmeasured", "no load was measured"
    bench.half.gate.loaded({"ram": 100}, 1 << 20, 1e-6)
    assert bench.half.gate.decide({"ram": 64}, 1 << 20).why == "faster"


def test_of_ranks_the_slowest_load_counts_and_the_furthest_token() -> None:
    from kvstore.adapters.vllm.messages import Answer, Measured

    ours = Answer(3, loads=(Measured("a", 64, {"ram": 64}, 1000, 0.1), Measured("b", 8, {"ram": 8}, 10, 0.3)))
    theirs = Answer(3, frozenset("a"), loads=(Measured("a", 16, {"ram": 16}, 500, 0.2),))
    both = ours.aggregate(theirs)
    assert both.failed == {"a"}
    assert both.loads == (Measured("a", 64, {"ram": 16}, 500, 0.2), Measured("b", 8, {"ram": 8}, 10, 0.3))


def test_whole_blocks_are_announced_once_they_are_stored(bench: Bench) -> None:
    request = Request("a", tokens_of(2, 40))
    bench.half.match(request, 0)
    bench.answer(bench.step(new={"a": list(range(11))}).step)
    request.num_computed_tokens = 40
    orders = bench.step(going={"a": []})
    assert bench.half.events() == []
    bench.answer(orders.step, stored=(("a", 32, True),))
    (event,) = bench.half.events()
    assert (len(event.block_hashes), event.block_size, event.token_ids) == (2, 16, request.all_token_ids[:32])
    assert event.parent_block_hash is None
    assert bench.half.events() == []
