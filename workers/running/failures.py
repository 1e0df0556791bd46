"""Reports of attempts that failed, or that are handed back for another worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.domain.executors.record import ExecutorCall
from orchestrator.domain.tasks.retry import is_worth_retrying
from orchestrator.domain.tasks.task import Failed, Returned, Succeeded, TaskError
from orchestrator.errors import GiveUp, InvalidTask, PayloadError, RetryLater, TaskTimeout, Unavailable
from orchestrator.payloads.keeping import STORE_CAPABILITY, NoStore
from orchestrator.sdk.names import also_called, type_names
from orchestrator.sdk.tasks.failure import at_function, describe, without_secrets
from orchestrator.sdk.tasks.retry import Retry
from orchestrator.sdk.tasks.task import Task
from orchestrator.sealing import Sealed
from orchestrator.telemetry import get_logger
from orchestrator.workers.running.job import Job
from orchestrator.workers.running.task_runtime import NoDatabase, interruption

_TIMEOUT_TYPES = type_names(TaskTimeout())
RETURN_DELAY = 0.5
"""Seconds before a task that was handed back is dispatched again."""


def may_be_retried(job: Job, error: BaseException) -> bool:
    if isinstance(error, (InvalidTask, PayloadError)) and (error is job.refusal or not in_own_code(error)):
        return False  # the same arguments, or the same result, would be refused again
    if isinstance(error, GiveUp):
        return False
    policy = job.options.retry
    named = also_called(error, (*policy.on, *policy.give_up_on))
    return is_worth_retrying(policy, type_names(error) | named)


def retries_timeouts(job: Job) -> bool:
    """Return whether a job may be retried after its timeout. The parent needs this, because it has no retry policy."""
    return is_worth_retrying(job.options.retry, _TIMEOUT_TYPES)


def timed_out(job: Job, ended_at: float) -> bool:
    """Return whether an attempt timed out before its code ended."""
    return job.interrupted_by is TaskTimeout and job.deadline is not None and ended_at >= job.deadline


def completed(job: Job, result: bytes) -> Succeeded:
    """Return the report of an attempt that has completed in its transaction, which Postgres has already."""
    return Succeeded(job.dispatch.id, job.dispatch.attempt, time.monotonic() - job.started_at, result)


_UNKNOWN = "unknown task"


def unknown(job: Job, reason: str = _UNKNOWN) -> Returned:
    """Return the report that hands back a task which this process does not know or cannot run."""
    task = job.dispatch
    return Returned(task.id, task.attempt, reason, RETURN_DELAY, task.name, begun=reason != _UNKNOWN)


def in_own_code(error: BaseException) -> object:
    """Return the traceback entry of the first frame of user code, or None if the error reached none."""
    frame = error.__traceback__
    while frame is not None and "/orchestrator/" in frame.tb_frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.tb_next
    return frame


log = get_logger("worker")

_STORE_DELAY = 2.0
"""Seconds before a task is dispatched again whose payload store did not answer."""


class Failures:
    """Creates failure reports. `find` returns the task of a job; `redacted` are patterns that apply to all tasks."""

    def __init__(self, find: Callable[[Job], Task[..., Any] | None], redacted: set[str]) -> None:
        self._find = find
        self._redacted = redacted
        self._logged: set[tuple[str, str]] = set()
        """Warnings that were logged, as kind and subject: each is logged once."""

    def failure(self, job: Job, error: BaseException) -> Failed | Succeeded | Returned:
        """Return the report of a failed attempt.

        An interrupted attempt failed for the reason of the interruption. A timed-out attempt failed by timeout, even if
        its code replaced the exception. An attempt that needs the database, which this worker lacks, is handed back
        like an unknown task. An attempt whose data key this worker lacks is handed back alone: others of its name may
        use other keys.
        """
        if job.output is not None:
            job.output.abandon()
        if job.completion is not None:
            log.warning("task.failed_after_complete: the task counts as completed", exc_info=error, extra=job.fields)
            return completed(job, job.completion)
        reason = job.interrupted_by
        if reason is not None and isinstance(error, (reason, asyncio.CancelledError)):
            error = interruption(job, reason).with_traceback(error.__traceback__)
        elif timed_out(job, time.monotonic()):
            late, error = error, interruption(job, TaskTimeout)
            error.__cause__ = late
        elif isinstance(error, Sealed) and error.is_missing and not in_own_code(error):
            if self._is_new("key", error.key):
                log.error("task.returned error=%s: the task waits for a worker with that key", error, extra=job.fields)
            return Returned(job.dispatch.id, job.dispatch.attempt, "no data key", RETURN_DELAY, data_key=error.key)
        elif isinstance(error, (NoStore, Unavailable)) and (error is job.store_failure or not in_own_code(error)):
            return self._handed_back(job, error)
        elif isinstance(error, NoDatabase):
            if self._is_new("task", job.dispatch.name):
                log.error(
                    "task.returned error=%s: the task waits for a worker with a database", error, extra=job.fields
                )
            return unknown(job, "no database")
        return self.failed(job, error)

    def _is_new(self, kind: str, subject: str) -> bool:
        """Return whether a warning is new, and record it."""
        count = len(self._logged)
        self._logged.add((kind, subject))
        return len(self._logged) > count

    def _handed_back(self, job: Job, error: Exception) -> Returned:
        """Hand back an attempt whose payload could not be read or stored: that is no failure of the task."""
        task, kind = job.dispatch, type(error).__name__
        if self._is_new("store", kind):
            log.error("task.returned error=%s: it is retried", error, extra=job.fields)
        if isinstance(error, NoStore):
            return Returned(
                task.id, task.attempt, "no payload store", RETURN_DELAY, data_key=STORE_CAPABILITY, begun=True
            )
        return Returned(task.id, task.attempt, "payload store unavailable", _STORE_DELAY, begun=True)

    def failed(self, job: Job, error: BaseException) -> Failed:
        described = describe(error)
        if isinstance(error, PayloadError) and not in_own_code(error) and (task := self._find(job)) is not None:
            described = at_function(described, task.function)
        failed = self._as_failed(job, described, retryable=may_be_retried(job, error))
        if isinstance(error, RetryLater):
            return msgspec.structs.replace(failed, delay=error.seconds, charged=error._is_failure)
        return failed

    def _as_failed(self, job: Job, described: TaskError, *, retryable: bool) -> Failed:
        if patterns := self._redacted | {*job.options.hidden}:
            described = without_secrets(described, patterns, job.secrets)
        ran = time.monotonic() - job.started_at
        return Failed(job.dispatch.id, job.dispatch.attempt, ran, described, retryable, self._backoff(job))

    def broken(self, job: Job, error: TaskError, *, retryable: bool, delay: float | None = None) -> Failed:
        """Return the report of a failed execution. `delay` overrides the retry policy's delay."""
        is_retryable = retryable and is_worth_retrying(job.options.retry, frozenset({error.kind}))
        failed = self._as_failed(job, error, retryable=is_retryable)
        return failed if delay is None else msgspec.structs.replace(failed, delay=delay)

    def for_executor(self, job: Job, call: ExecutorCall) -> Returned:
        """Hand back a task that was enqueued without the executor it is declared with. Its body is never run.

        The leader adds the executor to the row and dispatches the task to a worker that has it. A leader of an earlier
        release does not, and dispatches it again after the delay.
        """
        task = job.dispatch
        if self._is_new("task", task.name):
            log.info("task.redirected executor=%s: the task was enqueued only by its name", call.name, extra=job.fields)
        return Returned(task.id, task.attempt, "an executor runs it", RETURN_DELAY, executor=call)

    def _backoff(self, job: Job) -> float | None:
        """Return the delay from the task's own backoff function, or None, so that the leader computes the delay."""
        if job.options.retry.backoff != "computed":
            return None
        task = self._find(job)
        retries = task._call_options.retries if task is not None else 0
        if not isinstance(retries, Retry) or not callable(retries.backoff):
            return None
        try:
            return min(max(0.0, float(retries.backoff(job.dispatch.failures + 1))), retries.cap)
        except Exception:
            log.exception("task.backoff_failed: the task waits for the default time", extra=job.fields)
            return None
