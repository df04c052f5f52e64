"""Metrics add up, keep to Prometheus' conventions, and reach a real Prometheus; alerts and dashboard know no others."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.events import Cause, Counters, Evicted, Fault, Hit, Miss, Moved, Prefilled, Refusal, Saved, Skipped
from kvstore.kv import HostKV

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from served import Served, serving

from kvstore.tools.metrics import of_counters, register, serve_metrics

TREE = Path(__file__).resolve().parents[2]
ALERTS, DASHBOARD = TREE / "tools" / "alerts.yml", TREE / "tools" / "grafana.json"
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")

HAPPENED = (
    Hit("ram", 40, 400, 0.002),
    Hit("ram", 2, 20, 7.0),
    Hit("nvme", 16, 160, 0.0003),
    Miss(Cause.ABSENT, 5),
    Saved("ram", 3, 300, 0.5),
    Moved("ram", "nvme", 3, 300, 1.5),
    Moved("nvme", "ram", 1, 100, 0.25),
    Evicted("ram", "lru", 4),
    Evicted("ram", "dead owner", 1),
    Skipped("nvme", "queue full", 2),
    Fault("nvme", "write", "EIO"),
    Refusal("transformers", "beams"),
    Prefilled("transformers", 7, 50, 0.5, False),
)


@pytest.fixture
def served(made: Any) -> Iterator[Served]:
    with serving(made.path) as server:
        yield server


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def counted() -> dict[str, int]:
    counters = Counters()
    for event in HAPPENED:
        counters(event)
    return counters.snapshot()


class Fixed:
    """A collector of what happened above."""

    def collect(self) -> Any:
        return of_counters(counted())


def text_of(collector: Any) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def test_hits_by_tier_and_misses_by_cause_sum_to_the_tokens_asked_for() -> None:
    found = samples(text_of(Fixed()))
    parts = [
        value for (name, _), value in found.items() if name in ("kvstore_hit_tokens_total", "kvstore_miss_tokens_total")
    ]
    assert sum(parts) == found["kvstore_asked_tokens_total", ()] == 63
    assert found["kvstore_hit_tokens_total", (("tier", "ram"),)] == 42
    assert found["kvstore_miss_tokens_total", (("cause", "checksum"),)] == 0


def test_everything_counted_is_told_in_base_units() -> None:
    found = samples(text_of(Fixed()))

    def one(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    assert one("kvstore_transfer_bytes_total", tier="ram", direction="load") == 420
    assert one("kvstore_transfer_bytes_total", tier="ram", direction="save") == 300
    assert one("kvstore_transfer_bytes_total", tier="nvme", direction="demote") == 300
    assert one("kvstore_transfer_bytes_total", tier="nvme", direction="promote") == 100
    assert one("kvstore_transfer_seconds_total", tier="nvme", direction="demote") == 1.5
    assert one("kvstore_evicted_blocks_total", tier="ram", reason="dead owner") == 1
    assert one("kvstore_skipped_blocks_total", tier="nvme", reason="queue full") == 2
    assert one("kvstore_faults_total", tier="nvme", operation="write") == 1
    assert one("kvstore_refusals_total", adapter="transformers", reason="beams") == 1
    assert one("kvstore_recomputed_tokens_total", adapter="transformers") == 7
    assert one("kvstore_prefill_seconds_total", adapter="transformers") == 0.5


def test_load_times_are_a_histogram() -> None:
    found = samples(text_of(Fixed()))

    def bucket(tier: str, bound: str) -> float:
        return found["kvstore_load_seconds_bucket", (("le", bound), ("tier", tier))]

    assert [bucket("ram", bound) for bound in ("0.001", "0.0025", "5.0", "+Inf")] == [0, 1, 1, 2]
    assert bucket("nvme", "0.0005") == 1
    assert found["kvstore_load_seconds_count", (("tier", "ram"),)] == 2
    assert found["kvstore_load_seconds_sum", (("tier", "ram"),)] == pytest.approx(7.002)


def test_the_server_counts_what_all_processes_did(made: Any, served: Served) -> None:
    space = served.store.namespace(made.layout, salt="first", label="first")
    match = served.store.match(space, [*made.tokens(40), 1, 2])
    served.store.load(match, HostKV.stacked(made.layout, np.zeros((2, 2, 2, 40, 16), np.uint32)))
    served.store.set_quota("first", ram=1 << 20)
    found = samples(served.ask("GET", "/metrics").body.decode())
    assert found["kvstore_asked_tokens_total", ()] == 42
    assert found["kvstore_hit_tokens_total", (("tier", "ram"),)] == 40
    assert found["kvstore_saved_blocks_total", (("tier", "ram"),)] == 9
    assert found["kvstore_tier_blocks", (("tier", "nvme"),)] == 9
    assert found["kvstore_pinned_blocks", ()] == 3
    assert found["kvstore_unwritten_blocks", ()] == 0
    salt = next(dict(labels)["salt"] for name, labels in found if name == "kvstore_quota_bytes")
    assert found["kvstore_quota_used_bytes", (("salt", salt), ("tier", "ram"))] == 4 * 12288


def test_what_nvme_has_not_is_counted_whoever_saved_it(made: Any, served: Served) -> None:
    ram = served.store._core.ram
    for segment in ram.segment_list():
        ram.arrays.of(segment.number).flags[: segment.slots] = 0
    assert samples(served.ask("GET", "/metrics").body.decode())["kvstore_unwritten_blocks", ()] == 9


def test_an_engines_process_serves_its_own_counts_by_one_call(made: Any) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        server, thread = serve_metrics(store, port=0)
        try:
            space = store.namespace(made.layout, salt="first", label="first")
            store.load(store.match(space, [5, 6]), HostKV.stacked(made.layout, np.zeros((2, 2, 2, 2, 16), np.uint32)))
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as got:
                found = samples(got.read().decode())
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        assert found["kvstore_asked_tokens_total", ()] == 2
        assert ("kvstore_saved_blocks_total", (("tier", "ram"),)) not in found, "another process saved"
        mine = CollectorRegistry()
        register(store, mine)
        assert samples(generate_latest(mine).decode())["kvstore_asked_tokens_total", ()] == 2


@promtool
def test_the_metrics_keep_to_the_conventions(served: Served) -> None:
    for text in (served.ask("GET", "/metrics").body, text_of(Fixed()).encode()):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@promtool
def test_the_alert_rules_hold_and_fire(tmp_path: Path) -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr

    def series(name: str, values: str) -> dict[str, str]:
        return {"series": name, "values": values}

    rising, still, at = "0+600x60", "0x60", 'instance="a"'
    cases = {
        "KVStoreFaults": ([series(f'kvstore_faults_total{{{at},tier="nvme",operation="write"}}', rising)], "warning"),
        "KVStoreDamage": ([series(f'kvstore_miss_tokens_total{{{at},cause="checksum"}}', rising)], "critical"),
        "KVStoreDiskPaused": ([series(f"kvstore_nvme_paused{{{at}}}", "1x60")], "critical"),
        "KVStoreServerDown": ([series(f'up{{{at},job="kvstore"}}', "0x60")], "warning"),
        "KVStoreCapReached": (
            [series(f'kvstore_skipped_blocks_total{{{at},tier="ram",reason="full"}}', rising)],
            "warning",
        ),
        "KVStoreUnderPressure": (
            [
                series(f'kvstore_tier_allocated_bytes{{{at},tier="ram"}}', "99x60"),
                series(f'kvstore_tier_budget_bytes{{{at},tier="ram"}}', "100x60"),
                series(f'kvstore_tier_slots{{{at},tier="ram"}}', "100x60"),
                series(f'kvstore_tier_free_slots{{{at},tier="ram"}}', "1x60"),
                series(f'kvstore_evicted_blocks_total{{{at},tier="ram",reason="lru"}}', rising),
            ],
            "info",
        ),
        "KVStoreQuotaReached": (
            [
                series(f'kvstore_quota_used_bytes{{{at},tier="ram",salt="ab"}}', "96x60"),
                series(f'kvstore_quota_bytes{{{at},tier="ram",salt="ab"}}', "100x60"),
            ],
            "info",
        ),
        "KVStoreRestoredButRecomputed": (
            [
                series(f'kvstore_recomputed_tokens_total{{{at},adapter="vllm"}}', rising),
                series(f'kvstore_hit_tokens_total{{{at},tier="ram"}}', "0+1000x60"),
            ],
            "warning",
        ),
        "KVStoreDiskBehind": (
            [
                series(f"kvstore_unwritten_blocks{{{at}}}", "600x60"),
                series(f'kvstore_tier_blocks{{{at},tier="ram"}}', "1000x60"),
            ],
            "warning",
        ),
        "KVStoreFewHits": (
            [
                series(f'kvstore_hit_tokens_total{{{at},tier="ram"}}', still + " 0x120"),
                series(f"kvstore_asked_tokens_total{{{at}}}", "0+60000x180"),
            ],
            "info",
        ),
    }
    names = set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
    assert names == set(cases)
    tests = []
    for name, (given, severity) in cases.items():
        late = "170m" if name == "KVStoreFewHits" else "40m"
        firing = {"expr": f'ALERTS{{alertname="{name}",alertstate="firing",severity="{severity}"}}', "eval_time": late}
        counted = {"expr": f"count({firing['expr']})", "eval_time": late, "exp_samples": [{"labels": "{}", "value": 1}]}
        tests.append({"interval": "1m", "input_series": given, "promql_expr_test": [counted]})
    quiet = [series(f"kvstore_asked_tokens_total{{{at}}}", "0+60000x180"), series(f'up{{{at},job="kvstore"}}', "1x180")]
    quiet.append(series(f'kvstore_hit_tokens_total{{{at},tier="ram"}}', "0+50000x180"))
    none = {"expr": "count(ALERTS)", "eval_time": "170m", "exp_samples": []}
    tests.append({"interval": "1m", "input_series": quiet, "promql_expr_test": [none]})
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def known_names() -> set[str]:
    """Every name that the code can tell."""
    names = {family.name for family in of_counters(counted())}
    text = (TREE / "tools" / "metrics.py").read_text()
    return names | set(re.findall(r'"(kvstore_\w+)"', text))


@pytest.mark.parametrize("file", [ALERTS, DASHBOARD], ids=["alerts", "dashboard"])
def test_alerts_and_dashboard_ask_for_metrics_that_exist(file: Path) -> None:
    asked = set(re.findall(r"\bkvstore_\w+", file.read_text()))
    known = known_names()
    assert len(asked) > 10
    plain = {re.sub(r"_(total|bucket)$", "", name) for name in asked}
    assert plain <= known


def test_the_dashboard_is_whole_and_needs_nothing_from_elsewhere() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    assert all(panel["title"] and panel["targets"] for panel in panels)
    assert "http" not in DASHBOARD.read_text()
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus")
def test_a_real_prometheus_scrapes_the_server_and_tells_the_hit_rate(made: Any, served: Served, tmp_path: Path) -> None:
    space = served.store.namespace(made.layout, salt="first", label="first")
    match = served.store.match(space, [*made.tokens(40), *range(10)])
    served.store.load(match, HostKV.stacked(made.layout, np.zeros((2, 2, 2, 40, 16), np.uint32)))
    target = f"127.0.0.1:{served.port}"
    job = {"job_name": "kvstore", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    job["authorization"] = {"credentials": served.token}
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": [job], "rule_files": [str(ALERTS)]}))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    line = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    line += [f"--web.listen-address=127.0.0.1:{free}", "--log.level=error"]
    query = "sum(kvstore_hit_tokens_total) / sum(kvstore_asked_tokens_total)"
    url = f"http://127.0.0.1:{free}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as prometheus:
        try:
            until, found = time.monotonic() + 60, []
            while not found:
                assert prometheus.poll() is None
                assert time.monotonic() < until
                try:
                    with urllib.request.urlopen(url, timeout=5) as got:
                        found = json.loads(got.read())["data"]["result"]
                except OSError:
                    time.sleep(0.1)
                time.sleep(0.1)
        finally:
            prometheus.terminate()
    assert float(found[0]["value"][1]) == pytest.approx(0.8)
