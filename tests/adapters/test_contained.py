"""What happens in the middle of a request: weights that change, breaking off, undone steps, a store that fails.

Whatever it is, the answer is the one without the store, and only what was really computed is kept.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import transformers.generation.utils as generation  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from kvstore.adapters.transformers import attach  # noqa: E402
from kvstore.adapters.transformers import run as running  # noqa: E402
from kvstore.adapters.transformers.layout import cache_argument  # noqa: E402
from kvstore.adapters.transformers.saver import Saver  # noqa: E402
from kvstore.events import Counters, Events, Hit, Prefilled, Skipped  # noqa: E402

BLOCK = 16
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def test_a_save_without_a_thread_is_done_at_once_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request never fails for it; later its memory is another request's."""
    saver, done = Saver(Events()), []

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        first = saver.submit(lambda: done.append(1), 1)
    assert first is not None
    assert first.done()
    saver.submit(lambda: done.append(2), 1)
    assert saver.flush(30)
    saver.close()
    assert done == [1, 2]


def test_a_returned_cache_is_the_users_for_good(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        name = cache_argument(model)
        kept = model.generate(ids(40), return_dict_in_generate=True, **GREEDY)[name]
        before = [(layer.keys.clone(), layer.values.clone()) for layer in kept.layers]
        for seed in range(4):
            model.generate(ids(40, seed=seed), **GREEDY)
        attachment.flush()
        for layer, (keys, values) in zip(kept.layers, before, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
        other = copy.deepcopy(kept)
        other.crop(-5)
        other.batch_repeat_interleave(3)
        other.reorder_cache(torch.tensor([2, 1, 0]))
        other.batch_select_indices(torch.tensor([0, 2]))
        with torch.no_grad():
            model(ids(4, rows=2), use_cache=True, **{name: other})
        assert (other.get_seq_length(), kept.get_seq_length()) == (46, 47)
        assert all(torch.equal(layer.keys, keys) for layer, (keys, _) in zip(kept.layers, before, strict=True))


def test_a_private_buffer_is_used_again_for_the_next_request(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")
    with attach(model, store, block_tokens=BLOCK, warm_tokens=256) as attachment:
        for seed in range(4):
            model.generate(ids(40, seed=seed), **GREEDY)
            attachment.flush()
        assert attachment._pool.made == 1


def test_weights_that_change_in_the_middle_of_an_answer_end_its_saving(
    tiny: Any, ids: Any, store: Any, seen: list[Any]
) -> None:
    model = tiny("llama")

    class Trains(BaseStreamer):
        seen = 0

        def put(self, value: Any) -> None:
            self.seen += 1
            if self.seen == 4:
                with torch.no_grad():
                    model.model.layers[0].self_attn.k_proj.weight.add_(0.5)

        def end(self) -> None:
            pass

    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        before = attachment._ground()
        out = model.generate(ids(40), streamer=Trains(), **GREEDY)
        attachment.flush()
        assert any(isinstance(event, Skipped) and event.reason == "changed" for event in seen)
        assert store.match(before.space, out[0].numpy()).tokens == 40
        assert store.match(attachment._ground().space, out[0].numpy()).tokens == 0


def test_an_answer_that_was_broken_off_is_stored_as_far_as_it_came(tiny: Any, ids: Any, store: Any) -> None:
    model = tiny("llama")

    class Breaks(BaseStreamer):
        seen = 0

        def put(self, value: Any) -> None:
            self.seen += 1
            if self.seen == 5:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    whole = model.generate(ids(40), **GREEDY)
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids(40), streamer=Breaks(), **GREEDY)
        attachment.flush()
        assert torch.equal(model.generate(whole[:, :46], max_new_tokens=2, do_sample=False), whole)
        assert attachment.last.reused_tokens == 43


@pytest.mark.parametrize("broken", ["match", "load", "save"])
def test_a_store_that_fails_costs_speed_and_never_the_request(
    broken: str, tiny: Any, ids: Any, store: Any, counted: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    expected = model.generate(ids(40), **GREEDY)

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("the medium is gone")

    monkeypatch.setattr(type(store), broken, fails)
    attachment = attach(model, store, block_tokens=BLOCK, warm_tokens=0)
    for _ in range(2):
        assert torch.equal(model.generate(ids(40), **GREEDY), expected)
    attachment.detach()
    assert any(name.startswith("fault.adapter") for name in counted.snapshot())


def test_what_was_loaded_before_the_adapter_failed_is_not_called_saved(
    tiny: Any, ids: Any, store: Any, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny("llama"), ids(64)
    plain = model.generate(prompt, **GREEDY)
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        model.generate(prompt, **GREEDY)
        attachment.flush()

        def fails(*_: Any) -> None:
            raise RuntimeError("no room")

        monkeypatch.setattr(running, "install", fails)
        assert torch.equal(model.generate(prompt, **GREEDY), plain)
        assert attachment.last.refused == "fault"
    served = sum(event.tokens for event in seen if isinstance(event, Hit))
    assert served == sum(event.rerun for event in seen if isinstance(event, Prefilled)) == 63


def test_a_store_that_was_closed_costs_nothing_but_speed(tiny: Any, ids: Any, open_store: Any) -> None:
    model = tiny("llama")
    expected = model.generate(ids(40), **GREEDY)
    opened = open_store()
    attachment = attach(model, opened, warm_tokens=0)
    opened.close()
    assert torch.equal(model.generate(ids(40), **GREEDY), expected)
    attachment.detach()


def test_a_save_for_which_there_is_no_room_is_skipped_and_counted(
    tiny: Any, ids: Any, store: Any, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    gate = threading.Event()
    original = type(store).save

    def slow(*arguments: Any, **named: Any) -> Any:
        assert gate.wait(60)
        return original(*arguments, **named)

    monkeypatch.setattr(type(store), "save", slow)
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        for seed in range(6):
            model.generate(ids(40, seed=seed), **GREEDY)
        gate.set()
        attachment.flush()
    assert sum(isinstance(event, Skipped) and event.reason == "busy" for event in seen) == 4


class NoEvent:
    """A device event on the CPU, where everything has happened already."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.mark.skipif(not hasattr(generation, "DeferredStopCheck"), reason="this release decides at once when to stop")
@pytest.mark.parametrize("returned", [False, True])
def test_a_step_that_was_undone_is_not_stored(
    returned: bool, tiny: Any, ids: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    plain = model.generate(ids(40), **GREEDY)
    end = next(int(token) for token in plain[0, 42:] if token not in plain[0, 40:42])
    expected = model.generate(ids(40), eos_token_id=end, **GREEDY)
    monkeypatch.setattr(generation.DeferredStopCheck, "is_supported", staticmethod(lambda *_, **__: True))
    monkeypatch.setattr(torch, "Event", NoEvent)
    with attach(model, store, block_tokens=BLOCK, warm_tokens=0) as attachment:
        out = model.generate(ids(40), eos_token_id=end, return_dict_in_generate=returned, **GREEDY)
        attachment.flush()
        sequence = out.sequences if returned else out
        assert torch.equal(sequence, expected)
        space = attachment._ground().space
        stored = store.match(space, [*sequence[0].tolist(), *plain[0, sequence.shape[1] :].tolist()]).tokens
        assert stored in (sequence.shape[1] - 1, sequence.shape[1])
        if returned:
            assert out[cache_argument(model)].get_seq_length() == sequence.shape[1] - 1
