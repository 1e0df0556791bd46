"""Calls of jobs as tasks. RQ's job data beside function and arguments travels in a header of the task.

The task is named `module:function`, so that a worker runs it if its operator has allowed the module (`--allow`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec

from orchestrator.compat.rq import values
from orchestrator.compat.rq.exceptions import TimeoutFormatError
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.tasks.context import current_runtime
from orchestrator.sdk.tasks.retry import Retry as NativeRetry

HEADER = "rq"
DEFAULT_TIMEOUT = 180
"""Default timeout of a job in seconds, as in RQ."""
_CALLBACK_TIMEOUT = 60
_FRONT_PRIORITY = 1
"""Priority of a job enqueued with `at_front`."""
_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


class Retry:
    """The retries of a failed job, and the seconds before each."""

    def __init__(self, max: int, interval: int | Iterable[int] = 0, enqueue_at_front: bool = False) -> None:
        if max < 1:
            raise ValueError("max: please enter a value greater than 0")
        self.max = max
        self.intervals = _intervals(interval)
        self.enqueue_at_front = enqueue_at_front


class Repeat:
    """The repetitions of a successful job, and the seconds before each."""

    def __init__(self, times: int, interval: int | Iterable[int] = 0) -> None:
        if times < 1:
            raise ValueError("times: please enter a value greater than 0")
        self.times = times
        self.intervals = _intervals(interval)


class Callback:
    """A function, or its import path, to call after a job."""

    def __init__(self, func: str | Callable[..., Any], timeout: Any = None) -> None:
        self.func = func
        self.timeout = parse_timeout(timeout) if timeout else _CALLBACK_TIMEOUT

    @property
    def name(self) -> str:
        return self.func if isinstance(self.func, str) else f"{self.func.__module__}.{self.func.__qualname__}"


class JobInfo(msgspec.Struct, omit_defaults=True, frozen=True):
    """RQ's data of a job beside its function and arguments."""

    id: str | None = None
    """The id chosen by the program; None for the task's own id."""
    description: str | None = None
    meta: dict[str, Any] = {}
    timeout: int = DEFAULT_TIMEOUT
    """Seconds; -1 for no limit."""
    ttl: int | None = None
    result_ttl: int | None = None
    at_front: bool = False
    waits: tuple[int, ...] = ()
    """Seconds before each retry."""
    repeats: tuple[int, ...] = ()
    """Seconds before each remaining repetition."""
    success: str | None = None
    failure: str | None = None
    stopped: str | None = None
    """The three callbacks, as `module:function`."""
    after: tuple[str, ...] = ()
    """The ids of the jobs that this job depends on."""
    allow_failure: bool = False


def read_info(headers: Mapping[str, str]) -> JobInfo:
    """Return the job data in a task's headers, or defaults if the task is no job."""
    return msgspec.json.decode(headers[HEADER], type=JobInfo) if HEADER in headers else JobInfo()


def task_id(job_id: str) -> UUID:
    """Return the task id of a job. If the job id is no UUID, the task id is derived from it."""
    try:
        return UUID(job_id)
    except ValueError:
        return uuid5(NAMESPACE_OID, f"rq:{job_id}")


def new_task_id(info: JobInfo) -> UUID:
    if info.id is not None:
        return task_id(info.id)
    runtime = current_runtime()
    return UUID(bytes=new_id() if runtime is None else runtime.next_id())


def function_name(function: str | Callable[..., Any] | Callback) -> str:
    """Return the task name for a function, `module:function`. Only functions of modules have one."""
    if isinstance(function, Callback):
        function = function.func
    if isinstance(function, str):
        module, _, name = function.replace(":", ".").rpartition(".")
    elif inspect.isfunction(function):
        module, name = function.__module__, function.__qualname__
    else:
        raise InvalidTask(
            f"Job {function!r:.100}: expected a function of a module, or its import path. A worker imports it by name, "
            f"and does not unpickle objects: write a function that makes the object."
        )
    if module == "__main__":
        raise ValueError("Functions from the __main__ module cannot be processed by workers")
    if not module or not name.isidentifier() or name.startswith("_"):
        raise InvalidTask(
            f"Job {module}.{name}: expected a public function at the top of a module, because a worker finds it "
            "by its name. Methods, lambdas and inner functions cannot be found by name."
        )
    return f"{module}:{name}"


def new_task(
    app: Orchestrator,
    identifier: UUID,
    name: str,
    queue: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    info: JobInfo,
    delay: float = 0.0,
    function: Callable[..., Any] | None = None,
) -> NewTask:
    args, kwargs = values.tagged_call(name, function, args, kwargs, app.settings.largest_value)
    options: dict[str, Any] = {"queue": queue, "headers": {HEADER: msgspec.json.encode(info).decode()}}
    if info.timeout > 0:
        options["timeout"] = info.timeout
    if info.waits:
        options["retries"] = NativeRetry(backoff=info.waits, jitter=0)
    if info.ttl is not None:
        options["expires"] = info.ttl + max(0.0, delay)
    if info.at_front:
        options["priority"] = _FRONT_PRIORITY
    if info.result_ttl == 0:
        options["store_result"] = False
    if delay > 0:
        options["delay"] = delay
    task = call_by_name(app.settings, name, args, kwargs, options=options, queue=queue)
    return msgspec.structs.replace(task, id=identifier.bytes)


