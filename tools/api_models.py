"""What the API takes, as types: from them come its checks and its description. Must not know routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvstore.identity import TOKEN_LIMIT

TOKENS_MOST = 1 << 20
NAME_MOST = 200
OUT_OF_REACH = {
    "hbm": "it is memory of a device, which only the engine's own process can fill, and does when it loads",
    "nvme": "what is saved is written there by itself",
}
"""Tiers that a prefetch cannot go to, by the reason."""
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
Root = Annotated[str, Field(pattern="^([0-9a-f]{64}|~[0-9a-f]{11})$")]
Salt = Annotated[str, Field(pattern="^([0-9a-f]{32}|~[0-9a-f]{11})?$")]
Size = Annotated[str, Field(pattern=r"^([0-9]{1,18}|[0-9]{1,4}(\.[0-9]{1,9})? ?[kKMGT]i?B)$", examples=["1GiB"])]
Seconds = Annotated[float, Field(ge=0, le=1e12)]


class Asked(BaseModel):
    """A body: nothing unknown, nothing converted. However much is wrong with one, few errors are made of it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > len(cls.model_fields):
            unknown = body.keys() - cls.model_fields.keys()
            raise ValueError(f"{len(unknown)} unknown fields, such as {min(unknown)[:NAME_MOST]!r}")
        # JSON knows no integers: 60.0 is one as well
        return {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in body.items()}


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


class Counted(Asked):
    """A change that is counted first."""

    dry_run: bool = Field(True, description="Only count. False takes the confirm of a dry run of the same.")
    confirm: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _said(self) -> Self:
        if not self.dry_run and self.confirm is None:
            raise ValueError("give the confirm that a dry run of the same answered")
        return self


class EvictAsked(Counted):
    """What to evict: exactly one of everything, namespace, name, salt, unused, larger; or a tier alone."""

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
    larger: Text | None = Field(
        None, description="Sequences whose KV takes more (1GiB), but for what others share and what is pinned."
    )


class QuotaAsked(Counted):
    """What a salt may hold."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"salt": "first", "nvme": "1GiB"}]})
    salt: Text
    ram: Text | None = Field(None, description="A size (1GiB), or off; left out, it stays.")
    nvme: Text | None = Field(None, description="The same.")


class NamespaceAsked(Asked):
    """A namespace, and how long its blocks live."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"namespace": "first", "ttl": 86400}]})
    namespace: Text = Field(description="A label, or the beginning of a root.")
    ttl: int | None = Field(None, ge=0, le=10**10, description="Seconds without use after which they expire; 0: never.")


class DropAsked(Asked):
    """Whether namespaces are forgotten."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})
    dry_run: bool = Field(True, description="Only list them.")


def _reachable(tier: Any) -> Any:
    """Says of a tier that there is why nothing can be brought there from here. Raises ValueError."""
    if isinstance(tier, str) and tier in OUT_OF_REACH:
        raise ValueError(f"nothing can be prefetched to {tier}: {OUT_OF_REACH[tier]}; use ram")
    return tier


class PrefetchAsked(Chosen):
    """A prefix to bring up."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "greeting", "tier": "ram"}]})
    tier: Annotated[Literal["ram"], BeforeValidator(_reachable)] = Field(
        "ram", description="Where to. hbm is filled by the engine whose device it is; to nvme all goes by itself."
    )
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
    memory: Text | None = Field(None, description="Of one device.")
    devices: int = Field(1, ge=1, le=1 << 20, description="How many such devices.")
    weights: Text | None = None
    hbm: Text = "0"
    ram: Text = "2GiB"
    nvme: Text = "20GiB"
    ram_rate: Text = "10GB"
    nvme_rate: Text = "3GB"
    flops: float | None = Field(None, gt=0, le=1e30, description="Operations a second that prefill reaches on one.")
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
