"""What the scheduler's half tells the workers' halves in every step, and what they answer.

Plain values that any process can read. Must not know the store or vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.adapters.vllm.layout import EngineLayout
from kvstore.identity import Tokens


@dataclass(frozen=True, slots=True)
class Whose:
    """Which namespace a request's KV belongs to, within the engine's layout.

    adapter: digest of its LoRA, empty for none. generation: changes when the engine's weights may have.
    """

    salt: str = ""
    adapter: str = ""
    generation: str = ""

    def traits(self) -> dict[str, str]:
        """What it adds to the engine's layout."""
        return {"adapters": self.adapter, "generation": self.generation}


@dataclass(frozen=True, slots=True)
class Load:
    """Load ``tokens[first:]`` into pages ``blocks`` of the sequence; the tokens before are there."""

    request: str
    whose: Whose
    tokens: Tokens
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Save ``tokens``, which lie in pages ``blocks``."""

    request: str
    whose: Whose
    tokens: Tokens
    blocks: tuple[int, ...]


@dataclass
class Orders(KVConnectorMetadata):
    """One step's work.

    fresh: pages that are given to requests in this step, and written. before: saves out of pages that were freed.
    saves: out of pages that stay. loads: before the forward. later: loads that take their time. idle: nothing runs.
    """

    step: int = 0
    idle: bool = True
    fresh: frozenset[int] = frozenset()
    before: Sequence[Save] = ()
    saves: Sequence[Save] = ()
    loads: Sequence[Load] = ()
    later: Sequence[Load] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One load as it was measured.

    tokens: of the request, from its start on, that are in its pages now. by_tier: tokens copied. seconds: of it all.
    """

    request: str
    tokens: int
    by_tier: dict[str, int]
    bytes: int
    seconds: float


@dataclass
class Answer(KVConnectorWorkerMetadata):
    """What workers say after a step. failed: requests of which something could not be loaded.

    loading_s: seconds for which the step's forward waited for loads. stored: saves that are over, by request, tokens,
    and whether anything new was stored.
    """

    step: int
    failed: frozenset[str] = frozenset()
    loads: tuple[Measured, ...] = ()
    loading_s: float = 0.0
    stored: tuple[tuple[str, int, bool], ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Answer:
        """Both ranks' answers: a load is as slow as its slowest shard, and failed where one failed."""
        assert isinstance(other, Answer)
        return replace(
            self,
            step=min(self.step, other.step),
            failed=self.failed | other.failed,
            loads=_slowest(self.loads, other.loads),
            loading_s=max(self.loading_s, other.loading_s),
        )


def _slowest(ours: Sequence[Measured], theirs: Sequence[Measured]) -> tuple[Measured, ...]:
    """Of every request the load that took longer, and all tokens that some rank has."""
    found: dict[str, Measured] = {}
    for load in (*ours, *theirs):
        other = found.get(load.request, load)
        slower = max(other, load, key=lambda entry: entry.seconds)
        found[load.request] = replace(slower, tokens=max(load.tokens, other.tokens))
    return tuple(found.values())


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """What a rank says of itself at the start: its layout, or why it runs uncached."""

    engine: EngineLayout | None = None
    refused: str = ""
    detail: str = field(default="")
