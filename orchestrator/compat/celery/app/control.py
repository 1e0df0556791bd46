"""`app.control`: revoke tasks, and look at workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from orchestrator.compat.celery.exceptions import AttributeNotCovered
from orchestrator.compat.celery.utils import to_id
from orchestrator.compat.coverage import CELERY, refused
from orchestrator.domain.states import TaskState
from orchestrator.errors import NotFound, WrongState
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.sdk.values.payload import decode_call

_MOST = 1_000
"""Tasks that one look shows."""
_REFUSED = {
    **refused(CELERY.attributes),
    "time_limit": "Set time_limit on the task.",
    "rate_limit": "Set rate_limit on the task, or `orchestrator queues limit NAME --rate 10/s`.",
    "autoscale": "Start workers with --autoscale MIN,MAX.",
    "disable_events": "Nothing is to be disabled.",
    "election": "Schedules and runs have one leader already.",
    "revoke_by_stamped_headers": "Give the tasks a tag or a run, and cancel that.",
}


_QUERIED = {TaskState.RUNNING: "active", TaskState.DISPATCHED: "reserved", TaskState.PENDING: "ready"}
"""Celery's words for tasks that have not ended."""


class Control:
    """Commands about tasks and workers."""

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
        """Cancel tasks that have not begun; with `terminate`, also those that run."""
        for one in [task_id] if isinstance(task_id, str) else task_id:
            _revoke(self.app, one, terminate=terminate)

    def terminate(self, task_id: str | Iterable[str], **kwargs: Any) -> None:
        """Cancel tasks, also those that run."""
        self.revoke(task_id, terminate=True, **kwargs)

    def ping(self, destination: Any = None, **_: Any) -> list[dict[str, Any]]:
        return [{name: {"ok": "pong"}} for name in self.inspect(destination).names()]

    def inspect(self, destination: Any = None, **_: Any) -> Inspect:
        return Inspect(self.app, destination)

    def purge(self, **_: Any) -> int:
        """Cancel all that waits; return how many tasks that were."""
        return sum(self._purged(queue) for queue in self.app.orchestrator.queues())

    discard_all = purge

    def _purged(self, queue: str) -> int:
        count: int = self._calls.queues.open_tasks(queue)
        self._calls.queues.purge(queue)
        return count

    def shutdown(self, destination: Any = None, **_: Any) -> None:
        for worker in {name.removeprefix("celery@") for name in self.inspect(destination).names()}:
            self._calls.fleet.drain(worker)

    def heartbeat(self, *_: Any, **__: Any) -> None:
        """Do nothing: workers beat each second."""


def _revoke(app: Any, task_id: str, *, terminate: bool) -> None:
    client = app.orchestrator._client
    handle: Handle[Any] = Handle(client, to_id(task_id).bytes)
    try:
        state = handle.status()
    except NotFound:
        with suppress(NotFound, WrongState):
            client.run_handle(to_id(task_id).bytes).cancel()
        return
    with suppress(WrongState):  # it has ended
        if terminate or state != TaskState.RUNNING:
            handle.cancel()


class Inspect:
    """What workers do, by their names."""

    def __init__(self, app: Any, destination: Any = None) -> None:
        self.app = app
        self._wanted = [destination] if isinstance(destination, str) else destination

    @property
    def _insights(self) -> Any:
        self.app._configure()
        return self.app.orchestrator._client.backend.insights

    def _workers(self) -> list[Any]:
        found = [worker for worker in self._insights.list_workers() if worker.state not in ("dead", "stopped")]
        return [worker for worker in found if self._wanted is None or _name(worker) in self._wanted]

    def names(self) -> list[str]:
        return list(dict.fromkeys(map(_name, self._workers())))

    def _by_worker(self, empty: Any) -> dict[str, Any] | None:
        return {name: empty() for name in self.names()} or None

    def ping(self, **_: Any) -> dict[str, Any] | None:
        return {name: {"ok": "pong"} for name in self.names()} or None

    def active(self, **_: Any) -> dict[str, Any] | None:
        return self._tasks(TaskState.RUNNING)

    def reserved(self, **_: Any) -> dict[str, Any] | None:
        """Return the tasks that were sent to workers and have not begun."""
        return self._tasks(TaskState.DISPATCHED)

    def scheduled(self, **_: Any) -> dict[str, Any] | None:
        """Return the tasks that wait for their time; they wait in Postgres, and are listed with the first worker."""
        found = self._by_worker(list)
        if found is not None:
            found[next(iter(found))] = [
                {"eta": one.wake_at.isoformat(), "priority": one.priority, "request": self._request(one)}
                for one in self._listed(TaskState.PENDING)
                if one.wake_at is not None
            ]
        return found

    def _listed(self, status: TaskState) -> list[Any]:
        from orchestrator.sdk.calls.insights import list_tasks
        from orchestrator.store.insights import TaskFilter

        return list_tasks(self._insights, TaskFilter(statuses=(status,)), limit=_MOST).tasks

    def _tasks(self, status: TaskState) -> dict[str, Any] | None:
        found = self._by_worker(list)
        names = {worker.id: _name(worker) for worker in self._workers()}
        if found is not None:
            for one in self._listed(status):
                name = names.get(one.worker or "") or (next(iter(found)) if self._wanted is None else None)
                if name is not None:
                    found[name].append(self._request(one))
        return found

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

    def registered(self, *wanted: str) -> dict[str, Any] | None:
        """Return the names of the tasks that workers have."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for worker in self._workers():
            found[_name(worker)].update(one for one in worker.names if "@" not in one)
        return {name: [self._told(one, wanted) for one in sorted(names)] for name, names in found.items()} or None

    def _told(self, name: str, wanted: Sequence[str]) -> str:
        """Return the name of a task, with some of its attributes."""
        task = self.app.tasks.get(name)
        told = [f"{one}={getattr(task, one, None) if one != 'name' else name}" for one in wanted]
        return f"{name} [{' '.join(told)}]" if told else name

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
        found: dict[str, Any] = {}
        for worker in self._workers():
            one = found.setdefault(_name(worker), {"pid": worker.pid, "pool": {"max-concurrency": 0, "processes": []}})
            one["pool"]["max-concurrency"] += worker.slots
            one["pool"]["processes"].append(worker.pid)
            one["uptime"] = worker.started_at.isoformat()
        return found or None

    def conf(self, **_: Any) -> dict[str, Any] | None:
        """Return the settings of this program, for each worker."""
        return {name: dict(self.app.conf) for name in self.names()} or None

    def report(self) -> dict[str, Any] | None:
        """Return how workers are doing, in a line."""
        return {name: {"ok": f"{name}: {one['pool']}"} for name, one in (self.stats() or {}).items()} or None

    def revoked(self) -> dict[str, Any] | None:
        ended = [str(one.id) for one in self._listed(TaskState.CANCELLED)]
        return dict.fromkeys(self.names(), ended) or None

    def query_task(self, *ids: str) -> dict[str, Any] | None:
        given = [one for item in ids for one in ([item] if isinstance(item, str) else item)]
        details = {one: self._insights.show_task(to_id(one)) for one in given}
        shown = {
            one: [_QUERIED[detail.status], self._request(detail)]
            for one, detail in details.items()
            if detail is not None and detail.status in _QUERIED
        }
        return dict.fromkeys(self.names(), shown) or None

    def clock(self) -> dict[str, Any] | None:
        """Return a clock for each worker, which stands still: order is that of Postgres."""
        return {name: {"clock": 0} for name in self.names()} or None


def _name(worker: Any) -> str:
    return f"celery@{worker.host}"
