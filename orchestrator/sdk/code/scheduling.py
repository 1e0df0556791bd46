"""Tasks inside a workflow: scheduled, never run or enqueued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.domain.code.commands import CancelTask, ScheduleTask
from orchestrator.errors import InvalidTask, NotDeterministic, OrchestratorError
from orchestrator.sdk.code.current import current_flow
from orchestrator.sdk.code.futures import DurableFuture
from orchestrator.sdk.values.payload import digest_call

if TYPE_CHECKING:
    from orchestrator.sdk.tasks.task import Task

R = TypeVar("R")


def schedule_task(task: Task[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> DurableFuture[R]:
    """Command a task, and return what will become of it."""
    flow = current_flow()
    if flow is None or flow.started is None:
        raise OrchestratorError(f"{task.name}.schedule(…) works inside a workflow only. Use enqueue(…) here.")
    if task._call_options.on_success is True:
        raise InvalidTask("Option on_success=True: only inside a task that runs in a worker; this is a workflow.")
    ordinal, identifier = flow.next("task")
    described = task._as_scheduled(flow.started.queue)._described(identifier, args, kwargs, flow.run_id, ordinal)
    flow.issue(ScheduleTask(ordinal, described, digest_call(args, kwargs)))
    restore = task._signature.restore_kept
    return flow.expect(DurableFuture(flow, identifier, f"Task {task.name!r}", restore, CancelTask(identifier)))


def refuse_in_workflow(task: Task[..., Any], how: str) -> None:
    """Say what to do instead where the code of a workflow would run or enqueue a task by itself."""
    if current_flow() is not None:
        name = getattr(task, "__name__", task.name)
        raise NotDeterministic(
            f"Task {task.name!r} was {how} inside a workflow, and would be so again on every replay. "
            f"Use `await {name}.schedule(…)`."
        )
