"""What a store holds and does, for Prometheus: of a whole store from `kvstore serve`, or of one engine's process by one
call of `serve_metrics` or `register`.

Counters are those of `kvstore.events.Counters` under conventional names: base units, ``_total``. An engine's own
metrics count that process alone; the server's count all processes. Scrape one or the other, or keep them apart by job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import kvstore
from kvstore.events import LOAD_BOUNDS_US, Cause
from kvstore.rescan import unwritten
from kvstore.statistics import Stats, by_middle
from kvstore.store import Store
from kvstore.tools.standins import stand_ins

PORT = 9464


@dataclass(frozen=True)
class Family:
    """Counters ``first.….last`` as one metric. labels: of what lies between, cut at dots. scale: to base units."""

    name: str
    says: str
    first: str
    last: str
    labels: tuple[str, ...]
    scale: float = 1.0


FAMILIES = (
    Family("kvstore_hit_tokens", "Tokens served, by the tier they came from.", "hit", "tokens", ("tier",)),
    Family("kvstore_miss_tokens", "Tokens asked for and not served, by cause.", "miss", "tokens", ("cause",)),
    Family(
        "kvstore_recomputed_tokens",
        "Tokens that were served, and that the engine computed all the same.",
        "prefill",
        "rerun.tokens",
        ("adapter",),
    ),
    Family("kvstore_prefill_seconds", "Seconds of prefill.", "prefill", "microseconds", ("adapter",), 1e-6),
    Family(
        "kvstore_gate_decisions", "Loads weighed against running again.", "gate", "decisions", ("adapter", "reason")
    ),
    Family("kvstore_saved_blocks", "New blocks that became readable.", "save", "blocks", ("tier",)),
    Family("kvstore_moved_blocks", "Blocks copied between tiers.", "move", "blocks", ("source", "target")),
    Family("kvstore_evicted_blocks", "Blocks that left a tier, and why.", "evict", "blocks", ("tier", "reason")),
    Family(
        "kvstore_skipped_blocks", "Blocks that were not saved or moved, and why.", "skip", "blocks", ("tier", "reason")
    ),
    Family("kvstore_faults", "What failed and was contained.", "fault", "", ("tier", "operation")),
    Family("kvstore_notices", "What an operator should know.", "notice", "", ("subject",)),
    Family("kvstore_refusals", "Requests that an adapter left uncached.", "refuse", "", ("adapter", "reason")),
)


KNOWN: Mapping[str, tuple[str, ...]] = {"hit": ("ram", "nvme"), "miss": tuple(cause.value for cause in Cause)}
"""What is told from the beginning, as zero, so that the first of it is seen as a growth."""


def of_counters(counters: Mapping[str, int]) -> Iterator[Metric]:
    """Metrics of counters as `kvstore.events.Counters` names them."""
    yield CounterMetricFamily(
        "kvstore_asked_tokens",
        "Tokens asked for: the sum of hits by tier and misses by cause.",
        value=counters.get("asked.tokens", 0),
    )
    yield CounterMetricFamily("kvstore_matches", "Lookups of a prompt.", value=counters.get("match.times", 0))
    yield CounterMetricFamily(
        "kvstore_match_seconds", "Seconds that lookups took.", value=counters.get("match.microseconds", 0) / 1e6
    )
    for family in FAMILIES:
        metric = CounterMetricFamily(family.name, family.says, labels=family.labels)
        found = dict.fromkeys(KNOWN.get(family.first, ()), 0) | _between(counters, family.first, family.last)
        for middle, amount in found.items():
            values = middle.split(".", len(family.labels) - 1)
            if len(values) == len(family.labels):
                metric.add_metric(values, amount * family.scale)
        yield metric
    for unit, last, scale in (("bytes", "bytes", 1.0), ("seconds", "microseconds", 1e-6)):
        says = f"{unit.capitalize()} moved: load and save between engine and tier; demote and promote between tiers."
        metric = CounterMetricFamily(f"kvstore_transfer_{unit}", says, labels=("tier", "direction"))
        for tier, direction, amount in _transfers(counters, last):
            metric.add_metric((tier, direction), amount * scale)
        yield metric
    yield _load_times(counters)


def _transfers(counters: Mapping[str, int], last: str) -> Iterator[tuple[str, str, int]]:
    """Tier, direction and amount. A move is told of the lower tier: that is where it waits."""
    for direction, first in (("load", "hit"), ("save", "save")):
        for tier, amount in by_middle(counters, first, last).items():
            yield tier, direction, amount
    ranks = ("hbm", "ram", "nvme", "remote")
    for way, amount in by_middle(counters, "move", last).items():
        source, _, target = way.partition(".")
        down = ranks.index(target) > ranks.index(source)
        yield (target, "demote", amount) if down else (source, "promote", amount)


def _between(counters: Mapping[str, int], first: str, last: str) -> dict[str, int]:
    if last:
        return by_middle(counters, first, last)
    return {name[len(first) + 1 :]: amount for name, amount in counters.items() if name.startswith(f"{first}.")}


def _load_times(counters: Mapping[str, int]) -> Metric:
    """How long loads took, by tier."""
    metric = HistogramMetricFamily(
        "kvstore_load_seconds", "Seconds that a load took in a tier, from the lookup on.", labels=("tier",)
    )
    counted: dict[str, dict[str, int]] = {}
    for middle, amount in by_middle(counters, "load", "times").items():
        tier, _, bound = middle.rpartition(".")
        counted.setdefault(tier, {})[bound] = amount
    for tier, by_bound in counted.items():
        buckets, so_far = [], 0
        for bound in LOAD_BOUNDS_US:
            so_far += by_bound.get(str(bound), 0)
            buckets.append((repr(bound / 1e6), so_far))
        buckets.append(("+Inf", so_far + by_bound.get("more", 0)))
        metric.add_metric((tier,), buckets, counters.get(f"hit.{tier}.microseconds", 0) / 1e6)
    return metric


def of_store(store: Store, stats: Stats) -> Iterator[Metric]:
    """Metrics of what a store holds now."""
    yield from _of_tiers(stats)
    core = store._core
    told: tuple[tuple[str, str, float], ...] = (
        ("kvstore_processes", "Processes that have the store open.", stats.processes),
        ("kvstore_namespaces", "Namespaces.", stats.namespaces),
        ("kvstore_names", "Named prefixes.", stats.names),
        ("kvstore_unwritten_blocks", "Blocks in ram that nvme has not yet.", unwritten(core.ram) if core.nvme else 0),
    )
    for name, says, value in told:
        yield GaugeMetricFamily(name, says, value=value)
    pinned = core.pins.keys()
    sizes = {key: record.slot_bytes for record in store.names().values() for key in record.keys}
    yield GaugeMetricFamily("kvstore_pinned_blocks", "Blocks that pins keep.", value=len(pinned))
    size = sum(sizes.get(key, 0) for key in pinned)
    yield GaugeMetricFamily("kvstore_pinned_bytes", "Bytes of slots that pins keep in each tier.", value=size)
    yield from _of_quotas(store)


def _of_tiers(stats: Stats) -> Iterator[Metric]:
    told: tuple[tuple[str, str, str], ...] = (
        ("kvstore_tier_budget_bytes", "What a tier's files may take.", "budget_bytes"),
        ("kvstore_tier_allocated_bytes", "What they take.", "allocated_bytes"),
        ("kvstore_tier_used_bytes", "Bytes of slots that hold a block.", "used_bytes"),
        ("kvstore_tier_blocks", "Blocks in a tier.", "blocks"),
        ("kvstore_tier_slots", "Slots in a tier.", "slots"),
        ("kvstore_tier_free_slots", "Slots that hold nothing.", "free_slots"),
        ("kvstore_tier_index_bytes", "What a tier's index may take.", "index_bytes"),
        ("kvstore_tier_index_used_bytes", "What it takes.", "index_used_bytes"),
    )
    for name, says, attribute in told:
        metric = GaugeMetricFamily(name, says, labels=("tier",))
        for tier in stats.tiers:
            metric.add_metric((tier.name,), getattr(tier, attribute))
        yield metric


def _of_quotas(store: Store) -> Iterator[Metric]:
    """Quotas and what is used of them. salt: what stands in for its digest."""
    limit = GaugeMetricFamily("kvstore_quota_bytes", "What a salt may hold in a tier.", labels=("tier", "salt"))
    held = GaugeMetricFamily("kvstore_quota_used_bytes", "What it holds.", labels=("tier", "salt"))
    spell = stand_ins(store)
    for one in store.quotas():
        limit.add_metric((one.tier, spell(one.salt)), one.limit)
        held.add_metric((one.tier, spell(one.salt)), one.used)
    yield limit
    yield held


def of_process(store: Store) -> Iterator[Metric]:
    """Metrics of what one process alone can know: its queue, and what the package is."""
    mover = store._core.mover
    blocks, size = mover.depth if mover is not None else (0, 0)
    paused = mover is not None and mover.paused
    yield GaugeMetricFamily("kvstore_queue_blocks", "Blocks that wait for nvme in this process.", value=blocks)
    yield GaugeMetricFamily("kvstore_queue_bytes", "Bytes of them.", value=size)
    yield GaugeMetricFamily("kvstore_nvme_paused", "1 while nvme is not written after faults.", value=int(paused))
    build = GaugeMetricFamily("kvstore_build_info", "1, with the version.", labels=("version",))
    build.add_metric((kvstore.__version__,), 1)
    yield build


class _Told(Collector):
    """Collects when it is scraped."""

    def __init__(self, tell: Callable[[], Iterable[Metric]]) -> None:
        self._tell = tell

    def collect(self) -> Iterable[Metric]:
        return self._tell()

    def describe(self) -> Iterable[Metric]:
        """Nothing: to be registered must not cost a look."""
        return ()


def store_registry(store: Store) -> CollectorRegistry:
    """Metrics of a whole store, all its processes counted."""

    def tell() -> Iterator[Metric]:
        stats = store.stats()
        yield from of_counters(stats.counters)
        yield from of_store(store, stats)
        yield from of_process(store)

    return _registry(tell)


def register(store: Store, registry: CollectorRegistry) -> None:
    """Add what this process counted to a registry of one's own, such as ``prometheus_client.REGISTRY``."""

    def tell() -> Iterator[Metric]:
        yield from of_counters(store._core.counters.snapshot())
        yield from of_process(store)

    registry.register(_Told(tell))


def serve_metrics(store: Store, port: int = PORT, host: str = "127.0.0.1") -> Any:
    """Serve what this process counted at ``http://host:port/metrics``, from an engine's own process.

    Returns the server and its thread; ``server.shutdown()`` ends it. port: 0 for any that is free.
    """
    registry = CollectorRegistry()
    register(store, registry)
    return start_http_server(port, host, registry)


def _registry(tell: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Told(tell))
    return registry
