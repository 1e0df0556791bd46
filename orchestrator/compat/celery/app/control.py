"""`app.control`: revoke tasks, and inspect workers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from orchestrator.compat.celery import outcomes
from orchestrator.compat.celery.exceptions import AttributeNotCovered, TaskError
from orchestrator.compat.celery.utils import to_id
from orchestrator.compat.coverage import CELERY, refused
from orchestrator.domain.dag.composed import PREFIX
from orchestrator.domain.fleet.announced import tasks_among
from orchestrator.domain.ids import derived_id, is_derived, tree_of
from orchestrator.domain.states import TaskState
from orchestrator.errors import NotFound, WrongState
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.sdk.values.payload import decode_call

_MAX_TASKS = 1_000
"""Tasks that one inspection lists, at most."""
_REFUSED = {
    **refused(CELERY.attributes),
    "time_limit": "Set time_limit on the task.",
    "rate_limit": "Set rate_limit on the task, or `orchestrator queues limit NAME --rate 10/s`.",
    "autoscale": "Start workers with --autoscale MIN,MAX.",
    "disable_events": "There are no events to disable.",
    "election": "Schedules and runs have one leader already.",
    "revoke_by_stamped_headers": "Give the tasks a tag or a run, and cancel that.",
}


_CREATION = 5.0
"""Seconds to wait until a part of a group has been created."""
_POLL = 0.05
_QUERIED = {TaskState.RUNNING: "active", TaskState.DISPATCHED: "reserved", TaskState.PENDING: "ready"}
"""Celery's terms for the states of open tasks."""


