"""The scheduler's half: what a request may be given from the store, and what of it is to be saved.

It matches and leases, but touches no KV. A claim is made again at will and costs nothing when it is not taken; a load
that failed is not claimed again. Only KV of steps whose outcome is known is saved. Must not know tensors.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvstore.adapters.vllm.allow import explain, refuse_request
from kvstore.adapters.vllm.announcing import Announcements
from kvstore.adapters.vllm.files import weights_digest
from kvstore.adapters.vllm.layout import EngineLayout, Refused
from kvstore.adapters.vllm.messages import Answer, Hello, Load, Orders, Save, Whose
from kvstore.adapters.vllm.prefills import Prefills, Ran
from kvstore.adapters.vllm.spaces import Spaces
from kvstore.adapters.vllm.tracked import Claim, Tracked
from kvstore.errors import BudgetError, KVStoreError
from kvstore.events import Cause, Decided, Fault, Miss, Prefilled, Refusal
from kvstore.gate import Gate
from kvstore.host import boottime_ns
from kvstore.match import Match
from kvstore.store import Store

ADAPTER = "vllm"
LEASE_S = 30.0
LORA_FILES = ("adapter_config.json",)
"""Says how strongly a LoRA's weights act."""


class SchedulerHalf:
    """What the connector does in the scheduler's process.

    later_bytes: loads from `ram` of more than this don't hold up a step. announce: collect KV events. say: tells people
    something once.
    """

    def __init__(self, store: Store, gate: Gate, *, later_bytes: int, announce: bool, say: Any) -> None:
        self._store, self.gate, self._say = store, gate, say
        self._announce = announce
        self._later_bytes = later_bytes
        self._engine: EngineLayout | None = None
        self._spaces: Spaces | None = None
        self._tracked: dict[str, Tracked] = {}
        self._adapters: dict[str, str | None] = {}
        self._generation = ""
        self._announcements: Announcements | None = None
        self._step = self._settled = 0
        self._loads: list[tuple[Load, bool]] = []
        self._before: list[Save] = []
        self._taken: dict[str, tuple[int, Claim]] = {}
        self._prefills = Prefills()
        self._fresh: set[int] = set()

    def greet(self, hellos: Iterable[Hello]) -> None:
        """Take the layout that all ranks agree on. Raises Refused where there is none, or no room for it."""
        said = list(hellos)
        refused = next((hello for hello in said if hello.engine is None), None)
        if refused is not None:
            raise Refused(refused.refused, refused.detail)
        engine = said[0].engine
        assert engine is not None
        if any(hello.engine != engine for hello in said):
            raise Refused("layout")
        spaces = Spaces(self._store, engine)
        try:
            spaces.of(Whose())
        except BudgetError as error:
            raise Refused("budget", f"{error.problem}: {error.remedy}") from error
        self._engine, self._spaces = engine, spaces
        self._announcements = Announcements(spaces) if self._announce else None

    # ---------------------------------------------------------------- claims

    def match(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens beyond ``computed`` that can be loaded, and whether the request waits for them."""
        tracked = self.track(request)
        tracked.local = computed
        if self._spaces is None or tracked.whose is None or tracked.failed or request.skip_reading_prefix_cache:
            return 0, False
        claim = tracked.claim
        if claim is None or not claim.holds(computed, boottime_ns()):
            tracked.drop_claim()
            claim = tracked.claim = self._claim(tracked, computed)
        return (claim.tokens - computed, claim.later) if claim is not None else (0, False)

    def allocated(self, request: Any, blocks: tuple[list[int], ...], external: int) -> None:
        """The engine gave a request pages; ``external`` of its tokens are to be loaded into them."""
        tracked = self.track(request)
        claim, tracked.claim = tracked.claim, None
        if tracked.loading:  # the load is over; these are the pages for the rest
            tracked.loading = False
            return
        if claim is None or external <= 0:
            if claim is not None:
                claim.release()
            self._missed(tracked, request.num_tokens - tracked.local)
            return
        assert tracked.whose is not None
        tokens = tracked.tokens(claim.first + external)
        order = Load(request.request_id, tracked.whose, tokens, claim.first, tuple(blocks[0]))
        self._loads.append((order, claim.later))
        self._taken[request.request_id] = (self._step + 1, claim)
        tracked.loading = claim.later
        tracked.saved = max(tracked.saved, len(tokens))
        self._missed(tracked, request.num_tokens - len(tokens))

    def tiers(self, request: Any) -> Mapping[str, int]:
        """Tokens of the request's load by tier, as far as it was taken in this step."""
        taken = self._taken.get(request.request_id)
        return taken[1].by_tier if taken is not None else {}

    # ---------------------------------------------------------------- steps

    def orders(self, output: Any) -> Orders:
        """This step's work."""
        self._step += 1
        for name in output.preempted_req_ids or ():
            self._preempted(name)
        self._prefills.ordered(self._step, output.total_num_scheduled_tokens, self._prompts(output))
        self._fresh = set()
        saves = tuple(self._scheduled(output))
        loads, self._loads = self._loads, []
        before, self._before = self._before, []
        for order, _ in loads:
            self._fresh.update(order.blocks[order.first // self._page :])
        return Orders(
            step=self._step,
            idle=not output.total_num_scheduled_tokens,
            fresh=frozenset(self._fresh),
            before=tuple(before),
            saves=saves,
            loads=tuple(order for order, later in loads if not later),
            later=tuple(order for order, later in loads if later),
        )

    def answered(self, output: Any) -> None:
        """The outcome of a step."""
        answer = output.kv_connector_worker_meta
        if isinstance(answer, Answer):
            self._settled = max(self._settled, answer.step)
            for name in answer.failed:
                if (tracked := self._tracked.get(name)) is not None:
                    tracked.failed = True
                    tracked.saved = 0
            for load in answer.loads:
                self.gate.loaded(load.by_tier, load.bytes, load.seconds)
                if (tracked := self._tracked.get(load.request)) is not None:
                    tracked.restored = load.tokens
            if self._announcements is not None:
                self._announcements.settled(answer.stored)
            outcome = self._prefills.settled(answer.step, answer.loading_s, answer.failed)
            self.gate.computed(outcome.tokens, outcome.seconds)
            for tracked in outcome.over:
                self._prefilled(tracked)
            over = {name for name, (step, claim) in self._taken.items() if step <= self._settled and not claim.later}
            self._release(over)
        self._release(output.finished_recving or ())
        if output.invalid_block_ids:
            bad = set(output.invalid_block_ids)
            for tracked in self._tracked.values():
                tracked.tainted |= not tracked.failed and not bad.isdisjoint(tracked.blocks)

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> None:
        """A request ended: what is final of it is saved, if nothing but its own end is in the way."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        tracked.drop_claim()
        aborted = request.status.name == "FINISHED_ABORTED"
        settled = tracked.admitted <= self._settled or (tracked.admitted > 0 and not aborted)
        if self._spaces is None or tracked.loading or tracked.tainted or not settled or not tracked.admitted:
            return
        tracked.blocks = list(blocks[0])
        self._before += self._ordered(tracked, tracked.computed())

    def events(self) -> list[Any]:
        """KV events since this was last asked."""
        return self._announcements.take() if self._announcements is not None else []

    def forget(self) -> None:
        """The engine was told to drop every cache, its connector's too: its weights may be others from now on."""
        self._generation = uuid.uuid4().hex
        for tracked in self._tracked.values():
            tracked.tainted = True
            tracked.drop_claim()
            tracked.whose = None

    def close(self) -> None:
        """Release every lease."""
        for tracked in self._tracked.values():
            tracked.drop_claim()
        self._release(list(self._taken))

    # ---------------------------------------------------------------- inside

    def _release(self, names: Iterable[str]) -> None:
        """Loads that are over."""
        for name in names:
            taken = self._taken.pop(name, None)
            if taken is not None:
                taken[1].release()

    @property
    def _page(self) -> int:
        assert self._engine is not None
        return self._engine.page

    def track(self, request: Any) -> Tracked:
        """The request as it is followed, from now on at the latest."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = Tracked(request)
            tracked.reason = refuse_request(request)
            if tracked.reason is None and self._spaces is not None:
                tracked.whose = self._whose(request, tracked)
            if tracked.reason is not None:
                self._store.events.emit(Refusal(ADAPTER, tracked.reason))
                self._say(tracked.reason, explain(tracked.reason))
        return tracked

    def _whose(self, request: Any, tracked: Tracked) -> Whose | None:
        adapter = ""
        if request.lora_request is not None:
            digest = self._adapter(request.lora_request)
            if digest is None:
                tracked.reason = "lora"
                return None
            adapter = digest
        return Whose(request.cache_salt or "", adapter, self._generation)

    def _adapter(self, lora: Any) -> str | None:
        """Digest of a LoRA's files, read when the engine reads them; None where they cannot be read."""
        name = f"{lora.lora_int_id}\0{lora.lora_path}"
        if name not in self._adapters or lora.load_inplace:
            try:
                self._adapters[name] = weights_digest(Path(lora.lora_path), also=LORA_FILES)
            except KVStoreError:
                self._adapters[name] = None
        return self._adapters[name]

    def _claim(self, tracked: Tracked, computed: int) -> Claim | None:
        assert self._spaces is not None
        assert tracked.whose is not None
        request = tracked.request
        try:
            space = self._spaces.of(tracked.whose)
            tokens = tracked.tokens(request.num_tokens)
            match = self._store.match(space, tokens, limit=request.num_tokens - 1)
            if match.tokens <= computed:
                return None
            return self._promise(match, computed)
        except KVStoreError as error:
            self._store.events.emit(Fault("store", "match", error.problem))
            return None

    def _promise(self, match: Match, computed: int) -> Claim | None:
        """A claim of what was matched, leased, if loading it is worth it."""
        by_tier = _beyond(match, computed)
        size = match.space.layout.token_bytes() * (match.tokens - computed)  # of one shard: all load at once
        decision = self.gate.decide(by_tier, size)
        self._store.events.emit(Decided(ADAPTER, decision.why))
        if not decision.load:
            return None
        lease = self._store.lease(match, LEASE_S)
        tokens = match.tokens
        if set(match.by_tier) == {"ram"}:
            tokens = min(tokens, lease.tokens)
        if tokens <= computed:
            lease.release()
            return None
        later = "nvme" in by_tier or size > self._later_bytes
        return Claim(tokens, computed, later, by_tier, lease, boottime_ns() + int(LEASE_S / 2 * 1e9))

    def _ordered(self, tracked: Tracked, count: int) -> list[Save]:
        """A save of a request's first tokens, if it is one."""
        before = tracked.saved
        save = tracked.save(count, self._page)
        if save is not None and self._announcements is not None:
            self._announcements.ordered(save, before)
        return [] if save is None else [save]

    def _scheduled(self, output: Any) -> Iterable[Save]:
        """Follow pages of all requests in this step; saves of what became final."""
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            self._fresh.update(new.block_ids[0][self._kept(tracked) :])
            if tracked is not None:
                tracked.blocks, tracked.admitted = list(new.block_ids[0]), self._step
                tracked.resumes(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        followed = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, fresh, computed in followed:
            tracked = self._tracked.get(name)
            if fresh:
                self._fresh.update(fresh[0][self._kept(tracked) if name in cached.resumed_req_ids else 0 :])
            if tracked is None:
                continue
            tracked.resumes(computed)
            if name in cached.resumed_req_ids:
                tracked.blocks, tracked.admitted = list(fresh[0]) if fresh else [], self._step
                continue
            if fresh:
                tracked.blocks += fresh[0]
            yield from self._due(tracked)

    def _kept(self, tracked: Tracked | None) -> int:
        """Pages of a request that hold what they held: those that the engine's own cache gave it."""
        return tracked.local // self._page if tracked is not None and self._engine is not None else 0

    def _due(self, tracked: Tracked) -> list[Save]:
        tracked.final = tracked.computed()
        if self._spaces is None or tracked.tainted or tracked.whose is None or tracked.admitted > self._settled:
            return []
        count = tracked.due(self._spaces.block_tokens)
        return self._ordered(tracked, count) if count else []

    def _preempted(self, name: str) -> None:
        """Its pages are given to others in this very step: what is final is saved first."""
        tracked = self._tracked.get(name)
        if tracked is None or self._spaces is None:
            return
        if not tracked.tainted and 0 < tracked.admitted <= self._settled:
            self._before += self._ordered(tracked, tracked.final)
        tracked.blocks, tracked.final = [], 0

    def _prompts(self, output: Any) -> list[Ran]:
        """Requests of whose prompts something runs in this step."""
        found: list[Ran] = []
        for name, count in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            left = tracked.request.num_prompt_tokens - tracked.request.num_computed_tokens if tracked is not None else 0
            if tracked is not None and left > 0:
                found.append((tracked, count, count >= left))
        return found

    def _prefilled(self, tracked: Tracked) -> None:
        self._store.events.emit(Prefilled(ADAPTER, *tracked.prefilled(), self._root(tracked)))

    def _missed(self, tracked: Tracked, tokens: int) -> None:
        """Count what the store could not give, once a request."""
        if not tracked.missed and tokens > 0:
            tracked.missed, root = True, self._root(tracked)
            self._store.events.emit(Miss(Cause.LIMIT, 1, root))
            if tokens > 1:
                self._store.events.emit(Miss(Cause.REFUSED if tracked.reason else Cause.ABSENT, tokens - 1, root))

    def _root(self, tracked: Tracked) -> bytes:
        """The request's namespace; empty where it has none."""
        if self._spaces is None or tracked.whose is None:
            return b""
        return self._spaces.of(tracked.whose).root


def _beyond(match: Match, computed: int) -> dict[str, int]:
    """Matched tokens past ``computed`` by tier."""
    found: dict[str, int] = {}
    for piece in next(iter(match.pieces.values()), ()):
        take = piece.start + piece.take - max(piece.start, computed)
        if take > 0:
            found[piece.tier] = found.get(piece.tier, 0) + take
    return found
