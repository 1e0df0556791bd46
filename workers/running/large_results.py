"""What a task returns or writes, and what a turn commands: if it is too large for a report, it is stored first.

The object is there before the report that names it is sent. If this process dies in between, no row ever names it, and
the collector finds it: the next attempt writes another.
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
from orchestrator.sdk.values.sealing import left_task, store_of
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, get_logger
from orchestrator.workers.running.job import Job

log = get_logger("worker")

T = TypeVar("T")
_PATIENCE = 300.0
"""Seconds for which a result waits for a store that does not answer; then its task is handed back."""
_PATIENCE_OF_TURNS = 20.0
"""The same for a turn, which costs little to take again, and is watched by a clock."""


class LargeResults:
    """Keeps the results of one worker process that are large."""

    def __init__(self, settings: Settings) -> None:
        self._store: PayloadStore | None = store_of(settings)
        self.has_store = self._store is not None
        self._inline = settings.max_payload if self._store is None else self._store.inline
        self._outage = Outage(log, "the payload store", "large results wait")
        self.limit = settings.largest_value

    def are_large(self, report: AttemptReport) -> bool:
        """Say whether a report has a result that leaves it."""
        return self._store is not None and isinstance(report, Succeeded) and len(report.result) > self._inline

    def left(self, job: Job, report: AttemptReport) -> AttemptReport:
        """Return a report with its result in the store, if that is large."""
        if not self.are_large(report) or not isinstance(report, Succeeded) or report.result == job.completion:
            return report
        return replace(report, result=self.keep(job, report.result))

    def keep(self, job: Job, data: bytes) -> bytes:
        """Return an encoded result, or what stands for it once it is stored; wait for a store that is away."""
        store, task = self._store, job.dispatch
        if store is None or len(data) <= self._inline:
            return data
        return self._patiently(job, lambda: store.result(data, task.id, task.run_id, task.attempt))

    def left_turn(self, job: Job, report: Activated) -> Activated:
        """Return the report of a turn with what is large of its commands in the store."""
        store, task = self._store, job.dispatch
        if store is None or all(command_size(command) <= self._inline for command in report.commands):
            return report
        left = [
            self._patiently(job, partial(_left_command, command, store, task.id, task.attempt), _PATIENCE_OF_TURNS)
            for command in report.commands
        ]
        return replace(report, commands=left)

    def _patiently(self, job: Job, write: Callable[[], T], patience: float = _PATIENCE) -> T:
        """Write into the store; wait for one that is away."""
        give_up_at = time.monotonic() + patience
        pause = 0.1
        while True:
            try:
                kept = write()
            except Unavailable as error:
                self._outage.failed(str(error))
                if time.monotonic() > give_up_at or job.interrupted_by is not None:
                    raise
                threading.Event().wait(pause)
                pause = min(2 * pause, 5.0)
            else:
                self._outage.worked()
                return kept

    def open_output(self, job: Job) -> Output:
        """Return a file whose bytes become the result of a job."""
        name = job.dispatch.name
        if job.output is not None:
            raise WrongState(f"Task {name!r}: ctx.open_output() has been called already, and a task has one result.")
        if job.transaction is not None or job.completion is not None:
            raise WrongState(f"Task {name!r}: inside ctx.transaction(), the result is what ctx.complete() is given.")
        if self._store is not None:
            task = job.dispatch
            job.output = self._store.output(
                task.id, task.run_id, task.attempt, lambda write: self._write_output(job, write)
            )
        else:
            job.output = Output(None, self._inline, lambda size: _too_large(name, size, self._inline))
        return job.output

    def _write_output(self, job: Job, write: Callable[[], None]) -> None:
        """Write some of what becomes the result; wait for a store that is away, but not on the event loop."""
        try:
            self._patiently(job, write, 0.0 if job.on_loop else _PATIENCE)
        except Unavailable as error:
            job.store_failure = error
            raise


def _too_large(name: str, size: int, limit: int) -> PayloadError:
    return PayloadError(
        f"The output of task {name!r}: {size:,} bytes, and at most {limit:,} are allowed without a payload store. See "
        f"the setting payload_store."
    )


def read_events(activation: Activation) -> Activation:
    """Return an activation whose stored values have been read: the code of a workflow must not meet an outage."""
    return replace(activation, events=[read_event(event) for event in activation.events])


async def in_thread(ask: Callable[[], T]) -> T:
    """Read or write in a thread, while the event loop goes on.

    What it raises has no frames of the libraries in between: by its frames an error is known to be the task's own.
    """

    def attempt() -> tuple[T | None, BaseException | None]:
        try:
            return ask(), None
        except BaseException as error:  # noqa: BLE001  # it is raised on the loop
            return None, error

    value, error = await asyncio.to_thread(attempt)
    if error is not None:
        raise error.with_traceback(None)
    return cast(T, value)


def finished_output(job: Job, value: object) -> bytes:
    """Return what a job has written as its encoded result."""
    assert job.output is not None
    if value is not None:
        raise PayloadError(
            f"Task {job.dispatch.name!r} has written its result with ctx.open_output(), and returned another one. "
            f"Return None."
        )
    return job.output.finish()


def _left_command(command: Command, store: PayloadStore, run: bytes, attempt: int) -> Command:
    """Return a command with its value in the store, if that is large; values that people see stay.

    Each value belongs to its receiver: the arguments of a child or a successor to that run, a signal to the run that
    gets it, and all else to the run itself. The result belongs to the attempt, like the result of a task: if another
    attempt follows, nothing refers to it.
    """
    match command:
        case commands.ScheduleTask(task=task):
            return replace(command, task=left_task(task, store))
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
