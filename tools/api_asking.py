"""Routes that work something out: show, explain, plan.

Nothing in a body is taken for a path, a model or a tokenizer to load. Must not know how it is worked out.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from kvstore.errors import NotFoundError
from kvstore.tools import answers, naming
from kvstore.tools import api_given as given
from kvstore.tools import api_models as models
from kvstore.tools.api_access import WITH_TOKEN, Behind, Told
from kvstore.tools.api_changing import chosen
from kvstore.tools.explaining import explain as find_out
from kvstore.tools.planning import planned
from kvstore.tools.problems import RESPONSES
from kvstore.tools.published import PUBLISHED
from kvstore.tools.savings import answer as answer_savings
from kvstore.tools.worth import Prices

routes = APIRouter(prefix="/v1", responses=RESPONSES, tags=["ask"])


@routes.post("/show", response_model=given.ShownGiven, dependencies=WITH_TOKEN)
async def show(service: Behind, asked: models.ShowAsked) -> dict[str, Any]:
    """One prefix: how many of its tokens are stored in which tier, its blocks and bytes, its names."""

    def work() -> dict[str, Any]:
        return answers.show(service.store, *chosen(service.store, asked))

    return await service.run(work)


@routes.post("/explain", dependencies=WITH_TOKEN)
async def explain(service: Behind, asked: models.ExplainAsked) -> dict[str, Any]:
    """Why a prompt missed: how much of it is stored, the first token that differs, and the likely cause."""

    def work() -> dict[str, Any]:
        store = service.store
        everything = store.namespaces()
        uses = naming.namespaces_for(store, asked.namespace, asked.salt)
        if asked.name is None:
            return find_out(store, asked.tokens or (), uses, everything).to_dict()
        named = naming.find_named(store, asked.name)
        own = [use for use in uses if use.record.root == named.record.root]
        return find_out(store, naming.ids_of(named.record), own or uses, everything).to_dict()

    return await service.run(work)


@routes.get("/savings")
async def savings(
    service: Behind,
    told: Told,
    days: Annotated[int, Query(ge=0, le=36500, description="Days to look back, today included; 0 for all.")] = 30,
    namespace: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    price: Annotated[float, Query(ge=0, le=1e9, description="Money a million input tokens.")] = 0.0,
    cache_read: Annotated[float, Query(ge=0, le=1e3)] = 0.1,
    cache_write: Annotated[float, Query(ge=0, le=1e3)] = 1.25,
    ram_price: Annotated[float, Query(ge=0, le=1e9, description="Money a GB and month of memory.")] = 0.0,
    disk_price: Annotated[float, Query(ge=0, le=1e9, description="Money a GB and month of disk.")] = 0.0,
    prefill: Annotated[float | None, Query(gt=0, le=1e12, description="Tokens a second of a prefill.")] = None,
) -> dict[str, Any]:
    """Tokens and seconds of prefill that were not repeated, by namespace and day, and what the store cost."""
    prices = Prices(price, cache_read, cache_write, ram_price, disk_price)
    return await service.run(answer_savings, service.store, days, namespace, prices, prefill, told)


@routes.post("/plan")
async def plan(service: Behind, asked: models.PlanAsked) -> dict[str, Any]:
    """From a model's configuration and a machine: bytes a token, sessions that fit, when loading pays."""

    def work() -> dict[str, Any]:
        given = asked.model_dump(exclude={"model", "config"})
        if asked.config is not None:
            return {"model": None, **planned(asked.config, **given)}
        config = PUBLISHED.get((asked.model or "").lower())
        if config is None:
            raise NotFoundError("no model is known by this name", f"known are: {', '.join(PUBLISHED)}")
        return {"model": asked.model, **planned(config, **given)}

    return await service.run(work)
