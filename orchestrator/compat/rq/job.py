"""RQ's Job: access to a task by RQ's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from orchestrator.compat.coverage import RQ
from orchestrator.compat.rq.call import (
    STATUSES,
    Callback,
    Dependency,
    JobInfo,
    JobStatus,
    Repeat,
    Result,
    Retry,
    function_name,
    job_info,
    new_task,
    new_task_id,
    read_info,
    store,
    task_id,
)
from orchestrator.compat.rq.exceptions import DuplicateJobError, InvalidJobOperation, NoSuchJobError
from orchestrator.compat.rq.values import app, untagged
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask, NotFound, OrchestratorError, ResultTimeout, TaskEnded, WrongState
from orchestrator.sdk.tasks.context import TaskContext, current_runtime
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.sdk.values.payload import decode_call, decode_value

if TYPE_CHECKING:
    from orchestrator.store.insights import TaskDetail

__all__ = [
    "Callback",
    "Dependency",
    "Job",
    "JobStatus",
    "Repeat",
    "Result",
    "Retry",
    "cancel_job",
    "get_current_job",
    "requeue_job",
]

_MAX_META = 1_000
"""Characters of a running job's saved meta as JSON, at most."""


class Job:
    """A job. Its data is read on first access, and again by `refresh()`."""

    def __init__(
        self,
        task: UUID,
        name: str,
        origin: str,
        info: JobInfo,
        call: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
        detail: TaskDetail | None = None,
    ) -> None:
        self._task, self._name, self._info, self._call, self._detail = task, name, info, call, detail
        self._function: Callable[..., Any] | None = None
        """The function itself, if the job was created from it."""
        self._context: TaskContext | None = None
        """The context of the running attempt, inside the job."""
        self._status: JobStatus | None = None
        """A status known without a query: the job is not stored, was run locally, or was cancelled by this object."""
        self._local_result: Result | None = None
        self._meta: dict[str, Any] | None = None
        self.origin = origin
        """The name of the queue."""
        self.id = info.id or str(task)
        self.description = info.description or self.func_name
        self.timeout = info.timeout
        self.ttl = info.ttl
        self.result_ttl = info.result_ttl
        self.dependency_ids = list(info.after)
        self.allow_dependency_failures = info.allow_failure

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.func_name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other._task == self._task

    def __hash__(self) -> int:
        return hash(self._task)

    # -- creating and finding jobs

    @classmethod
    def create(
        cls,
        func: str | Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        connection: Any = None,
        id: str | None = None,
        origin: str = "default",
        default_timeout: int = 180,
        **options: Any,
    ) -> Job:
        """Return a job without storing it: `queue.enqueue_job(job)` stores it."""
        info = job_info(default_timeout, job_id=id, **options)
        job = cls(new_task_id(info), function_name(func), origin, info, (args or (), kwargs or {}))
        job._function = None if isinstance(func, str) else func
        job._status = JobStatus.CREATED
        return job

    @classmethod
    def fetch(cls, id: str, connection: Any = None, serializer: Any = None) -> Job:
        job = cls._find(id)
        if job is None:
            raise NoSuchJobError(f"No such job: {id}")
        return job

    @classmethod
    def fetch_many(cls, job_ids: Iterable[str], connection: Any = None, serializer: Any = None) -> list[Job | None]:
        """Return the jobs with these ids, and None for each that does not exist."""
        return [cls._find(id) for id in job_ids]

    @classmethod
    def exists(cls, job_id: str, connection: Any = None) -> bool:
        return cls._find(job_id) is not None

    @classmethod
    def _find(cls, id: str) -> Job | None:
        detail = app._client.backend.insights.show_task(task_id(id))
        if detail is None:
            return None
        return cls(detail.id, detail.name, detail.queue, read_info(detail.options.get("headers", {})), detail=detail)

    def _store(self, delay: float = 0.0, *, unique: bool = False) -> Job:
        """Store the job. Return the job, or the open job that has its id."""
        chosen = self._info.id is not None
        if chosen and current_runtime() is None and (other := self._find(self.id)) is not None:
            if unique or other._is_over:
                raise DuplicateJobError(
                    f"Job ID {self.id!r}: a job of that id {'has ended and is kept' if other._is_over else 'is open'}. "
                    f"Give each job its own id, or call requeue() of one that failed."
                )
            return other
        store(app, [self._as_task(delay)], chosen=chosen)
        self._status = None
        return self

    def _as_task(self, delay: float = 0.0) -> NewTask:
        call = self._arguments()
        return new_task(app, self._task, self._name, self.origin, *call, self._info, delay, self._function)

    # -- function and arguments

    @property
    def func_name(self) -> str:
        return self._name.replace(":", ".")

    @property
    def func(self) -> Any:
        """The job's function, imported in this process."""
        return resolve_name(self._name)

    def get_call_string(self) -> str:
        """Return the call as Python source. Long arguments are cut."""
        named = sorted(f"{name}={value!r:.75}" for name, value in self.kwargs.items())
        return f"{self.func_name}({', '.join([*(f'{value!r:.75}' for value in self.args), *named])})"

    def _arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if self._call is None:
            args, kwargs, *_ = untagged(decode_call(self._read().payload))
            self._call = tuple(args), kwargs
        return self._call

    @property
    def args(self) -> Sequence[Any]:
        """The positional arguments, as data."""
        return self._arguments()[0]

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments, as data."""
        return self._arguments()[1]

    # -- status

    def _read(self, refresh: bool = False) -> TaskDetail:
        if self._detail is None or (refresh and not self._is_over):
            self._detail = app._client.backend.insights.show_task(self._task)
        if self._detail is None:
            raise NoSuchJobError(f"No such job: {self.id}")
        return self._detail

    @property
    def _is_over(self) -> bool:
        return self._detail is not None and self._detail.status in ENDED_TASK_STATES

    def refresh(self) -> None:
        self._meta = self._detail = None
        self._read()

    def get_status(self, refresh: bool = True) -> JobStatus:
        if self._status is not None:
            return self._status
        if self._context is not None:
            return JobStatus.STARTED
        detail = self._read(refresh)
        if not self._is_over and any(state not in ENDED_TASK_STATES for state in self._dependency_states()):
            return JobStatus.DEFERRED
        if detail.status != "pending":
            return STATUSES[detail.status]
        is_later = detail.hold is None and detail.wake_at is not None and detail.wake_at > datetime.now(UTC)
        return JobStatus.SCHEDULED if is_later else JobStatus.QUEUED

    is_finished = property(lambda self: self.get_status() is JobStatus.FINISHED)
    is_failed = property(lambda self: self.get_status() is JobStatus.FAILED)
    is_queued = property(lambda self: self.get_status() is JobStatus.QUEUED)
    is_started = property(lambda self: self.get_status() is JobStatus.STARTED)
    is_deferred = property(lambda self: self.get_status() is JobStatus.DEFERRED)
    is_canceled = property(lambda self: self.get_status() is JobStatus.CANCELED)
    is_scheduled = property(lambda self: self.get_status() is JobStatus.SCHEDULED)
    is_stopped = property(lambda self: self.get_status() is JobStatus.STOPPED)
    created_at = enqueued_at = property(lambda self: self._read().created_at)
    started_at = property(lambda self: self._read(refresh=True).started_at)
    ended_at = property(lambda self: self._read(refresh=True).ended_at)
    worker_name = property(lambda self: self._read(refresh=True).worker)
    retries_left = property(lambda self: max(0, len(self._info.waits) - self._read(refresh=True).failures))

    # -- results

    def return_value(self, refresh: bool = False) -> Any:
        """Return the job's result, or None if the job has not succeeded."""
        if self._local_result is not None:
            return self._local_result.return_value
        detail = self._read(refresh=True)
        if detail.status != "success" or detail.result is None:
            return None
        return untagged(decode_value(detail.result))

    result = property(return_value)

    @property
    def exc_info(self) -> str | None:
        if self._local_result is not None:
            return self._local_result.exc_string
        error = self._read(refresh=True).error
        return None if error is None else error.traceback or f"{error.kind}: {error.message}"

    def latest_result(self, timeout: float = 0) -> Result | None:
        """Return the outcome of the job, waiting up to `timeout` seconds for it, or None."""
        if self._local_result is not None:
            return self._local_result
        if timeout and not self._is_over:
            with suppress(TaskEnded, ResultTimeout):
                Handle(app._client, self._task.bytes).result(timeout)
        status = self.get_status()
        if status not in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELED):
            return None
        types = {JobStatus.FINISHED: Result.Type.SUCCESSFUL, JobStatus.FAILED: Result.Type.FAILED}
        return Result(
            type=types.get(status, Result.Type.STOPPED),
            job_id=self.id,
            return_value=self.return_value(),
            exc_string=self.exc_info,
            created_at=self.ended_at,
        )

    def results(self) -> list[Result]:
        """Return the outcome of the job as a list. Results of earlier attempts are not kept."""
        result = self.latest_result()
        return [] if result is None else [result]

    # -- meta

    @property
    def meta(self) -> dict[str, Any]:
        """Data set by the program and the running job. `save_meta()` inside the job makes changes visible."""
        if self._meta is None:
            self._meta = self._saved_meta() or dict(self._info.meta)
        return self._meta

    def _saved_meta(self) -> dict[str, Any] | None:
        if self._context is not None:
            return dict(self._context.details) if isinstance(self._context.details, dict) else None
        saved = app._client.backend.tasks.progress(self._task.bytes) if self._status is None else None
        return msgspec.json.decode(saved.text) if saved is not None and saved.text.startswith("{") else None

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:
        """Return the meta, read again."""
        if refresh and self._context is None:
            self._meta = None
        return self.meta

    def save_meta(self) -> None:
        """Save the meta of the running job, for other programs and for its next attempt."""
        if self._context is None:
            raise InvalidJobOperation(
                f"Job {self.id}: only the running job can save its meta. Give it with enqueue(…, meta=…)."
            )
        text = msgspec.json.encode(self.meta).decode()
        if len(text) > _MAX_META:
            raise InvalidTask(
                f"Job {self.id}: its meta has {len(text):,} characters as JSON, and {_MAX_META:,} can be saved. "
                f"Keep large data elsewhere, and a reference here."
            )
        self._context.heartbeat(self.meta)
        share = self.meta.get("progress")
        fraction = float(share) if isinstance(share, (int, float)) and 0 <= share <= 100 else 0.0
        self._context.progress(fraction if fraction <= 1 else fraction / 100, text)

    save = save_meta

    # -- dependencies

    def fetch_dependencies(self) -> list[Job]:
        return [job for job in Job.fetch_many(self.dependency_ids) if job is not None]

    @property
    def dependency(self) -> Job | None:
        return next(iter(self.fetch_dependencies()), None)

    def _dependency_states(self) -> list[str]:
        """Return the states of the jobs that this job depends on. Jobs no longer stored count as successful."""
        states = []
        for id in self.dependency_ids:
            try:
                states.append(app._client.backend.tasks.status(task_id(id).bytes))
            except NotFound:
                states.append("success")
        return states

    # -- requests

    def cancel(self, pipeline: Any = None, enqueue_dependents: bool = False) -> None:
        """Cancel the job. A running job is stopped."""
        self._request(Handle.cancel)
        self._status = JobStatus.CANCELED

    def requeue(self, at_front: bool = False) -> Job:
        self._request(Handle.retry)
        self._detail = self._status = None
        return self

    def _request(self, request: Callable[[Handle[Any]], None]) -> None:
        try:
            request(Handle(app._client, self._task.bytes))
        except (WrongState, NotFound) as error:
            raise InvalidJobOperation(str(error)) from error

    def delete(self, pipeline: Any = None, remove_from_queue: bool = True, delete_dependents: bool = False) -> None:
        """Cancel the job if it is open. An ended job stays for the retention time of ended tasks."""
        if self._read(refresh=True).status not in ENDED_TASK_STATES:
            self.cancel()

    def __getattr__(self, name: str) -> Any:
        if name in RQ.attributes:
            raise OrchestratorError(f"Job.{name} is not covered: {RQ.attributes[name].note}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_current: ContextVar[Job | None] = ContextVar("orchestrator_rq_job", default=None)


def get_current_job(connection: Any = None, job_class: Any = None) -> Job | None:
    """Return the job that is running the current code, or None outside of jobs."""
    return _current.get()


def cancel_job(job_id: str, connection: Any = None, serializer: Any = None, enqueue_dependents: bool = False) -> None:
    Job.fetch(job_id).cancel()


def requeue_job(job_id: str, connection: Any = None, serializer: Any = None) -> Job:
    """Run a failed job again."""
    return Job.fetch(job_id).requeue()
