"""A real server of a store in this process, on a real socket, and a client that speaks to it as any program would."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from kvstore.store import Store
from kvstore.tools.api import application
from kvstore.tools.connections import HEAD_BYTES, Connection
from kvstore.tools.guard import rules_for
from kvstore.tools.standing import standing_store

TOKEN = "a-token-of-the-test-0123456789"


@dataclass
class Answer:
    """A response. told: its JSON, where it is JSON."""

    status: int
    headers: dict[str, str]
    body: bytes
    told: Any = None


@dataclass
class Served:
    """A server under test."""

    store: Store
    port: int
    token: str | None = TOKEN
    app: Any = None
    stop: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = "", **headers: str) -> Answer:
        """One request. token: "" for the server's own, None for none. body: sent as JSON, bytes as they are."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = self.token if token == "" else token
        if sent is not None:
            given["Authorization"] = f"Bearer {sent}"
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if raw is not None:
            given.setdefault("Content-Type", "application/json")
        with contextlib.closing(line):
            line.request(method, path, raw, given)
            got = line.getresponse()
            read = got.read()
            kind = got.headers.get("content-type", "")
            told = json.loads(read) if read and "json" in kind else None
            return Answer(got.status, {name.lower(): value for name, value in got.headers.items()}, read, told)

    def get(self, path: str, **headers: Any) -> Any:
        """What a GET tells."""
        found = self.ask("GET", path, **headers)
        assert found.status == 200, found.body
        return found.told

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """What a POST tells."""
        found = self.ask("POST", path, body)
        assert found.status == status, found.body
        return found.told

    def finished(self, job: dict[str, Any]) -> dict[str, Any]:
        """A job once it has ended."""
        until = time.monotonic() + 30
        while job["state"] == "running":
            assert time.monotonic() < until
            time.sleep(0.02)
            job = self.get(f"/v1/jobs/{job['id']}")
        return job

    def raw(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def serving(
    path: Path, token: str | None = TOKEN, *, every: float = 0.1, host: str = "127.0.0.1", port: int = 0
) -> Iterator[Served]:
    """A server of the store at ``path``. host: decides the rules; it listens on loopback in any case."""
    listener = socket.create_server(("127.0.0.1", port))
    with standing_store(path) as store:
        app = application(store, rules_for(host, token), every=every)
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)

        def stop() -> None:
            server.should_exit = True
            thread.join()
            listener.close()

        try:
            yield Served(store, listener.getsockname()[1], token, app, stop)
        finally:
            stop()
