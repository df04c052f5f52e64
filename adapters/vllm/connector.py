"""`KVStoreConnector`: the store as vLLM's KV connector, loaded by name and module path.

Owns the wiring between vLLM's hooks and the two halves, and what happens where an engine is refused: nothing, and a
warning. Must not decide what is loaded or saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvstore
from kvstore.adapters.temporaries import keep_temporaries
from kvstore.adapters.vllm.layout import Refused, describe
from kvstore.adapters.vllm.messages import Answer, Hello, Orders
from kvstore.adapters.vllm.options import Options, read_options
from kvstore.adapters.vllm.scheduling import ADAPTER, SchedulerHalf
from kvstore.adapters.vllm.stats import ConnectorMetrics, ConnectorStats
from kvstore.adapters.vllm.working import WorkerHalf, in_layer_order
from kvstore.errors import BudgetError, KVStoreError, SettingsError, UnsupportedError
from kvstore.events import Counters, Fault, Notice, Refusal
from kvstore.gate import Gate
from kvstore.store import Store

logger = init_logger(f"vllm.{__name__}")
_COUNTING: set[str] = set()
"""Stores whose events a connector of this process counts already: in one process both roles share one store."""
_SOURCES = {"ram": CacheHitSource.HOST, "nvme": CacheHitSource.DISK}


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's side of the store. One is made in the scheduler's process and one in every worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise UnsupportedError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block evicted meanwhile would fail "
                "its request",
                'write "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            )
        self._options: Options = read_options(transfer.kv_connector_extra_config)
        self._counters: Counters | None = None
        self._said: set[str] = set()
        self._hello = Hello(refused="store")
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._store = self._open()
        if role is KVConnectorRole.SCHEDULER and self._store is not None:
            gate = Gate(on=self._options.gate, floor=self._options.least_tokens)
            events = vllm_config.kv_events_config
            self._scheduler = SchedulerHalf(
                self._store,
                gate,
                later_bytes=self._options.later_bytes,
                announce=events is not None and events.enable_kv_cache_events,
                say=self._say,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, nothing more."""
        return False

    # ---------------------------------------------------------------- both

    def shutdown(self) -> None:
        """Finish what runs and let go of the store."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()
        self._worker = self._scheduler = None
        if self._store is not None:
            if self._counters is not None:
                _COUNTING.discard(str(self._store.settings.path))
            self._store.close()
            self._store = None

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What was counted in this process since this was last asked."""
        fresh = self._counters.take() if self._counters is not None else {}
        return ConnectorStats(data=dict(fresh)) if fresh else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Stats out of their plain form."""
        return ConnectorStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        """Counters beside vLLM's own."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn the engine's pages; from them, its layout."""
        if self._store is None:
            return
        try:
            layers = self._vllm_config.compilation_config.static_forward_context
            engine = describe(self._vllm_config, self._kv_cache_config, kv_caches, layers)
            names = self._kv_cache_config.kv_cache_groups[0].layer_names
            tensors = in_layer_order(names, kv_caches)
            device = tensors[0].device
            if device.type != "cpu" and (device.type != "cuda" or not self._store.settings.hbm):
                raise Refused("device", str(device))
            if self._worker is not None:
                self._worker.close()
            if device.type == "cpu":
                keep_temporaries()
            rank = self._vllm_config.parallel_config.rank
            self._worker = WorkerHalf(self._store, engine, tensors, rank)
            self._hello = Hello(engine)
        except Refused as refused:
            self._refuse(refused.reason, refused.problem)
            self._hello = Hello(refused=refused.reason, detail=refused.detail)

    def get_handshake_metadata(self) -> Hello:
        """The layout, for the scheduler."""
        return self._hello

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Ahead of a step's first write: read what was freed, and not yet saved."""
        if self._worker is not None:
            self._worker.before(_orders(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(_orders(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads: before the forward where it needs them."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Every load that a forward needs is done before it begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: KV of a step is saved when its outcome is known."""

    def wait_for_save(self) -> None:
        """Pages of this step's saves have been read."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        over = self._worker.finished() if self._worker is not None else set()
        return None, over or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages whose claim could not be kept."""
        return self._worker.bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Answer | None:
        """The step's outcome, for the scheduler."""
        return self._worker.answer() if self._worker is not None else None

    # ---------------------------------------------------------------- scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """What the workers said of themselves."""
        if self._scheduler is None:
            return
        try:
            self._scheduler.greet(metadata.values())
        except Refused as refused:
            self._scheduler.close()
            self._scheduler = None
            self._refuse(refused.reason, refused.problem)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the store has beyond the engine's own; whether the request waits for them."""
        return self._scheduler.match(request, num_computed_tokens) if self._scheduler is not None else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its pages."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """External hits by tier."""
        by_tier = self._scheduler.tiers(request) if self._scheduler is not None else {}
        if sum(by_tier.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return {_SOURCES[tier]: tokens for tier, tokens in by_tier.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """The step's work."""
        return self._scheduler.orders(scheduler_output) if self._scheduler is not None else Orders()

    def update_connector_output(self, connector_output: Any) -> None:
        """The step's outcome."""
        if self._scheduler is not None:
            self._scheduler.answered(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its pages are free at once."""
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same where there is one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """What was stored before is not used again by this engine: its weights may be others now."""
        if self._scheduler is not None:
            self._scheduler.forget()
        return True

    def take_events(self) -> Iterable[Any]:
        """Blocks that were stored."""
        return self._scheduler.events() if self._scheduler is not None else ()

    # ---------------------------------------------------------------- inside

    def _open(self) -> Store | None:
        """The store; None, with a warning, where a fault of the medium is in the way. A wrong setting is raised."""
        try:
            settings = dict(self._options.store)
            if self.role is KVConnectorRole.SCHEDULER:  # it touches no KV: a device is the workers' alone
                settings |= {"hbm": 0, "device": None}
            elif settings.get("hbm") and torch.cuda.is_available():
                settings.setdefault("device", f"cuda:{torch.cuda.current_device()}")
            store = kvstore.open(**settings, observers=(self._tell,))
        except (SettingsError, BudgetError):
            raise
        except KVStoreError as error:
            self._say("store", str(error))
            return None
        path = str(store.settings.path)
        if path not in _COUNTING:
            _COUNTING.add(path)
            self._counters = Counters()
            store.events.subscribe(self._counters)
        return store

    def _refuse(self, reason: str, detail: str) -> None:
        if self._store is not None:
            self._store.events.emit(Refusal(ADAPTER, reason))
        self._say(reason, detail)

    def _say(self, reason: str, detail: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("kvstore: uncached (%s): %s", reason, detail)

    def _tell(self, event: object) -> None:
        if isinstance(event, Notice):
            logger.info("kvstore: %s: %s", event.subject, event.detail)
        elif isinstance(event, Fault) and (fault := f"{event.tier}: {event.what}") not in self._said:
            self._said.add(fault)
            logger.warning("kvstore: %s failed, here for the first time, and was contained: %s", fault, event.detail)


def _orders(metadata: object) -> Orders:
    assert isinstance(metadata, Orders)
    return metadata
