"""OpenTelemetry spans of matches, loads and saves: an observer of a store's events, off unless it is subscribed.

    kvstore.open(path, observers=[Spans()])

Spans end when they are told of and begin as long before as what they tell of took; they are children of whatever span
the calling thread is in, such as an engine's request. No token id and no key is in them. Needs the extra ``tracing``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import TracerProvider

import kvstore
from kvstore.events import Event, Fault, Hit, Matched, Miss, Saved

ROOT_DIGITS = 16


class Spans:
    """The observer. provider: where spans go; the process's own, where none is given."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("kvstore", kvstore.__version__, provider)

    def __call__(self, event: Event) -> None:
        told: dict[str, str | int]
        match event:
            case Matched(asked, tokens, seconds, root):
                self._span("match", seconds, root, {"kvstore.asked_tokens": asked, "kvstore.tokens": tokens})
            case Hit(tier, tokens, size, seconds, root):
                told = {"kvstore.tier": tier, "kvstore.tokens": tokens, "kvstore.bytes": size}
                self._span("load", seconds, root, told)
            case Saved(tier, blocks, size, seconds, root):
                told = {"kvstore.tier": tier, "kvstore.blocks": blocks, "kvstore.bytes": size}
                self._span("save", seconds, root, told)
            case Miss(cause, tokens):
                self._note("kvstore.miss", {"kvstore.cause": cause.value, "kvstore.tokens": tokens})
            case Fault(tier, what, detail):
                self._note("kvstore.fault", {"kvstore.tier": tier, "kvstore.operation": what, "kvstore.detail": detail})

    def _span(self, name: str, seconds: float, root: bytes, told: Mapping[str, str | int]) -> None:
        end = time.time_ns()
        attributes = {**told, "kvstore.namespace": root.hex()[:ROOT_DIGITS]}
        span = self._tracer.start_span(f"kvstore.{name}", attributes=attributes, start_time=end - round(seconds * 1e9))
        span.end(end)

    def _note(self, name: str, told: Mapping[str, str | int]) -> None:
        """What takes no time is an event of the span that the caller is in."""
        trace.get_current_span().add_event(name, told)
