"""RQ's Queue."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pkgutil import resolve_name
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from orchestrator.compat.rq import registry
from orchestrator.compat.rq.call import (
    DEFAULT_TIMEOUT,
    OPTIONS,
    JobStatus,
    Result,
    Retry,
    function_name,
    new_task,
    new_task_id,
    parse_timeout,
    read_info,
    store,
    waits_of,
)
from orchestrator.compat.rq.exceptions import InvalidJobDependency
from orchestrator.compat.rq.job import Job, _current
from orchestrator.compat.rq.values import RQApplication, app, tagged, untagged
from orchestrator.domain.states import ENDED_TASK_STATES, TaskState
from orchestrator.errors import ConfigurationError, GiveUp, InvalidTask, RetryLater, TaskAborted, TaskTimeout
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.middleware import AttemptEnd, Middleware
from orchestrator.sdk.names import type_name
from orchestrator.sdk.tasks.context import TaskContext, current_runtime, current_task
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
        self, func: Function, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
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


Find = Callable[[str], Any]
_LONGEST_WAIT = 15.0
"""Seconds between two looks at the jobs that one depends on."""


def perform(function: Callable[..., Any], find: Find) -> Callable[..., Any]:
    """Return a function that runs a job; `find` finds callbacks, which the worker must allow as well."""
    name = function_name(function)
    signature = Signature(name, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        context = current_task() or TaskContext(task_name=name)
        job = Job(context.task_id, name, context.queue, read_info(context.headers), untagged((args, kwargs)))
        _await_dependencies(job, context)
        return run_job(job, context, function, signature, find)

    return call


def run_job(job: Job, context: TaskContext, function: Callable[..., Any], signature: Signature, find: Find) -> Any:
    """Run a job in an attempt, with its callbacks; return its result as data."""
    job._context, info, token = context, job._info, _current.set(job)
    if info.stopped or info.failure:
        _running[job._task] = job, find
        if not any(isinstance(one, _Ends) for one in app.middleware):
            app.middleware.add(_Ends())
    try:
        keywords = signature.pick(job.kwargs) if context.workflow_name else dict(job.kwargs)
        arguments, keywords = signature.restore(list(job.args), keywords)
        if signature.wants_context:
            signature.add_context(context, arguments, keywords)
        value = function(*arguments, **keywords)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if isinstance(value, Retry):
            raise _later(value, context)
        data = None if info.result_ttl == 0 else tagged(value)
        if info.success is not None:
            _callback(find, info.success)(job, None, value)
        if info.repeats:
            _repeat(job)
        return data
    except RetryLater:
        raise
    except TaskAborted:
        if info.stopped and _running.pop(job._task, None):
            _callback(find, info.stopped)(job, None)
        raise
    except Exception:
        if info.failure and _running.pop(job._task, None):
            _callback(find, info.failure)(job, None, *sys.exc_info())
        raise
    finally:
        _current.reset(token)
        _running.pop(job._task, None)


_running: dict[UUID, tuple[Job, Find]] = {}
"""Jobs that run here and have callbacks for their end, which have not been called."""


class _Ends(Middleware):
    """Calls what a job cannot whose code blocks: its process is replaced after a cancel or timeout."""

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        job, find = _running.pop(ctx.task_id, (None, None))
        if job is None or find is None:
            return
        if end.outcome == "cancelled" and job._info.stopped:
            _callback(find, job._info.stopped)(job, None)
        elif end.error is not None and end.error.kind == type_name(TaskTimeout) and job._info.failure:
            _callback(find, job._info.failure)(job, None, TaskTimeout, TaskTimeout(end.error.message), None)


def _callback(find: Find, name: str) -> Callable[..., Any]:
    found = find(name)
    if found is None:
        raise InvalidTask(f"Callback {name} is not among the functions that this worker allows (--allow).")
    called: Callable[..., Any] = found
    return called


def _await_dependencies(job: Job, context: TaskContext) -> None:
    """Hand the job back while others that it depends on are open; fail it if one of them has not succeeded."""
    if not job.dependency_ids:
        return
    try:
        states = job._dependency_states()
    except ConfigurationError as error:
        raise GiveUp(
            f"Job {job.id} depends on others, and its worker cannot look at them: {error} Give workers "
            f"ORCHESTRATOR_DATABASE_URL or ORCHESTRATOR_API_URL."
        ) from error
    if any(state not in ENDED_TASK_STATES for state in states):
        raise RetryLater(min(_LONGEST_WAIT, 0.2 * 1.3 ** min(context.attempt, 30)))
    if not job.allow_dependency_failures and any(state != "success" for state in states):
        missing = [one for one, state in zip(job.dependency_ids, states, strict=True) if state != "success"]
        raise InvalidJobDependency(f"Job {job.id} depends on {', '.join(missing)}, which did not succeed.")


def _later(policy: Retry, context: TaskContext) -> Exception:
    """Return what makes a job run again that returned a Retry, as often as that says."""
    waits = waits_of(policy)
    if context.attempt > len(waits):
        return GiveUp(f"The job returned a Retry in attempt {context.attempt}, and may have {len(waits)} retries.")
    return RetryLater(waits[context.attempt - 1])


def _repeat(job: Job) -> None:
    """Let the job run again: as a new job, which exists if this one succeeds."""
    runtime = current_runtime()
    if runtime is None:
        return  # it was run where it was enqueued
    wait, *rest = job._info.repeats
    info = msgspec.structs.replace(job._info, id=None, repeats=tuple(rest), after=())
    again = new_task(app, new_task_id(info), job._name, job.origin, job.args, job.kwargs, info, delay=wait)
    runtime.enqueue_on_success([again])


RQApplication.perform = staticmethod(perform)
