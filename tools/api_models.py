"""What the API takes and gives, as types: from them come its checks and its description.

Must not know routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvstore.identity import TOKEN_LIMIT

TOKENS_MOST = 1 << 20
NAME_MOST = 200
CONFIG_VALUES, CONFIG_DEPTH = 20_000, 16
"""The largest configurations of models have a tenth as many values, and a third of that depth."""


def _fathomable(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration that is not too large to work on. Raises ValueError."""
    level: list[Any] = [config]
    values = 0
    for _ in range(CONFIG_DEPTH):
        below = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        values += sum(map(len, below))
        if values > CONFIG_VALUES:
            raise ValueError(f"it has more than {CONFIG_VALUES} values")
        level = [value for one in below for value in one]
        if not level:
            return config
    raise ValueError(f"it is nested more than {CONFIG_DEPTH} deep")


Token = Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)]
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1, max_length=TOKENS_MOST, examples=[[40, 100, 101]])]
Config = Annotated[dict[str, Any], AfterValidator(_fathomable)]
Text = Annotated[str, Field(min_length=1, max_length=NAME_MOST)]
Key = Annotated[str, Field(pattern="^[0-9a-f]{6,64}$", description="The beginning of a key, in hexadecimal digits.")]
Root = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(ge=0, le=1e12)]


class Asked(BaseModel):
    """A body: nothing unknown, nothing converted. However much is wrong with one, few errors are made of it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > len(cls.model_fields):
            unknown = body.keys() - cls.model_fields.keys()
            raise ValueError(f"{len(unknown)} unknown fields, such as {min(unknown)[:NAME_MOST]!r}")
        return body


class Given(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")


class Chosen(Asked):
    """A stored prefix, by exactly one of its tokens, the beginning of its key, or its name."""

    tokens: Tokens | None = Field(None, description="Its token ids.")
    key: Key | None = None
    name: Text | None = Field(None, description="What it was named.")
    namespace: Text | None = Field(None, description="A label, or the beginning of a root; else where most of it is.")
    salt: Text | None = Field(None, description="Only namespaces under this salt.")

    @model_validator(mode="after")
    def _one(self) -> Chosen:
        if sum(one is not None for one in (self.tokens, self.key, self.name)) != 1:
            raise ValueError("give exactly one of tokens, key and name")
        return self


class ShowAsked(Chosen):
    """Which prefix to tell of."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "greeting"}]})


class PinAsked(Chosen):
    """A prefix to name and keep."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [40, 100, 101], "pin_as": "rules"}]})
    pin_as: Text = Field(description="What to call it; an older pin of that name is replaced.")
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    ttl: int | None = Field(None, ge=1, le=10**10, description="Seconds after which the pin ends.")
    partial: bool = Field(False, description="Pin what is there, even if it is not all.")


class UnpinAsked(Asked):
    """A name to forget."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "rules"}]})
    name: Text


class EvictAsked(Asked):
    """What to evict: exactly one of everything, namespace, name, salt, unused; or a tier alone."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tier": "ram"}]})
    everything: bool = False
    tier: Literal["ram", "nvme"] | None = Field(None, description="Only the copies in this tier.")
    namespace: Text | None = Field(None, description="A label, or the beginning of a root.")
    prefix: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None, description="In the namespace: first tokens (1,2,3), or the beginning of a key."
    )
    name: Text | None = Field(None, description="A named prefix; its name and pin go with it.")
    salt: Text | None = Field(None, description="All namespaces under this salt.")
    unused: Seconds | None = Field(None, description="What was not used for so many seconds.")
    dry_run: bool = Field(True, description="Only count. False takes the confirm of a dry run of the same.")
    confirm: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _said(self) -> EvictAsked:
        if not self.dry_run and self.confirm is None:
            raise ValueError("give the confirm that a dry run of the same answered")
        return self


class PrefetchAsked(Chosen):
    """A prefix to bring up."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "greeting", "tier": "ram"}]})
    tier: Literal["ram"] = Field("ram", description="Where to: hbm belongs to an engine's own process.")
    deadline_s: float | None = Field(None, gt=0, le=3600)


class ExplainAsked(Asked):
    """A prompt to explain: token ids, or the name of a prefix."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [40, 100, 101, 7, 8, 9]}]})
    tokens: Tokens | None = None
    name: Text | None = None
    namespace: Text | None = None
    salt: Text | None = None

    @model_validator(mode="after")
    def _one(self) -> ExplainAsked:
        if (self.tokens is None) == (self.name is None):
            raise ValueError("give exactly one of tokens and name")
        return self


class PlanAsked(Asked):
    """A model and a machine. Sizes are bytes, or have a unit: 80GB, 2GiB."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "llama-3.1-70b", "context": 131072, "memory": "640GB", "weights": "141GB"}]
        }
    )
    model: Annotated[str, Field(max_length=NAME_MOST)] | None = Field(None, description="A well-known model's name.")
    config: Config | None = Field(None, description="Instead of a name: the content of a config.json.")
    context: int | None = Field(None, ge=1, le=1 << 40, description="Tokens of a session.")
    memory: Text | None = Field(None, description="Of all devices together.")
    weights: Text | None = None
    hbm: Text = "0"
    ram: Text = "2GiB"
    nvme: Text = "20GiB"
    ram_rate: Text = "10GB"
    nvme_rate: Text = "3GB"
    flops: float | None = Field(None, gt=0, le=1e30)
    latency: float = Field(0.005, ge=0, le=1e6)
    dtype: Annotated[str, Field(max_length=32)] | None = None

    @model_validator(mode="after")
    def _one(self) -> PlanAsked:
        if (self.model is None) == (self.config is None):
            raise ValueError("give exactly one of model and config")
        return self


class VerifyAsked(Asked):
    """How to verify."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})
    books_only: bool = Field(False, description="Leave out the payloads' checksums.")
    repair: bool = Field(False, description="Remove what is wrong.")


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
    """A layout under a salt. salt: its digest."""

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
    """A stored sequence that no other one continues. first_tokens: only for who has the token."""

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
    """A named prefix, and what is stored of it."""

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
    """Blocks by tier. confirm: what makes a dry run real, once, within two minutes."""

    dry_run: bool
    evicted: bool
    blocks: dict[str, int]
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
    """What a salt, by its digest, may hold in a tier, and holds."""

    salt: str
    labels: str
    tier: str
    limit_bytes: int
    used_bytes: int


class QuotasGiven(Given):
    """All of them."""

    quotas: list[QuotaGiven]


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
    """What this server is, to whoever asks. may_change: whether this request's token would be taken for changes."""

    version: str
    path: str
    read_only: bool
    may_change: bool
    began: float
    every_s: float
    settings: dict[str, str | int | float | None]


class HistoryGiven(Given):
    """Looks at the store, the oldest first, and the pressure now."""

    every_s: float
    looks: list[dict[str, Any]]
    pressure: list[str]
