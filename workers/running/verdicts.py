"""What becomes of an attempt that its code did not end as it should."""

from __future__ import annotations

import time

from orchestrator.domain.tasks.retry import is_worth_retrying
from orchestrator.domain.tasks.task import Returned, Succeeded
from orchestrator.errors import GiveUp, InvalidTask, PayloadError, TaskTimeout
from orchestrator.sdk.names import also_called, type_names
from orchestrator.workers.running.job import Job

_KINDS_OF_TIMEOUT = type_names(TaskTimeout())
RETURN_DELAY = 0.5
"""Seconds before a task is tried again that a worker has handed back."""


def may_be_retried(job: Job, error: BaseException) -> bool:
    if isinstance(error, (InvalidTask, PayloadError)) and not in_own_code(error):
        return False  # the same arguments will not fit next time either
    if isinstance(error, GiveUp):
        return False
    policy = job.options.retry
    named = also_called(error, (*policy.on, *policy.give_up_on))
    return is_worth_retrying(policy, type_names(error) | named)


def retries_timeouts(job: Job) -> bool:
    """Say whether a job may be tried again after its timeout, for its parent, which knows no policy."""
    return is_worth_retrying(job.options.retry, _KINDS_OF_TIMEOUT)


def timed_out(job: Job, ended_at: float) -> bool:
    """Say whether an attempt timed out before its code ended."""
    return job.interrupted_by is TaskTimeout and job.deadline is not None and ended_at >= job.deadline


def completed(job: Job, result: bytes) -> Succeeded:
    """Return the report of an attempt that has completed in its transaction; Postgres knows it already."""
    return Succeeded(job.dispatch.id, job.dispatch.attempt, time.monotonic() - job.started_at, result)


_UNKNOWN = "unknown task"


def unknown(job: Job, reason: str = _UNKNOWN) -> Returned:
    """Return the report for a task that this process does not know, or that it cannot run on: another worker may."""
    task = job.dispatch
    return Returned(task.id, task.attempt, reason, RETURN_DELAY, task.name, begun=reason != _UNKNOWN)


def in_own_code(error: BaseException) -> object:
    """Return the first frame of the user's own code, or None if the error never reached any."""
    frame = error.__traceback__
    while frame is not None and "/orchestrator/" in frame.tb_frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.tb_next
    return frame
