"""Drives executions from start to end: the part that all executors share.

    leader   claims an attempt, and stores the name of its execution in the same transaction
    driver   submit, under that name      ── crash here: the next driver submits again, and finds the execution
             store the external id        ── crash here: the next driver watches the execution
             report the start
             watch                        ── crash here: the next driver watches the execution
             report the end, until it is applied
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
from orchestrator.workers.executors.protocol import (
    BuffersOutput,
    Executor,
    Expiring,
    Gone,
    Setup,
    Unequipped,
    Unreachable,
)
from orchestrator.workers.executors.watched import Watched
from orchestrator.workers.reporting.reporter import Reporter
from orchestrator.workers.reporting.task_log import TaskLog
from orchestrator.workers.running.job import Job, Stage
from orchestrator.workers.running.large_results import in_thread
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.task_runtime import Outbox, interruption

log = get_logger("worker")

_MIN_PAUSE = 0.5
"""Seconds between the first two tries to reach a remote side. The setting `executor_pause` is the maximum."""
_CANCEL_WAIT = 30.0
"""Seconds to wait for work to be cancelled. After that the attempt is reported, and cancelling goes on."""
_CANCEL_TIMEOUT = 600.0
"""Seconds after which cancelling is given up."""
_RELEASE_AFTER = 3.0
"""Seconds between the end and the release, in which a worker that was cut off learns that another one watches."""
_RETURN_DELAY = 0.5
"""Seconds before an attempt that was handed back is dispatched again."""
_MIN_WATCH = 1.0
"""Minimum seconds to watch, so that an execution is seen to have ended even if its timeout is already over."""

T = TypeVar("T")


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
        self._max_pause = setup.settings.executor_pause
        self._healthy_after = 2 * max(self._max_pause, setup.settings.executor_timeout)
        self.limit = limit
        """Maximum number of executions watched at once."""
        self._executors: dict[str, Executor] = {}
        self._jobs: dict[int, Job] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._freed = threading.Event()
        self._is_closing = asyncio.Event()
        """Set when the process ends, so that ended executions are released at once."""
        self._in_doubt = False
        self._doubts = 0
        """How often this worker was cut off, so that other workers may watch its executions."""

    def __len__(self) -> int:
        return len(self._jobs)

    def doubt(self, is_doubtful: bool) -> None:
        """Record that this worker was cut off, or that its heartbeats arrive again."""
        self._in_doubt = is_doubtful
        self._doubts += is_doubtful

    @property
    def room(self) -> int:
        """Return how many more executions the driver accepts."""
        return self.limit - len(self._jobs)

    def wait_for_room(self, timeout: float) -> int:
        if self.room <= 0:
            self._freed.clear()
            if self.room <= 0:
                self._freed.wait(timeout)
        return max(0, self.room)

    def finish(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        """Release ended executions before the process ends, for at most `timeout` seconds."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._is_closing.set)
        give_up_at = time.monotonic() + timeout
        while self._background and time.monotonic() < give_up_at:
            time.sleep(0.01)

    def accept(self, job: Job) -> None:
        """Count a job that is about to be driven."""
        self._jobs[id(job)] = job

    # -- handing back

    def hand_back_all(self, reason: str) -> int:
        """Hand all executions back without ending their work. Return how many."""
        return sum(self.release_job(job, reason) for job in list(self._jobs.values()))

    def release_job(self, job: Job, reason: str) -> bool:
        """Hand a job back without ending its work: another worker will watch it. Any thread may call this."""
        if not (job.take_back() or job.finish()):
            return False
        self._reporter.report(Returned(job.dispatch.id, job.dispatch.attempt, reason), job)
        self._forget(job)
        if job.interrupt is not None:
            job.interrupt(TaskAborted)
        return True

    def revoke(self, revoked: set[tuple[bytes, int]], moved: set[tuple[bytes, int]]) -> None:
        """Stop attempts that no longer count: release those that have `moved` to another worker, cancel the others."""
        now = time.monotonic()
        for job in list(self._jobs.values()):
            attempt = job.dispatch.id, job.dispatch.attempt
            if attempt in moved:
                self.release_job(job, "another attempt counts")
            elif attempt in revoked:
                job.stop_with(TaskAborted, now)

    # -- one execution

    async def drive(self, job: Job) -> None:
        """Drive a job from its start to its end."""
        try:
            if not job.begin(time.monotonic()):
                return
            current, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert current is not None
            job.interruptible(lambda _: loop.call_soon_threadsafe(current.cancel))
            try:
                watched = await self._begin(job)
            except Unequipped as error:
                self._hand_back(job, str(error))
                return
            except BaseException as error:  # noqa: BLE001  # no failure of the work, which has not begun
                self._end(job, self._runner.failures.failure(job, error))
                return
            if watched is not None and watched.ends:
                await self._cancel_orphan(watched)
            elif watched is not None:
                await self._run_to_end(watched)
        finally:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        self._jobs.pop(id(job), None)
        self._freed.set()

    async def _begin(self, job: Job) -> Watched | None:
        """Return an execution with its executor, or hand the job back if this worker lacks the executor."""
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
        if record is None or record.failures != job.dispatch.failures:  # sent by a leader of an earlier release
            name, attempt = execution_name(job.dispatch.id, job.dispatch.attempt), job.dispatch.attempt
            record = Record(name=name, attempt=attempt, failures=job.dispatch.failures, since=time.time())
            await self._store_record(job, record)
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
        return Watched(job, executor, execution, record, ends=call.ends is not None)

    async def _run_to_end(self, watched: Watched) -> None:
        job = watched.job
        remaining = None if job.options.timeout is None else job.options.timeout - watched.record.elapsed
        min_timeout = _MIN_WATCH if watched.external_id else 0.0
        try:
            async with asyncio.timeout(None if remaining is None else max(min_timeout, remaining)) as limit:
                outcome = await self._watch(watched, limit)
            report = await self._runner.kept(job, self._report(job, outcome))
        except BaseException as error:  # noqa: BLE001  # any error of an executor is the failure of this attempt
            if job.stage is not Stage.RUNNING:
                return  # the job was handed back, and its work goes on
            job.uninterruptible()
            reason = TaskTimeout if limit.expired() else job.interrupted_by
            if reason is None and isinstance(error, asyncio.CancelledError):
                self.release_job(job, "its event loop ends")
                return
            if reason is None and isinstance(error, Unequipped):
                self._hand_back(job, str(error))
                return
            if reason is None and isinstance(error, (NoStore, Unavailable)):  # the end of the work stays readable
                self._end(job, self._runner.failures.failure(job, error))
                return
            if reason is None and isinstance(error, Gone):
                lost = TaskError("ExecutionLost", f"Execution {watched.execution.name} is gone: {error}")
                report = self._runner.failures.broken(job, lost, retryable=True)
            else:
                await self._cancel(watched)
                report = self._runner.failures.failure(job, error if reason is None else interruption(job, reason))
        self._end(job, report, watched)

    async def _cancel_orphan(self, watched: Watched) -> None:
        """Cancel the work of a cancelled task that had no watcher, or whose watcher may have died."""
        job, executor, execution = watched.job, watched.executor, watched.execution
        try:
            async with asyncio.timeout(job.options.timeout):
                await self._retry_unreachable(watched, lambda: executor.cancel(execution, watched.external_id))
            report: AttemptReport = self._runner.finished(job, None)
        except Unequipped as error:
            self._hand_back(job, str(error))
            return
        except BaseException as error:  # noqa: BLE001  # any error of an executor is the failure of this attempt
            report = self._runner.failures.failure(job, error)
            watched.external_id = ""  # prevents the release, so that the next attempt can find the work
        self._end(job, report, watched)

    def _hand_back(self, job: Job, reason: str) -> None:
        """Hand a job back for a worker that has the configuration its executor needs."""
        call = job.options.executor
        assert call is not None
        log.error(
            "task.returned reason=%r: the task waits for a worker that meets the needs of its executor",
            reason,
            extra=job.fields,
        )
        reason = "its executor cannot run on this worker"
        self._end(job, Returned(job.dispatch.id, job.dispatch.attempt, reason, _RETURN_DELAY, call.requirement))

    async def _watch(self, watched: Watched, limit: asyncio.Timeout) -> Outcome:
        """Submit the execution unless that was done, and return its outcome."""
        job, execution, executor = watched.job, watched.execution, watched.executor
        if not watched.external_id:
            watched.external_id = await self._retry_unreachable(watched, lambda: executor.submit(execution))
            host = socket.gethostname() if executor.options.is_local else ""
            record = msgspec.structs.replace(watched.record, external_id=watched.external_id, host=host)
            await self._store_record(job, record)
        if job.stage is Stage.RUNNING:
            job.announced = True
            age = time.monotonic() - job.started_at
            self._reporter.report(Started(job.dispatch.id, job.dispatch.attempt, age))
        listener = watched.listener = Listener(job, self._outbox, limit)
        return await self._retry_unreachable(watched, lambda: executor.watch(execution, watched.external_id, listener))

    async def _retry_unreachable(self, watched: Watched, call: Callable[[], Awaitable[T]]) -> T:
        """Call an executor, and retry while the remote side is unreachable."""
        pause = first = min(_MIN_PAUSE, self._max_pause)
        while True:
            began = time.monotonic()
            try:
                return await call()
            except Unreachable as error:
                if time.monotonic() - began > self._healthy_after:
                    pause = first  # it was reachable for a while
                if pause == first:
                    log.warning("executor.unavailable error=%s: it is retried", error, extra=watched.job.fields)
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(2 * pause, self._max_pause)

    async def _cancel(self, watched: Watched) -> None:
        """Cancel the work. If that takes long, cancelling goes on while the attempt is reported."""
        await asyncio.wait([self._in_background(self._cancel_until_ended(watched))], timeout=_CANCEL_WAIT)

    async def _cancel_until_ended(self, watched: Watched) -> None:
        executor, execution = watched.executor, watched.execution
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT):
                await self._retry_unreachable(watched, lambda: executor.cancel(execution, watched.external_id))
                if watched.listener is not None and isinstance(executor, BuffersOutput):
                    await executor.drain_output(execution, watched.external_id, watched.listener)
        except Exception as error:  # noqa: BLE001  # any error of an executor; nothing waits for this task
            log.error("execution.not_cancelled execution=%s error=%r", execution.name, error, extra=watched.job.fields)

    # -- reports

    async def _store_record(self, job: Job, record: Record) -> None:
        """Wait until the leader has stored a record with the task, or has found that the attempt no longer counts."""
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()

        def mark_stored() -> None:
            if not stored.done():
                stored.set_result(None)

        details = encode_record(msgspec.structs.replace(record, elapsed=0.0))
        note = Noted(job.dispatch.id, job.dispatch.attempt, details)
        self._reporter.report(note, applied=lambda: _call_soon(loop, mark_stored))
        await stored

    def _report(self, job: Job, outcome: Outcome) -> Succeeded | Failed:
        if isinstance(outcome, Finished):
            return self._runner.finished(job, outcome.output)
        error = TaskError(outcome.kind, outcome.message, outcome.detail)
        return self._runner.failures.broken(job, error, retryable=outcome.retryable, delay=outcome.delay)

    def _end(self, job: Job, report: AttemptReport, watched: Watched | None = None) -> None:
        if not job.finish():
            return
        job.uninterruptible()
        self._task_log.ended(job, report)
        applied = None
        if watched is not None and watched.external_id:
            loop = asyncio.get_running_loop()
            delay = 0.0 if job.interrupted_by is TaskAborted else _RELEASE_AFTER
            doubts = -1 if self._in_doubt else self._doubts

            def applied() -> None:
                _call_soon(loop, lambda: self._in_background(self._release(watched, delay, doubts)))

        self._reporter.report(report, job, applied)
        self._runner.ended(job, report)

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _release(self, watched: Watched, delay: float, doubts: int) -> None:
        """Release an ended execution, unless another worker may still read the end: this one was cut off."""
        executor, execution = watched.executor, watched.execution
        if delay and isinstance(executor, Expiring) and self._doubts == doubts:
            await self._clear_away(watched, executor.expire(execution, watched.external_id))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_closing.wait(), delay)
        if self._doubts == doubts:
            await self._clear_away(watched, executor.release(execution, watched.external_id))

    async def _clear_away(self, watched: Watched, call: Awaitable[None]) -> None:
        try:
            await call
        except Exception as error:  # noqa: BLE001  # leftovers are deleted by another process, or expire
            name, fields = watched.execution.name, watched.job.fields
            log.info("execution.not_deleted execution=%s error=%r", name, error, extra=fields)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, because the process ends
        loop.call_soon_threadsafe(call)
