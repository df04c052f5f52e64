"""What the API says when something cannot be done: problem details (RFC 9457), each with what to do next.

Owns which status belongs to which error. Must not know routes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from kvstore import errors
from kvstore.errors import KVStoreError
from kvstore.sizes import counted
from kvstore.tools.wording import COMMAND_LINE, READER, for_api

MEDIA_TYPE = "application/problem+json"
URN = "urn:kvstore:problem:"
SHOWN_ERRORS = 20

STATUS: Mapping[type[KVStoreError], int] = {
    errors.NotFoundError: 404,
    errors.AmbiguousError: 409,
    errors.BudgetError: 409,
    errors.BusyError: 409,
    errors.SettingsError: 422,
    errors.TokenError: 422,
    errors.LayoutError: 422,
    errors.UnsupportedError: 422,
    errors.MissingExtraError: 422,
    errors.EngineError: 502,
    errors.ClosedError: 503,
    errors.NoSpaceError: 507,
}
"""Everything else is the store's own trouble: 500."""

TITLES: Mapping[int, str] = {
    400: "The request cannot be read",
    401: "This needs the token",
    403: "This is not allowed from here",
    404: "There is no such thing",
    405: "Not with this method",
    408: "The request came too slowly",
    409: "Not as things are now",
    413: "The request is too large",
    421: "This server has another name",
    422: "The request does not say what is needed",
    431: "The head of the request is too large",
    429: "Too much at once",
    500: "The store is in trouble",
    502: "The engine did not do it",
    503: "Not now",
    504: "It takes too long",
    507: "There is no room",
}


class Problem(BaseModel):
    """Why a request was not done."""

    model_config = ConfigDict(extra="forbid")
    type: str = Field(description="Which kind of problem.", examples=["urn:kvstore:problem:not-found"])
    title: str = Field(description="The kind in words.")
    status: int
    detail: str = Field(description="What is wrong.")
    remedy: str = Field(description="What to do.")
    errors: list[str] = Field(default=[], description="What is wrong with the request, each with its place.")


RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem, and what to do.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}


class Refused(Exception):
    """A request that is refused for how it comes, not for what the store has."""

    def __init__(self, status: int, kind: str, detail: str, remedy: str, headers: Mapping[str, str] = {}) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.remedy, self.headers = status, kind, detail, remedy, dict(headers)


def answer(
    status: int,
    kind: str,
    detail: str,
    remedy: str,
    *,
    listed: list[str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The response that tells a problem."""
    title = TITLES.get(status, "It was not done")
    told = Problem(type=URN + kind, title=title, status=status, detail=detail, remedy=remedy, errors=listed or [])
    return JSONResponse(told.model_dump(), status, dict(headers or {}), MEDIA_TYPE)


def of_error(error: KVStoreError, as_command: bool = False) -> JSONResponse:
    """The response for an error of the store. as_command: in the words of the command line."""
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    name = type(error).__name__.removesuffix("Error")
    kind = "".join(f"-{one.lower()}" if one.isupper() else one for one in name).lstrip("-")
    detail, remedy = error.problem, error.remedy
    if not as_command:
        detail, remedy = for_api(detail), for_api(remedy)
    return answer(status, kind, detail, remedy)


def of_refusal(refused: Refused) -> JSONResponse:
    """The response for a refusal."""
    return answer(refused.status, refused.kind, refused.detail, refused.remedy, headers=refused.headers)


def of_fault() -> JSONResponse:
    """The response for a mistake of this server's own."""
    remedy = "the server's log has more; POST /v1/verify tells whether the store is well"
    return answer(500, "fault", "this server failed", remedy)


def of_unreadable(status: int) -> JSONResponse:
    """The response for bytes that are no request. status: 400, or what the parser takes it for."""
    return answer(
        status, "not-http", "this is not an HTTP request that can be read", "send HTTP/1.1, as any client does"
    )


def install(app: FastAPI) -> None:
    """Let every error of an app leave as a problem."""
    app.add_exception_handler(KVStoreError, _store_error)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(TimeoutError, _late)
    app.add_exception_handler(Exception, _fault)


async def _store_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KVStoreError)
    return of_error(error, request.headers.get(READER) == COMMAND_LINE)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return of_refusal(error)


async def _not_valid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    listed = [f"{'.'.join(map(str, one['loc']))[:200]}: {one['msg'][:300]}" for one in found[:SHOWN_ERRORS]]
    remedy = "compare it with /openapi.json"
    return answer(422, "not-valid", f"the request has {counted(len(found), 'mistake')}", remedy, listed=listed)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = error.status_code
    kind = {404: "no-route", 405: "no-method"}.get(status, "not-readable")
    headers = dict(error.headers or {})
    if status == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request))) or headers.get("allow", "GET")
    return answer(status, kind, str(error.detail), "/openapi.json lists what there is", headers=headers)


def _methods(request: Request) -> set[str]:
    """The methods that the description has for a path."""
    for template, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), request.url.path):
            return {method.upper() for method in operations}
    return set()


async def _late(request: Request, error: Exception) -> JSONResponse:
    remedy = "what it changes goes on: look again in a moment, or ask for less"
    return answer(504, "late", "the answer took longer than this server waits", remedy)


async def _fault(request: Request, error: Exception) -> JSONResponse:
    return of_fault()
