"""Queues and workers: pause, limit, purge and drain."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.api.context import MAX_INT, Api, Done
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import QUEUE, WHOLE
from orchestrator.sdk.calls.fleet import Drained
from orchestrator.sdk.checks import check_name, check_rate, check_retention
from orchestrator.sdk.queue import refuse_unnamed

routes = Routes("queues", "/api/v1/queues")


class QueueLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a queue; null lifts a limit."""

    concurrency: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """Tasks of the queue that may run at once."""
    rate: str | None = None
    """The rate of starts: `10/s`, `100/minute`."""


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds for which ended tasks of a queue are kept; 0 means forever, null the default of the settings."""

    success: float | None = None
    failed: float | None = None


class QueueQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the queue may be new."""

    new: bool = False
    """Accept a queue that no task, worker, workflow or setting has named yet."""


def _existing(api: Api, name: str, query: QueueQuery | None = None) -> str:
    """Check that a queue exists, or is declared as `new`; return its name."""
    check_name("queue", name)
    if query is None or not query.new:
        refuse_unnamed(name, api.backend.queues.named(), if_new="" if query is None else "?new=true")
    return name


@routes.post("/{name}/pause", about=QUEUE)
def pause_queue(api: Api, name: str, query: QueueQuery) -> Done:
    """Pause a queue: no more of its tasks are dispatched; tasks that workers already have continue."""
    api.backend.queues.pause(_existing(api, name, query), True)
    return Done("paused")


@routes.post("/{name}/resume", about=QUEUE)
def resume_queue(api: Api, name: str) -> Done:
    """Resume a queue."""
    api.backend.queues.pause(_existing(api, name), False)
    return Done("resumed")


@routes.put("/{name}/limits", about=QUEUE, examples=[{"concurrency": 10, "rate": "100/minute"}])
def limit_queue(api: Api, name: str, query: QueueQuery, body: QueueLimits) -> Done:
    """Set how many tasks of a queue may run at once, and their rate of starts."""
    api.backend.queues.limit(_existing(api, name, query), body.concurrency, check_rate("rate", body.rate))
    return Done("limited")


@routes.put("/{name}/retention", about=QUEUE, examples=[{"success": 3600, "failed": 604800}])
def retain_queue(api: Api, name: str, query: QueueQuery, body: Retention) -> Done:
    """Set how long ended tasks of a queue are kept."""
    success, failed = check_retention("success", body.success), check_retention("failed", body.failed)
    api.backend.queues.retain(_existing(api, name, query), success, failed)
    return Done("retained")


@routes.post("/{name}/purge", about=QUEUE, status=202)
def purge_queue(api: Api, name: str) -> Done:
    """Cancel all tasks that wait in a queue now."""
    api.backend.queues.purge(_existing(api, name))
    return Done("asked to purge")


worker_routes = Routes("workers", "/api/v1/workers")

WorkerName = Annotated[str, Meta(min_length=1, max_length=300, examples=["web1-812"])]


@worker_routes.post("/{id}/drain", about=WHOLE, status=202)
def drain_worker(api: Api, id: WorkerName) -> Drained:
    """Drain a worker, like SIGTERM: it takes no more tasks, finishes those it runs, and ends all its processes.

    The id is that of one of its processes, the worker's name (its host and the number of its parent process), or its
    host if no other worker is there. A worker that starts later under the same name is not drained.
    """
    return api.backend.fleet.drain(id)
