"""The place of K and V in a page is found by writing one, and an order that is not known is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvstore.adapters.vllm.arrangement import Arrangement, find_arrangement, planes  # noqa: E402
from kvstore.errors import UnsupportedError  # noqa: E402

BLOCKS, HEADS, TOKENS, DIM = 3, 2, 8, 4


def kernel(arrangement: Arrangement | None) -> Any:
    """An attention layer whose kernel writes pages in this order; in one of its own for None."""

    def update(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        chosen = arrangement or Arrangement.SIDES
        for side, sent in zip(planes(cache, chosen, DIM), (keys, values), strict=True):
            side[slots // TOKENS, :, slots % TOKENS] = sent if arrangement else sent.flip(-1)

    return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))


@pytest.mark.parametrize("arrangement", list(Arrangement))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_known_order_is_recognised(arrangement: Arrangement, dtype: Any) -> None:
    pages = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=dtype)
    assert find_arrangement(kernel(arrangement), pages, DIM) is arrangement


def test_tokens_before_heads_are_recognised_too() -> None:
    pages = torch.zeros(BLOCKS, TOKENS, HEADS, 2 * DIM).permute(0, 2, 1, 3)
    assert find_arrangement(kernel(Arrangement.SIDES), pages, DIM) is Arrangement.SIDES


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not known"):
        find_arrangement(kernel(None), torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM), DIM)


def test_a_kernel_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        find_arrangement(SimpleNamespace(impl=None), torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM), DIM)


def test_the_pages_of_the_engine_stay_as_they_are() -> None:
    pages = torch.full((BLOCKS, HEADS, TOKENS, 2 * DIM), 7.0)
    find_arrangement(kernel(Arrangement.COLUMNS), pages, DIM)
    assert bool((pages == 7.0).all())
