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
from orchestrator.compat.rq.exceptions import InvalidJobDependency, JobTimeoutException
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
_CALL_OPTIONS = ({*OPTIONS} - {"timeout"}) | {"unique"}
"""Options that a call passes among the function's arguments; there, the timeout is called `job_timeout`."""
_REFUSED = {
    "webhooks": "Post from the job, or use the webhook of a workflow.",
    "pipeline": "A job is durable when enqueue returns: use enqueue_many for all or none.",
}


class Prepared(NamedTuple):
    """A call prepared for `enqueue_many`."""

    func: Function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]


class Queue:
    """A queue. `connection` is ignored: settings configure Postgres and Redis."""

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
        """Enqueue a call of a function: `enqueue(send, "ann@example.com", job_timeout=30)`."""
        return self._enqueue(*_parse(f, args, kwargs))

    def enqueue_call(
        self, func: Function, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Job:
        """Enqueue a call, with the arguments separate from the options."""
        return self._enqueue(func, args or (), kwargs or {}, options)

    def enqueue_at(self, datetime: datetime, f: Function, *args: Any, **kwargs: Any) -> Job:
        """Enqueue a call that runs at a time. A time without a zone is in UTC."""
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
        """Enqueue any number of calls in one transaction: all or none."""
        jobs = [self._create_job(*prepared) for prepared in job_datas]
        store(app, [job._as_task() for job in jobs], chosen=any(job._info.id for job in jobs))
        for job in jobs:
            job._status = None
        return jobs

    def enqueue_job(self, job: Job, pipeline: Any = None, at_front: bool = False) -> Job:
        """Store a job made by `Job.create` in this queue."""
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
        job = self._create_job(func, args, kwargs, options)
        return job._store(delay, unique=options.get("unique", False)) if self.is_async else _run_here(job)

    def _create_job(
        self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Job:
        for name in _REFUSED.keys() & options.keys():
            if options[name] is not None:
                raise InvalidTask(f"Option {name} of RQ is not covered. {_REFUSED[name]}")
        job_options = {name: value for name, value in options.items() if name not in _REFUSED and name != "unique"}
        job_options["id"] = job_options.pop("job_id", None)
        return Job.create(func, args, kwargs, origin=self.name, default_timeout=self._default_timeout, **job_options)

    # -- jobs of the queue

    @classmethod
    def all(cls, connection: Any = None, **_: Any) -> list[Queue]:
        """Return all queues that have open jobs, workers or settings."""
        return [cls(counts.queue) for counts in app._client.backend.insights.list_queues()]

    def get_job_ids(self, offset: int = 0, length: int = -1) -> list[str]:
        """Return the ids of the jobs that wait for a worker, the oldest first, out of the first 10,000."""
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
        """Return the job with this id, if it belongs to this queue."""
        job = Job._find(job_id)
        return job if job is not None and job.origin == self.name else None

    def empty(self) -> None:
        app.queue(self.name).purge()

    def delete(self, delete_jobs: bool = True) -> None:
        """Cancel all waiting jobs. The queue exists while it has jobs, workers or settings."""
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
    """Return the seconds until a time. A time without a zone is in UTC."""
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


def _parse(
    function: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Function, Sequence[Any], Mapping[str, Any], dict[str, Any]]:
    """Separate the options of RQ from the arguments of the function, as RQ does."""
    options = {name: kwargs.pop(name) for name in (*_CALL_OPTIONS, *_REFUSED) if name in kwargs}
    options["timeout"] = kwargs.pop("job_timeout", None)
    if "args" in kwargs or "kwargs" in kwargs:
        if args:
            raise InvalidTask("Extra positional arguments cannot be used when using explicit args and kwargs.")
        args, kwargs = kwargs.pop("args", None) or (), kwargs.pop("kwargs", None) or {}
    return function, args, kwargs, options


def _run_here(job: Job) -> Job:
    """Run a job of a queue with `is_async=False`. An error is recorded as the job's failure."""
    try:
        context = TaskContext(task_id=job._task, task_name=job._name, queue=job.origin)
        data = run_job(job, context, job.func, Signature(job._name, job.func), resolve_name)
    except Exception:  # noqa: BLE001  # any error of the job
        job._status = JobStatus.FAILED
        job._local_result = Result(type=Result.Type.FAILED, job_id=job.id, exc_string=traceback.format_exc())
    else:
        job._status = JobStatus.FINISHED
        job._local_result = Result(type=Result.Type.SUCCESSFUL, job_id=job.id, return_value=untagged(data))
    return job


Find = Callable[[str], Any]
_MAX_DEPENDENCY_WAIT = 15.0
"""Maximum seconds between two checks of the jobs that a job depends on."""


def perform(function: Callable[..., Any], find: Find) -> Callable[..., Any]:
    """Return a function that runs a job. `find` looks up callbacks, which the worker must allow as well."""
    name = function_name(function)
    signature = Signature(name, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        context = current_task() or TaskContext(task_name=name)
        job = Job(context.task_id, name, context.queue, read_info(context.headers), untagged((args, kwargs)))
        _await_dependencies(job, context)
        return run_job(job, context, function, signature, find)

    call._interruptions = {TaskTimeout: JobTimeoutException}  # type: ignore[attr-defined]
    return call


def run_job(job: Job, context: TaskContext, function: Callable[..., Any], signature: Signature, find: Find) -> Any:
    """Run a job in an attempt, with its callbacks. Return its result as data."""
    job._context, info, token = context, job._info, _current.set(job)
    if info.stopped or info.failure:
        _running[job._task] = job, find
        if not any(isinstance(hooks, _EndCallbacks) for hooks in app.middleware):
            app.middleware.add(_EndCallbacks())
    try:
        keywords = signature.pick(job.kwargs) if context.workflow_name else dict(job.kwargs)
        arguments, keywords = signature.restore(list(job.args), keywords)
        if signature.wants_context:
            signature.add_context(context, arguments, keywords)
        value = function(*arguments, **keywords)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if isinstance(value, Retry):
            raise _retry_error(value, context)
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
"""Running jobs with end callbacks that have not been called."""


class _EndCallbacks(Middleware):
    """Calls end callbacks of jobs whose code blocks, so that their process is replaced after a cancel or timeout."""

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        job, find = _running.pop(ctx.task_id, (None, None))
        if job is None or find is None:
            return
        if end.outcome == "cancelled" and job._info.stopped:
            _callback(find, job._info.stopped)(job, None)
        elif end.error is not None and end.error.kind == type_name(TaskTimeout) and job._info.failure:
            error = JobTimeoutException(end.error.message)
            _callback(find, job._info.failure)(job, None, JobTimeoutException, error, None)


def _callback(find: Find, name: str) -> Callable[..., Any]:
    function = find(name)
    if function is None:
        raise InvalidTask(f"Callback {name} is not among the functions that this worker allows (--allow).")
    callback: Callable[..., Any] = function
    return callback


def _await_dependencies(job: Job, context: TaskContext) -> None:
    """Hand the job back while jobs that it depends on are open. Fail it if one of those has not succeeded."""
    if not job.dependency_ids:
        return
    try:
        states = job._dependency_states()
    except ConfigurationError as error:
        raise GiveUp(
            f"Job {job.id} depends on other jobs, and its worker cannot check them: {error} Give workers "
            "ORCHESTRATOR_DATABASE_URL or ORCHESTRATOR_API_URL."
        ) from error
    if any(state not in ENDED_TASK_STATES for state in states):
        raise RetryLater(min(_MAX_DEPENDENCY_WAIT, 0.2 * 1.3 ** min(context.attempt, 30)))
    if not job.allow_dependency_failures and any(state != "success" for state in states):
        missing = [id for id, state in zip(job.dependency_ids, states, strict=True) if state != "success"]
        raise InvalidJobDependency(f"Job {job.id} depends on {', '.join(missing)}, which did not succeed.")


def _retry_error(policy: Retry, context: TaskContext) -> Exception:
    """Return the error that retries a job which has returned a Retry, or GiveUp if no retry is left."""
    waits = waits_of(policy)
    if context.attempt > len(waits):
        return GiveUp(f"The job returned a Retry in attempt {context.attempt}, and may have {len(waits)} retries.")
    return RetryLater(waits[context.attempt - 1])


def _repeat(job: Job) -> None:
    """Enqueue the next repetition as a new job, which exists only if this job succeeds."""
    runtime = current_runtime()
    if runtime is None:
        return  # the job ran in the process that enqueued it
    wait, *rest = job._info.repeats
    info = msgspec.structs.replace(job._info, id=None, repeats=tuple(rest), after=())
    next_task = new_task(app, new_task_id(info), job._name, job.origin, job.args, job.kwargs, info, delay=wait)
    runtime.enqueue_on_success([next_task])


RQApplication.perform = staticmethod(perform)
