"""`kvstore serve` killed in the middle of each changing call: engines beside it go on, and the store is sound."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.kv import HostKV

pytest.importorskip("fastapi")
from served import TOKEN

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import os, signal, sys
from children import die_at
os._exit = lambda code: os.kill(os.getpid(), signal.SIGKILL)
target, when, tier, nth = sys.argv.pop(1).split(",")
if target:
    die_at(target, when, tier or None, int(nth))
from kvstore.tools.cli import main
main()
"""
EVICT = ("evict", {"namespace": "first"})
DEATHS: list[tuple[str, dict[str, Any], str]] = [
    ("pin", {"tokens": [64, 100], "pin_as": "x"}, "kvstore.pins:Pins.put,before,,1"),
    ("pin", {"tokens": [64, 100], "pin_as": "x"}, "kvstore.pins:Pins.put,after,,1"),
    ("unpin", {"name": "greeting"}, "kvstore.pins:Pins.drop,after,,1"),
    (*EVICT, "kvstore.purge:PurgeLog.add,before,,1"),
    (*EVICT, "kvstore.purge:PurgeLog.add,after,,1"),
    (*EVICT, "kvstore.tiers.slotted:SlottedTier.remove,after,ram,1"),
    (*EVICT, "kvstore.tiers.slotted:SlottedTier.remove,before,nvme,1"),
    ("evict", {"name": "greeting"}, "kvstore.pins:Pins.drop,before,,1"),
    ("prefetch", {"name": "greeting"}, "kvstore.tiers.slotted:SlottedTier.reserve,after,ram,1"),
    ("prefetch", {"name": "greeting"}, "kvstore.tiers.slotted:SlottedTier.publish,before,ram,1"),
    ("verify", {"repair": True}, "kvstore.tiers.slotted:SlottedTier.remove,before,nvme,1"),
    ("verify", {"repair": True}, "kvstore.tiers.slotted:SlottedTier.remove,after,nvme,1"),
]


def start(path: Path, death: str) -> tuple[subprocess.Popen[str], int]:
    """A server that will die where it is told to, and its port."""
    line = [sys.executable, "-c", SERVER, death, "serve", "--port", "0", "--path", str(path), "--json"]
    seen = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "KVSTORE_TOKEN": TOKEN, "PYTHONPATH": seen}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    told = ""
    while not told.endswith("}\n"):
        told += process.stdout.readline()
    return process, int(json.loads(told)["url"].rstrip("/").rpartition(":")[2])


def post(port: int, call: str, body: dict[str, Any]) -> Any:
    """What a call answers; None when the server dies over it."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    try:
        line.request("POST", f"/v1/{call}", json.dumps(body), headers)
        return json.loads(line.getresponse().read())
    except (http.client.HTTPException, ConnectionError):
        return None
    finally:
        line.close()


def kv(layout: Any, length: int) -> HostKV:
    return HostKV.stacked(layout, np.zeros((2, 2, 2, length, 16), np.uint32))


def flip_a_byte(path: Path) -> None:
    """Damage one payload on the disk, the one that lies in the first slot."""
    segment = path / "nvme" / "00000000.seg"
    with segment.open("r+b") as file:
        file.seek(4096 + 100)
        old = file.read(1)
        file.seek(4096 + 100)
        file.write(bytes([old[0] ^ 255]))


@pytest.mark.parametrize(("call", "body", "death"), DEATHS, ids=[f"{call} {death}" for call, _, death in DEATHS])
def test_killed_in_the_middle_of_a_call(made: Any, call: str, body: dict[str, Any], death: str) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as engine:
        space = engine.namespace(made.layout, salt="second", label="second")
        if call == "prefetch":
            engine.evict(everything=True, tier="ram")
        if call == "verify":
            flip_a_byte(made.path)
        process, port = start(made.path, death)
        try:
            told = post(port, call, body)
            if call == "evict":
                told = post(port, call, {**body, "dry_run": False, "confirm": told["confirm"]})
            assert told is None or told.get("state") == "running"
            assert process.wait(15) == -signal.SIGKILL
        finally:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()
            process.wait()
        engine.save(space, range(500, 540), kv(made.layout, 40))
        match = engine.match(space, range(500, 540))
        assert engine.load(match, kv(made.layout, 40)).tokens == 40
        assert engine.flush(30)
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as after:
        found = after.verify()
        if call == "verify":
            found = after.verify(repair=True) if found.problems else found
            found = after.verify()
        assert found.problems == []
        assert after.match(space, made.tokens(64)).tokens in ((64,) if call != "verify" else range(65))
        space = after.namespace(made.layout, salt="first", label="first")
        left = after.match(space, made.tokens(40)).tokens
        if call == "evict":
            assert left == (40 if "PurgeLog.add,before" in death else 0), "all of it went, or nothing"


def test_a_server_that_is_stopped_or_started_does_not_touch_an_engine(made: Any) -> None:
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as engine:
        space = engine.namespace(made.layout, salt="second", label="second")
        for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            process, port = start(made.path, ",,,0")
            assert post(port, "verify", {})["state"] == "running"
            engine.save(space, [stop, *range(40)], kv(made.layout, 41))
            process.send_signal(stop)
            assert process.wait(20) != 0
            assert process.stdout is not None
            process.stdout.close()
            assert engine.load(engine.match(space, [stop, *range(40)]), kv(made.layout, 41)).tokens == 41
        assert engine.stats().processes <= 2
        assert engine.verify().problems == []
