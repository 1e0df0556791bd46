"""Run one task and turn its end into a report."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from orchestrator.workers.running.delivery import DELIVERY, Interruptible, discard_interruption
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
from orchestrator.workers.running.task_runtime import ENCODED_NONE, JobRuntime, Outbox, interruption

log = get_logger("worker")


class _CurrentThread(threading.local):
    """Holds the callback that interrupts the current thread, made once for all tasks of the thread."""

    def __init__(self) -> None:
        self.interrupt = partial(DELIVERY.send, threading.get_ident())

    def interrupt_as(
        self, others: Mapping[type[BaseException], type[BaseException]]
    ) -> Callable[[type[BaseException]], object]:
        """Return the callback that interrupts a task's code with the exceptions that the code expects."""
        send = self.interrupt
        return lambda reason: send(others.get(reason, reason))


_CURRENT_THREAD = _CurrentThread()


class Runner:
    """Runs jobs of one application."""

    def __init__(self, app: Orchestrator, outbox: Outbox, allowed: Allowed, *, database: bool = False) -> None:
        self.client = app._client
        self._database = app if database else None
        self._tasks = app.tasks
        self._allowed = allowed
        self._results = LargeResults(app.settings)
        self._redacted = {*redaction.split_patterns(app.settings.redact)}
        self._outbox = outbox
        self.failures = Failures(self.find, self._redacted)
        settings, self._workflows = app.settings, app.code_workflows
        self._engine = Engine(app.code_workflows.find, settings.max_payload, largest=settings.largest_value)

    def is_registered(self, job: Job) -> bool:
        """Return whether the task of a job is registered, so that finding it imports nothing."""
        return job.dispatch.name in self._tasks

    def find(self, job: Job) -> Task[..., Any] | None:
        """Return the task of a job: a registered one, or a function that the operator allowed."""
        name = job.dispatch.name
        return self._tasks.get(name) or self._allowed.find(name)

    def running(self, job: Job) -> Running | None:
        """Return the workflow turn that a job is executing in this process, if any."""
        if job.next_turn and job.dispatch.run_id is not None:
            return self._engine.running(job.dispatch.run_id, job.next_turn)
        return self._engine.running(job.dispatch.id, job.dispatch.attempt)

    def run(self, job: Job) -> AttemptReport:
        """Run a task or a workflow turn in the current thread. An asynchronous task gets an event loop of its own."""
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
            others = task._interruptions
            job.interruptible(_CURRENT_THREAD.interrupt if others is None else _CURRENT_THREAD.interrupt_as(others))
            arguments, keywords = self._arguments(task, job)
            enter_task(runtime := JobRuntime(job, self._outbox, self._database, self._results))
            if (hooks := self.client.middleware) is None:
                value = task.function(*arguments, **keywords)
            else:  # in a new context, so that variables set by a hook do not leak into the next task
                call = partial(task.function, *arguments, **keywords)
                value = copy_context().run(around, hooks, runtime.context(), call)
            end_fork()
            report = self._success(job, task, value)
            return self._results.store(job, report) if self._results.has_store else report
        except BaseException as error:  # noqa: BLE001  # whatever a task raises is its failure, SystemExit too
            end_fork(error)
            return self.failures.failure(job, error)
        finally:
            job.uninterruptible()
            if job.interrupted_by is not None:
                discard_interruption()
            end_lines(job)
            enter_task(None)

    def run_on(self, asyncio_runner: AbstractContextManager[asyncio.Runner], job: Job) -> AttemptReport:
        """Run an asynchronous task on an event loop. Restart the loop if the task stops it."""
        try:
            with asyncio_runner as runner:
                loop = runner.get_loop()
                task = loop.create_task(self.run_async(job))
                while True:
                    try:
                        return loop.run_until_complete(task)
                    except RuntimeError:
                        if task.done() or loop.is_closed():
                            raise
        except BaseException as error:  # noqa: BLE001  # the task ended its loop as well as itself
            end_fork(error)
            return self.failures.failure(job, error)

    def _activate(self, job: Job) -> AttemptReport:
        """Run a workflow turn. A workflow that is unknown to this worker may be known to another."""
        dispatch = job.dispatch
        if dispatch.name not in self._workflows._announced:
            return unknown(job)
        try:
            activation = self._with_pages(job, decode(Activation, dispatch.payload))
            if activation is None:
                return Activated(dispatch.id, dispatch.attempt, time.monotonic() - job.started_at, missing=True)
            activation = read_events(open_activation(activation))
            job.interruptible(_CURRENT_THREAD.interrupt)
            if (hooks := self.client.middleware) is None:
                report = self._engine.activate(activation, dispatch.id, dispatch.attempt)
            else:
                report = copy_context().run(around_turn, self._engine, hooks, job, activation)
            return self._results.store_turn(job, report)
        except BaseException as error:  # noqa: BLE001  # not an error of the workflow's code: that would be in the report
            return self.failures.failure(job, error)
        finally:
            job.uninterruptible()
            if job.interrupted_by is not None:
                discard_interruption()

    def may_follow(self, job: Job, report: AttemptReport) -> bool:
        """Return whether the workflow's code may run its next turn right after this job (see
        `domain/code/activation.py`).

        With middleware it may not: hooks need headers that only an activation brings.
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
            and job.options.on_loss == "retry"  # otherwise a crash of the workflow's code would fail the task
        )

    def follow(self, job: Job, report: AttemptReport) -> Activated | None:
        """Run the turn that follows the success of a job. Return None if the leader has to send an activation."""
        dispatch = job.dispatch
        assert dispatch.run_id is not None
        assert isinstance(report, Succeeded)

        def begin(attempt: int) -> None:
            job.next_turn = attempt
            job.interruptible(_CURRENT_THREAD.interrupt)

        try:
            with DELIVERY.watched():
                leader_time = dispatch.at + time.monotonic() - job.received_at
                turn = self._engine.follow(dispatch.run_id, dispatch.id, report.result, begin, leader_time)
                return None if turn is None else self._results.store_turn(job, turn)
        except BaseException as error:  # noqa: BLE001  # the task has succeeded, whether or not the turn fails
            log.debug("run.turn_dropped error=%r: the leader sends the turn", error, extra=job.fields)
            return None
        finally:
            job.uninterruptible()
            job.next_turn = 0
            if job.interrupted_by is not None:
                discard_interruption()

    def ended(self, job: Job, report: AttemptReport) -> None:
        """Call the middleware's hook for the end of an attempt. Turns have a hook of their own."""
        hooks = self.client.middleware
        if hooks is not None and hooks.has_ended_hook and (end := attempt_end(job, report)) is not None:
            hooks.ended(self._runtime(job).context(), end)

    def _with_pages(self, job: Job, activation: Activation) -> Activation | None:
        """Return the activation with the events of its Redis pages, or None if a page is gone."""
        if not activation.pages:
            return activation
        events: list[Event] = []
        for number in range(activation.pages):
            page = self._outbox.page(job, number)
            try:
                events += decode(list[Event], page or b"")
            except Malformed:
                log.warning("run.history_page_gone page=%d: the leader sends it again", number, extra=job.fields)
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
            return (
                await in_thread(lambda: self._results.store(job, report)) if self._results.is_large(report) else report
            )
        except BaseException as error:  # noqa: BLE001  # whatever a task raises is its failure, CancelledError too
            end_fork(error)
            return self.failures.failure(job, error)
        finally:
            job.uninterruptible()
            end_lines(job)

    def _arguments(self, task: Task[..., Any], job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Decode the call: positional arguments, keyword arguments and, for a workflow step, its step context.

        The input of a step may contain more than the function's parameters; the function gets only those it declares.
        """
        (arguments, keywords, *step), is_unread = decode_unread(job.dispatch.payload)
        if is_unread or task._signature.wants_payload:
            if step:
                keywords = task._signature.pick(keywords)  # values that the function does not take are not read
            arguments, keywords = task._signature.load(arguments, keywords)
        if (
            self._redacted
            or task._redacting_options.redact
            or (job.options is not DEFAULT_OPTIONS and job.options.hidden)
        ):
            patterns = self._redacted | {*job.options.hidden, *task._redacting_options.redact}
            defaults = task._signature.plain_defaults(beside=len(arguments))
            job.secrets = Redaction(patterns).secrets(arguments, defaults | keywords)
        if step:
            job.set_step(step[0])
            keywords = task._signature.pick(keywords)
        arguments, keywords = task._signature.restore(arguments, keywords)
        if task._signature.wants_context:
            task._signature.add_context(self._runtime(job).context(), arguments, keywords)
        return arguments, keywords

    def _runtime(self, job: Job) -> JobRuntime:
        return JobRuntime(job, self._outbox, self._database, self._results)

    def _success(self, job: Job, task: Task[..., Any], value: Any) -> Succeeded | Failed:
        ended_at = time.monotonic()
        if job.deadline is not None:
            job.uninterruptible()  # the timeout does not count what follows
        data = ENCODED_NONE
        if job.output is not None:
            data = finished_output(job, value)
        elif job.options.store_result:
            data = encode_value(value, task._signature.result_label, self._results.limit)
        if job.completion is not None:
            if value is not None and data != job.completion and not is_reference(job.completion):
                log.warning(
                    "task.result_ignored: the task returned a different result from the one it passed to "
                    "ctx.complete()",
                    extra=job.fields,
                )
            return completed(job, job.completion)
        if job.interrupted_by is not None and timed_out(job, ended_at):  # and returned all the same
            return self.failures.failed(job, interruption(job, TaskTimeout))
        if job.options.store_result and job.output is None:
            task._signature.check_result(value, data)
        return Succeeded(job.dispatch.id, job.dispatch.attempt, ended_at - job.started_at, data, job.children)

    # -- for executors

    def call(self, job: Job) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a job as plain data for an executor, by name if this worker knows the task."""
        arguments: Sequence[Any]
        keywords: Mapping[str, Any]
        arguments, keywords, *step = decode_call(job.dispatch.payload)
        task = self._tasks.get(job.dispatch.name)
        patterns = self._redacted | {*job.options.hidden}
        if task is not None:
            patterns |= {*task._redacting_options.redact}
            if step:
                keywords = task._signature.pick(keywords)  # the input may contain more than the function's parameters
            arguments, keywords = task._signature.data_by_name(arguments, keywords, self._results.limit)
        if patterns:
            job.secrets = Redaction(patterns).secrets(arguments, keywords)
        if step:
            job.set_step(step[0])
        return arguments, keywords

    def finished(self, job: Job, output: Any) -> Succeeded | Failed:
        """Return the success report of an execution."""
        data = ENCODED_NONE
        try:
            if job.options.store_result:
                data = encode_value(output, f"The result of task {job.dispatch.name!r}", self._results.limit)
                if (task := self._tasks.get(job.dispatch.name)) is not None:
                    task._signature.check_result(output, data)
        except PayloadError as error:
            return self.failures.failed(job, error)
        return Succeeded(job.dispatch.id, job.dispatch.attempt, time.monotonic() - job.started_at, data)

    async def kept(self, job: Job, report: AttemptReport) -> AttemptReport:
        """Return the report, with a large result moved to the payload store. Raise Unavailable if the store is down."""
        return await in_thread(lambda: self._results.store(job, report)) if self._results.is_large(report) else report
