"""One request as the scheduler's half follows it: its pages, what of it is final, claimed, saved.

Must not know the store's calls or vLLM's outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.adapters.vllm.messages import Save, Whose
from kvstore.identity import Tokens
from kvstore.serving import Lease


@dataclass(slots=True)
class Claim:
    """What a request was promised. tokens: all that would then be there, ``first`` of them the engine's own already.

    later: loaded while the request waits. until: CLOCK_BOOTTIME ns up to which the lease holds.
    """

    tokens: int
    first: int
    later: bool
    by_tier: dict[str, int]
    lease: Lease | None = None
    until: int = 0

    def holds(self, computed: int, now: int) -> bool:
        """Whether it is still good for a request of which the engine has ``computed`` tokens itself."""
        return self.first == computed and now <= self.until

    def release(self) -> None:
        """Let go of the blocks."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


@dataclass(slots=True)
class Tracked:
    """A request.

    local: tokens of it that the engine's own cache had when it was asked last. admitted: the step in which it was last
    given pages. final: tokens whose KV will not change. saved: tokens that were handed to a save. loading: pages are
    being filled while it waits. failed: a load of it failed, so it is never claimed for again. tainted: its pages may
    hold what a failed load left, so nothing of it is saved. missed: what the store could not give is counted.
    restored: tokens, from its start on, that a load brought and the engine has not computed again. ran, ran_s, rerun:
    tokens of its prompt that ran, in how many seconds, and those among them that a load had brought.
    """

    request: Any
    whose: Whose | None = None
    reason: str | None = None
    claim: Claim | None = None
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    admitted: int = 0
    final: int = 0
    saved: int = 0
    loading: bool = False
    failed: bool = False
    tainted: bool = False
    missed: bool = False
    restored: int = 0
    ran: int = 0
    ran_s: float = 0.0
    rerun: int = 0

    def tokens(self, count: int) -> Tokens:
        """The first ``count`` token ids, prompt and answer."""
        return np.array(self.request.all_token_ids[:count], np.uint32)

    def computed(self) -> int:
        """Tokens whose KV is in the pages and will not change: neither in flight, nor placeholders, nor drafts."""
        request = self.request
        return max(0, min(int(request.num_computed_tokens - request.num_in_flight_tokens), int(request.num_tokens)))

    def drop_claim(self) -> None:
        """Release what was promised and not taken."""
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    def resumes(self, position: int) -> None:
        """The engine goes on at ``position``, whatever a load brought past it."""
        again = max(0, self.restored - position)
        self.restored -= again
        self.rerun += again

    def prefilled(self) -> tuple[int, int, float, bool]:
        """Its prompt has run: tokens run again, tokens run, seconds, and whether nothing of it was reused."""
        whole = not self.rerun and self.ran >= int(self.request.num_prompt_tokens)
        told = self.rerun, self.ran, self.ran_s, whole
        self.rerun, self.ran, self.ran_s = 0, 0, 0.0
        return told

    def due(self, block_tokens: int) -> int:
        """How many tokens to save now, by whole blocks; 0 for nothing new. What is left is saved when it ends."""
        whole = self.final - self.final % block_tokens
        return whole if whole > self.saved else 0

    def save(self, count: int, page: int) -> Save | None:
        """A save of the first ``count`` tokens; None where their pages are not all known."""
        pages = -(-count // page)
        if self.whose is None or count <= self.saved or pages > len(self.blocks):
            return None
        self.saved = count
        return Save(self.request.request_id, self.whose, self.tokens(count), tuple(self.blocks[:pages]))
