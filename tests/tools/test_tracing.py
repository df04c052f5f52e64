"""Spans of match, load and save hang below the caller's own, tell no content, and cost nothing unless asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.kv import HostKV

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore.tools.tracing import Spans


def test_match_load_and_save_are_children_of_the_callers_span(made: Any) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    kv = HostKV.stacked(made.layout, np.zeros((2, 2, 2, 60, 16), np.uint32))
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB", observers=[Spans(provider)]) as store:
        space = store.namespace(made.layout, salt="first", label="first")
        with provider.get_tracer("engine").start_as_current_span("request"):
            match = store.match(space, [*made.tokens(40), *range(20)])
            store.load(match, kv)
            store.save(space, [*made.tokens(40), *range(20)], kv)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"request", "kvstore.match", "kvstore.load", "kvstore.save"}
    request = spans.pop("request")
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
        assert dict(span.attributes)["kvstore.namespace"] == space.root.hex()[:16]
    told = dict(spans["kvstore.match"].attributes)
    assert (told["kvstore.asked_tokens"], told["kvstore.tokens"]) == (60, 40)
    told = dict(spans["kvstore.load"].attributes)
    assert (told["kvstore.tier"], told["kvstore.tokens"], told["kvstore.bytes"]) == ("ram", 40, 40 * 512)
    assert dict(spans["kvstore.save"].attributes)["kvstore.blocks"] == 2
    (miss,) = request.events
    assert (miss.name, dict(miss.attributes)) == ("kvstore.miss", {"kvstore.cause": "absent", "kvstore.tokens": 20})


def test_nothing_of_it_is_loaded_unless_it_is_asked_for() -> None:
    program = "import sys, kvstore, kvstore.store, kvstore.tools.cli; print([m for m in sys.modules if m in UNWANTED])"
    unwanted = "UNWANTED = {'opentelemetry', 'fastapi', 'uvicorn', 'prometheus_client', 'pydantic', 'torch'}; "
    done = subprocess.run(
        [sys.executable, "-c", unwanted + program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        check=True,
    )
    assert done.stdout.strip() == "[]"
