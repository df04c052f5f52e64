"""Whether it will fit, and whether it will pay: a model's KV beside a machine's memory, bandwidth and arithmetic.

Pure arithmetic over a `Geometry` and a `Machine`; must not know files, stores or how results are shown. Sizes in bytes,
rates in bytes or floating-point operations a second, times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import SettingsError
from kvstore.header import slot_bytes
from kvstore.layout import LayerShape, default_block_tokens
from kvstore.sizes import parse_size
from kvstore.tools.geometry import Geometry, geometry

INDEX_SHARE = 256
"""A tier's index takes one 256th of its budget."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to fit into. memory: of all devices together. weights: what the model takes of it.

    tiers: budgets by tier. bandwidth: a second, by tier. flops: that prefill reaches, of all devices together.
    latency: of a load, before its first byte.
    """

    memory: int | None = None
    weights: int | None = None
    tiers: Mapping[str, int] = field(default_factory=dict)
    bandwidth: Mapping[str, int] = field(default_factory=dict)
    flops: float | None = None
    latency: float = 0.005

    def __post_init__(self) -> None:
        for name, value in (("--memory", self.memory), ("--weights", self.weights), ("--flops", self.flops)):
            if value is not None and value <= 0:
                raise SettingsError(f"{name} is {value}", "give what the machine has, more than nothing")
        if self.latency < 0 or any(rate <= 0 for rate in self.bandwidth.values()):
            raise SettingsError("a bandwidth of nothing, or a latency below it", "give what the medium really does")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions beside the weights. free: memory left for KV, below zero where not even the weights fit."""

    memory: int
    weights: int
    free: int
    exact: float
    whole: int

    def sentence(self, context: int) -> str:
        """The answer for people."""
        if self.free <= 0:
            return f"The weights alone take {-self.free / 1e9:.0f} GB more than the memory: no session fits."
        if not self.whole:
            return f"{self.free / 1e9:.0f} GB are left beside the weights: no full session of {context:,} tokens fits."
        return (
            f"{self.free / 1e9:.0f} GB are left beside the weights: {self.exact:.1f}, so {self.whole} full "
            f"session{'s' if self.whole > 1 else ''} of {context:,} tokens."
        )


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier of a budget holds: whole blocks in slots, the index taken off."""

    budget: int
    blocks: int
    tokens: int
    sessions: int


@dataclass(frozen=True, slots=True)
class Timing:
    """A load against a prefill, for a session of the whole context.

    rate: bytes a second that a load was taken to reach. break_even: tokens from which loading wins.
    """

    rate: int
    load_s: float
    prefill_s: float
    break_even: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for one model on one machine. parts: slot bytes and payload bytes of a block's parts."""

    geometry: Geometry
    context: int
    token_bytes: int
    session_bytes: int
    block_tokens: int
    parts: tuple[tuple[int, int], ...]
    sessions: Sessions | None
    tiers: Mapping[str, Held]
    times: Mapping[str, Timing]
    prefill_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, in the order in which people ask for them."""
        geometry = self.geometry
        return {
            "family": geometry.family,
            "attention": geometry.kind,
            "layers": len(geometry.layers),
            "dtype": geometry.dtype,
            "parameters": geometry.parameters,
            "token_bytes": self.token_bytes,
            "context": self.context,
            "session_bytes": self.session_bytes,
            "session_gb": round(self.session_bytes / 1e9, 1),
            "block_tokens": self.block_tokens,
            "block_bytes": sum(payload for _, payload in self.parts),
            "sessions": None
            if self.sessions is None
            else {
                "memory_bytes": self.sessions.memory,
                "weights_bytes": self.sessions.weights,
                "free_bytes": self.sessions.free,
                "exact": round(self.sessions.exact, 2),
                "whole": self.sessions.whole,
                "sentence": self.sessions.sentence(self.context),
            },
            "tiers": {
                name: {
                    "budget_bytes": held.budget,
                    "blocks": held.blocks,
                    "tokens": held.tokens,
                    "sessions": held.sessions,
                }
                for name, held in self.tiers.items()
            },
            "prefill_s": self.prefill_s,
            "loads": {
                name: {"bytes_per_s": time.rate, "load_s": time.load_s, "break_even_tokens": time.break_even}
                for name, time in self.times.items()
            },
            "notes": list(geometry.notes),
        }


def machine(
    *,
    memory: str | None,
    weights: str | None,
    budgets: Mapping[str, str],
    rates: Mapping[str, str],
    flops: float | None,
    latency: float,
    devices: int = 1,
) -> Machine:
    """A machine out of sizes as people write them. memory, flops: of one of the devices. Raises SettingsError."""
    sizes = {name: parse_size(budget) for name, budget in budgets.items()}
    return Machine(
        memory=parse_size(memory) * devices if memory is not None else None,
        weights=parse_size(weights) if weights is not None else None,
        tiers={name: size for name, size in sizes.items() if size},
        bandwidth={name: parse_size(rate) for name, rate in rates.items()},
        flops=flops * devices if flops is not None else None,
        latency=latency,
    )


def plan(model: Geometry, machine: Machine, context: int | None = None) -> Plan:
    """What fits, what a tier holds, and from where on a load beats a prefill.

    context: tokens of a session; left out, the model's longest. Raises SettingsError where neither says it.
    """
    tokens = context if context is not None else model.context
    if tokens is None or tokens < 1:
        raise SettingsError("the configuration has no context length", "pass --context with the tokens of a session")
    groups = model.groups()
    block = default_block_tokens(groups, model.dtype)
    parts = tuple(_part(group, model.itemsize, block) for group in groups)
    session = model.bytes_at(tokens)
    weights = machine.weights
    if weights is None and model.parameters is not None:
        weights = model.parameters * model.itemsize
    sessions = None
    if machine.memory is not None:
        if weights is None:
            raise SettingsError("the size of the weights is not known", "pass --weights, such as --weights 141GB")
        free = machine.memory - weights
        exact = max(0.0, free / session)
        sessions = Sessions(machine.memory, weights, free, exact, int(exact))
    held = {name: _held(budget, parts, block, tokens) for name, budget in machine.tiers.items()}
    prefill = prefill_seconds(model, tokens, machine.flops)
    times = {}
    if machine.flops is not None and prefill is not None:
        for name, rate in machine.bandwidth.items():
            load = machine.latency + session / rate
            times[name] = Timing(rate, load, prefill, break_even(model, rate, machine.flops, machine.latency, tokens))
    return Plan(model, tokens, model.token_bytes, session, block, parts, sessions, held, times, prefill)


def planned(
    config: Mapping[str, Any],
    *,
    memory: str | None,
    weights: str | None,
    hbm: str,
    ram: str,
    nvme: str,
    ram_rate: str,
    nvme_rate: str,
    flops: float | None,
    latency: float,
    devices: int,
    context: int | None,
    dtype: str | None,
) -> dict[str, Any]:
    """The answer as plain values, of a configuration and of sizes as people write them. Raises what `plan` raises."""
    told = machine(
        memory=memory,
        weights=weights,
        budgets={"hbm": hbm, "ram": ram, "nvme": nvme},
        rates={"ram": ram_rate, "nvme": nvme_rate},
        flops=flops,
        latency=latency,
        devices=devices,
    )
    return plan(geometry(config, dtype), told, context).to_dict()


def prefill_seconds(geometry: Geometry, tokens: int, flops: float | None) -> float | None:
    """Seconds to prefill ``tokens`` tokens: two operations a weight and token, and four an attended pair, head and dim.

    After Kaplan et al. 2020, section 2.1; causal, so that a token attends to half of the others on average. None where
    the weights or the arithmetic are not known.
    """
    if flops is None or geometry.parameters is None:
        return None
    pairs = 0.0
    for layer in geometry.layers:
        if layer.shape is not None:
            seen = tokens if layer.window is None else min(tokens, layer.window)
            pairs += (tokens * seen - seen * seen / 2) * layer.shape.k_dim
    return (2 * geometry.parameters * tokens + 4 * geometry.heads * pairs) / flops


def break_even(geometry: Geometry, rate: int, flops: float, latency: float, most: int) -> int | None:
    """The shortest prefix, up to ``most`` tokens, that loads faster than it is computed; None where none does."""

    def wins(tokens: int) -> bool:
        prefill = prefill_seconds(geometry, tokens, flops)
        return prefill is not None and latency + geometry.bytes_at(tokens) / rate < prefill

    if not wins(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def _part(group: Sequence[LayerShape], itemsize: int, block_tokens: int) -> tuple[int, int]:
    payload = sum(shape.elements for shape in group) * itemsize * block_tokens
    return slot_bytes(payload), payload


def _held(budget: int, parts: Sequence[tuple[int, int]], block_tokens: int, context: int) -> Held:
    if budget < 0:
        raise SettingsError(f"a tier of {budget} bytes", "give a budget of zero or more")
    room = budget - budget // INDEX_SHARE
    blocks = room // sum(slot for slot, _ in parts)
    return Held(budget, blocks, blocks * block_tokens, blocks // math.ceil(context / block_tokens))
