"""What the connector counted, in the forms in which vLLM logs it and hands it to Prometheus.

Names are those of `kvstore.events.Counters`. Must not know who counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

ADAPTER = "vllm"
_RERUN = f"prefill.{ADAPTER}.rerun.tokens"


class ConnectorStats(KVConnectorStats):
    """Counts by dotted name."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget them."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Both."""
        return ConnectorStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """What goes into the log."""
        asked, hits = self.data.get("asked.tokens", 0), _sum(self.data, "hit.", ".tokens")
        spent = _sum(self.data, "hit.", ".microseconds")
        size = _sum(self.data, "hit.", ".bytes")
        return {
            "kvstore asked tokens": asked,
            "hit tokens": hits,
            "loaded and run again": self.data.get(_RERUN, 0),
            "loaded MB": round(size / 1e6, 1),
            "load GB/s": round(size / spent / 1e3, 2) if spent else 0.0,
            "saved MB": round(_sum(self.data, "save.", ".bytes") / 1e6, 1),
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


_FAMILIES = {
    "hit": ("tier", "Tokens, bytes and microseconds served from the store"),
    "miss": ("cause", "Tokens that the store was asked for and did not serve"),
    "prefill": ("", "Prompts that ran, as far as they were not found"),
    "rerun": ("", "Tokens that were served, and run again all the same"),
    "save": ("tier", "Blocks, bytes and microseconds saved to the store"),
    "gate": ("reason", "Decisions to load or to run again"),
    "asked": ("", "Tokens that the store was asked for"),
}


class ConnectorMetrics(KVConnectorPromMetrics):
    """Prometheus counters `vllm:kvstore_hit_tokens_total{tier}`, `vllm:kvstore_miss_tokens_total{cause}`, …"""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics: dict[str, tuple[Any, str]] = {}
        for family, (label, text) in _FAMILIES.items():
            for unit in ("tokens", "bytes", "microseconds", "blocks", "decisions"):
                labels = [*self._labelnames, *([label] if label else [])]
                name = f"vllm:kvstore_{family}_{unit}"
                self._metrics[f"{family}.{unit}"] = (
                    self._counter_cls(name=name, documentation=f"{text} ({unit}).", labelnames=labels),
                    label,
                )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, amount in transfer_stats_data.items():
            family, *middle, unit = ["rerun", "tokens"] if name == _RERUN else name.split(".")
            middle = [word for word in middle if word != ADAPTER]
            metric, label = self._metrics.get(f"{family}.{unit}", (None, ""))
            if metric is None or bool(label) != bool(middle):
                continue
            values = [*self.per_engine_labelvalues[engine_idx], *([".".join(middle)] if label else [])]
            metric.labels(*values).inc(amount)


def _sum(data: Mapping[str, int], head: str, tail: str) -> int:
    return sum(count for name, count in data.items() if name.startswith(head) and name.endswith(tail))
