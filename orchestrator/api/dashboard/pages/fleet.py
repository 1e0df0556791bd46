from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.charts import hour, outline
from orchestrator.api.dashboard.list_notes import progress_of, task_calls, task_errors
from orchestrator.api.dashboard.pages.overview import read_is_led, read_marks, read_queues
from orchestrator.api.dashboard.rendering import page, pages, visitor
from orchestrator.api.key_scope import QUEUE, WHOLE, WITHIN
from orchestrator.api.routes import system
from orchestrator.api.routes import tasks as task_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import TaskState
from orchestrator.errors import NotFound
from orchestrator.monitoring.exposition import SECONDS
from orchestrator.sdk.queue import refuse_unnamed
from orchestrator.store.insights import TaskView, WorkerView, empty_queue, longest_waits, minutes_of_worker, slowest
from orchestrator.store.limits.queues import of_workflows
from orchestrator.store.throughput import Throughput

routes = pages("/ui/workers")

_MAX_TASKS = 500
_MAX_NAMED = 3
"""Tasks of a worker that the list names."""
_GONE = ("dead", "stopped")


@routes.get("", about=WHOLE)
def list_workers(api: Api) -> Response:
    """Show the fleet."""
    is_led = read_is_led(api)
    workers = _read_workers(api, is_led=is_led)
    present = [worker for worker in workers if worker.state not in _GONE]
    running = _running(api)
    parents = {worker.parent: worker.parent_memory or 0 for worker in present}
    return page(
        "workers.html",
        workers=workers,
        running=running,
        done=progress_of(api, (task for tasks in running.values() for task in tasks[:_MAX_NAMED])),
        sizes=Counter(worker.parent for worker in present),
        first={worker.parent: worker.id for worker in reversed(present)},
        memory=sum(worker.memory or 0 for worker in present) + sum(parents.values()),
        overview=api.recent.get(("overview",), 1.0, lambda: system.status(api)),
        is_led=is_led,
    )


def _read_workers(api: Api, *, is_led: bool) -> list[WorkerView]:
    """Return the workers. Without a leader that hears them, their last known state is shown as `unheard`."""
    found = api.backend.insights.list_workers()
    if is_led:
        return found
    return [worker if worker.state in _GONE else replace(worker, state="unheard") for worker in found]


def _running(api: Api) -> dict[str, list[TaskView]]:
    """Return the tasks in flight, by worker."""
    query = task_routes.TaskQuery(statuses=(TaskState.RUNNING, TaskState.DISPATCHED), limit=_MAX_TASKS)
    running: dict[str, list[TaskView]] = {}
    for task in task_routes.list_tasks(api, query, KeyScope()).items:
        if task.worker is not None:
            running.setdefault(task.worker, []).append(task)
    return running


@routes.get("/{worker}", about=WHOLE)
def show_worker(api: Api, worker: str) -> Response:
    """Show one worker process: its tasks, and its throughput in the last hour."""
    found = next(
        (candidate for candidate in _read_workers(api, is_led=read_is_led(api)) if candidate.id == worker), None
    )
    if found is None:
        raise NotFound(f"There is no worker {worker!r:.140}: workers that ended a while ago are no longer listed.")
    now = datetime.now(UTC)
    since = now.replace(second=0, microsecond=0) - timedelta(minutes=59)
    minutes = api.recent.get(
        ("minutes", worker), 5.0, lambda: api.read_list(minutes_of_worker, worker, since, tuple(SECONDS))
    )
    running = _running(api).get(worker, [])
    return page(
        "worker.html",
        worker=found,
        running=running,
        calls=task_calls(api, running),
        done=progress_of(api, running),
        marks=read_marks(api, KeyScope(), since),
        hour=hour(minutes, now),
        slow=api.recent.get(("slowest of", worker), 5.0, lambda: api.read_list(slowest, since, worker=worker)),
    )


queue_routes = pages("/ui/queues")


@queue_routes.get("", about=WITHIN)
def list_queues(api: Api, key_scope: KeyScope) -> Response:
    """Show every queue."""
    now = datetime.now(UTC)
    by_queue: dict[str, list[Throughput]] = {}
    for bucket in system.read_minutes(api, key_scope, each=True):
        by_queue.setdefault(bucket.queue, []).append(bucket)
    hours = {queue: outline(found, now) for queue, found in by_queue.items()}
    return page("queues.html", queues=read_queues(api, key_scope), hours=hours, is_led=read_is_led(api))


@queue_routes.get("/{name}", about=QUEUE)
def show_queue(api: Api, name: str) -> Response:
    """Show one queue: its counts, its limits, and its tasks."""
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
        calls=task_calls(api, listed.items),
        errors=task_errors(api, listed.items),
        slow=api.recent.get(("slowest", name), 5.0, lambda: api.read_list(slowest, since, queue=name)),
        waits=api.recent.get(("waits", name), 2.0, lambda: api.read(longest_waits, queue)),
    )


def _has_ended_tasks(api: Api, name: str, key_scope: KeyScope) -> bool:
    return bool(task_routes.list_tasks(api, task_routes.TaskQuery(queue=name, limit=1), key_scope).items)
