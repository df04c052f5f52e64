"""Who may ask `kvstore serve` for what, and how much of it: token, host, origin, size and time of a request.

An ASGI layer in front of everything, and the rules it goes by. Must not know what routes do.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeAlias

from kvstore.errors import SettingsError
from kvstore.tools import problems
from kvstore.tools.connections import HEAD_BYTES
from kvstore.tools.problems import Refused
from kvstore.tools.sealing import is_api, seal

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES = 256 << 10
"""The longest config.json is a tenth of that."""
TOKENS_BYTES = 4 << 20
"""A prompt of half a million tokens, written as JSON."""
TAKES_TOKENS = frozenset({"/v1/show", "/v1/explain", "/v1/pin", "/v1/prefetch"})
"""Calls whose body may hold a prompt; all of them need the token, so that nobody else may send as much."""
BODY_S = 10.0
REQUEST_S = 60.0
STREAM = "/v1/events"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Beside the page's own files: what tells nothing of the store's content."""


@dataclass(frozen=True)
class Rules:
    """What a server allows.

    token: None where there is none, so that nothing may be changed. closed: reading needs the token too, as it must
    where others than this host can connect. hosts: names by which browsers may know the server; empty: any.
    """

    token: str | None = None
    closed: bool = False
    hosts: frozenset[str] = frozenset()

    def knows(self, given: str) -> bool:
        """Whether this is the token, compared in a time that tells nothing of it."""
        wanted = hashlib.sha256((self.token or "").encode()).digest()
        return hmac.compare_digest(hashlib.sha256(given.encode(errors="replace")).digest(), wanted) and bool(self.token)


def rules_for(host: str, token: str | None) -> Rules:
    """The rules for an address to listen on. Raises SettingsError for one that others reach, without a token."""
    if is_loopback(host):
        return Rules(token, False, frozenset({"localhost", "127.0.0.1", "[::1]", host}))
    if token is None:
        raise SettingsError(
            f"listening on {host} lets other machines in, and there is no token",
            "pass --token-file, or set KVSTORE_TOKEN; or listen on 127.0.0.1",
        )
    return Rules(token, True)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches an address."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """The layer: what passes has `scope["state"]["trusted"]`, whether it came with the token."""

    def __init__(self, app: App, rules: Rules, *, body_s: float = BODY_S, request_s: float = REQUEST_S) -> None:
        self._app, self._rules = app, rules
        self._body_s, self._request_s = body_s, request_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def sealed(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                seal(scope["path"], message)
            await send(message)

        try:
            self._admit(scope)
            if scope["path"] == STREAM:
                await self._app(scope, receive, sealed)
                return
            async with asyncio.timeout(self._request_s):
                body = await self._body(scope, receive)
                await self._app(scope, _replayed(body, receive), sealed)
        except Refused as refused:
            await problems.of_refusal(refused)(scope, receive, sealed)
        except TimeoutError:
            if not started:
                remedy = "what it changes goes on: look again in a moment, or ask for less"
                told = problems.answer(504, "late", "the answer took longer than this server waits", remedy)
                await told(scope, receive, sealed)
        except Exception:
            if not started:
                await problems.of_fault()(scope, receive, sealed)
            raise

    def _admit(self, scope: Scope) -> None:
        headers = _headers(scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > HEAD_BYTES:
            raise Refused(431, "head", f"the head has more than {HEAD_BYTES >> 10} KiB", "send fewer headers")
        host = headers.get(b"host", b"").decode("latin-1")
        if self._rules.hosts and _name(host) not in self._rules.hosts:
            raise Refused(
                421,
                "host",
                "this server does not go by the name that was asked for",
                "open it as http://127.0.0.1:PORT/ or http://localhost:PORT/",
            )
        origin = headers.get(b"origin")
        foreign = origin is not None and origin.decode("latin-1").partition("://")[2] != host
        site = headers.get(b"sec-fetch-site", b"none")
        if foreign or (site not in (b"none", b"same-origin") and is_api(scope["path"])):
            raise Refused(
                403,
                "origin",
                "pages of other sites may not ask this server",
                "ask from its own page, or from a program",
            )
        trusted = self._trusted(headers.get(b"authorization"))
        scope.setdefault("state", {})["trusted"] = trusted
        if self._rules.closed and not trusted and is_api(scope["path"]) and scope["path"] not in OPEN_PATHS:
            raise no_token()

    def _trusted(self, given: bytes | None) -> bool:
        if given is None:
            return False
        scheme, _, token = given.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not self._rules.knows(token.strip()):
            raise Refused(
                401,
                "unauthorized",
                "this is not the token" if self._rules.token else "this server has no token",
                "send Authorization: Bearer TOKEN, with the token that the server was started with",
                {"WWW-Authenticate": "Bearer"},
            )
        return True

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, in time and not too large."""
        headers = _headers(scope)
        length = headers.get(b"content-length", b"0")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            says, remedy = "the body has a length and is chunked as well", "send one of the two headers"
            raise Refused(400, "two-lengths", says, remedy, {"Connection": "close"})
        large = scope["path"] in TAKES_TOKENS and scope["state"]["trusted"]
        most = TOKENS_BYTES if large else BODY_BYTES
        if not length.isdigit() or int(length) > TOKENS_BYTES:
            raise _too_large(most)
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        break
                    part = message.get("body", b"")
                    size += len(part)
                    if size > TOKENS_BYTES:
                        raise _too_large(most)
                    if size <= most:
                        body += part
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Refused(
                408,
                "slow",
                f"the body did not come within {self._body_s:.0f} s",
                "send it at once",
                {"Connection": "close"},
            ) from None
        if size > most:  # read to its end, and not kept: who was cut off while sending would not hear why
            raise _too_large(most)
        return bytes(body)


def no_token() -> Refused:
    """What is said to who comes without the token."""
    return Refused(
        401,
        "unauthorized",
        "this call needs the token",
        "send Authorization: Bearer TOKEN, with the token that the server was started with",
        {"WWW-Authenticate": "Bearer"},
    )


def _too_large(most: int) -> Refused:
    says = f"the body is larger than {most >> 10} KiB"
    return Refused(413, "large", says, "ask for less", {"Connection": "close"})


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _name(host: str) -> str:
    """The name in a Host header, without a port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read already, then whatever comes next."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay
