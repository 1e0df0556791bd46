"""RQ's Queue."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pkgutil import resolve_name
from typing import Any, NamedTuple

from orchestrator.compat.rq import registry
from orchestrator.compat.rq.application import app
from orchestrator.compat.rq.call import DEFAULT_TIMEOUT, parse_timeout, store
from orchestrator.compat.rq.job import Job
from orchestrator.compat.rq.options import OPTIONS, JobStatus, Result
from orchestrator.compat.rq.performing import run_job
from orchestrator.compat.rq.values import untagged
from orchestrator.domain.states import TaskState
from orchestrator.errors import InvalidTask
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.sdk.tasks.signature import Signature

Function = str | Callable[..., Any]
_IN_CALLS = ({*OPTIONS} - {"timeout"}) | {"unique"}
"""Options among the arguments of a function; its timeout is called job_timeout there."""
_REFUSED = {
    "webhooks": "Post from the job, or use the webhook of a workflow.",
    "pipeline": "A job is durable when enqueue returns: use enqueue_many for all or none.",
}


class Prepared(NamedTuple):
    """A call for `enqueue_many`."""

    func: Function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]


class Queue:
    """A queue. The connection is not used: settings say where Postgres and Redis are."""

    DEFAULT_TIMEOUT = DEFAULT_TIMEOUT

    def __init__(
        self,
        name: str = "default",
        connection: Any = None,
        default_timeout: float | str | None = None,
        is_async: bool = True,
        job_class: Any = None,
        serializer: Any = None,
        **_: Any,
    ) -> None:
        self.name = check_name("queue", name)
        self.connection = connection
        self.is_async = is_async
        self._default_timeout = parse_timeout(default_timeout) or self.DEFAULT_TIMEOUT
        if job_class is not None and job_class is not Job:
            raise InvalidTask(f"Queue {name!r}: a job_class of your own is not covered; found {job_class!r:.100}.")

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Queue) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    # -- enqueueing

    def enqueue(self, f: Function, *args: Any, **kwargs: Any) -> Job:
        """Have a worker run a function: `enqueue(send, "ann@example.com", job_timeout=30)`."""
        return self._enqueue(*_parse(f, args, kwargs))

    def enqueue_call(
        self,
        func: Function,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Job:
        """Do the same with the arguments apart from the options."""
        return self._enqueue(func, args or (), kwargs or {}, options)

    def enqueue_at(self, datetime: datetime, f: Function, *args: Any, **kwargs: Any) -> Job:
        """Do the same at a time; one without a zone is in UTC."""
        return self._enqueue(*_parse(f, args, kwargs), delay=seconds_until(datetime))

    def enqueue_in(self, time_delta: timedelta, func: Function, *args: Any, **kwargs: Any) -> Job:
        return self._enqueue(*_parse(func, args, kwargs), delay=time_delta.total_seconds())

    @staticmethod
    def prepare_data(
        func: Function, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Prepared:
        """Return a call for `enqueue_many`."""
        return Prepared(func, args or (), kwargs or {}, options)

    def enqueue_many(self, job_datas: Iterable[Prepared], pipeline: Any = None, group_id: Any = None) -> list[Job]:
        """Enqueue any number of calls in one transaction: all of them or none."""
        jobs = [self._created(*one) for one in job_datas]
        store(app, [job._as_task() for job in jobs], chosen=any(job._info.id for job in jobs))
        for job in jobs:
            job._status = None
        return jobs

    def enqueue_job(self, job: Job, pipeline: Any = None, at_front: bool = False) -> Job:
        """Store a job of `Job.create` in this queue."""
        job.origin = self.name
        return job._store() if self.is_async else _run_here(job)

    def _enqueue(
        self,
        func: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        delay: float = 0.0,
    ) -> Job:
        job = self._created(func, args, kwargs, options)
        return job._store(delay, unique=options.get("unique", False)) if self.is_async else _run_here(job)

    def _created(
        self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Job:
        for name in _REFUSED.keys() & options.keys():
            if options[name] is not None:
                raise InvalidTask(f"Option {name} of RQ is not covered. {_REFUSED[name]}")
        given = {name: value for name, value in options.items() if name not in _REFUSED and name != "unique"}
        given["id"] = given.pop("job_id", None)
        return Job.create(func, args, kwargs, origin=self.name, default_timeout=self._default_timeout, **given)

    # -- what is in it

    @classmethod
    def all(cls, connection: Any = None, **_: Any) -> list[Queue]:
        """Return every queue that has open jobs, workers or settings."""
        return [cls(counts.queue) for counts in app._client.backend.insights.list_queues()]

    def get_job_ids(self, offset: int = 0, length: int = -1) -> list[str]:
        """Return the ids of the jobs that wait for a worker, the oldest first, of 10,000 at most."""
        waiting = [
            task
            for task in registry.tasks_in(self.name, TaskState.PENDING, TaskState.DISPATCHED)
            if task.wake_at is None or task.hold is not None
        ]
        return [registry.job_id(task) for task in waiting[offset : None if length < 0 else offset + length]]

    def get_jobs(self, offset: int = 0, length: int = -1) -> list[Job]:
        return [job for job in Job.fetch_many(self.get_job_ids(offset, length)) if job is not None]

    job_ids = property(get_job_ids)
    jobs = property(get_jobs)
    count = property(lambda self: len(self.get_job_ids()))

    def __len__(self) -> int:
        return len(self.get_job_ids())

    def __bool__(self) -> bool:
        return True

    def is_empty(self) -> bool:
        return not self.get_job_ids()

    def fetch_job(self, job_id: str) -> Job | None:
        """Return the job of that id, if it is of this queue."""
        job = Job._find(job_id)
        return job if job is not None and job.origin == self.name else None

    def empty(self) -> None:
        app.queue(self.name).purge()

    def delete(self, delete_jobs: bool = True) -> None:
        """Cancel all that waits in it: a queue is there while it has jobs, workers or settings."""
        if delete_jobs:
            self.empty()

    def remove(self, job_or_id: Job | str, pipeline: Any = None) -> None:
        (Job.fetch(job_or_id) if isinstance(job_or_id, str) else job_or_id).cancel()

    started_job_registry = property(lambda self: registry.StartedJobRegistry(queue=self))
    finished_job_registry = property(lambda self: registry.FinishedJobRegistry(queue=self))
    failed_job_registry = property(lambda self: registry.FailedJobRegistry(queue=self))
    scheduled_job_registry = property(lambda self: registry.ScheduledJobRegistry(queue=self))
    deferred_job_registry = property(lambda self: registry.DeferredJobRegistry(queue=self))
    canceled_job_registry = property(lambda self: registry.CanceledJobRegistry(queue=self))


def seconds_until(moment: datetime) -> float:
    """Return how long it is until a time, which is in UTC if it has no zone."""
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


def _parse(
    function: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Function, Sequence[Any], Mapping[str, Any], dict[str, Any]]:
    """Take apart the options of RQ and the arguments of the function, as RQ does."""
    options = {name: kwargs.pop(name) for name in (*_IN_CALLS, *_REFUSED) if name in kwargs}
    options["timeout"] = kwargs.pop("job_timeout", None)
    if "args" in kwargs or "kwargs" in kwargs:
        if args:
            raise InvalidTask("Extra positional arguments cannot be used when using explicit args and kwargs.")
        args, kwargs = kwargs.pop("args", None) or (), kwargs.pop("kwargs", None) or {}
    return function, args, kwargs, options


def _run_here(job: Job) -> Job:
    """Run a job of a queue with `is_async=False`; its failure is the job's."""
    try:
        context = TaskContext(task_id=job._task, task_name=job._name, queue=job.origin)
        data = run_job(job, context, job.func, Signature(job._name, job.func), resolve_name)
    except Exception:  # noqa: BLE001  # whatever it raises
        job._status = JobStatus.FAILED
        job._here = Result(type=Result.Type.FAILED, job_id=job.id, exc_string=traceback.format_exc())
    else:
        job._status = JobStatus.FINISHED
        job._here = Result(type=Result.Type.SUCCESSFUL, job_id=job.id, return_value=untagged(data))
    return job
