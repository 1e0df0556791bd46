"""How runs of code end, and what the code of others learns of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import Event, Outcome
from orchestrator.domain.runs.changes import TurnTaskEnd
from orchestrator.domain.runs.verdict import RAN_TOO_LONG, TERMINATED, WAS_TERMINATED
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import TaskError

C = TypeVar("C")
NOTHING = b"\xc0"
"""The result of what returns none."""
PARENT_ASKS, PARENT_ENDED = "its parent asks for it", "its parent has ended"
"""Why a child is asked to cancel itself, for its history."""
ASKED = "somebody asked for it"
"""Why any run is."""
MOST_REFUSALS = 100
"""How often in a row the end of a run is refused because there are messages that its code has not seen."""
CAME_LATE = {"came_late": True}
"""The data of the error of an update that its run ended without: none of it was done, so it may go to another run."""
MAY_BE_EARLY = (commands.CompleteRun, commands.FailRun)
"""Ends that are refused then."""
_CANCELLED = TaskError("Cancelled", "Cancelled by request.")


def _carried_out(batch: Sequence[Command]) -> Iterator[Command]:
    """Yield the commands of a batch that are carried out beside being recorded.

    Where the batch ends the run, that is what reaches others: detached children, cancels of children, signals,
    answers and attributes. All else that it asks for belongs to the run, whose end cancels it before it begins.
    """
    ends = bool(batch) and isinstance(batch[-1], commands.EndCommand)
    for command in batch:
        match command:
            case commands.StartChildRun(detached=True):
                yield command
            case commands.CancelChildRun() | commands.SignalRun() | commands.AnswerUpdate():
                yield command
            case commands.SetState() | commands.ClearState():
                yield command
            case _ if not ends:
                yield command


class CommandsByKind:
    """The commands of batches that are carried out: a leader does all of a kind at once, for all runs."""

    def __init__(self, batches: Mapping[bytes, Sequence[Command]]) -> None:
        self._found: dict[type, list[tuple[bytes, Any]]] = defaultdict(list)
        for run, batch in batches.items():
            for command in _carried_out(batch):
                self._found[type(command)].append((run, command))

    def of(self, kind: type[C]) -> list[tuple[bytes, C]]:
        """Return the commands of a kind, each with its run."""
        return self._found[kind]


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


def ends_too_early(report: Activated, unseen: Iterable[Event], *, has_messages: bool = False) -> bool:
    """Say whether code has ended without messages that people have sent.

    `unseen` are the first events that it was not shown; `has_messages`: some are not among the events yet. A run that
    continues passes messages on; a request to cancel does not change an end that came before it; and a signal that may
    begin a run of its own does so. After some refusals in a row the end counts all the same: otherwise a flood of
    signals would keep the run open for ever. So does that of a worker that knows of no refusals.
    """
    if not isinstance(report.commands[-1], MAY_BE_EARLY) or not 0 <= report.refusals < MOST_REFUSALS:
        return False
    for event in unseen:
        match event.what:
            case history.RunCancelRequested():
                return False
            case history.SignalReceived(otherwise=otherwise) if otherwise is not None:
                return False
            case history.SignalReceived() | history.UpdateRequested():
                has_messages = True
    return has_messages


def run_state(end: TurnTaskEnd, timed_out: bool) -> RunState:
    """Return the state of a run whose turn task has ended. One that was cancelled when its time was up has failed."""
    return RunState.FAILED if timed_out and end.state == TaskState.CANCELLED else RunState(end.state)


def run_error(end: TurnTaskEnd, state: str, reason: str | None = None) -> TaskError | None:
    """Return why a run ended in its state."""
    if reason == TERMINATED:
        return WAS_TERMINATED
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
