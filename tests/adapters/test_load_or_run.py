"""With a gate, a prefix is loaded only where that is faster than running it again; the answer is the same."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.adapters.transformers import attach

GREEDY = {"max_new_tokens": 6, "do_sample": False}
OPTIONS = {"block_tokens": 16, "least_tokens": 16, "warm_tokens": 0}
MIB = 1 << 20


def reused(model: Any, store: Any, ids: Any, gate: bool, load_s: float) -> tuple[int, list[int]]:
    """Tokens that a second call of ``generate`` did not run, and its answer. load_s: seconds that a MiB was told to
    take."""
    with attach(model, store, gate=gate, salt=f"{gate} {load_s}", **OPTIONS) as attachment:
        model.generate(ids, **GREEDY)
        assert attachment.flush(30)
        attachment._gate.loaded({"ram": 1000}, MIB, load_s)
        answer = model.generate(ids, **GREEDY)
        return attachment.last.reused_tokens, answer[0].tolist()


@pytest.mark.parametrize(("gate", "load_s", "expected"), [(True, 1e6, 0), (True, 1e-6, 199), (False, 1e6, 199)])
def test_a_load_that_would_be_slower_is_not_made_where_there_is_a_gate(
    tiny: Any, ids: Any, store: Any, counted: Any, gate: bool, load_s: float, expected: int
) -> None:
    model, asked = tiny("llama"), ids(200)
    plain = model.generate(asked, **GREEDY)[0].tolist()
    assert reused(model, store, asked, gate, load_s) == (expected, plain)
    reason = {(True, 0): "slower", (True, 199): "faster", (False, 199): "off"}[gate, expected]
    assert counted.snapshot()[f"gate.transformers.{reason}.decisions"] == 1


def test_a_prefix_below_the_floor_is_run_again(tiny: Any, ids: Any, store: Any) -> None:
    model, asked = tiny("llama"), ids(14)
    assert reused(model, store, asked, True, 1e-6)[0] == 0
