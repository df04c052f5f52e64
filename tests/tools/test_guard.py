"""What `kvstore serve` does not take: from whom, how large, how slow, how many. Its memory stays where it is."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import select
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.kv import HostKV

pytest.importorskip("fastapi")
from made import LAYOUT, filled
from served import TOKEN, Served, serving

from kvstore.errors import KVStoreError, SettingsError
from kvstore.records import Entry
from kvstore.tools import api_looking, connections, guard, service
from kvstore.tools.guard import Rules, is_loopback, rules_for
from kvstore.tools.token_file import read_token
from kvstore.transaction import Database

CHANGING = ("pin", "unpin", "evict", "quota", "namespace", "drop-empty", "prefetch", "verify", "show", "explain")
CHANGES = [("POST", f"/v1/{name}") for name in CHANGING]
CHANGES += [("GET", "/v1/jobs"), ("GET", "/v1/jobs/0123456789abcdef"), ("DELETE", "/v1/jobs/0123456789abcdef")]
LOOKS = ["/v1/stats", "/v1/namespaces", "/v1/prefixes", "/v1/names", "/v1/processes", "/v1/server", "/v1/history"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all that only try it: nothing here is to leave a trace."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_RAM_DIRECTORY", shared)
        with serving(filled(tmp_path_factory.mktemp("guard") / "store").path) as server:
            yield server


def memory() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_closed(line: socket.socket, seconds: float) -> bool:
    """Whether the other side ends a connection in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if select.select([line], [], [], 0.05)[0]:
            try:
                if not line.recv(1 << 16):
                    return True
            except ConnectionError:
                return True
    return False


# -------------------------------------------------------------------- who


NEAR = (None, TOKEN[:-1], TOKEN + "0", TOKEN.upper(), " ", "x" * 5000)


def test_what_changes_or_tells_token_ids_needs_the_token(served: Served) -> None:
    for method, path in CHANGES:
        for token in NEAR:
            found = served.ask(method, path, {}, token=token)
            assert found.status == 401, path
            assert found.headers["www-authenticate"] == "Bearer"
            assert found.headers["content-type"] == "application/problem+json"
        assert served.ask(method, path, {}).status != 401, path
    for given in (f"Basic {TOKEN}", TOKEN, f"Bearer{TOKEN}", f"Bearer {TOKEN} x"):
        assert served.ask("POST", "/v1/verify", {}, token=None, Authorization=given).status == 401


def test_without_a_token_nothing_is_changed_by_anybody(made: Any) -> None:
    with serving(made.path, token=None) as served:
        for method, path in CHANGES:
            assert served.ask(method, path, {}).status == 403
            assert served.ask(method, path, {}, token="None").status == 401


def test_token_ids_are_told_only_with_the_token(served: Served) -> None:
    assert all(one["first_tokens"] for one in served.get("/v1/prefixes")["prefixes"])
    assert not any(one["first_tokens"] for one in served.get("/v1/prefixes", token=None)["prefixes"])
    assert "first_tokens" not in str(served.ask("GET", "/v1/names", token=None).told)


def test_a_server_for_others_tells_nothing_without_the_token(made: Any) -> None:
    with serving(made.path, host="0.0.0.0") as served:
        for path in (*LOOKS, "/metrics", "/v1/events", "/v1/absent"):
            assert served.ask("GET", path, token=None).status == 401
        assert served.ask("POST", "/v1/plan", {"model": "llama-3.1-8b"}, token=None).status == 401
        for path in LOOKS:
            assert served.ask("GET", path).status == 200
        assert served.ask("GET", "/healthz", token=None).status == 200


def test_listening_for_others_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(SettingsError, match="there is no token"):
            rules_for(host, None)
        assert rules_for(host, TOKEN).closed
    for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        assert not rules_for(host, None).closed


def test_no_word_is_the_token_of_a_server_without_one() -> None:
    assert not any(Rules(None).knows(word) for word in ("", "None", "\0"))
    assert Rules(TOKEN).knows(TOKEN)


def test_a_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    answer = True

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return answer

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert Rules(TOKEN).knows("another")
    answer = False
    assert not Rules(TOKEN).knows(TOKEN)
    assert not Rules(TOKEN).knows("longer" * 99)
    assert {len(word) for pair in compared for word in pair} == {hashlib.sha256().digest_size}, "lengths tell nothing"
    assert len(compared) == 3


