"""Run one task and turn what happens into a report."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from typing import Any

import msgspec

from orchestrator.domain import redaction
from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.code.history import Event
from orchestrator.domain.redaction import Redaction
from orchestrator.domain.sealed import open_activation
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, Failed, Succeeded
from orchestrator.errors import (
    PayloadError,
    SoftTimeout,
    TaskTimeout,
)
from orchestrator.references import is_reference, may_hold_references
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.code.engine import Engine, Running
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_call, decode_unread, encode_value
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import Malformed, decode
from orchestrator.workers.functions import Allowed
from orchestrator.workers.reporting.task_output import end_lines
from orchestrator.workers.running.delivery import DELIVERY, Interruptible, uninterrupted
from orchestrator.workers.running.failures import (
    Failures,
    completed,
    timed_out,
    unknown,
)
from orchestrator.workers.running.forks import end_fork
from orchestrator.workers.running.hooks import around, around_turn, async_around, attempt_end
from orchestrator.workers.running.job import Job
from orchestrator.workers.running.large_results import LargeResults, finished_output, in_thread, read_events
from orchestrator.workers.running.task_runtime import NOTHING, JobRuntime, Outbox, interruption

log = get_logger("worker")


class _Here(threading.local):
    """What interrupts the current thread, made once for all tasks that it runs."""

    def __init__(self) -> None:
        self.interrupt = partial(DELIVERY.send, threading.get_ident())


_HERE = _Here()


class Runner:
    """Runs jobs of one application."""

    def __init__(self, app: Orchestrator, outbox: Outbox, allowed: Allowed, *, database: bool = False) -> None:
        self.client = app._client
        self._database = app if database else None
        self._tasks = app.tasks
        self._allowed = allowed
        self._large = LargeResults(app.settings)
        """Of what executors bring."""
        self._redacted = {*redaction.words(app.settings.redact)}
        self._outbox = outbox
        self.failures = Failures(self.find, self._redacted)
        settings, self._workflows = app.settings, app.code_workflows
        self._engine = Engine(app.code_workflows.find, settings.max_payload, largest=settings.largest_value)

    def has(self, job: Job) -> bool:
        """Say whether the task of a job is registered, so that nothing is imported to find it."""
        return job.dispatch.name in self._tasks

    def find(self, job: Job) -> Task[..., Any] | None:
        """Return the task that a job names: registered, or a function that the operator allowed."""
        name = job.dispatch.name
        return self._tasks.get(name) or self._allowed.find(name)

    def running(self, job: Job) -> Running | None:
        """Return the turn of a workflow that a job is, while its code runs here."""
        if job.next_turn and job.dispatch.run_id is not None:
            return self._engine.running(job.dispatch.run_id, job.next_turn)
        return self._engine.running(job.dispatch.id, job.dispatch.attempt)

    def run(self, job: Job) -> AttemptReport:
        """Run a task, or a turn of a workflow's code, in the current thread; an asynchronous task on its own loop."""
        if job.is_turn:
            with DELIVERY.watched():
                return self._activate(job)
        task = self.find(job)
        if task is None:
            return unknown(job)
        if (executor := task._call_options.executor_call) is not None:
            return self.failures.for_executor(job, executor)
        if task._is_async:
            return self.run_on(asyncio.Runner(), job)
        try:
            job.interruptible(_HERE.interrupt)
            arguments, keywords = self._arguments(task, job)
            enter_task(runtime := JobRuntime(job, self._outbox, self._database, self._large))
            if (hooks := self.client.middleware) is None:
                value = task.function(*arguments, **keywords)
            else:  # in a context of its own, so that no variable which a hook sets is there for the next task
                call = partial(task.function, *arguments, **keywords)
                value = copy_context().run(around, hooks, runtime.context(), call)
            end_fork()
            report = self._success(job, task, value)
            return self._large.left(job, report) if self._large.has_store else report
        except BaseException as error:  # noqa: BLE001  # whatever a task raises is its failure, SystemExit too
            end_fork(error)
            return self.failures.failure(job, error)
        finally:
            job.uninterruptible()
            if job.interrupted_by is not None:
                uninterrupted()
            end_lines(job)
            enter_task(None)

    def run_on(self, entered: AbstractContextManager[asyncio.Runner], job: Job) -> AttemptReport:
        """Run an asynchronous task on an event loop, which goes on if the task stops it."""
        try:
            with entered as runner:
                loop = runner.get_loop()
                task = loop.create_task(self.run_async(job))
                while True:
                    try:
                        return loop.run_until_complete(task)
                    except RuntimeError:
                        if task.done() or loop.is_closed():
                            raise
        except BaseException as error:  # noqa: BLE001  # the task ended its loop, not only itself
            end_fork(error)
            return self.failures.failure(job, error)

    def _activate(self, job: Job) -> AttemptReport:
        """Show a workflow's code what is new to it. A workflow that is unknown here may be known elsewhere."""
        dispatch = job.dispatch
        if dispatch.name not in self._workflows._announced:
            return unknown(job)
        try:
            activation = self._gather(job, decode(Activation, dispatch.payload))
            if activation is None:
                return Activated(dispatch.id, dispatch.attempt, time.monotonic() - job.started_at, missing=True)
            activation = read_events(open_activation(activation))
            job.interruptible(_HERE.interrupt)
            if (hooks := self.client.middleware) is None:
                report = self._engine.activate(activation, dispatch.id, dispatch.attempt)
            else:
                report = copy_context().run(around_turn, self._engine, hooks, job, activation)
            return self._large.left_turn(job, report)
        except BaseException as error:  # noqa: BLE001  # no fault of the code: that would be in the report
            return self.failures.failure(job, error)
        finally:
            job.uninterruptible()
            if job.interrupted_by is not None:
                uninterrupted()

    def may_follow(self, job: Job, report: AttemptReport) -> bool:
        """Say whether the code of its run may be shown the success of a job at once: see `domain/code/activation.py`.

        Turns inside the hooks of middleware have headers that only an activation brings.
        """
        run = job.dispatch.run_id
        return (
            run is not None
            and isinstance(report, Succeeded)
            and self._engine.may_follow(run, job.dispatch.id)
            and self.client.middleware is None
            and job.completion is None
            and job.interrupted_by is None
            and not may_hold_references(report.result)
            and job.options.on_loss == "retry"  # else code of the workflow that crashes would fail the task
        )

    def follow(self, job: Job, report: AttemptReport) -> Activated | None:
        """Take the turn that follows the success of a job; None if an activation has to bring it."""
        dispatch = job.dispatch
        assert dispatch.run_id is not None
        assert isinstance(report, Succeeded)

        def begin(attempt: int) -> None:
            job.next_turn = attempt
            job.interruptible(_HERE.interrupt)

        try:
            with DELIVERY.watched():
                leader_time = dispatch.at + time.monotonic() - job.received_at
                turn = self._engine.follow(dispatch.run_id, dispatch.id, report.result, begin, leader_time)
                return None if turn is None else self._large.left_turn(job, turn)
        except BaseException as error:  # noqa: BLE001  # the task has succeeded, whatever becomes of the turn
            log.debug("run.turn_dropped error=%r: the leader sends it", error, extra=job.fields)
            return None
        finally:
            job.uninterruptible()
            job.next_turn = 0
            if job.interrupted_by is not None:
                uninterrupted()

    def ended(self, job: Job, report: AttemptReport) -> None:
        """Tell the middleware of the end of an attempt that is being reported. Turns have a hook of their own."""
        hooks = self.client.middleware
        if hooks is not None and hooks.sees_ends and (end := attempt_end(job, report)) is not None:
            hooks.ended(self._runtime(job).context(), end)

    def _gather(self, job: Job, activation: Activation) -> Activation | None:
        """Return an activation with the events that stand in pages; None if one of those is gone."""
        if not activation.pages:
            return activation
        events: list[Event] = []
        for number in range(activation.pages):
            page = self._outbox.page(job, number)
            try:
                events += decode(list[Event], page or b"")
            except Malformed:
                log.warning("run.history_page_gone page=%d: it is sent again", number, extra=job.fields)
                return None
        return msgspec.structs.replace(activation, events=events, pages=0)

    async def run_async(self, job: Job) -> AttemptReport:
        """Run an asynchronous task on the current event loop."""
        task = self.find(job)
        if task is None:
            return unknown(job)
        if (executor := task._call_options.executor_call) is not None:
            return self.failures.for_executor(job, executor)
        current = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert current is not None
        try:
            job.interruptible(lambda _: loop.call_soon_threadsafe(current.cancel))
            if may_hold_references(job.dispatch.payload):
                arguments, keywords = await in_thread(lambda: self._arguments(task, job))
            else:
                arguments, keywords = self._arguments(task, job)
            runtime = self._runtime(job)
            enter_task(runtime)
            call = task.function(*arguments, **keywords)
            if (hooks := self.client.middleware) is not None:
                call = async_around(hooks, runtime.context(), call)
            if job.options.soft_timeout is not None:
                call = Interruptible(call, lambda: job.interrupted_by is SoftTimeout)
            value = await call
            end_fork()
            report = self._success(job, task, value)
            return await in_thread(lambda: self._large.left(job, report)) if self._large.are_large(report) else report
        except BaseException as error:  # noqa: BLE001  # whatever a task raises is its failure, CancelledError too
            end_fork(error)
            return self.failures.failure(job, error)
        finally:
            job.uninterruptible()
            end_lines(job)

    def _arguments(self, task: Task[..., Any], job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Decode the call: positional and named arguments, and for a step of a workflow what it knows of itself.

        A step's input is a mapping that holds more than a function need know; it gets what it has parameters for.
        """
        (arguments, keywords, *step), is_unread = decode_unread(job.dispatch.payload)
        if is_unread or task._signature.wants_unread:
            if step:
                keywords = task._signature.pick(keywords)  # what it does not want is not read
            arguments, keywords = task._signature.load(arguments, keywords)
        if (
            self._redacted
            or task._redacting_options.redact
            or (job.options is not DEFAULT_OPTIONS and job.options.hidden)
        ):
            patterns = self._redacted | {*job.options.hidden, *task._redacting_options.redact}
            rest = task._signature.plain_defaults(beside=len(arguments))
            job.secrets = Redaction(patterns).secrets(arguments, rest | keywords)
        if step:
            job.set_step(step[0])
            keywords = task._signature.pick(keywords)
        arguments, keywords = task._signature.restore(arguments, keywords)
        if task._signature.wants_context:
            task._signature.add_context(self._runtime(job).context(), arguments, keywords)
        return arguments, keywords

    def _runtime(self, job: Job) -> JobRuntime:
        return JobRuntime(job, self._outbox, self._database, self._large)

    def _success(self, job: Job, task: Task[..., Any], value: Any) -> Succeeded | Failed:
        ended_at = time.monotonic()
        if job.deadline is not None:
            job.uninterruptible()  # its time is not used up by what follows
        data = NOTHING
        if job.output is not None:
            data = finished_output(job, value)
        elif job.options.store_result:
            data = encode_value(value, task._signature.result_words, self._large.limit)
        if job.completion is not None:
            if value is not None and data != job.completion and not is_reference(job.completion):
                log.warning(
                    "task.result_ignored: the task returned another result than it gave to ctx.complete()",
                    extra=job.fields,
                )
            return completed(job, job.completion)
        if job.interrupted_by is not None and timed_out(job, ended_at):  # and returned all the same
            return self.failures.failed(job, interruption(job, TaskTimeout))
        if job.options.store_result and job.output is None:
            task._signature.check_result(value, data)
        return Succeeded(job.dispatch.id, job.dispatch.attempt, ended_at - job.started_at, data, job.children)

    # -- what executors do

    def call(self, job: Job) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a job as plain data, for an executor: by name, where this worker knows the task."""
        arguments: Sequence[Any]
        keywords: Mapping[str, Any]
        arguments, keywords, *step = decode_call(job.dispatch.payload)
        task = self._tasks.get(job.dispatch.name)
        patterns = self._redacted | {*job.options.hidden}
        if task is not None:
            patterns |= {*task._redacting_options.redact}
            if step:
                keywords = task._signature.pick(keywords)  # of which it may hold more than the function has
            # A task enqueued by its name alone, as a follower or as a step, lacks the arguments that have defaults.
            arguments, keywords = task._signature.data_by_name(arguments, keywords, self._large.limit)
        if patterns:
            job.secrets = Redaction(patterns).secrets(arguments, keywords)
        if step:
            job.set_step(step[0])
        return arguments, keywords

    def finished(self, job: Job, output: Any) -> Succeeded | Failed:
        """Return the report of work that an executor has finished."""
        data = NOTHING
        try:
            if job.options.store_result:
                data = encode_value(output, f"The result of task {job.dispatch.name!r}", self._large.limit)
                if (task := self._tasks.get(job.dispatch.name)) is not None:
                    task._signature.check_result(output, data)
        except PayloadError as error:
            return self.failures.failed(job, error)
        return Succeeded(job.dispatch.id, job.dispatch.attempt, time.monotonic() - job.started_at, data)

    async def kept(self, job: Job, report: AttemptReport) -> AttemptReport:
        """Return a report with its result in the payload store, if that is large; Unavailable if the store is away."""
        return await in_thread(lambda: self._large.left(job, report)) if self._large.are_large(report) else report
