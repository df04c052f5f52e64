"""Headers that every answer of a server has, whoever wrote it. Must not know what is answered."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Mapping[bytes, bytes] = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=()",
}


def is_api(path: str) -> bool:
    """Whether a path tells of the store."""
    return path.startswith(("/v1/", "/metrics"))


def seal(path: str, message: MutableMapping[str, Any]) -> None:
    """Put them on the start of an answer, but for those that it has."""
    known = {name.lower() for name, _ in message["headers"]}
    more = dict(HEADERS)
    if is_api(path):
        more[b"cache-control"] = b"no-store"
    message["headers"] = [*message["headers"], *((name, value) for name, value in more.items() if name not in known)]
