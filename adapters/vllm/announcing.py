"""vLLM's KV events for what the connector stored: blocks by the store's own keys, medium ``CPU``.

Only whole blocks are announced, and only stores: a store is shared and outlives the engine, so that what leaves it is
not this engine's to tell. Must not know when anything is saved.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored

from kvstore.adapters.vllm.messages import Save
from kvstore.adapters.vllm.spaces import Spaces
from kvstore.identity import chain


class Announcements:
    """Saves that were ordered, until a worker says what became of them."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._ordered: dict[tuple[str, int], tuple[Save, int]] = {}
        self._told: list[Any] = []

    def ordered(self, save: Save, before: int) -> None:
        """A save was ordered of a request of which ``before`` tokens had been saved."""
        self._ordered[save.request, len(save.tokens)] = (save, before)

    def settled(self, stored: tuple[tuple[str, int, bool], ...]) -> None:
        """Saves that are over: request, tokens, and whether anything new was stored."""
        for request, count, fresh in stored:
            found = self._ordered.pop((request, count), None)
            if found is not None and fresh:
                self._announce(*found)

    def take(self) -> list[Any]:
        """Events since this was last asked."""
        told, self._told = self._told, []
        return told

    def _announce(self, save: Save, before: int) -> None:
        space = self._spaces.of(save.whose)
        size = space.layout.block_tokens
        linked = chain(space.root, save.tokens, size)
        first, whole = before // size, linked.whole
        if whole > first:
            self._told.append(
                BlockStored(
                    block_hashes=list(linked.keys[first:whole]),
                    parent_block_hash=linked.keys[first - 1] if first else None,
                    token_ids=save.tokens[first * size : whole * size].tolist(),
                    block_size=size,
                    lora_id=None,
                    medium=MEDIUM_CPU,
                    lora_name=None,
                )
            )
