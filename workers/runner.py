"""Run one task and turn what happens into a report."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import UUID

import msgspec

from orchestrator.domain.ids import derived_id
from orchestrator.domain.retry import is_worth_retrying
from orchestrator.domain.task import AttemptReport, Failed, NewTask, Returned, Succeeded
from orchestrator.errors import GiveUp, InvalidTask, PayloadError, RetryLater, TaskTimeout
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.context import TaskContext, enter
from orchestrator.sdk.failure import describe
from orchestrator.sdk.names import type_names
from orchestrator.sdk.payload import encode_value
from orchestrator.sdk.retry import Retry
from orchestrator.sdk.task import Task
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import LARGEST_MESSAGE
from orchestrator.workers.allowed import Allowed
from orchestrator.workers.interrupt import interrupt_thread, uninterrupted
from orchestrator.workers.job import Job

log = get_logger("worker")

_UNKNOWN_DELAY = 0.5
_NOTHING = encode_value(None, "nothing", 1)
_MOST_ENQUEUED = LARGEST_MESSAGE // 2
_OVERHEAD = 300
"""Bytes that a task takes in a message beside its payload, at most, roughly."""
_decode_call = msgspec.msgpack.Decoder().decode


class Outbox(Protocol):
    """Where tasks go that a running task enqueues."""

    def hand_over(self, tasks: Sequence[NewTask]) -> None:
        """Return once the leader has them in Postgres."""


class JobOutlet:
    """The way out for one running task."""

    def __init__(self, job: Job, outbox: Outbox) -> None:
        self._job = job
        self._outbox = outbox

    def context(self) -> TaskContext:
        dispatch, step = self._job.dispatch, self._job.step
        return TaskContext(
            task_id=UUID(bytes=dispatch.id),
            task_name=step.get("step", dispatch.name),
            attempt=dispatch.attempt,
            queue=dispatch.queue,
            run_id=UUID(bytes=dispatch.run_id) if dispatch.run_id else None,
            position=dispatch.position,
            workflow_name=step.get("workflow"),
            parallel_index=step.get("index") if step.get("count") is not None else None,
            parallel_count=step.get("count"),
        )

    def next_id(self) -> bytes:
        self._job.counter += 1
        return derived_id(self._job.dispatch.id, self._job.dispatch.attempt, self._job.counter)

    def enqueue(self, tasks: Sequence[NewTask]) -> None:
        _check_size(tasks)
        self._outbox.hand_over(tasks)

    def enqueue_on_success(self, tasks: Sequence[NewTask]) -> None:
        _check_size([*self._job.children, *tasks])
        self._job.children.extend(tasks)


def _check_size(tasks: Sequence[NewTask]) -> None:
    """Refuse what would not fit the one message in which it travels, and which the leader applies as a whole."""
    size = sum(len(task.payload) + _OVERHEAD for task in tasks)
    if size > _MOST_ENQUEUED:
        raise PayloadError(
            f"{len(tasks):,} tasks with {size:,} bytes are enqueued at once inside a task, and at most "
            f"{_MOST_ENQUEUED:,} bytes are allowed. Enqueue them in several calls, or pass references to large data."
        )


class Runner:
    """Runs jobs of one application."""

    def __init__(self, app: Orchestrator, outbox: Outbox, allowed: Allowed) -> None:
        self._tasks = app.tasks
        self._allowed = allowed
        self._limit = app.settings.max_payload
        self._outbox = outbox

    def find(self, job: Job) -> Task[..., Any] | None:
        """Return the task that a job names: registered, or a function that the operator allowed."""
        name = job.dispatch.name
        return self._tasks.get(name) or self._allowed.find(name)

    def run(self, job: Job) -> AttemptReport:
        """Run a synchronous task in the current thread."""
        task = self.find(job)
        if task is None:
            return unknown(job)
        thread = threading.get_ident()
        job.interrupt = lambda reason: interrupt_thread(thread, reason)
        try:
            arguments, keywords = self._arguments(task, job)
            enter(JobOutlet(job, self._outbox))
            if task.is_async:
                value = asyncio.run(task.function(*arguments, **keywords))
            else:
                value = task.function(*arguments, **keywords)
            return self._success(job, value)
        except BaseException as error:  # noqa: BLE001  # whatever a task raises is its failure, SystemExit too
            return self.failure(job, error)
        finally:
            enter(None)
            uninterrupted(thread)

    async def run_async(self, job: Job) -> AttemptReport:
        """Run an asynchronous task on the current event loop."""
        task = self.find(job)
        if task is None:
            return unknown(job)
        current = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert current is not None
        job.interrupt = lambda _: _ignore(loop.call_soon_threadsafe(current.cancel))
        try:
            arguments, keywords = self._arguments(task, job)
            enter(JobOutlet(job, self._outbox))
            return self._success(job, await task.function(*arguments, **keywords))
        except BaseException as error:  # noqa: BLE001  # whatever a task raises is its failure, CancelledError too
            return self.failure(job, error)

    def _arguments(self, task: Task[..., Any], job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Decode the call: positional and named arguments, and for a step of a workflow what it knows of itself.

        A step's input is a mapping that holds more than a function need know; it gets what it has parameters for.
        """
        arguments, keywords, *step = _decode_call(job.dispatch.payload)
        if step:
            job.step = step[0]
            keywords = task.signature.pick(keywords)
        arguments, keywords = task.signature.restore(arguments, keywords)
        if task.signature.wants_context:
            task.signature.add_context(JobOutlet(job, self._outbox).context(), arguments, keywords)
        return arguments, keywords

    def _success(self, job: Job, value: Any) -> Succeeded:
        data = _NOTHING
        if job.options.store_result:
            data = encode_value(value, f"The result of task {job.dispatch.name!r}", self._limit)
        duration = time.monotonic() - job.started_at
        return Succeeded(job.dispatch.id, job.dispatch.attempt, duration, data, job.children)

    def failure(self, job: Job, error: BaseException) -> Failed:
        """Return the report of a failed attempt; what was interrupted failed for the reason of the interruption."""
        reason = job.interrupted_by
        if reason is not None and isinstance(error, (reason, asyncio.CancelledError)):
            error = interruption(job, reason).with_traceback(error.__traceback__)
        later = isinstance(error, RetryLater)
        return Failed(
            job.dispatch.id,
            job.dispatch.attempt,
            time.monotonic() - job.started_at,
            describe(error),
            _is_worth_retrying(job, error),
            error.seconds if isinstance(error, RetryLater) else self._backoff(job),
            charged=not later,
        )

    def _backoff(self, job: Job) -> float | None:
        """Return the wait that the task's own function gives; if it fails too, the scheduler decides."""
        if job.options.retry.backoff != "computed":
            return None
        task = self.find(job)
        retries = task.call_options.retries if task is not None else 0
        if not isinstance(retries, Retry) or not callable(retries.backoff):
            return None
        try:
            return min(max(0.0, float(retries.backoff(job.dispatch.failures + 1))), retries.cap)
        except Exception:
            log.exception("the backoff function of task %s failed; it waits as by default", job.dispatch.name)
            return None


def _is_worth_retrying(job: Job, error: BaseException) -> bool:
    if isinstance(error, (InvalidTask, PayloadError)) and not _frames(error):
        return False  # the same arguments will not fit next time either
    return not isinstance(error, GiveUp) and is_worth_retrying(job.options.retry, type_names(error))


def unknown(job: Job) -> Returned:
    """Return the report for a task that this process does not know: another worker may."""
    return Returned(job.dispatch.id, job.dispatch.attempt, "unknown task", _UNKNOWN_DELAY)


def interruption(job: Job, reason: type[BaseException]) -> BaseException:
    """Return the exception that ends a job from outside."""
    if reason is TaskTimeout:
        return TaskTimeout(f"ran longer than its timeout of {job.options.timeout:g} s")
    return reason()


def _frames(error: BaseException) -> object:
    """Return the first frame of the user's own code, or None if the error never reached any."""
    frame = error.__traceback__
    while frame is not None and "/orchestrator/" in frame.tb_frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.tb_next
    return frame


def _ignore(_: object) -> None:
    return None
