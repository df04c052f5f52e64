"""Namespaces of one engine: one for every salt, LoRA and generation of weights that requests came with.

Must not know requests.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.adapters.vllm.layout import EngineLayout
from kvstore.adapters.vllm.messages import Whose
from kvstore.layout import Layout
from kvstore.match import Namespace
from kvstore.store import Store

KEPT = 1024


class Spaces:
    """The namespaces that were used last."""

    def __init__(self, store: Store, engine: EngineLayout) -> None:
        self._store, self._engine = store, engine
        self._known: OrderedDict[Whose, Namespace] = OrderedDict()
        self._layouts: OrderedDict[tuple[str, str], Layout] = OrderedDict()
        self.block_tokens = engine.with_traits({}).block_tokens

    def of(self, whose: Whose) -> Namespace:
        """The namespace. Raises BudgetError where no two of its blocks fit the store."""
        known = self._known.get(whose)
        if known is None:
            layout = self._layout(whose)
            known = self._known[whose] = self._store.namespace(layout, salt=whose.salt, label=self._engine.label)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(whose)
        return known

    def _layout(self, whose: Whose) -> Layout:
        name = (whose.adapter, whose.generation)
        if name not in self._layouts:
            self._layouts[name] = self._engine.with_traits(whose.traits())
            while len(self._layouts) > KEPT:
                self._layouts.popitem(last=False)
        return self._layouts[name]
