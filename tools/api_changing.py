"""Routes that change a store, and jobs: pin, unpin, evict, quotas, TTLs, prefetch, verify. All need the token.

Must not know how any of it is done.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path

from kvstore.identity import Tokens as Ids
from kvstore.match import Match, Namespace
from kvstore.store import Store
from kvstore.tools import answers, naming
from kvstore.tools import api_given as given
from kvstore.tools import api_models as models
from kvstore.tools.api_access import WITH_TOKEN, Behind
from kvstore.tools.jobs import Cancelled, Job
from kvstore.tools.problems import RESPONSES
from kvstore.tools.service import Service

routes = APIRouter(prefix="/v1", responses=RESPONSES, dependencies=WITH_TOKEN, tags=["change"])

JobId = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]
POLL_S = 0.05


def chosen(store: Store, asked: models.Chosen) -> tuple[Namespace, Ids]:
    """The prefix that a body names. Raises NotFoundError, AmbiguousError, TokenError."""
    uses = naming.namespaces_for(store, asked.namespace, asked.salt)
    if asked.tokens is not None:
        return naming.by_ids(store, asked.tokens, uses)
    return naming.by_name(store, asked.name or asked.key or "", uses)


def _twice(service: Service, asked: models.Counted) -> tuple[dict[str, Any], str]:
    """What a body asks for, and the same as a text that a dry run and what follows share. Raises NotFoundError."""
    said = asked.model_dump(exclude={"dry_run", "confirm"})
    same = json.dumps([type(asked).__name__, said], sort_keys=True)
    if not asked.dry_run:
        service.redeem(asked.confirm or "", same)
    return said, same


@routes.post("/pin", response_model=given.PinnedGiven)
async def pin(service: Behind, asked: models.PinAsked) -> dict[str, Any]:
    """Name a stored prefix, and keep its blocks from eviction in every tier and process, across restarts."""

    def work() -> dict[str, Any]:
        space, ids = chosen(service.store, asked)
        return answers.pin(
            service.store,
            asked.pin_as,
            space,
            ids,
            priority=asked.priority,
            ttl=asked.ttl,
            partial=asked.partial,
        )

    return await service.run(work)


@routes.post("/unpin", response_model=given.UnpinnedGiven)
async def unpin(service: Behind, asked: models.UnpinAsked) -> dict[str, Any]:
    """Forget a name and its pin; the blocks stay, and may be evicted like any others."""
    return await service.run(answers.unpin, service.store, asked.name)


@routes.post("/evict", response_model=given.EvictedGiven)
async def evict(service: Behind, asked: models.EvictAsked) -> dict[str, Any]:
    """Evict, in every process. First a dry run, which counts and answers a ``confirm``; then the same with it."""
    said, same = _twice(service, asked)

    def work() -> dict[str, Any]:
        target = answers.eviction_target(service.store, **said)
        would = answers.eviction_counted(service.store, target, asked.tier)
        if asked.dry_run:
            return would
        done = answers.evict(service.store, target, asked.tier)
        service.catalogue.forget()
        return {**would, "blocks": done}

    told = await service.run(work)
    confirm = service.promise(same) if asked.dry_run else None
    return {"dry_run": asked.dry_run, "evicted": not asked.dry_run, **told, "confirm": confirm}


@routes.post("/quota", response_model=given.QuotaChanged)
async def quota(service: Behind, asked: models.QuotaAsked) -> dict[str, Any]:
    """What a salt may hold in a tier; lowering it evicts down to it. First a dry run, as with evict.

    With neither ``ram`` nor ``nvme``, only told.
    """
    said, same = _twice(service, asked)
    told = await service.run(answers.set_quota, service.store, **said, dry_run=asked.dry_run)
    service.catalogue.forget()
    return {**told, "confirm": service.promise(same) if asked.dry_run else None}


@routes.post("/namespace", response_model=given.NamespaceGiven)
async def namespace(service: Behind, asked: models.NamespaceAsked) -> dict[str, Any]:
    """Set a namespace's TTL, or take it off; without one, only told."""
    return await service.run(answers.set_ttl, service.store, asked.namespace, asked.ttl)


@routes.post("/drop-empty", response_model=given.DroppedGiven)
async def drop_empty(service: Behind, asked: models.DropAsked) -> dict[str, Any]:
    """Forget namespaces without blocks and names; a dry run lists them."""
    return await service.run(answers.drop_empty, service.store, asked.dry_run)


@routes.post("/prefetch", response_model=given.JobGiven, status_code=202)
async def prefetch(service: Behind, asked: models.PrefetchAsked) -> dict[str, Any]:
    """Bring a prefix up to ``ram``, as a job; done and total are tokens.

    ``hbm`` is a device's memory, and only its engine's own process can fill it; it does when it loads, from ``ram``.
    """

    def find() -> Match:
        return service.store.match(*chosen(service.store, asked))

    match = await service.run(find)

    def work(job: Job) -> dict[str, Any]:
        running = service.store.prefetch(match, deadline_s=asked.deadline_s)
        try:
            while not running.wait(POLL_S):
                job.progress(running.tokens, match.tokens)
        except Cancelled:
            running.cancel()
            running.wait(10)
            raise
        job.progress(running.tokens, match.tokens)
        return {"tier": asked.tier, "tokens": running.tokens, "asked": match.tokens}

    return service.jobs.start("prefetch", work).to_dict()


@routes.post("/verify", response_model=given.JobGiven, status_code=202)
async def verify(service: Behind, asked: models.VerifyAsked) -> dict[str, Any]:
    """Check index, slots, counters and checksums, as a job; done and total are blocks."""

    def work(job: Job) -> dict[str, Any]:
        began = time.monotonic()
        report = service.store.verify(payloads=not asked.books_only, repair=asked.repair, progress=job.progress)
        return {**answers.verified(report), "seconds": round(time.monotonic() - began, 3)}

    return service.jobs.start("verify", work).to_dict()


@routes.get("/jobs", response_model=given.JobsGiven)
async def jobs(service: Behind) -> dict[str, Any]:
    """Jobs under way and ended ones, the latest first."""
    return {"jobs": [job.to_dict() for job in service.jobs.listing()]}


@routes.get("/jobs/{job}", response_model=given.JobGiven)
async def job(service: Behind, job: JobId) -> dict[str, Any]:
    """One job: how far it is, what it found."""
    return service.jobs.get(job).to_dict()


@routes.delete("/jobs/{job}", response_model=given.JobGiven)
async def cancel(service: Behind, job: JobId) -> dict[str, Any]:
    """Ask a job to stop. It stops where that does no harm; what it has done stays done."""
    return service.jobs.cancel(job).to_dict()
