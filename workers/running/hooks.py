"""Where middleware meets an attempt: around the code, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal
from uuid import UUID

from orchestrator.domain.code.activation import Activated, Activation
from orchestrator.domain.code.history import Fact
from orchestrator.domain.tasks.outcomes import AttemptReport, RetryTask, after_failure
from orchestrator.domain.tasks.task import Failed, Lost, Succeeded, TaskError
from orchestrator.errors import TaskAborted
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.middleware import AttemptEnd, Chain, TurnContext
from orchestrator.sdk.tasks.context import TaskContext
from orchestrator.telemetry import get_logger
from orchestrator.workers.running.forks import end_fork
from orchestrator.workers.running.job import Job

log = get_logger("worker")


def attempt_end(job: Job, report: AttemptReport) -> AttemptEnd | None:
    """Return how an attempt has ended, as middleware is told; None where it has not, or where it is none of a task's.

    One that was handed back has not ended; turns and the tasks that end cancelled executions are our own.
    """
    executor = job.options.executor
    if job.dispatch.is_turn_task or (executor is not None and executor.ends is not None):
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
