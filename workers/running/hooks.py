"""Where middleware meets an attempt: around the code, and at its end."""

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
    """Return how an attempt has ended, as middleware is told; None where it has not, or where it is none of a task's.

    One that was handed back has not ended; turns and the tasks that end cancelled executions are our own.
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
    """Call a function inside the hooks of middleware; a fork of it ends before they go on."""
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
        call.close()  # a hook may have refused to begin it


def around_turn(engine: Engine, hooks: Chain, job: Job, activation: Activation) -> Activated:
    """Take a turn inside its hooks. What they raise after it is logged: the turn has been taken."""
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
        log.exception("middleware.failed hook=turn: the turn counts", extra=job.fields)
    return report


# -- the spans of attempts, where this process makes some; and, whether or not, the trace that their code belongs to


class AttemptSpans:
    """Knows the tracer, if spans are exported."""

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans
        self.makes_any = spans is not None
        """Else only the code of a task that is traced already belongs to something."""

    def begin(self, job: Job) -> object:
        """Have what the current thread or coroutine does belong to an attempt; return what `leave` takes."""
        if self._spans is not None:
            return self._begin(self._spans, job)
        return None if job.trace is None else enter(job.trace)

    def _begin(self, spans: Spans, job: Job) -> object:
        task = job.dispatch
        about: dict[str, str | int] = {
            "messaging.destination.name": task.queue,
            "messaging.message.id": to_text(task.id),
            "orchestrator.attempt": task.attempt,
        }
        if task.run_id is not None:
            about["orchestrator.run.id"] = to_text(task.run_id)
        job.span = spans.attempt(
            task.trace, task.id, task.attempt, task.name, is_turn=task.is_turn_task, attributes=about
        )
        job.trace = spans.trace_of(job.span)
        return spans.enter(job.span)

    def leave(self, job: Job, token: object) -> None:
        """Have it belong to nothing any more."""
        if job.trace is not None:
            leave(token)

    def ended(self, job: Job, report: AttemptReport) -> None:
        """End the span of an attempt whose end is being reported. It says what failed, and no text of that."""
        span, job.span = job.span, None
        if span is None or self._spans is None:
            return
        if job.step:
            span.set_attributes({"orchestrator.workflow": job.step["workflow"], "orchestrator.step": job.step["step"]})
        kind = report.error.kind if isinstance(report, Failed) else "WorkerLost" if isinstance(report, Lost) else None
        if isinstance(report, Returned):
            span.set_attribute("orchestrator.outcome", "returned")
        self._spans.end(span, kind)
