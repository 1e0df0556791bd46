"""Drive executions from their start to their end: what is the same for all executors.

    leader   claims a try, and keeps the name of its execution in the same transaction
    driver   submit, under that name      ── dies here: the next one submits again, and finds it
             the external id is kept      ── dies here: the next one watches it
             started
             watch                        ── dies here: the next one watches it
             the end is reported, and applied
             release

All of it runs on the event loop of the worker process. A worker that stops hands its executions back, and ends none.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from orchestrator.domain.executors.options import Execution, Finished, Outcome
from orchestrator.domain.executors.record import Record, decode_record, encode_record, execution_name
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Failed, Noted, Returned, Started, Succeeded, TaskError
from orchestrator.errors import TaskAborted, TaskTimeout, Unavailable
from orchestrator.payloads.keeping import NoStore
from orchestrator.references import may_hold_references
from orchestrator.telemetry import get_logger
from orchestrator.workers.executors import registry
from orchestrator.workers.executors.listener import Listener
from orchestrator.workers.executors.protocol import Executor, Expiring, Gone, Setup, Telling, Unequipped, Unreachable
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.reporting.task_log import TaskLog
from orchestrator.workers.running.job import Job, Stage
from orchestrator.workers.running.large_results import in_thread
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.task_runtime import Outbox, interruption

log = get_logger("worker")

_FIRST_PAUSE = 0.5
"""Seconds between the first two tries to reach whatever does the work; the setting executor_pause is the longest."""
_CANCEL_FOR = 30.0
"""Seconds in which work that was to end should have; then its attempt is reported, and goes on being cancelled."""
_CANCEL_ON = 600.0
"""Seconds after which it is no longer tried to cancel it."""
_RELEASE_AFTER = 3.0
"""Seconds between the end and the release. A worker that was cut off learns in that time that others watch by now."""
_LATER = 0.5
"""Seconds before a task goes elsewhere that is handed back."""
_LAST_LOOK = 1.0
"""Seconds to find that an execution has ended although its time was over before it was watched."""

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    """One execution that is watched here."""

    job: Job
    executor: Executor
    execution: Execution
    record: Record
    ends: bool = False
    """It is only to be ended: its task was cancelled."""
    external_id: str = ""
    listener: Listener | None = None

    def __post_init__(self) -> None:
        self.external_id = self.record.external_id


class Driver:
    """All executions of a worker process."""

    def __init__(
        self, runner: Runner, outbox: Outbox, reporter: Reporter, task_log: TaskLog, setup: Setup, limit: int
    ) -> None:
        self._runner = runner
        self._outbox = outbox
        self._reporter = reporter
        self._task_log = task_log
        self._setup = setup
        self._longest_pause = setup.settings.executor_pause
        self._a_while = 2 * max(self._longest_pause, setup.settings.executor_timeout)
        self.limit = limit
        """How many it watches at once."""
        self._executors: dict[str, Executor] = {}
        self._jobs: dict[int, Job] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._freed = threading.Event()
        self._hurry = asyncio.Event()
        """This process ends: what is over is released at once."""
        self._in_doubt = False
        self._doubts = 0
        """How often this worker was cut off, so that others may watch its executions."""

    def __len__(self) -> int:
        return len(self._jobs)

    def doubt(self, is_so: bool) -> None:
        """Note that this worker was cut off for a while, or that the leader knows of it again."""
        self._in_doubt = is_so
        self._doubts += is_so

    @property
    def room(self) -> int:
        """Return how many more it takes."""
        return self.limit - len(self._jobs)

    def wait_for_room(self, timeout: float) -> int:
        if self.room <= 0:
            self._freed.clear()
            if self.room <= 0:
                self._freed.wait(timeout)
        return max(0, self.room)

    def finish(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        """Release what is over, for so many seconds at most: the process ends."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._hurry.set)
        give_up_at = time.monotonic() + timeout
        while self._background and time.monotonic() < give_up_at:
            time.sleep(0.01)

    def accept(self, job: Job) -> None:
        """Count a job that is about to be driven."""
        self._jobs[id(job)] = job

    # -- letting go

    def let_go_all(self, reason: str) -> int:
        """Hand everything back, and let the work go on; return how many."""
        return sum(self.let_go(job, reason) for job in list(self._jobs.values()))

    def let_go(self, job: Job, reason: str) -> bool:
        """Hand a job back, from any thread, and let the work go on: another worker will watch it."""
        if not (job.take_back() or job.finish()):
            return False
        self._reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason), job)
        self._forget(job)
        if job.interrupt is not None:
            job.interrupt(TaskAborted)
        return True

    def revoke(self, wanted: set[tuple[bytes, int]], moved: set[tuple[bytes, int]]) -> None:
        """Stop attempts that no longer count: those that have `moved` are others' now, the rest is cancelled."""
        now = time.monotonic()
        for job in list(self._jobs.values()):
            attempt = job.dispatch.id, job.dispatch.attempt
            if attempt in moved:
                self.let_go(job, "another attempt counts")
            elif attempt in wanted:
                job.stop_with(TaskAborted, now)

    # -- one execution

    async def drive(self, job: Job) -> None:
        """Take a job from its start to its end."""
        try:
            if not job.begin(time.monotonic()):
                return
            current, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert current is not None
            job.interruptible(lambda _: loop.call_soon_threadsafe(current.cancel))
            try:
                watched = await self._begin(job)
            except BaseException as error:  # noqa: BLE001  # no fault of the work, which has not begun
                self._end(job, self._runner.failures.failure(job, error))
                return
            if watched is not None and watched.ends:
                await self._finish_off(watched)
            elif watched is not None:
                await self._go_on(watched)
        finally:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        self._jobs.pop(id(job), None)
        self._freed.set()

    async def _begin(self, job: Job) -> _Job | None:
        """Return an execution with its executor; None if this worker has none, and has handed it back."""
        call = job.options.executor
        assert call is not None
        executor = self._executors.get(call.name)
        if executor is None:
            executor = registry.create(call.name, self._setup)
            if executor is None:
                self._hand_back(job, f"no executor {call.name}")
                return None
            self._executors[call.name] = executor
        record = decode_record(job.dispatch.details)
        if record is None or record.failures != job.dispatch.failures:  # a leader of an earlier release has sent it
            name, attempt = execution_name(job.dispatch.id, job.dispatch.attempt), job.dispatch.attempt
            record = Record(name=name, attempt=attempt, failures=job.dispatch.failures, since=time.time())
            await self._keep(job, record)
        if call.ends is not None:
            record = call.ends
        if may_hold_references(job.dispatch.payload):
            arguments, keywords = await in_thread(lambda: self._runner.call(job))
        else:
            arguments, keywords = self._runner.call(job)
        dispatch, step = job.dispatch, job.step
        count = step.get("count")
        execution = Execution(
            name=record.name,
            task=dispatch.name,
            task_id=to_text(dispatch.id),
            attempt=record.attempt,
            queue=dispatch.queue,
            options=msgspec.convert(call.options, executor.options),
            arguments=tuple(arguments),
            input=keywords,
            timeout=job.options.timeout,
            run_id=None if dispatch.run_id is None else to_text(dispatch.run_id),
            workflow=step.get("workflow"),
            step=step.get("step"),
            index=step.get("index") if count is not None else None,
            count=count,
        )
        return _Job(job, executor, execution, record, ends=call.ends is not None)

    async def _go_on(self, watched: _Job) -> None:
        job = watched.job
        left = None if job.options.timeout is None else job.options.timeout - watched.record.elapsed
        least = _LAST_LOOK if watched.external_id else 0.0
        try:
            async with asyncio.timeout(None if left is None else max(least, left)) as limit:
                outcome = await self._watch(watched, limit)
            report = await self._runner.kept(job, self._report(job, outcome))
        except BaseException as error:  # noqa: BLE001  # whatever an executor raises is the failure of this try
            if job.stage is not Stage.RUNNING:
                return  # it was handed back, and goes on
            job.uninterruptible()
            reason = TaskTimeout if limit.expired() else job.interrupted_by
            if reason is None and isinstance(error, asyncio.CancelledError):
                self.let_go(job, "its event loop ends")
                return
            if reason is None and isinstance(error, Unequipped):
                self._hand_back(job, str(error))
                return
            if reason is None and isinstance(error, (NoStore, Unavailable)):  # what was done already stays
                self._end(job, self._runner.failures.failure(job, error))
                return
            if reason is None and isinstance(error, Gone):
                lost = TaskError("ExecutionLost", f"Execution {watched.execution.name} is gone: {error}")
                report = self._runner.failures.broken(job, lost, retryable=True)
            else:
                await self._cancel(watched)
                report = self._runner.failures.failure(job, error if reason is None else interruption(job, reason))
        self._end(job, report, watched)

    async def _finish_off(self, watched: _Job) -> None:
        """End the work of a task that was cancelled while it had no watcher, or whose watcher may have died then."""
        job, executor, execution = watched.job, watched.executor, watched.execution
        try:
            async with asyncio.timeout(job.options.timeout):
                await self._reach(watched, lambda: executor.cancel(execution, watched.external_id))
            report: AttemptReport = self._runner.finished(job, None)
        except Unequipped as error:
            self._hand_back(job, str(error))
            return
        except BaseException as error:  # noqa: BLE001  # whatever an executor raises is the failure of this try
            report = self._runner.failures.failure(job, error)
            watched.external_id = ""  # which keeps what is left of it for the next try
        self._end(job, report, watched)

    def _hand_back(self, job: Job, reason: str) -> None:
        """Let another worker have it: this one was not given what it needs, nor were others like it."""
        call = job.options.executor
        assert call is not None
        log.error(
            "task.returned reason=%r: the task waits for a worker that has what its executor needs",
            reason,
            extra=job.fields,
        )
        reason = "its executor lacks something here"
        self._end(job, Returned(job.dispatch.id, job.dispatch.attempt, reason, _LATER, call.means))

    async def _watch(self, watched: _Job, limit: asyncio.Timeout) -> Outcome:
        """Start it, unless that was done, and return how it ends."""
        job, execution, executor = watched.job, watched.execution, watched.executor
        if not watched.external_id:
            watched.external_id = await self._reach(watched, lambda: executor.submit(execution))
            host = socket.gethostname() if executor.options.is_local else ""
            record = msgspec.structs.replace(watched.record, external_id=watched.external_id, host=host)
            await self._keep(job, record)
        if job.stage is Stage.RUNNING:
            job.announced = True
            age = time.monotonic() - job.started_at
            self._reporter.report(Started(job.dispatch.id, job.dispatch.attempt, age))
        listener = watched.listener = Listener(job, self._outbox, limit)
        return await self._reach(watched, lambda: executor.watch(execution, watched.external_id, listener))

    async def _reach(self, watched: _Job, call: Callable[[], Awaitable[T]]) -> T:
        """Call an executor, again and again while whatever does the work cannot be reached."""
        pause = first = min(_FIRST_PAUSE, self._longest_pause)
        while True:
            began = time.monotonic()
            try:
                return await call()
            except Unreachable as error:
                if time.monotonic() - began > self._a_while:
                    pause = first  # it was there for a while
                if pause == first:
                    log.warning("executor.unavailable error=%s: it is tried again", error, extra=watched.job.fields)
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(2 * pause, self._longest_pause)

    async def _cancel(self, watched: _Job) -> None:
        """End the work. Where that takes long, it goes on while the attempt is reported."""
        await asyncio.wait([self._in_background(self._cancel_on(watched))], timeout=_CANCEL_FOR)

    async def _cancel_on(self, watched: _Job) -> None:
        executor, execution = watched.executor, watched.execution
        try:
            async with asyncio.timeout(_CANCEL_ON):
                await self._reach(watched, lambda: executor.cancel(execution, watched.external_id))
                if watched.listener is not None and isinstance(executor, Telling):
                    await executor.pass_on_rest(execution, watched.external_id, watched.listener)
        except Exception as error:  # noqa: BLE001  # whatever an executor raises; nobody waits for this
            log.error("execution.not_cancelled execution=%s error=%r", execution.name, error, extra=watched.job.fields)

    # -- reports

    async def _keep(self, job: Job, record: Record) -> None:
        """Return once the leader has a record with the task, or has seen that the attempt counts no more."""
        loop = asyncio.get_running_loop()
        kept: asyncio.Future[None] = loop.create_future()

        def keep() -> None:
            if not kept.done():
                kept.set_result(None)

        details = encode_record(msgspec.structs.replace(record, elapsed=0.0))
        noted = Noted(job.dispatch.id, job.dispatch.attempt, details)
        self._reporter.report(noted, applied=lambda: _call_soon(loop, keep))
        await kept

    def _report(self, job: Job, outcome: Outcome) -> Succeeded | Failed:
        if isinstance(outcome, Finished):
            return self._runner.finished(job, outcome.output)
        error = TaskError(outcome.kind, outcome.message, outcome.detail)
        return self._runner.failures.broken(job, error, retryable=outcome.retryable, delay=outcome.delay)

    def _end(self, job: Job, report: AttemptReport, watched: _Job | None = None) -> None:
        if not job.finish():
            return
        job.uninterruptible()
        self._task_log.ended(job, report)
        applied = None
        if watched is not None and watched.external_id:
            loop = asyncio.get_running_loop()
            after = 0.0 if job.interrupted_by is TaskAborted else _RELEASE_AFTER
            doubts = -1 if self._in_doubt else self._doubts

            def applied() -> None:
                _call_soon(loop, lambda: self._in_background(self._release(watched, after, doubts)))

        self._reporter.report(report, job, applied)
        self._runner.ended(job, report)

    def _in_background(self, going: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(going)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _release(self, watched: _Job, after: float, doubts: int) -> None:
        """Clear it away, unless this worker was in doubt since it ended: another may be about to read how it did."""
        executor, execution = watched.executor, watched.execution
        if after and isinstance(executor, Expiring) and self._doubts == doubts:
            await self._clear_away(watched, executor.expire(execution, watched.external_id))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), after)
        if self._doubts == doubts:
            await self._clear_away(watched, executor.release(execution, watched.external_id))

    async def _clear_away(self, watched: _Job, clearing: Awaitable[None]) -> None:
        try:
            await clearing
        except Exception as error:  # noqa: BLE001  # what is left there is cleared away by others, or by time
            name, fields = watched.execution.name, watched.job.fields
            log.info("execution.not_deleted execution=%s error=%r", name, error, extra=fields)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the process ends
        loop.call_soon_threadsafe(call)
