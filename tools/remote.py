"""A store that another machine, container or user looks after: asked through its server, `kvstore serve`.

Answers are those of `answers`, as plain values; problems become the errors they were there. The token goes to that
server alone. Must not know what a command does with an answer.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, NoReturn

from kvstore import errors
from kvstore.errors import AmbiguousError, KVStoreError, NotFoundError, PathError, SettingsError, StorageError
from kvstore.identity import salt_digest
from kvstore.statistics import Stats, TierStats
from kvstore.tools.naming import no_salt
from kvstore.tools.standing import ID_DIGITS
from kvstore.tools.standins import MARK
from kvstore.tools.token_file import VARIABLE, token_of_environment
from kvstore.tools.wording import COMMAND_LINE, READER

TIMEOUT_S = 70.0
"""A little more than a server takes for an answer."""
POLL_S = 0.2
PAGE = 200
ANSWER_BYTES = 64 << 20
URN = "urn:kvstore:problem:"
NEEDS_TOKEN = {
    "unauthorized": f"set {VARIABLE} to the token that the server was started with",
    "read-only": f"start kvstore serve with --token-file, or with {VARIABLE} set",
}
"""What to do at a command line, by the problem."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A server that sends elsewhere would have the token sent there too."""

    def redirect_request(self, *given: Any) -> None:
        return None


class Remote:
    """One server, by its address. Raises SettingsError for an address that is none."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise SettingsError(f"{url!r} is not a server's address", "write it as kvstore serve prints it: http://…")
        self._url = url.rstrip("/")
        self._token = token_of_environment()
        self._opener = urllib.request.build_opener(_NoRedirect)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """What a GET answers; None leaves a parameter out."""
        asked = urllib.parse.urlencode({name: value for name, value in query.items() if value is not None})
        return self._ask("GET", f"{path}?{asked}" if asked else path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a POST answers; None leaves a field out."""
        return self._ask("POST", path, {name: value for name, value in body.items() if value is not None})

    def counted(self, path: str, asked: dict[str, Any]) -> Callable[[bool], dict[str, Any]]:
        """A change that is counted first: to be called with True, then with False to do what was counted."""
        confirm: str | None = None

        def ask(dry_run: bool) -> dict[str, Any]:
            nonlocal confirm
            told = self.post(path, {**asked, "dry_run": dry_run, "confirm": confirm})
            confirm = told.pop("confirm")
            return told

        return ask

    def finished(self, path: str, body: dict[str, Any], step: Callable[[int, int], None]) -> dict[str, Any]:
        """The result of a job, followed to its end; interrupted, the job is cancelled. Raises StorageError."""
        job = self.post(path, body)
        try:
            while job["state"] == "running":
                step(job["done"], job["total"])
                time.sleep(POLL_S)
                job = self.get(f"/v1/jobs/{job['id']}")
        except BaseException:
            self._ask("DELETE", f"/v1/jobs/{job['id']}", None)
            raise
        if job["state"] != "done":
            problem = str(job["problem"] or job["state"])
            raise StorageError(f"the server did not finish: {problem}", "ask again")
        result: dict[str, Any] = job["result"]
        return result

    def namespace(self, name: str) -> dict[str, Any]:
        """A namespace by its label, or the beginning of its root. Raises NotFoundError, AmbiguousError."""
        known: list[dict[str, Any]] = self.get("/v1/namespaces")["namespaces"]
        found = [one for one in known if one["label"] == name] or [
            one for one in known if name and one["root"].startswith(name.lower())
        ]
        if not found:
            listed = ", ".join(one["label"] or one["root"][:ID_DIGITS] for one in known) or "none"
            raise NotFoundError(f"the store has no namespace {name!r}", f"it has: {listed}")
        if len(found) > 1:
            roots = ", ".join(one["root"][:ID_DIGITS] for one in found)
            raise AmbiguousError(f"{name!r} names {len(found)} namespaces", f"use the beginning of a root: {roots}")
        return found[0]

    def salt(self, salt: str) -> str:
        """A salt's digest, as this server tells it. Raises NotFoundError; SettingsError where it tells stand-ins."""
        wanted = salt_digest(salt).hex()
        told = {one["salt"] for one in self.get("/v1/namespaces")["namespaces"]}
        if wanted not in told:
            if any(one.startswith(MARK) for one in told):
                raise SettingsError("salts are told only with the token", NEEDS_TOKEN["unauthorized"])
            raise NotFoundError(*no_salt(salt))
        return wanted

    def prefixes(self, limit: int, **chosen: Any) -> tuple[list[dict[str, Any]], int]:
        """Sequences, the last used first, and how many there are. limit: 0 for all. chosen: as `Selection` has it."""
        found: list[dict[str, Any]] = []
        while True:
            most = min(PAGE, limit - len(found)) if limit else PAGE
            told = self.get("/v1/prefixes", sort="hottest", offset=len(found), limit=most, **chosen)
            found += told["prefixes"]
            if not told["prefixes"] or len(found) >= (limit or told["total"]):
                return found, told["total"]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path, method=method)
        request.add_header("Accept", "application/json")
        request.add_header(READER, COMMAND_LINE)
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token}")
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as got:
                return self._read(got.read(ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                _raise(error.code, error.read(ANSWER_BYTES))
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise PathError(f"{self._url} does not answer: {reason}", "is kvstore serve running there?") from error

    def _read(self, raw: bytes) -> dict[str, Any]:
        try:
            told = json.loads(raw)
        except ValueError as error:
            raise StorageError(f"{self._url} is not kvstore serve: {error}", "check the address") from error
        if not isinstance(told, dict):
            raise StorageError(f"{self._url} is not kvstore serve", "check the address")
        return told


def at(url: str | None) -> Remote | None:
    """The server at an address, or none."""
    return None if url is None else Remote(url)


def stats_of(told: dict[str, Any]) -> Stats:
    """The statistics that were told."""
    return Stats(**{**told, "tiers": tuple(TierStats(**tier) for tier in told["tiers"])})


def _raise(status: int, raw: bytes) -> NoReturn:
    """The error that a problem was, there."""
    try:
        told = json.loads(raw)
        name = str(told["type"]).removeprefix(URN)
        detail, remedy = "; ".join([str(told["detail"]), *told.get("errors", [])]), str(told["remedy"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"the server answered {status}", "check the address: is it kvstore serve?") from error
    remedy = NEEDS_TOKEN.get(name, remedy)
    kind = getattr(errors, "".join(part.capitalize() for part in name.split("-")) + "Error", None)
    if not (isinstance(kind, type) and issubclass(kind, KVStoreError)):
        kind = SettingsError if status < 500 else StorageError
    raise kind(detail, remedy)
