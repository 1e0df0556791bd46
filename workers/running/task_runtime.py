"""Services for a running task: enqueueing, logs, progress, notes for its next attempt and, if allowed, the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from uuid import UUID

import msgspec

from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.redaction import inheritable_patterns, scrub
from orchestrator.domain.tasks.headers import check_headers, headers_of, inheriting
from orchestrator.domain.tasks.task import Dispatch, KeyHolder, NewTask, with_inherited
from orchestrator.errors import (
    AttemptOver,
    ConfigurationError,
    Duplicate,
    InvalidWorkflow,
    NotFound,
    OrchestratorError,
    PayloadError,
    SoftTimeout,
    TaskTimeout,
    WrongState,
)
from orchestrator.payloads.objects import Output
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.context import TEXT_LIMIT, Level, TaskContext
from orchestrator.sdk.values.payload import decode_value, encode_value
from orchestrator.sdk.values.sealing import sealed
from orchestrator.sealing import VALUE
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import MAX_MESSAGE, LogLine, ProgressMark
from orchestrator.transport.connection import UNAVAILABLE, describe
from orchestrator.transport.pages import Pages
from orchestrator.workers.reporting.journal import Journal
from orchestrator.workers.reporting.printed import PrintBuffer
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.running.job import Job, Stage
from orchestrator.workers.running.large_results import LargeResults

log = get_logger("worker")
_task_output = get_logger("tasks")
"""Logger of the messages that tasks log through their contexts."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

ENCODED_NONE = encode_value(None, "nothing", 1)
"""The encoded result of a task without a result."""
_MAX_ENQUEUED = MAX_MESSAGE // 2
_REFUSALS: dict[str, type[OrchestratorError]] = {
    error.__name__: error for error in (Duplicate, InvalidWorkflow, NotFound, PayloadError)
}
"""Errors that the leader may return, by name."""
_OVERHEAD = 320
"""Bytes that a task takes in a message beside its payload, at most, roughly."""


class NoDatabase(ConfigurationError):
    """A task needs the database, which this worker does not have. The task is handed back for another worker."""


class Outbox(Protocol):
    """Receives the messages of running tasks, and reads the event pages of workflow turns."""

    def send_tasks(self, tasks: Sequence[NewTask]) -> Mapping[bytes, KeyHolder] | None:
        """Send tasks to the leader, and return once they are in Postgres. Return which task holds each unique key."""

    def publish_progress(self, task: bytes, mark: ProgressMark) -> None:
        """Publish the progress of a task."""

    def log(self, job: Job, line: LogLine) -> None:
        """Store a log line of a task."""

    def log_lines(self, job: Job, lines: LogLine) -> None:
        """Store many log lines of a task, which are one text."""

    def save_details(self, job: Job, details: bytes) -> None:
        """Store the note for the next attempt, in place of an earlier one."""

    def page(self, job: Job, number: int) -> bytes | None:
        """Return a page of events for a workflow turn, or None if the page is gone or cannot be read now."""


class ProcessOutbox:
    def __init__(self, reporter: Reporter, journal: Journal, pages: Pages, *, keeps_lines: bool = True) -> None:
        self._pages = pages
        self.send_tasks = reporter.send_tasks
        self.publish_progress = journal.publish_progress
        self._journal = journal if keeps_lines else None

    def log(self, job: Job, line: LogLine) -> None:
        if self._journal is not None:
            self._journal.log(job, line)

    def log_lines(self, job: Job, lines: LogLine) -> None:
        if self._journal is not None:
            self._journal.log_lines(job, lines)

    def save_details(self, job: Job, details: bytes) -> None:
        job.noted = details  # sent by the pool's clock, or with the report that ends the job

    def page(self, job: Job, number: int) -> bytes | None:
        try:
            return self._pages.read(job.dispatch.id, job.dispatch.attempt, number)
        except UNAVAILABLE as error:
            log.warning("run.history_page_unreadable error=%s", describe(error), extra=job.fields)
            return None


