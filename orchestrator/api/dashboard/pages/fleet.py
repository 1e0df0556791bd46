"""Workers, and the tasks that each of them runs."""

from __future__ import annotations

from collections import Counter

from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import WHOLE
from orchestrator.api.routes import system
from orchestrator.api.routes import tasks as task_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import TaskState
from orchestrator.store.insights import TaskView

routes = pages("/ui/workers")

_MOST_TASKS = 500
_GONE = ("dead", "stopped")


@routes.get("", about=WHOLE)
def list_workers(api: Api) -> Response:
    """Show the fleet."""
    query = task_routes.TaskQuery(statuses=(TaskState.RUNNING, TaskState.DISPATCHED), limit=_MOST_TASKS)
    running: dict[str, list[TaskView]] = {}
    for task in task_routes.list_tasks(api, query, KeyScope()).items:
        if task.worker is not None:
            running.setdefault(task.worker, []).append(task)
    workers = api.backend.insights.list_workers()
    there = [worker for worker in workers if worker.state not in _GONE]
    parents = {worker.parent: worker.parent_memory or 0 for worker in there}
    return page(
        "workers.html",
        workers=workers,
        running=running,
        sizes=Counter(worker.parent for worker in there),
        first={worker.parent: worker.id for worker in reversed(there)},
        memory=sum(worker.memory or 0 for worker in there) + sum(parents.values()),
        overview=api.recent.get(("overview",), 1.0, lambda: system.status(api)),
    )
