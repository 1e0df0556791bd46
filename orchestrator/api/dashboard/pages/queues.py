"""Queues: their tasks, limits and last hour; what runs and waits longest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.charts import hour, outline
from orchestrator.api.dashboard.pages.overview import read_is_led, read_marks, read_queues
from orchestrator.api.dashboard.rendering import page, pages, visitor
from orchestrator.api.key_scope import QUEUE, WITHIN
from orchestrator.api.routes import system
from orchestrator.api.routes import tasks as task_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import TaskState
from orchestrator.sdk.queue import refuse_unnamed
from orchestrator.store.insights import empty_queue, longest_waits, slowest
from orchestrator.store.limits.queues import of_workflows
from orchestrator.store.throughput import Throughput

routes = pages("/ui/queues")


@routes.get("", about=WITHIN)
def list_queues(api: Api, key_scope: KeyScope) -> Response:
    """Show every queue."""
    now = datetime.now(UTC)
    by_queue: dict[str, list[Throughput]] = {}
    for bucket in system.read_minutes(api, key_scope, each=True):
        by_queue.setdefault(bucket.queue, []).append(bucket)
    hours = {queue: outline(found, now) for queue, found in by_queue.items()}
    return page("queues.html", queues=read_queues(api, key_scope), hours=hours, is_led=read_is_led(api))


@routes.get("/{name}", about=QUEUE)
def show_queue(api: Api, name: str) -> Response:
    """Show one queue: its numbers, its limits, and what stands in it."""
    key_scope = visitor().key_scope
    queues = read_queues(api, key_scope)
    found = next((queue for queue in queues if queue.queue == name), None)
    open_states = (TaskState.RUNNING, TaskState.DISPATCHED, TaskState.PENDING)
    listed = task_routes.list_tasks(api, task_routes.TaskQuery(queue=name, statuses=open_states, limit=20), key_scope)
    minutes = system.read_minutes(api, key_scope, name)
    if found is None and not (minutes or listed.items or _has_ended_tasks(api, name, key_scope)):
        refuse_unnamed(name, {queue.queue for queue in queues} | api.read(of_workflows), if_new="")
    queue, now = found or empty_queue(name), datetime.now(UTC)
    since = now - timedelta(hours=1)
    return page(
        "queue.html",
        name=name,
        queue=queue,
        is_led=read_is_led(api),
        hour=hour(minutes, now),
        marks=read_marks(api, key_scope, hour(minutes, now).begin),
        tasks=listed.items,
        slow=api.recent.get(("slowest", name), 5.0, lambda: api.read_list(slowest, since, queue=name)),
        waits=api.recent.get(("waits", name), 2.0, lambda: api.read(longest_waits, queue)),
    )


def _has_ended_tasks(api: Api, name: str, key_scope: KeyScope) -> bool:
    return bool(task_routes.list_tasks(api, task_routes.TaskQuery(queue=name, limit=1), key_scope).items)
