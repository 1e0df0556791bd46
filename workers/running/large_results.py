"""Stores values that are too large for a report: results of tasks and values in commands of workflow turns.

An object is written before the report that refers to it is sent. If the process dies in between, no row refers to the
object, and the collector deletes it; the next attempt writes another.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from msgspec.structs import replace

from orchestrator.domain.code import commands
from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.code.commands import Command, command_size
from orchestrator.domain.ids import successor_id
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Succeeded
from orchestrator.errors import PayloadError, Unavailable, WrongState
from orchestrator.payloads.keeping import PayloadStore
from orchestrator.payloads.objects import Output
from orchestrator.sdk.code.engine import read_event
from orchestrator.sdk.values.sealing import store_of, task_with_stored_arguments
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, get_logger
from orchestrator.workers.running.job import Job

log = get_logger("worker")

T = TypeVar("T")
_STORE_TIMEOUT = 300.0
"""Seconds that a result waits for a store that does not answer. Then the task is handed back."""
_TURN_STORE_TIMEOUT = 20.0
"""Seconds that a workflow turn waits for the store: a turn costs little to repeat, and its time is limited."""


class LargeResults:
    """Stores the large results of a worker process."""

    def __init__(self, settings: Settings) -> None:
        self._store: PayloadStore | None = store_of(settings)
        self.has_store = self._store is not None
        self._inline = settings.max_payload if self._store is None else self._store.inline
        self._outage = Outage(log, "the payload store", "large results wait")
        self.limit = settings.largest_value

    def is_large(self, report: AttemptReport) -> bool:
        """Return whether a report has a result that must go to the store."""
        return self._store is not None and isinstance(report, Succeeded) and len(report.result) > self._inline

    def store(self, job: Job, report: AttemptReport) -> AttemptReport:
        """Return the report, with a large result moved to the store."""
        if not self.is_large(report) or not isinstance(report, Succeeded) or report.result == job.completion:
            return report
        return replace(report, result=self.store_if_large(job, report.result))

    def store_if_large(self, job: Job, data: bytes) -> bytes:
        """Store an encoded result if it is large. Return the result or its reference. Wait for a store that is down."""
        store, task = self._store, job.dispatch
        if store is None or len(data) <= self._inline:
            return data
        return self._retry(job, lambda: store.result(data, task.id, task.run_id, task.attempt))

    def store_turn(self, job: Job, report: Activated) -> Activated:
        """Return the report of a turn, with large values of its commands moved to the store."""
        store, task = self._store, job.dispatch
        if store is None or all(command_size(command) <= self._inline for command in report.commands):
            return report
        stored = [
            self._retry(job, partial(_stored_command, command, store, task.id, task.attempt), _TURN_STORE_TIMEOUT)
            for command in report.commands
        ]
        return replace(report, commands=stored)

    def _retry(self, job: Job, write: Callable[[], T], timeout: float = _STORE_TIMEOUT) -> T:
        """Call `write`, and retry while the store is down, until `timeout` seconds have passed."""
        give_up_at = time.monotonic() + timeout
        pause = 0.1
        while True:
            try:
                result = write()
            except Unavailable as error:
                self._outage.failed(str(error))
                if time.monotonic() > give_up_at or job.interrupted_by is not None:
                    raise
                threading.Event().wait(pause)
                pause = min(2 * pause, 5.0)
            else:
                self._outage.worked()
                return result

    def open_output(self, job: Job) -> Output:
        """Return a file whose bytes become the result of a job."""
        name = job.dispatch.name
        if job.output is not None:
            raise WrongState(
                f"Task {name!r}: ctx.open_output() has been called already, but a task has only one result."
            )
        if job.transaction is not None or job.completion is not None:
            raise WrongState(f"Task {name!r}: inside ctx.transaction(), pass the result to ctx.complete().")
        if self._store is not None:
            task = job.dispatch
            job.output = self._store.output(
                task.id, task.run_id, task.attempt, lambda write: self._write_output(job, write)
            )
        else:
            job.output = Output(None, self._inline, lambda size: _too_large(job, size, self._inline))
        return job.output

    def _write_output(self, job: Job, write: Callable[[], None]) -> None:
        """Write a part of the output. Wait for a store that is down, unless on the event loop."""
        try:
            self._retry(job, write, 0.0 if job.on_loop else _STORE_TIMEOUT)
        except Unavailable as error:
            job.store_failure = error
            raise


def _too_large(job: Job, size: int, limit: int) -> PayloadError:
    job.refusal = error = PayloadError(
        f"The output of task {job.dispatch.name!r}: {size:,} bytes; at most {limit:,} are allowed without a payload "
        f"store. See the setting payload_store."
    )
    return error


def read_events(activation: Activation) -> Activation:
    """Return an activation with its stored values read in advance: the workflow's code must not meet an outage."""
    return replace(activation, events=[read_event(event) for event in activation.events])


async def in_thread(call: Callable[[], T]) -> T:
    """Call a function in a thread, while the event loop goes on.

    Its error is raised without traceback: library frames would make it look like an error of the task's own code.
    """

    def attempt() -> tuple[T | None, BaseException | None]:
        try:
            return call(), None
        except BaseException as error:  # noqa: BLE001  # raised again on the loop
            return None, error

    value, error = await asyncio.to_thread(attempt)
    if error is not None:
        raise error.with_traceback(None)
    return cast(T, value)


def finished_output(job: Job, value: object) -> bytes:
    """Return the output that a job has written, as its encoded result."""
    assert job.output is not None
    if value is not None:
        raise PayloadError(
            f"Task {job.dispatch.name!r} wrote its result with ctx.open_output(), but also returned one. Return None."
        )
    return job.output.finish()


def _stored_command(command: Command, store: PayloadStore, run: bytes, attempt: int) -> Command:
    """Return a command with its large value moved to the store. Values shown to people stay in the command.

    Each value belongs to its receiver: arguments to the child or successor run, a signal to the run that gets it,
    others to the run itself. A result belongs to the attempt, as for a task: if another attempt follows, nothing refers
    to it.
    """
    match command:
        case commands.ScheduleTask(task=task):
            return replace(command, task=task_with_stored_arguments(task, store))
        case commands.StartChildRun(id=child, payload=payload):
            return replace(command, payload=store.arguments(payload, child, None))
        case commands.ContinueRun(payload=payload):
            return replace(command, payload=store.arguments(payload, successor_id(run), None))
        case commands.SignalRun(run=target, value=value, key=key):
            return replace(command, value=store.arguments(value, run if key else target, None))
        case commands.RecordOperation(result=bytes() as result):
            return replace(command, result=store.arguments(result, run, None))
        case commands.CompleteRun(result=result):
            return replace(command, result=store.result(result, run, run, attempt))
        case _:
            return command
