"""What is said of jobs: their options, dependencies, states and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum
from typing import Any

from orchestrator.compat.rq.call import Callback, JobInfo, Repeat, Retry, function_name, parse_timeout, waits_of

Followed = Callback | Callable[..., Any] | str | None


class JobStatus(StrEnum):
    """Where a job stands."""

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
"""By the states of tasks; what is pending depends."""


class Dependency:
    """Jobs that must have ended before another starts."""

    def __init__(self, jobs: Any, allow_failure: bool = False, enqueue_at_front: bool = False) -> None:
        self.dependencies = list(jobs) if isinstance(jobs, (list, tuple)) else [jobs]
        if not self.dependencies:
            raise ValueError("jobs: cannot be empty.")
        self.allow_failure = allow_failure
        self.enqueue_at_front = enqueue_at_front


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a job has ended."""

    class Type(Enum):
        """Whether it succeeded."""

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
    failure_ttl: Any = None,  # the retention of the queue decides
    description: str | None = None,
    depends_on: Any = None,
    job_id: str | None = None,
    at_front: bool = False,
    meta: Mapping[str, Any] | None = None,
    retry: Retry | int | None = None,
    repeat: Repeat | int | None = None,
    on_success: Followed = None,
    on_failure: Followed = None,
    on_stopped: Followed = None,
) -> JobInfo:
    """Return what travels with a job that has these options of `enqueue_call`."""
    needed = depends_on if isinstance(depends_on, Dependency | None) else Dependency(depends_on)
    seconds = parse_timeout(timeout)
    return JobInfo(
        id=job_id,
        description=description,
        meta=dict(meta or {}),
        timeout=default_timeout if seconds is None else seconds,
        ttl=parse_timeout(ttl),
        result_ttl=parse_timeout(result_ttl),
        at_front=at_front or (needed is not None and needed.enqueue_at_front),
        waits=waits_of(retry),
        repeats=waits_of(repeat),
        success=None if on_success is None else function_name(on_success),
        failure=None if on_failure is None else function_name(on_failure),
        stopped=None if on_stopped is None else function_name(on_stopped),
        after=tuple(one if isinstance(one, str) else one.id for one in needed.dependencies) if needed else (),
        allow_failure=needed is not None and needed.allow_failure,
    )


OPTIONS = (*(job_info.__kwdefaults__ or ()),)
"""The names of these options."""
