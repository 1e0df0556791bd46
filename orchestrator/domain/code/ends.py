"""How runs of code end, and what the code of others learns of it."""

from __future__ import annotations

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.history import Outcome
from orchestrator.domain.runs.changes import TurnTaskEnd
from orchestrator.domain.runs.verdict import RAN_TOO_LONG
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import TaskError

NOTHING = b"\xc0"
"""The result of what returns none."""
_CANCELLED = TaskError("Cancelled", "Cancelled by request.")


def end_of(run: bytes, last: commands.EndCommand) -> TurnTaskEnd:
    """Return how the turn task of a run ends with the last command of its code."""
    match last:
        case commands.CompleteRun(result=result):
            return TurnTaskEnd(run, TaskState.SUCCESS, result, None)
        case commands.FailRun(error=error):
            return TurnTaskEnd(run, TaskState.FAILED, None, error)
        case commands.CancelRun():
            return TurnTaskEnd(run, TaskState.CANCELLED, None, _CANCELLED)
        case commands.ContinueRun():
            return TurnTaskEnd(run, TaskState.SUCCESS, NOTHING, None)


def run_state(end: TurnTaskEnd, timed_out: bool) -> RunState:
    """Return the state of a run whose turn task has ended. One that was cancelled when its time was up has failed."""
    return RunState.FAILED if timed_out and end.state == TaskState.CANCELLED else RunState(end.state)


def run_error(end: TurnTaskEnd, state: str) -> TaskError | None:
    """Return why a run ended in its state."""
    return RAN_TOO_LONG if state == RunState.FAILED and end.state == TaskState.CANCELLED else end.error


def child_outcome(child: bytes, state: str, end: TurnTaskEnd) -> Outcome:
    """Return what a parent learns of the end of its child, by the id that it knows it by."""
    if state == RunState.SUCCESS:
        return history.ChildCompleted(child, end.result or NOTHING)
    if state == RunState.CANCELLED:
        return history.ChildCancelled(child)
    return history.ChildFailed(child, run_error(end, state) or TaskError("Failed", "The run failed."))


def task_outcome(task: bytes, state: str, result: bytes | None, error: TaskError | None) -> Outcome:
    """Return what the code of a run learns of the end of one of its tasks."""
    if state == TaskState.SUCCESS:
        return history.TaskCompleted(task, result or NOTHING)
    if state == TaskState.FAILED:
        return history.TaskFailed(task, error or TaskError("Failed", "The task failed."))
    return history.TaskCancelled(task)