def store(app: Orchestrator, tasks: Sequence[NewTask], *, chosen: bool = False) -> None:
    """Store tasks, all or none. Inside a job, the scheduler stores them. Tasks with `chosen` ids may exist already."""
    runtime = current_runtime()
    if runtime is not None:
        runtime.enqueue(tasks)
    elif tasks:
        app._client.backend.tasks.enqueue_many(tasks, repeated=chosen)


def waits_of(policy: Retry | Repeat | int | None) -> tuple[int, ...]:
    """Return the seconds before each retry or repetition. The last interval is used for the remaining ones."""
    if policy is None:
        return ()
    if isinstance(policy, int):
        return (0,) * policy
    count = policy.max if isinstance(policy, Retry) else policy.times
    return (*policy.intervals, *[policy.intervals[-1]] * count)[:count]


def parse_timeout(timeout: float | str | None) -> int | None:
    """Return a timeout in seconds, from a number or a text such as `1h`."""
    try:
        return None if timeout is None else int(timeout)
    except ValueError:
        text = str(timeout)
        if text[:-1].isdigit() and text[-1].lower() in _UNITS:
            return int(text[:-1]) * _UNITS[text[-1].lower()]
        raise TimeoutFormatError(
            f"Timeout: expected seconds, or digits and a unit, d, h, m or s, such as 1h; found {timeout!r}."
        ) from None


def _intervals(interval: int | Iterable[int]) -> list[int]:
    intervals = [interval] if isinstance(interval, int) else list(interval)
    if any(seconds < 0 for seconds in intervals):
        raise ValueError("interval: negative numbers are not allowed")
    return intervals or [0]


CallbackOption = Callback | Callable[..., Any] | str | None


class JobStatus(StrEnum):
    """The states of RQ's jobs."""

    CREATED = "created"
    QUEUED = "queued"
    FINISHED = "finished"
    FAILED = "failed"
    STARTED = "started"
    DEFERRED = "deferred"
    SCHEDULED = "scheduled"
    STOPPED = "stopped"
    CANCELED = "canceled"


STATUSES = {
    "dispatched": JobStatus.QUEUED,
    "running": JobStatus.STARTED,
    "success": JobStatus.FINISHED,
    "failed": JobStatus.FAILED,
    "cancelled": JobStatus.CANCELED,
    "skipped": JobStatus.CANCELED,
}
"""Job states by task state. The state of a pending task needs more information."""


class Dependency:
    """Jobs that must end before another job starts."""

    def __init__(self, jobs: Any, allow_failure: bool = False, enqueue_at_front: bool = False) -> None:
        self.dependencies = list(jobs) if isinstance(jobs, (list, tuple)) else [jobs]
        if not self.dependencies:
            raise ValueError("jobs: cannot be empty.")
        self.allow_failure = allow_failure
        self.enqueue_at_front = enqueue_at_front


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a job."""

    class Type(Enum):
        """Kinds of outcomes."""

        SUCCESSFUL = 1
        FAILED = 2
        STOPPED = 3

    type: Type
    job_id: str
    return_value: Any = None
    exc_string: str | None = None
    created_at: datetime | None = None


def job_info(
    default_timeout: int,
    *,
    timeout: float | str | None = None,
    result_ttl: float | str | None = None,
    ttl: float | str | None = None,
    failure_ttl: Any = None,  # the retention of the queue applies
    description: str | None = None,
    depends_on: Any = None,
    job_id: str | None = None,
    at_front: bool = False,
    meta: Mapping[str, Any] | None = None,
    retry: Retry | int | None = None,
    repeat: Repeat | int | None = None,
    on_success: CallbackOption = None,
    on_failure: CallbackOption = None,
    on_stopped: CallbackOption = None,
) -> JobInfo:
    """Return the job data for these options of `enqueue_call`."""
    dependency = depends_on if isinstance(depends_on, Dependency | None) else Dependency(depends_on)
    seconds = parse_timeout(timeout)
    return JobInfo(
        id=job_id,
        description=description,
        meta=dict(meta or {}),
        timeout=default_timeout if seconds is None else seconds,
        ttl=parse_timeout(ttl),
        result_ttl=parse_timeout(result_ttl),
        at_front=at_front or (dependency is not None and dependency.enqueue_at_front),
        waits=waits_of(retry),
        repeats=waits_of(repeat),
        success=None if on_success is None else function_name(on_success),
        failure=None if on_failure is None else function_name(on_failure),
        stopped=None if on_stopped is None else function_name(on_stopped),
        after=tuple(job if isinstance(job, str) else job.id for job in dependency.dependencies) if dependency else (),
        allow_failure=dependency is not None and dependency.allow_failure,
    )


OPTIONS = (*(job_info.__kwdefaults__ or ()),)
"""The names of the options of `job_info`."""
