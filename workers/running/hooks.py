"""Calls of middleware hooks around the code of an attempt and at its end, and the spans of attempts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.code.history import Fact
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.outcomes import AttemptReport, RetryTask, after_failure
from orchestrator.domain.tasks.task import Failed, Lost, Returned, Succeeded, TaskError
from orchestrator.errors import TaskAborted
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.middleware import AttemptEnd, Chain, TurnContext
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.telemetry import get_logger
from orchestrator.tracing.entry import enter, leave
from orchestrator.workers.running.forks import end_fork
from orchestrator.workers.running.job import Job

if TYPE_CHECKING:
    from orchestrator.tracing.spans import Spans

log = get_logger("worker")


def attempt_end(job: Job, report: AttemptReport) -> AttemptEnd | None:
    """Return how an attempt has ended, for middleware. Return None for attempts that middleware does not see.

    These are attempts that were handed back, workflow turns, and internal tasks that end cancelled executions.
    """
    executor = job.options.executor
    if job.is_turn or (executor is not None and executor.ends is not None):
        return None
    if isinstance(report, Lost):
        return AttemptEnd(outcome="lost", error=TaskError("WorkerLost", report.reason))
    if not isinstance(report, (Succeeded, Failed)):
        return None
    error = report.error if isinstance(report, Failed) else None
    outcome: Literal["success", "retry", "failure", "cancelled"] = "success"
    if job.interrupted_by is TaskAborted and job.completion is None:
        outcome = "cancelled"
    elif isinstance(report, Failed):
        decision = after_failure(report, job.options.retry, job.dispatch.failures, 0.0)
        outcome = "retry" if isinstance(decision, RetryTask) else "failure"
    return AttemptEnd(outcome=outcome, error=error, seconds=report.duration)


def around(hooks: Chain, ctx: TaskContext, call: Callable[[], Any]) -> Any:
    """Call a function inside the middleware's hooks. A fork made by the function ends before the hooks continue."""
    with hooks.executing(ctx):
        try:
            value = call()
        except BaseException as error:
            end_fork(error)
            raise
        end_fork()
        return value


async def async_around(hooks: Chain, ctx: TaskContext, call: Coroutine[Any, Any, Any]) -> Any:
    try:
        async with hooks.aexecuting(ctx):
            try:
                value = await call
            except BaseException as error:
                end_fork(error)
                raise
            end_fork()
            return value
    finally:
        call.close()  # a hook may have refused to run it


def around_turn(engine: Engine, hooks: Chain, job: Job, activation: Activation) -> Activated:
    """Run a workflow turn inside its hooks. Errors that hooks raise after the turn are logged: the turn counts."""
    dispatch, report = job.dispatch, None
    turn = TurnContext(
        workflow=activation.workflow,
        run_id=UUID(bytes=dispatch.id),
        headers={**job.options.headers},
        is_replay=not activation.after and not all(isinstance(event.what, Fact) for event in activation.events),
    )
    try:
        with hooks.turning(turn):
            report = engine.activate(activation, dispatch.id, dispatch.attempt)
    except Exception:
        if report is None:
            raise
        log.exception("middleware.failed hook=turn: the turn remains valid", extra=job.fields)
    return report


# -- spans of attempts, and the trace context of their code


class AttemptSpans:
    """Creates the spans of attempts, if spans are exported."""

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans
        self.exports = spans is not None
        """Whether this process exports spans. If not, only tasks that arrive with a trace have a trace context."""

    def begin(self, job: Job) -> object:
        """Enter the trace context of an attempt in the current thread or coroutine. Return the token for `leave`."""
        if self._spans is not None:
            return self._begin(self._spans, job)
        return None if job.trace is None else enter(job.trace)

    def _begin(self, spans: Spans, job: Job) -> object:
        task = job.dispatch
        attributes: dict[str, str | int] = {
            "messaging.destination.name": task.queue,
            "messaging.message.id": to_text(task.id),
            "orchestrator.attempt": task.attempt,
        }
        if task.run_id is not None:
            attributes["orchestrator.run.id"] = to_text(task.run_id)
        job.span = spans.attempt(
            task.trace, task.id, task.attempt, task.name, is_turn=task.is_turn_task, attributes=attributes
        )
        job.trace = spans.trace_of(job.span)
        return spans.enter(job.span)

    def leave(self, job: Job, token: object) -> None:
        """Leave the trace context of an attempt."""
        if job.trace is not None:
            leave(token)

    def ended(self, job: Job, report: AttemptReport) -> None:
        """End the span of an attempt whose end is being reported. It has the type of an error, not its message."""
        span, job.span = job.span, None
        if span is None or self._spans is None:
            return
        if job.step:
            span.set_attributes({"orchestrator.workflow": job.step["workflow"], "orchestrator.step": job.step["step"]})
        kind = report.error.kind if isinstance(report, Failed) else "WorkerLost" if isinstance(report, Lost) else None
        if isinstance(report, Returned):
            span.set_attribute("orchestrator.outcome", "returned")
        self._spans.end(span, kind)
