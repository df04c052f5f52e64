"""The admin API put together: routes, guard, errors, page and metrics, as one ASGI application.

Must not know what any of them does.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, Response

import kvstore
from kvstore.store import Store
from kvstore.tools import api_asking, api_changing, api_looking, problems
from kvstore.tools.guard import Guard, Rules
from kvstore.tools.service import EVERY_S, Service

PAGE = Path(__file__).parent / "page"
FILES = {
    file.name: kind
    for file in sorted(PAGE.glob("*"))
    if (
        kind := {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}.get(
            file.suffix
        )
    )
}
"""What of the page is served; no name from a request is ever looked for on a disk."""
DESCRIPTION = (
    "Looks after a kvstore store while engines use it. Errors are problem details (RFC 9457) that say what to do. "
    "Changing calls, and those that tell token ids, need the token as a bearer."
)


def application(store: Store, rules: Rules, *, every: float = EVERY_S) -> Guard:
    """The whole of it, for uvicorn. every: seconds between two looks at the store."""
    service = Service(store, read_only=rules.token is None, every=every)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="kvstore",
        version=kvstore.__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    problems.install(app)
    for routes in (api_looking.routes, api_looking.plain, api_changing.routes, api_asking.routes):
        app.include_router(routes)
    _serve_page(app)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    return Guard(app, rules)


def _serve_page(app: FastAPI) -> None:
    def file(name: str) -> Any:
        async def serve() -> Response:
            return FileResponse(PAGE / name, media_type=FILES[name], headers={"Cache-Control": "no-cache"})

        return serve

    for name in FILES:
        app.add_api_route(f"/page/{name}", file(name), include_in_schema=False)
    if "index.html" in FILES:
        app.add_api_route("/", file("index.html"), include_in_schema=False)


def _described(app: FastAPI) -> dict[str, Any]:
    """The description, with problems where FastAPI would put its own errors."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = problems.Problem.model_json_schema()
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["summary"] = re.sub("_", " ", operation["operationId"])
        app.openapi_schema = made
    return app.openapi_schema
