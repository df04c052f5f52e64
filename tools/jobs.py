"""Work that outlasts a request: started, watched, cancelled. Must not know what the work is."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvstore.errors import BusyError, KVStoreError, NotFoundError
from kvstore.tools.wording import for_api

KEPT = 64
"""Jobs that are remembered after their end."""
WAIT_S = 5.0
"""How long the end of a server waits for jobs to stop."""


class Cancelled(Exception):
    """Raised inside a job's work when it should stop."""


@dataclass
class Job:
    """A piece of work. state: running, done, failed or cancelled. done, total: how far it is; total 0: not known yet.

    result: what it found, as plain values. problem: why it failed, and what to do.
    """

    kind: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "running"
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.time)
    ended: float | None = None
    result: dict[str, Any] | None = None
    problem: str | None = None
    stopping: bool = False

    def progress(self, done: int, total: int) -> None:
        """Note how far it is. Raises Cancelled when it should stop: to be called where stopping does no harm."""
        self.done, self.total = done, total
        if self.stopping:
            raise Cancelled

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        names = ("id", "kind", "state", "done", "total", "began", "ended", "result", "problem")
        return {name: getattr(self, name) for name in names}


Work: TypeAlias = Callable[[Job], dict[str, Any]]


class Jobs:
    """The jobs of a server. limits: how many of a kind may run at once."""

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, kind: str, work: Work) -> Job:
        """Start work in a thread. Raises BusyError past the limit of its kind."""
        running = sum(job.kind == kind and job.state == "running" for job in self._jobs.values())
        if running >= self._limits[kind]:
            raise BusyError(f"{running} jobs of the kind {kind} are running", "wait for one, or cancel it")
        job = Job(kind)
        self._jobs[job.id] = job
        for old in [one for one in self._jobs.values() if one.state != "running"][: max(0, len(self._jobs) - KEPT)]:
            del self._jobs[old.id]
        task = asyncio.get_running_loop().create_task(self._run(job, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def listing(self) -> list[Job]:
        """All that are known, the latest first."""
        return sorted(self._jobs.values(), key=lambda job: -job.began)

    def get(self, job_id: str) -> Job:
        """Raises NotFoundError."""
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFoundError("there is no such job", "GET /v1/jobs lists them; old ones are forgotten")
        return job

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop; one that has ended stays as it is. Raises NotFoundError."""
        job = self.get(job_id)
        job.stopping = True
        return job

    async def close(self) -> None:
        """Ask all to stop, and wait a while."""
        for job in self._jobs.values():
            job.stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=WAIT_S)

    async def _run(self, job: Job, work: Work) -> None:
        try:
            job.result = await asyncio.to_thread(work, job)
            job.state = "done"
        except Cancelled:
            job.state = "cancelled"
        except KVStoreError as error:
            job.state, job.problem = "failed", for_api(str(error))
        except Exception as error:  # noqa: BLE001  nobody waits for it, so it is told here
            job.state, job.problem = "failed", repr(error)
        finally:
            job.ended = time.time()