def test_a_token_comes_from_a_file_that_is_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(KVStoreError, match="cannot be read"):
        read_token(file)
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    with pytest.raises(KVStoreError, match="can be read by others"):
        read_token(file)
    file.chmod(stat.S_IRUSR)
    assert read_token(file) == TOKEN
    assert read_token(None, {"KVSTORE_TOKEN": TOKEN}) == TOKEN
    assert read_token(None, {}) is None
    for poor in ("short", "with space in it, long", "ünreadable-and-long-enough"):
        with pytest.raises(KVStoreError, match="is no token"):
            read_token(None, {"KVSTORE_TOKEN": poor})


# -------------------------------------------------------------------- from where


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@evil"])
def test_a_name_that_is_not_the_servers_own_is_refused(served: Served, host: str) -> None:
    """A page whose name was made to mean 127.0.0.1 comes with its own name."""
    assert served.ask("GET", "/v1/stats", Host=host).status == 421
    assert served.ask("GET", "/", Host=host).status == 421


def test_pages_of_other_sites_are_refused(served: Served) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert served.ask("GET", "/v1/stats", **headers).status == 403
        assert served.ask("POST", "/v1/evict", {"everything": True}, **headers).status == 403
    own = served.ask("GET", "/v1/stats", Origin=served.url)
    assert own.status == 200
    assert not [name for name in own.headers if name.startswith("access-control")]
    assert served.ask("OPTIONS", "/v1/stats").status == 405


@pytest.mark.parametrize("path", ["/v1/stats", "/v1/absent", "/absent", "/healthz", "/openapi.json"])
def test_every_answer_has_the_headers_that_close_it(served: Served, path: str) -> None:
    headers = served.ask("GET", path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers
    assert path.startswith("/v1") == (headers.get("cache-control") == "no-store")


@pytest.mark.parametrize(
    "path",
    [
        "/page/../serve.py",
        "/page/%2e%2e/serve.py",
        "/page/..%2fserve.py",
        "/page//etc/passwd",
        "/page/%00",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/page/index.html%00.js",
        "/v1/jobs/..%2f..%2fetc",
    ],
)
def test_no_path_of_a_request_is_a_path_on_the_disk(served: Served, path: str) -> None:
    with served.raw() as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        got = line.recv(1 << 16)
    assert got.split()[1] in (b"404", b"422", b"400")
    assert b"import" not in got
    assert b"root:" not in got


# -------------------------------------------------------------------- how much


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    ],
)
def test_a_malformed_head_ends_the_connection_and_nothing_else(served: Served, head: bytes) -> None:
    with served.raw() as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(head)
        got = b""
        with contextlib.suppress(ConnectionError):
            line.settimeout(5)
            got = line.recv(1 << 16)
        assert not got or got.split()[1] in (b"400", b"404", b"413", b"421", b"422", b"431")
        told, _, body = got.partition(b"\r\n\r\n")
        assert not got or b"content-type: application/problem+json" in told
        assert not got or b"content-security-policy: default-src 'none'" in told
        if body:
            problem, _ = json.JSONDecoder().raw_decode(body.decode())  # another answer may follow
            assert problem["status"] == int(got.split()[1])
            assert problem["remedy"]
    assert served.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize(
    "path", ["/v1/stats/", "/v1/", "/v1/jobs/", "/healthz/", "/page/", "/page/main.js/", "//", "/v1"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "HEAD", "BREW"])
def test_whatever_there_is_not_is_a_problem_and_leads_nowhere(served: Served, method: str, path: str) -> None:
    found = served.ask(method, path)
    assert found.status in (404, 405)
    assert "location" not in found.headers
    assert found.headers["content-type"] == "application/problem+json"
    assert method == "HEAD" or found.told["remedy"]