class Control:
    """Commands for tasks and workers."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            raise AttributeNotCovered(f"app.control.{name}", _REFUSED[name])
        raise AttributeError(name)

    @property
    def _calls(self) -> Any:
        self.app._configure()
        return self.app.orchestrator._client.backend

    def revoke(self, task_id: str | Iterable[str], destination: Any = None, terminate: bool = False, **_: Any) -> None:
        """Cancel tasks and compositions that have not started; with `terminate`, also running ones.

        Without `terminate`, the running tasks of a composition continue, and no further ones start.
        """
        for id_ in [task_id] if isinstance(task_id, str) else task_id:
            _revoke(self.app, id_, terminate=terminate)

    def terminate(self, task_id: str | Iterable[str], **kwargs: Any) -> None:
        """Cancel tasks, including running ones."""
        self.revoke(task_id, terminate=True, **kwargs)

    def ping(self, destination: Any = None, **_: Any) -> list[dict[str, Any]]:
        return [{name: {"ok": "pong"}} for name in self.inspect(destination).names()]

    def inspect(self, destination: Any = None, **_: Any) -> Inspect:
        return Inspect(self.app, destination)

    def purge(self, **_: Any) -> int:
        """Cancel all waiting tasks; return their number."""
        return sum(self._purge_queue(queue) for queue in self.app.orchestrator.queues())

    discard_all = purge

    def _purge_queue(self, queue: str) -> int:
        count: int = self._calls.queues.open_tasks(queue)
        self._calls.queues.purge(queue)
        return count

    def shutdown(self, destination: Any = None, **_: Any) -> None:
        for worker in {name.removeprefix("celery@") for name in self.inspect(destination).names()}:
            self._calls.fleet.drain(worker)

    def heartbeat(self, *_: Any, **__: Any) -> None:
        """Do nothing: workers send heartbeats every second."""


def _revoke(app: Any, task_id: str, *, terminate: bool) -> None:
    """Revoke a task, a whole composition, or a part of one. Unknown ids are ignored, as in Celery."""
    handle: Handle[Any] = Handle(app.orchestrator._client, to_id(task_id).bytes)
    until = time.monotonic() + _CREATION
    while True:
        with suppress(NotFound):
            state = handle.status()
            with suppress(WrongState):  # the task has ended
                if terminate or state != TaskState.RUNNING:
                    handle.cancel()
            return
        if _revoke_run(app, task_id, terminate=terminate) or not _is_to_be_created(app, handle._id):
            return
        if time.monotonic() >= until:
            raise TaskError(
                f"Task {task_id} was not revoked: the scheduler has not created it yet, as part of a large group or "
                f"because no scheduler runs. Revoke it again later, or revoke the whole group."
            )
        time.sleep(_POLL)


def _revoke_run(app: Any, task_id: str, *, terminate: bool) -> bool:
    """Revoke a composition. Return False if the id is not that of one."""
    client = app.orchestrator._client
    run = client.run_handle(to_id(task_id).bytes)
    try:
        run.status()
    except NotFound:
        run = outcomes.run_under(app, task_id)
    if run is not None:
        with suppress(WrongState):
            run.cancel() if terminate else client.backend.runs.withhold(run._id, None)
    return run is not None


def _is_to_be_created(app: Any, task: bytes) -> bool:
    """Return whether a task may be a part of an open group that is created soon. Revoke a later part of a chain."""
    from orchestrator.store.insights import RunFilter

    if not is_derived(task):
        return False
    backend, last = app.orchestrator._client.backend, UUID(bytes=tree_of(task) + b"\xff" * 10)
    found = backend.insights.page_of_runs(RunFilter(within=PREFIX), limit=_MAX_TASKS, before=last)
    runs = [run for run in found.runs if tree_of(run.id.bytes) == tree_of(task) and run.ended_at is None]
    for run in runs:
        definition = backend.insights.definition_of_run(run.id)
        for step in () if definition is None else definition.steps:
            if step.foreach is None and derived_id(run.id.bytes, step.name, 0) == task:
                backend.runs.withhold(run.id.bytes, step.name)
                return False
    return bool(runs)


class Inspect:
    """Information about workers, by worker name."""

    def __init__(self, app: Any, destination: Any = None) -> None:
        self.app = app
        self._destination = [destination] if isinstance(destination, str) else destination

    @property
    def _insights(self) -> Any:
        self.app._configure()
        return self.app.orchestrator._client.backend.insights

    def _workers(self) -> list[Any]:
        workers = [worker for worker in self._insights.list_workers() if worker.state not in ("dead", "stopped")]
        return [worker for worker in workers if self._destination is None or _name(worker) in self._destination]

    def names(self) -> list[str]:
        return list(dict.fromkeys(map(_name, self._workers())))

    def _by_worker(self, empty: Any) -> dict[str, Any] | None:
        return {name: empty() for name in self.names()} or None

    def ping(self, **_: Any) -> dict[str, Any] | None:
        return {name: {"ok": "pong"} for name in self.names()} or None

    def active(self, **_: Any) -> dict[str, Any] | None:
        return self._tasks(TaskState.RUNNING)

    def reserved(self, **_: Any) -> dict[str, Any] | None:
        """Return the tasks that were sent to workers and have not started."""
        return self._tasks(TaskState.DISPATCHED)

    def scheduled(self, **_: Any) -> dict[str, Any] | None:
        """Return the tasks with an eta, listed under the first worker: they wait in Postgres."""
        by_worker = self._by_worker(list)
        if by_worker is not None:
            by_worker[next(iter(by_worker))] = [
                {"eta": task.wake_at.isoformat(), "priority": task.priority, "request": self._request(task)}
                for task in self._list_tasks(TaskState.PENDING)
                if task.wake_at is not None
            ]
        return by_worker

    def _list_tasks(self, status: TaskState) -> list[Any]:
        from orchestrator.sdk.calls.insights import list_tasks
        from orchestrator.store.insights import TaskFilter

        return list_tasks(self._insights, TaskFilter(statuses=(status,)), limit=_MAX_TASKS).tasks

    def _tasks(self, status: TaskState) -> dict[str, Any] | None:
        by_worker = self._by_worker(list)
        names = {worker.id: _name(worker) for worker in self._workers()}
        if by_worker is not None:
            for task in self._list_tasks(status):
                name = names.get(task.worker or "") or (next(iter(by_worker)) if self._destination is None else None)
                if name is not None:
                    by_worker[name].append(self._request(task))
        return by_worker

    def _request(self, task: Any) -> dict[str, Any]:
        detail = self._insights.show_task(task.id)
        args, kwargs = ((), {}) if detail is None else decode_call(detail.payload)[:2]
        return {
            "id": str(task.id),
            "name": task.name,
            "args": list(args),
            "kwargs": {name: value for name, value in kwargs.items() if name != "_celery"},
            "type": task.name,
            "hostname": task.worker,
            "time_start": task.started_at.timestamp() if task.started_at else None,
            "acknowledged": True,
            "delivery_info": {
                "exchange": "",
                "routing_key": self.app._celery_queue(task.queue),
                "priority": task.priority,
                "redelivered": task.attempt > 1,
            },
            "worker_pid": None,
        }

    def registered(self, *attributes: str) -> dict[str, Any] | None:
        """Return the names of the tasks that workers have registered."""
        tasks: defaultdict[str, set[str]] = defaultdict(set)
        for worker in self._workers():
            tasks[_name(worker)].update(tasks_among(worker.names))
        return {name: [self._text(one, attributes) for one in sorted(names)] for name, names in tasks.items()} or None

    def _text(self, name: str, attributes: Sequence[str]) -> str:
        """Return the name of a task, with some of its attributes."""
        task = self.app.tasks.get(name)
        shown = [f"{one}={getattr(task, one, None) if one != 'name' else name}" for one in attributes]
        return f"{name} [{' '.join(shown)}]" if shown else name

    registered_tasks = registered

    def active_queues(self) -> dict[str, Any] | None:
        found: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for worker in self._workers():
            found[_name(worker)].update(dict.fromkeys(worker.queues))
        return {
            name: [{"name": self.app._celery_queue(queue), "routing_key": queue} for queue in queues]
            for name, queues in found.items()
        } or None

    def stats(self) -> dict[str, Any] | None:
        stats: dict[str, Any] = {}
        for worker in self._workers():
            stat = stats.setdefault(_name(worker), {"pid": worker.pid, "pool": {"max-concurrency": 0, "processes": []}})
            stat["pool"]["max-concurrency"] += worker.slots
            stat["pool"]["processes"].append(worker.pid)
            stat["uptime"] = worker.started_at.isoformat()
        return stats or None

    def conf(self, **_: Any) -> dict[str, Any] | None:
        """Return the settings of this program, for each worker."""
        return {name: dict(self.app.conf) for name in self.names()} or None

    def report(self) -> dict[str, Any] | None:
        """Return a one-line summary of each worker."""
        return {name: {"ok": f"{name}: {stats['pool']}"} for name, stats in (self.stats() or {}).items()} or None

    def revoked(self) -> dict[str, Any] | None:
        ended = [str(id_.id) for id_ in self._list_tasks(TaskState.CANCELLED)]
        return dict.fromkeys(self.names(), ended) or None

    def query_task(self, *ids: str) -> dict[str, Any] | None:
        task_ids = [id_ for item in ids for id_ in ([item] if isinstance(item, str) else item)]
        details = {id_: self._insights.show_task(to_id(id_)) for id_ in task_ids}
        states = {
            id_: [_QUERIED[detail.status], self._request(detail)]
            for id_, detail in details.items()
            if detail is not None and detail.status in _QUERIED
        }
        return dict.fromkeys(self.names(), states) or None

    def clock(self) -> dict[str, Any] | None:
        """Return a constant clock for each worker: Postgres orders events here."""
        return {name: {"clock": 0} for name in self.names()} or None


def _name(worker: Any) -> str:
    return f"celery@{worker.host}"