class JobRuntime:
    """The services for one running task."""

    __slots__ = ("_database", "_large_results", "_outbox", "job", "printed")

    def __init__(
        self,
        job: Job,
        outbox: Outbox,
        database: Orchestrator | None = None,
        large_results: LargeResults | None = None,
    ) -> None:
        self.job = job
        self._outbox = outbox
        self._database = database
        """The application, if this worker has the database."""
        self._large_results = large_results
        self.printed: PrintBuffer | None = None
        """The printed text of the task; None until it prints."""

    @property
    def dispatch(self) -> Dispatch:
        return self.job.dispatch

    def context(self) -> TaskContext:
        job = self.job
        dispatch, step = job.dispatch, job.step
        remaining = None if job.deadline is None else timedelta(seconds=job.deadline - time.monotonic())
        return TaskContext(
            task_id=UUID(bytes=dispatch.id),
            task_name=dispatch.name if not step or is_composed(step["workflow"]) else step["step"],
            attempt=dispatch.attempt,
            queue=dispatch.queue,
            run_id=UUID(bytes=dispatch.run_id) if dispatch.run_id else None,
            position=dispatch.position,
            workflow_name=step.get("workflow"),
            parallel_index=step.get("index") if step.get("count") is not None else None,
            parallel_count=step.get("count"),
            deadline=None if remaining is None else datetime.now(UTC) + remaining,
            details=None if dispatch.details is None or job.options.executor else decode_value(dispatch.details),
            headers={**job.options.headers},
            failures=dispatch.failures,
            is_after_loss=dispatch.alone,
            _runtime=self,
        )

    # -- tasks that the task enqueues

    def next_id(self) -> bytes:
        self.job.counter += 1
        return derived_id(self.job.dispatch.id, self.job.dispatch.attempt, self.job.counter)

    def enqueue(self, tasks: Sequence[NewTask]) -> Mapping[bytes, bytes]:
        tasks = self._as_children(tasks)
        if self.job.transaction is not None:
            return self.job.transaction.enqueue(tasks)
        _check_size(tasks)
        holders = self._outbox.send_tasks(tasks) or {}
        for task in tasks:
            holder = holders.get(task.id)
            if task.unique is None or holder is None:
                continue
            if holder.is_other_call:
                raise Duplicate.other_call(task.unique.key, to_text(holder.id))
            if holder.error is not None:
                raise _REFUSALS.get(holder.error.kind, OrchestratorError)(holder.error.message)
        return {task: holder.id for task, holder in holders.items()}

    def enqueue_on_success(self, tasks: Sequence[NewTask]) -> Mapping[bytes, bytes]:
        if self.job.completion is not None:
            return self.enqueue(tasks)  # the task has succeeded already
        tasks = self._as_children(tasks)
        if self.job.transaction is not None:
            self.job.transaction.insert_callbacks(tasks)  # they commit with the success, or are rolled back with it
            return {}
        _check_size([*self.job.children, *tasks])
        self.job.children.extend(tasks)
        return {}

    def _as_children(self, tasks: Sequence[NewTask]) -> list[NewTask]:
        """Return tasks with this task as their parent, and with its headers and redaction patterns."""
        parent, hidden = self.job.dispatch.id, inheritable_patterns(self.job.options.hidden)
        children = [
            msgspec.structs.replace(task, parent=parent, options=with_inherited(task.options, hidden)) for task in tasks
        ]
        if headers := self.job.options.headers:
            children = [msgspec.structs.replace(task, options=inheriting(task.options, headers)) for task in children]
            for task in children:
                check_headers(headers_of(task.options))  # otherwise headers would grow from each child to the next
        return children

    # -- progress, logs and interruption

    def progress(self, fraction: float, text: str) -> None:
        if self.job.stage is Stage.RUNNING:  # a thread that outlives its task is ignored
            text = scrub(text, self.job.secrets)[:TEXT_LIMIT]
            self._outbox.publish_progress(self.job.dispatch.id, ProgressMark(self.job.dispatch.attempt, fraction, text))

    def log(self, level: Level, text: str) -> None:
        if self.job.stage is Stage.RUNNING:
            text = scrub(text, self.job.secrets)[:TEXT_LIMIT]
            if self.printed is not None:
                self.printed.flush()
            _task_output.log(_LEVELS[level], "%s", text)
            self._outbox.log(self.job, LogLine(time.time(), self.job.dispatch.attempt, level, text))

    def save_details(self, details: bytes) -> None:
        if self.job.stage is Stage.RUNNING:
            self._outbox.save_details(self.job, details)

    def interruption(self) -> BaseException | None:
        reason = self.job.interrupted_by
        # A task that has caught its soft timeout may go on.
        return None if reason is None or reason is SoftTimeout else interruption(self.job, reason)

    # -- completing in a transaction

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        job = self.job
        database = self._require_database()
        with database._client.transactions.begin(job.dispatch.id, job.dispatch.attempt) as transaction:
            job.transaction = transaction
            try:
                yield transaction.connection
                transaction.insert_callbacks(job.children)
                with job.commit() as is_allowed:
                    if not is_allowed:
                        raise self._completion_error()
                    result = transaction.result
                    transaction.commit(sealed(result, VALUE, database.settings), time.monotonic() - job.started_at)
                    job.completion = result
                    job.children.clear()
            finally:
                job.transaction = None

    def complete(self, result: Any) -> None:
        job = self.job
        if job.transaction is None or self._database is None:
            raise WrongState(
                f"Task {job.dispatch.name!r}: ctx.complete() sets the result that a transaction records; call it "
                f"inside `with ctx.transaction()`. Elsewhere, return the result."
            )
        if job.options.store_result:
            limit = self._database.settings.largest_value
            try:
                data = encode_value(result, f"The result of task {job.dispatch.name!r}", limit)
                task = self._database.tasks.get(job.dispatch.name)
                if task is not None:
                    task._signature.check_result(result, data)
            except PayloadError as error:
                job.refusal = error
                raise
            results = self._large_results
            job.transaction.result = data if results is None else results.store_if_large(job, data)

    def open_output(self) -> Output:
        if self._large_results is None:
            raise WrongState(f"Task {self.job.dispatch.name!r}: ctx.open_output() works only in a worker.")
        return self._large_results.open_output(self.job)

    def _completion_error(self) -> BaseException:
        """Return the error for a completion that is no longer possible. A swallowed timeout is raised again."""
        return self.interruption() or AttemptOver(
            f"Task {self.job.dispatch.name!r} has ended: ctx.transaction() in a thread that it left behind commits "
            f"nothing. Wait for that thread before the task returns."
        )

    def _require_database(self) -> Orchestrator:
        """Return the application with the database. Raise an error if a transaction cannot begin now."""
        name = self.job.dispatch.name
        if self._database is None:
            raise NoDatabase(
                f"Task {name!r}: ctx.transaction() needs the database, but this worker has no access to it. Start it "
                f"with `orchestrator worker --database`."
            )
        if self.job.transaction is not None:
            raise WrongState(f"Task {name!r}: ctx.transaction() is open already. Use its connection.")
        if self.job.completion is not None:
            raise WrongState(
                f"Task {name!r}: ctx.transaction() has completed this task already, and a task ends once. Do "
                f"everything in one block, or enqueue another task there for the rest."
            )
        if not self.job.may_complete():
            raise self._completion_error()
        if _on_event_loop():
            raise OrchestratorError(
                f"Task {name!r}: ctx.transaction() would block the event loop. Make the task a plain `def`, or put the "
                f"block into a function and `await asyncio.to_thread(function, ctx)`."
            )
        return self._database


def interruption(job: Job, reason: type[BaseException]) -> BaseException:
    """Return the exception that interrupts a job."""
    if reason is TaskTimeout:
        return TaskTimeout(f"ran longer than its timeout of {job.options.timeout:g} s")
    if reason is SoftTimeout:
        return SoftTimeout(f"ran longer than its soft timeout of {job.options.soft_timeout:g} s")
    return reason()


def _check_size(tasks: Sequence[NewTask]) -> None:
    """Raise an error if tasks do not fit into one message, which the leader applies as a whole."""
    size = sum(len(task.payload) + _OVERHEAD + (len(task.options) if task.options else 0) for task in tasks)
    if size > _MAX_ENQUEUED:
        raise PayloadError(
            f"{len(tasks):,} tasks with {size:,} bytes are enqueued at once inside a task; at most "
            f"{_MAX_ENQUEUED:,} bytes are allowed. Enqueue them in several calls, or pass references to large data."
        )


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