def test_a_fault_of_the_guard_itself_is_a_problem(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(guard, "is_api", broken)
    found = served.ask("GET", "/v1/stats", Sec_Fetch_Site="same-site")
    assert (found.status, found.headers["content-type"]) == (500, "application/problem+json")
    assert found.headers["x-content-type-options"] == "nosniff"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(served: Served) -> None:
    with served.raw() as line:
        head = f"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n"
        line.sendall(head.encode())
        assert line.recv(1 << 16).split()[1] == b"413"


def test_a_body_without_end_is_cut_off_and_takes_no_memory(served: Served) -> None:
    before = memory()
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    for _ in range(3):
        with served.raw() as line:
            line.sendall(b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(ConnectionError):  # noqa: PT012  whichever of the chunks finds the door closed
                for _ in range(2000):
                    line.sendall(chunk)
    assert memory() - before < 64 << 20


ODD = b'{"\\ud800": "\\udfff", "model": "\\ud800", "config": {"model_type": "\\ud800"}}'
"""Halves of characters."""
POSTS = [path for method, path in CHANGES if method == "POST"] + ["/v1/plan"]
LARGEST = {path: guard.TOKENS_BYTES if path in guard.TAKES_TOKENS else guard.BODY_BYTES for path in POSTS}


def largest(path: str, token: str | None, one: str, before: str, after: str) -> bytes:
    """As much of ``one`` (a number in it at ``%x``) as a body may hold."""
    most = LARGEST[path] if token else guard.BODY_BYTES
    count = (most - len(before) - len(after)) // (len(one % 0xFFFFFF) + 1)
    return (before + ",".join(one % number for number in range(count)) + after).encode()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("token", [TOKEN, None], ids=["with", "without"])
def test_however_much_is_wrong_with_a_body_little_is_made_of_it(served: Served, path: str, token: str | None) -> None:
    before = memory()
    for one, begins, ends in (
        ('"%x":{}', "{", "}"),
        ('"%x":[]', '{"config":{', "}}"),
        ('{"%x":-1}', '{"tokens":[', "]}"),
        ('"%x"', "[", "]"),
    ):
        body = largest(path, token, one, begins, ends)
        found = served.ask("POST", path, body, token=token)
        assert found.status == (422 if token or path == "/v1/plan" else 401), found.body
        assert found.headers["content-type"] == "application/problem+json"
        assert len(found.body) < 8192
        if found.status == 422:
            assert int((re.search(r"\d+", found.told["detail"]) or [""])[0]) <= 20, found.told["detail"]
    assert memory() - before < 96 << 20
    assert served.ask("POST", path, b" " * (guard.BODY_BYTES + 1), token=None).status == 413
    if LARGEST[path] == guard.BODY_BYTES:
        assert served.ask("POST", path, b" " * (guard.BODY_BYTES + 1)).status == 413


def test_a_configuration_may_not_be_endless_work(served: Served) -> None:
    small = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    deep: Any = []
    for _ in range(40):
        deep = {"a": deep}
    for more, says in (({"a": deep}, "nested more than"), ({"a": [0] * 30_000}, "more than 20000 values")):
        found = served.ask("POST", "/v1/plan", {"config": {**small, **more}, "context": 10})
        assert says in str(found.told["errors"])
    labels = {str(number): "LABEL" for number in range(5000)}
    assert served.post("/v1/plan", {"config": {**small, "id2label": labels}, "context": 10})["layers"] == 2


def test_deep_and_odd_json_is_refused(served: Served) -> None:
    for body in (
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe",
        b"{}trailing",
        b"NaN",
        b'{"context": 1e400}',
        b"",
        ODD,
    ):
        found = served.ask("POST", "/v1/plan", body)
        assert found.status in (400, 422), found.body
        assert found.headers["content-type"] == "application/problem+json"


# -------------------------------------------------------------------- how slow, how many


def test_a_client_that_does_not_finish_its_request_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    for sent in (b"", b"GET /v1/stats HTTP/1.1\r\n", b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nX: "):
        with served.raw() as line:
            line.sendall(sent)
            assert is_closed(line, 10)


def test_a_body_that_does_not_come_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.app, "_body_s", 0.2)
    with served.raw() as line:
        line.sendall(b"POST /v1/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        line.settimeout(10)
        assert line.recv(1 << 16).split()[1] == b"408"
        assert is_closed(line, 10)


def test_an_answer_that_takes_too_long_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.app, "_request_s", 0.2)
    real = type(served.store).namespaces
    monkeypatch.setattr(type(served.store), "namespaces", lambda self: (time.sleep(1), real(self))[1])
    found = served.ask("GET", "/v1/namespaces")
    assert (found.status, found.headers["content-type"]) == (504, "application/problem+json")
    assert served.ask("GET", "/healthz").status == 200


class Slow:
    """A client on a thin line: as little as can be is on its way to it, and it reads when it is told to."""

    def __init__(self, served: Served) -> None:
        self.line = socket.socket()
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        self.line.settimeout(60)
        self.line.connect(("127.0.0.1", served.port))

    def ask(self, path: str) -> None:
        self.line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def read(self, pause: float = 0.0) -> bytes:
        """One answer; ``pause`` seconds after each piece."""
        got = b""
        while b"\r\n\r\n" not in got:
            got += self.line.recv(4096)
        head, _, body = got.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", head)
        while len(body) < int(length):
            piece = self.line.recv(16384)
            assert piece, "cut off"
            body += piece
            time.sleep(pause)
        return body


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> int:
    """The answer of `/healthz` is so many bytes, more than sockets hold; servers hold little of it back."""
    size = 8 << 20
    monkeypatch.setattr(api_looking.given.HealthGiven, "model_dump", lambda self: {"says": "x" * size})
    monkeypatch.setattr(connections, "UNREAD_S", 0.4)
    return size


def test_a_slow_client_that_goes_on_reading_is_left_alone(served: Served, large: int) -> None:
    """Its timer must not outlive the answer for which it was set, nor count against one that is being fetched."""
    client = Slow(served)
    with client.line:
        for _ in range(2):
            client.ask("/healthz")
            assert len(client.read(pause=0.002)) > large
            time.sleep(1.0)  # longer than it may leave an answer unread: there is none
            client.ask("/v1/stats")
            assert client.read().startswith(b"{")


def test_a_client_that_leaves_an_answer_unread_is_dropped(served: Served, large: int) -> None:
    client = Slow(served)
    with client.line:
        client.ask("/healthz")
        assert client.line.recv(16)
        time.sleep(1.5)
        with pytest.raises((AssertionError, ConnectionError)):
            client.read()
    assert served.ask("GET", "/v1/stats").status == 200


def test_who_does_not_read_the_stream_is_dropped(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)
    with serving(made.path, every=0.01) as served:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", served.port))
        with line:
            line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            behind: Any = served.app._app.state.service
            until = time.monotonic() + 30
            while not behind._watchers:
                assert time.monotonic() < until
                time.sleep(0.01)
            while behind._watchers:
                assert time.monotonic() < until, "the slow reader is still there"
                behind._hand_out("look", {"padding": "x" * 100_000})
                time.sleep(0.01)
        assert served.ask("GET", "/healthz").status == 200


def test_a_thousand_streams_are_refused_and_the_server_goes_on(served: Served) -> None:
    ask = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = memory()
    held: list[socket.socket] = []
    statuses: list[bytes] = []
    try:
        for _ in range(1000):
            line = served.raw()
            held.append(line)
            with contextlib.suppress(ConnectionError):
                line.sendall(ask)
        for line in held:
            line.settimeout(5)
            try:
                statuses.append((line.recv(4096).split() or [b"", b""])[1])
            except (ConnectionError, TimeoutError):
                statuses.append(b"")
        assert statuses.count(b"200") == service.WATCHERS
        assert statuses.count(b"429") + statuses.count(b"200") <= connections.CONNECTIONS
        assert memory() - before < 64 << 20
    finally:
        for line in held:
            line.close()
    until = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError):
            if served.ask("GET", "/v1/stats").status == 200:
                break
        assert time.monotonic() < until


def test_bounds_are_those_that_the_documentation_tells() -> None:
    assert (guard.BODY_BYTES, guard.TOKENS_BYTES, guard.BODY_S, guard.REQUEST_S) == (256 << 10, 4 << 20, 10, 60)
    assert (connections.CONNECTIONS, service.WATCHERS) == (128, 16)


# -------------------------------------------------------------------- what may be guessed from it


def digests(served: Served) -> set[str]:
    """The beginnings of every key, root and digest of a salt of a store."""
    found = set()
    for tier in served.store._core.tiers:
        with tier.index.read() as txn:
            found |= {Entry.unpack(raw).key for _, raw in txn.scan(Database.BLOCKS)}
    for use in served.store.namespaces():
        found |= {use.record.root, use.record.salt}
    return {digest.hex()[:8] for digest in found if digest}


@pytest.fixture
def guessable(made: Any) -> Iterator[Served]:
    """With whatever may be told by a digest: a quota, days, a namespace without a label."""
    with kvstore.open(made.path, ram="8MiB", nvme="16MiB") as store:
        space = store.namespace(made.layout)
        store.save(space, range(40), HostKV.stacked(made.layout, np.zeros((2, 2, 2, 40, 16), np.uint32)))
        store.load(store.match(space, range(40)), HostKV.stacked(made.layout, np.zeros((2, 2, 2, 40, 16), np.uint32)))
        store.pin("short", space, range(16))
        store.set_quota("first", ram=1 << 20)
    with serving(made.path) as server:
        yield server


def test_no_answer_without_the_token_holds_what_a_prompt_could_be_guessed_from(guessable: Served) -> None:
    served = guessable
    paths = [path for path, of in served.get("/openapi.json")["paths"].items() if "get" in of and "{" not in path]
    assert {"/v1/prefixes", "/v1/names", "/v1/savings", "/v1/quotas", "/metrics", "/v1/events"} <= set(paths)
    paths += ["/v1/savings?namespace=x", "/v1/prefixes?sort=biggest&search=first", "/openapi.json", "/"]
    beginnings = digests(served)
    told_to_who_has_it = ""
    for path in paths:
        asked = f"{path}?most=2" if path == "/v1/events" else path
        with_it, without = served.ask("GET", asked), served.ask("GET", asked, token=None)
        told_to_who_has_it += with_it.body.decode()
        leaked = {one for one in beginnings if one in without.body.decode()}
        assert not leaked, (asked, without.body)
    assert sum(one in told_to_who_has_it for one in beginnings) >= 8, "the test looks for what there is"


def test_without_the_token_nobody_can_ask_whether_a_guess_is_right(guessable: Served) -> None:
    served = guessable
    for one in served.get("/v1/prefixes?limit=200")["prefixes"]:
        for digits in (12, 16, 64):
            by_key = f"/v1/prefixes?search={one['key'][:digits]}"
            assert served.get(by_key)["total"] == 1
            assert served.get(by_key, token=None)["total"] == 0
        by_root = f"/v1/prefixes?namespace={one['namespace']}"
        assert served.get(by_root)["total"] > 0
        assert served.get(by_root, token=None)["total"] == 0
        asked = f"/v1/savings?namespace={one['namespace'][:12]}"
        assert (served.ask("GET", asked).status, served.ask("GET", asked, token=None).status) == (200, 404)


def test_stand_ins_tell_apart_and_can_be_asked_for(guessable: Served) -> None:
    served = guessable
    for path, rows, field in (
        ("/v1/prefixes?limit=200", "prefixes", "key"),
        ("/v1/namespaces", "namespaces", "root"),
        ("/v1/namespaces", "namespaces", "salt"),
        ("/v1/names", "names", "namespace"),
        ("/v1/quotas", "quotas", "salt"),
    ):
        told = [one[field] for one in served.get(path)[rows]]
        without = [one[field] for one in served.get(path, token=None)[rows]]
        assert len(set(zip(told, without, strict=True))) == len(set(told)) == len(set(without))
        assert all(not one or re.fullmatch("~[0-9a-f]{11}", one) for one in without)
        assert without == [one[field] for one in served.get(path, token=None)[rows]]
    for one in served.get("/v1/namespaces", token=None)["namespaces"]:
        found = served.get(f"/v1/prefixes?namespace={one['root']}", token=None)["prefixes"]
        assert found
        assert {prefix["namespace"] for prefix in found} == {one["root"]}
        assert served.ask("GET", f"/v1/savings?namespace={one['root']}", token=None).status == 200


def test_the_twelve_digits_that_listings_print_name_a_prefix_wherever_one_is_asked_for(guessable: Served) -> None:
    served = guessable
    for one in served.get("/v1/prefixes?limit=200")["prefixes"]:
        key = one["key"][:12]
        assert served.post("/v1/show", {"key": key})["tokens"] == one["tokens"]
        assert served.post("/v1/pin", {"key": key, "pin_as": key})["tokens"] == one["tokens"]
        served.post("/v1/unpin", {"name": key})
        would = served.post("/v1/evict", {"namespace": one["namespace"], "prefix": key})
        assert sum(would["blocks"].values()) > 0
    (label,) = {one["label"] for one in served.get("/v1/namespaces")["namespaces"]} & {"second"}
    for number in range(40):
        space = served.store.namespace(LAYOUT, salt="second", label="second")
        kv = HostKV.stacked(LAYOUT, np.zeros((2, 2, 2, 1, 16), np.uint32))
        served.store.save(space, [10_000 + number], kv)
    found = [served.ask("POST", "/v1/evict", {"namespace": label, "prefix": digit}) for digit in "0123456789abcdef"]
    assert {one.status for one in found} <= {200, 404, 409}
    assert any(one.status == 409 and "use more digits" in one.told["remedy"] for one in found)
