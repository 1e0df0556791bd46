"""Queues, and the workers that take from them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST, Api, Done
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import QUEUE, WHOLE
from orchestrator.sdk.calls.fleet import Drained
from orchestrator.sdk.checks import check_name, check_rate, check_retention
from orchestrator.sdk.queue import refuse_unnamed

routes = Routes("queues", "/api/v1/queues")


class QueueLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a queue; null lifts a limit."""

    concurrency: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    """How many of its tasks may run at once."""
    rate: str | None = None
    """How often one may start: `10/s`, `100/minute`."""


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds for which a queue's tasks are kept; 0 is for ever, null as the settings say."""

    success: float | None = None
    failed: float | None = None


class QueueQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which queue may be meant."""

    new: bool = False
    """Accept a queue that no task, worker, workflow or setting has named yet."""


def _named(api: Api, name: str, query: QueueQuery | None = None) -> str:
    """Return the name of a queue that there is, or that is said to be `new`."""
    check_name("queue", name)
    if query is None or not query.new:
        refuse_unnamed(name, api.backend.queues.named(), if_new="" if query is None else "?new=true")
    return name


@routes.post("/{name}/pause", about=QUEUE)
def pause_queue(api: Api, name: str, query: QueueQuery) -> Done:
    """Hand out nothing more of a queue; what is with the workers goes on."""
    api.backend.queues.pause(_named(api, name, query), True)
    return Done("paused")


@routes.post("/{name}/resume", about=QUEUE)
def resume_queue(api: Api, name: str) -> Done:
    """Hand the tasks of a queue out again."""
    api.backend.queues.pause(_named(api, name), False)
    return Done("resumed")


@routes.put("/{name}/limits", about=QUEUE, examples=[{"concurrency": 10, "rate": "100/minute"}])
def limit_queue(api: Api, name: str, query: QueueQuery, body: QueueLimits) -> Done:
    """Set how many tasks of a queue may run at once, and how often one may start."""
    api.backend.queues.limit(_named(api, name, query), body.concurrency, check_rate("rate", body.rate))
    return Done("limited")


@routes.put("/{name}/retention", about=QUEUE, examples=[{"success": 3600, "failed": 604800}])
def retain_queue(api: Api, name: str, query: QueueQuery, body: Retention) -> Done:
    """Set how long the tasks of a queue are kept after they have ended."""
    success, failed = check_retention("success", body.success), check_retention("failed", body.failed)
    api.backend.queues.retain(_named(api, name, query), success, failed)
    return Done("retained")


@routes.post("/{name}/purge", about=QUEUE, status=202)
def purge_queue(api: Api, name: str) -> Done:
    """Cancel everything that waits in a queue now."""
    api.backend.queues.purge(_named(api, name))
    return Done("asked to purge")


worker_routes = Routes("workers", "/api/v1/workers")

WorkerName = Annotated[str, Meta(min_length=1, max_length=300, examples=["web1-812"])]


@worker_routes.post("/{id}/drain", about=WHOLE, status=202)
def drain_worker(api: Api, id: WorkerName) -> Drained:
    """Have a worker take nothing more, finish what it runs, and end, with all of its processes, as SIGTERM does.

    The id is that of one of its processes, the name of the worker (its host and the number of its parent process), or
    its host if no other worker is there. What starts again under that name is another worker, and goes on.
    """
    return api.backend.fleet.drain(id)
