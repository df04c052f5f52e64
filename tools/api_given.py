"""What the API gives, as types: from them comes its description, and what is left out of an answer is a fault.

Must not know routes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Given(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")


class Tier(Given):
    """A tier; bytes. used_bytes are of slots that hold a block, allocated_bytes of files.

    asked_bytes: the budget that was asked for; capped: why less is in force, empty where it is not.
    """

    name: str
    budget_bytes: int
    allocated_bytes: int
    index_bytes: int
    index_used_bytes: int
    segments: int
    slots: int
    free_slots: int
    blocks: int
    used_bytes: int
    asked_bytes: int
    capped: str


class StatsGiven(BaseModel):
    """A store at a moment; asked_tokens is the sum of hit_tokens and miss_tokens."""

    path: str
    tiers: list[Tier]
    asked_tokens: int
    hit_tokens: dict[str, int] = Field(description="By serving tier.")
    miss_tokens: dict[str, int] = Field(description="By cause.")
    counters: dict[str, int]
    mover_blocks: int
    mover_bytes: int
    mover_paused: bool
    processes: int
    namespaces: int
    names: int
    hbm: dict[str, int | str] | None


class Usage(Given):
    """Of a namespace in a tier."""

    blocks: int
    bytes: int


class NamespaceGiven(Given):
    """A layout under a salt. salt: its digest. Without the token root and salt are stand-ins, which begin with ~."""

    root: str
    label: str
    salt: str
    created: int
    ttl: int
    block_tokens: int
    token_bytes: int
    tiers: dict[str, Usage]


class NamespacesGiven(Given):
    """All of them."""

    namespaces: list[NamespaceGiven]


class NameOf(Given):
    """A name that ends in a sequence, after so many tokens."""

    name: str
    pinned: bool
    tokens: int
    expires: int | None


class PrefixGiven(Given):
    """A stored sequence that no other one continues. first_tokens: only for who has the token.

    Without the token key and namespace are stand-ins, which begin with ~: from a key prompts can be guessed.
    """

    key: str
    namespace: str
    label: str
    tokens: int
    bytes: int
    first_tokens: list[int]
    whole: bool
    idle_s: float
    blocks: dict[str, int]
    names: list[NameOf]


class PrefixesGiven(Given):
    """A page of them. age_s: how old the listing is. total: how many fit in all."""

    age_s: float
    total: int
    prefixes: list[PrefixGiven]


class NamedGiven(Given):
    """A named prefix, and what is stored of it. namespace: its root; without the token a stand-in."""

    name: str
    namespace: str
    label: str
    tokens: int
    stored: int
    by_tier: dict[str, int]
    pinned: bool
    priority: int
    created: int
    expires: int | None
    pinned_bytes: int


class NamesGiven(Given):
    """All of them."""

    names: list[NamedGiven]


class PinnedGiven(NamedGiven):
    """What was pinned. asked: tokens it was to have."""

    asked: int


class ShownGiven(Given):
    """One prefix."""

    namespace: str
    label: str
    tokens: int
    stored: int
    by_tier: dict[str, int]
    blocks: dict[str, int]
    bytes: int
    key: str | None
    names: list[NamedGiven]
    first_tokens: list[int]
    text: None


class UnpinnedGiven(Given):
    """What was forgotten."""

    name: str
    unpinned: bool
    tokens: int


class EvictedGiven(Given):
    """Blocks by tier. names: of prefixes that lose blocks; forgotten: those of them that go. confirm: what makes a dry
    run real, once, within two minutes."""

    dry_run: bool
    evicted: bool
    blocks: dict[str, int]
    names: list[str]
    forgotten: list[str]
    confirm: str | None


class JobGiven(Given):
    """Work under way, or ended. total 0: not known yet."""

    id: str
    kind: str
    state: Literal["running", "done", "failed", "cancelled"]
    done: int
    total: int
    began: float
    ended: float | None
    result: dict[str, Any] | None
    problem: str | None


class JobsGiven(Given):
    """The latest first."""

    jobs: list[JobGiven]


class QuotaGiven(Given):
    """What a salt, by its digest, may hold in a tier, and holds. Without the token it is told by a stand-in."""

    salt: str
    labels: str
    tier: str
    limit_bytes: int
    used_bytes: int


class QuotasGiven(Given):
    """All of them."""

    quotas: list[QuotaGiven]


class QuotaChanged(Given):
    """A salt's quotas. known: whether it had any, or anything stored. evicted: blocks by tier.

    confirm: what makes a dry run real, once, within two minutes.
    """

    quotas: list[QuotaGiven]
    known: bool
    changed: bool
    dry_run: bool
    evicted: dict[str, int]
    confirm: str | None


class NamespaceOf(Given):
    """A namespace by its digests."""

    root: str
    label: str
    salt: str


class DroppedGiven(Given):
    """What was forgotten, or would be."""

    dropped: bool
    dry_run: bool
    namespaces: list[NamespaceOf]


class ProcessGiven(Given):
    """A process that has the store open. hbm, nvme: which tiers it uses. self: this server."""

    id: str
    pid: int
    name: str | None
    since: float | None
    hbm: bool
    nvme: bool
    self: bool


class ProcessesGiven(Given):
    """Those that live."""

    processes: list[ProcessGiven]


class HealthGiven(Given):
    """Whether the server answers, or can be used."""

    ok: bool
    says: str
    version: str


class ServerGiven(Given):
    """What this server is, to whoever asks. streams: how many are open.

    may_change: whether this request's token would be taken for changes.
    """

    version: str
    path: str
    read_only: bool
    may_change: bool
    began: float
    every_s: float
    streams: int
    settings: dict[str, str | int | float | None]


class HistoryGiven(Given):
    """Looks at the store, the oldest first, and the pressure now."""

    every_s: float
    looks: list[dict[str, Any]]
    pressure: list[str]
