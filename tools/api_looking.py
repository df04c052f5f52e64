"""Routes that look at a store and change nothing: stats, namespaces, prefixes, names, processes, history, the stream.

Must not know how any of it is found out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

import kvstore
from kvstore.sizes import parse_size
from kvstore.tools import answers, attached
from kvstore.tools import api_given as given
from kvstore.tools import api_models as models
from kvstore.tools.api_access import Behind, Told, Trusted
from kvstore.tools.catalogue import Selection
from kvstore.tools.problems import RESPONSES, Refused
from kvstore.tools.service import Service, TooManyWatchers

routes = APIRouter(prefix="/v1", responses=RESPONSES, tags=["look"])
plain = APIRouter(tags=["health"], responses=RESPONSES)

BEAT_S = 15.0
STREAM_S = 1800.0
"""A stream ends after so long; a client opens another one."""


EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"const": "look"}, "data": {"type": "string", "contentMediaType": "application/json"}},
}


@routes.get("/server", response_model=given.ServerGiven)
async def server(service: Behind, trusted: Trusted) -> dict[str, Any]:
    """What this server is, and its settings as in force."""
    return {
        "version": kvstore.__version__,
        "path": str(service.store.settings.path),
        "read_only": service.read_only,
        "may_change": trusted and not service.read_only,
        "began": service.began,
        "every_s": service.every_s,
        "streams": service.streams,
        "settings": service.store.settings.to_dict(),
    }


@routes.get("/stats", response_model=given.StatsGiven)
async def stats(service: Behind) -> dict[str, Any]:
    """What each tier holds, and what all processes together were asked, served, and missed."""
    return (await service.run(service.store.stats)).to_dict()


@routes.get("/namespaces", response_model=given.NamespacesGiven)
async def namespaces(service: Behind, told: Told) -> dict[str, Any]:
    """Namespaces, with what they hold in each tier."""
    found = await service.run(service.store.namespaces)
    return {"namespaces": [answers.namespace_told(use, told) for use in found]}


@routes.get("/prefixes", response_model=given.PrefixesGiven)
async def prefixes(
    service: Behind,
    told: Told,
    sort: Literal["biggest", "hottest", "coldest"] = "hottest",
    search: Annotated[
        str, Query(max_length=64, description="A part of a label or a name; with the token also a key's beginning.")
    ] = "",
    namespace: Annotated[
        models.Root | None, Query(description="Only of the namespace with this root, as it was told.")
    ] = None,
    salt: Annotated[
        models.Salt | None,
        Query(description="Only under the salt with this digest, as it was told; empty: under none."),
    ] = None,
    tier: Annotated[
        Literal["ram", "nvme"] | None, Query(description="Only those of which this tier has a block.")
    ] = None,
    unused: Annotated[models.Seconds | None, Query(description="Only those not used for so many seconds.")] = None,
    larger: Annotated[
        models.Size | None, Query(description="Only those whose KV takes more: a size (1GiB), or bytes.")
    ] = None,
    offset: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
) -> dict[str, Any]:
    """Stored sequences, a page of them. The listing may be some seconds old, in a large store some minutes."""
    chosen = Selection(search, namespace, salt, tier, unused, None if larger is None else parse_size(larger))
    return await service.run(service.catalogue.page, chosen, sort=sort, offset=offset, limit=limit, spell=told)


@routes.get("/names", response_model=given.NamesGiven)
async def names(service: Behind, told: Told) -> dict[str, Any]:
    """Named prefixes: how much of each is still stored, and until when it is pinned."""
    return await service.run(answers.names, service.store, told)


@routes.get("/quotas", response_model=given.QuotasGiven)
async def quotas(service: Behind, told: Told) -> dict[str, Any]:
    """Quotas by salt and tier, and what is held of each."""
    return {"quotas": await service.run(answers.quotas_told, service.store, None, told)}


@routes.get("/processes", response_model=given.ProcessesGiven)
async def processes(service: Behind) -> dict[str, Any]:
    """Processes that have the store open, this server among them."""
    return {"processes": await service.run(attached.processes, service.store)}


@routes.get("/history", response_model=given.HistoryGiven)
async def history(service: Behind, most: Annotated[int, Query(ge=1, le=600)] = 300) -> dict[str, Any]:
    """What the store did in the last minutes, a look a second, and where it is under pressure."""
    looks = service.looks()[-most:]
    return {
        "every_s": service.every_s,
        "looks": [look.point() for look in looks],
        "pressure": looks[-1].sentences if looks else [],
    }


@routes.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": EVENT}}, "description": "The stream: each event."}},
)
async def events(service: Behind, most: Annotated[int, Query(ge=0, le=1 << 20)] = 0) -> StreamingResponse:
    """A look a second, as server-sent events named ``look``. most: looks after which it ends; 0: after half an hour.

    Who reads too slowly is dropped.
    """
    watching = service.watching()
    try:
        watcher = watching.__enter__()
    except TooManyWatchers as error:
        raise Refused(429, "streams", error.problem, error.remedy, {"Retry-After": "10"}) from None

    async def told() -> AsyncIterator[str]:
        try:
            yield f"retry: {round(service.every_s * 2000)}\n\n"
            sent, loop = 0, asyncio.get_running_loop()
            until = loop.time() + STREAM_S
            while not watcher.dropped and loop.time() < until and (not most or sent < most):
                try:
                    yield await asyncio.wait_for(watcher.waiting.get(), BEAT_S)
                    sent += 1
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            watching.__exit__(None, None, None)

    return StreamingResponse(told(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


@plain.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Behind) -> PlainTextResponse:
    """For Prometheus: what the store holds, and what all its processes have done."""
    told = await service.run(generate_latest, service.metrics)
    return PlainTextResponse(told, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _health(service: Service, ok: bool, says: str) -> JSONResponse:
    told = given.HealthGiven(ok=ok, says=says, version=kvstore.__version__)
    return JSONResponse(told.model_dump(), 200 if ok else 503)


@plain.get("/healthz", response_model=given.HealthGiven)
async def healthz(service: Behind) -> JSONResponse:
    """Whether the server answers."""
    return _health(service, True, "alive")


@plain.get(
    "/readyz",
    response_model=given.HealthGiven,
    responses={503: {"model": given.HealthGiven, "description": "Not now, and why."}},
)
async def readyz(service: Behind) -> JSONResponse:
    """Whether the store can be looked at."""
    trouble = service.trouble
    return _health(service, trouble is None, trouble or "ready")
