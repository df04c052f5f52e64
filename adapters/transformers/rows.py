"""The rows of a left-padded batch as token sequences, and how far all of them can be resumed.

A cache has one length for all rows, so a batch is resumed up to a common *column*. Must not know models, caches or
`generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.adapters.transformers.stack import Stack
from kvstore.events import Decided
from kvstore.gate import Gate
from kvstore.identity import Tokens, as_tokens
from kvstore.layout import Layout

if TYPE_CHECKING:
    from kvstore.match import Match, Namespace
    from kvstore.store import Store

ADAPTER = "transformers"


@dataclass(frozen=True, slots=True)
class Rows:
    """Token sequences of a batch; row i begins at column ``pads[i]`` and all end at column ``columns``.

    first_alike: for each row the index of the first row that is the same.
    """

    tokens: tuple[Tokens, ...]
    pads: tuple[int, ...]
    columns: int
    first_alike: tuple[int, ...]

    def distinct(self) -> list[int]:
        """Indices of rows, each different one once."""
        return [index for index, first in enumerate(self.first_alike) if index == first]


def rows_of(ids: torch.Tensor, pads: Sequence[int]) -> Rows:
    """The rows of ``ids`` ``[batch, columns]`` with ``pads[i]`` columns of padding on the left of row i."""
    table = ids.detach().cpu().numpy()
    tokens = tuple(as_tokens(table[index, pad:]) for index, pad in enumerate(pads))
    seen: dict[tuple[int, bytes], int] = {}
    first = tuple(
        seen.setdefault((pad, row.tobytes()), index) for index, (pad, row) in enumerate(zip(pads, tokens, strict=True))
    )
    return Rows(tokens, tuple(pads), table.shape[1], first)


def left_pads(ids: torch.Tensor, mask: torch.Tensor | None) -> list[int] | str:
    """Columns of padding on the left of every row; a reason of the allow-list where the mask is anything else.

    mask: ``[batch, columns]`` of 0 and 1, or None for no padding.
    """
    if mask is None:
        return [0] * ids.shape[0]
    if mask.dim() != 2 or mask.shape != ids.shape:
        return "mask"
    table = mask.detach().cpu().numpy() != 0
    pads = [int(row.argmax()) if row.any() else len(row) for row in table]
    if not all(row[-1] for row in table):
        return "right-padding"
    return pads if all(row[pad:].all() for row, pad in zip(table, pads, strict=True)) else "mask"


def counts_from_zero(positions: torch.Tensor | None, pads: Sequence[int], columns: int) -> bool:
    """Whether position ids, as passed to the forward, give every row's first token 0, the next 1, and so on."""
    if positions is None:  # the model counts columns
        return not any(pads)
    if positions.dim() != 2 or positions.shape[1] != columns or positions.shape[0] not in (1, len(pads)):
        return False
    table = np.broadcast_to(positions.detach().cpu().numpy(), (len(pads), columns))
    return all(np.array_equal(row[pad:], np.arange(columns - pad)) for row, pad in zip(table, pads, strict=True))


def fill(
    store: Store, space: Namespace, layout: Layout, rows: Rows, stack: Stack, gate: Gate, *, counted: bool = True
) -> tuple[int, int]:
    """Load what is stored of all rows into the front of ``stack``; the columns that are now filled, and the tokens
    that were loaded for nothing, since another row had fewer.

    At least one column is always left: a model given a cache of the whole prompt has nothing to run. Nothing
    is loaded that is not worth it to the gate. Rows that are alike are loaded once; padding is cleared. counted: as
    requests.
    """
    found = {}
    for index in rows.distinct():
        most = rows.columns - 1 - rows.pads[index]
        found[index] = store.match(space, rows.tokens[index], limit=most)
    cut = min(rows.pads[index] + match.tokens for index, match in found.items())
    if cut < 1 or not _is_worth_it(store, gate, list(found.values()), cut, counted):
        cut = 0
    loads: dict[int, int] = {}
    for index, match in found.items():
        # Asked for also where nothing comes of it: loads count the hits and the misses.
        wanted = max(0, cut - rows.pads[index])
        fitting = match if match.tokens <= wanted else store.match(space, rows.tokens[index], limit=wanted)
        loaded = store.load(fitting, stack.row(layout, index, rows.pads[index]), counted=counted)
        gate.loaded(loaded.by_tier, loaded.bytes, loaded.seconds)
        loads[index] = loaded.tokens
        if wanted:
            cut = min(cut, rows.pads[index] + loads[index])
    for index, first in enumerate(rows.first_alike):
        if index != first:
            stack.copy_row(first, index, 0, cut)
        stack.clear_left(index, min(rows.pads[index], cut))
    return cut, sum(max(0, loaded - max(0, cut - rows.pads[index])) for index, loaded in loads.items())


def _is_worth_it(store: Store, gate: Gate, matches: Sequence[Match], columns: int, counted: bool) -> bool:
    """Whether to load these rows' prefixes, ``columns`` columns in all, or to run them again."""
    if columns < gate.floor:
        return False
    by_tier: dict[str, int] = {}
    for match in matches:
        for tier, tokens in match.by_tier.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
    size = sum(match.tokens * match.space.layout.token_bytes() for match in matches)
    decision = gate.decide(by_tier, size)
    if counted:
        store.events.emit(Decided(ADAPTER, decision.why))
    return decision.load
