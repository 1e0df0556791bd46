"""How runs of code end, and what the code of others learns of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import Command, ContinueRun
from orchestrator.domain.code.history import Event, Fact, Outcome, PromiseSettled
from orchestrator.domain.runs import RAN_TOO_LONG, TERMINATED, WAS_TERMINATED, TurnTaskEnd
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


# -- what a run that continues as new leaves to the run in which it goes on.
#
# Whatever people say to a run is for its code to hear, and the code is gone once it has continued. So everything that
# it had not been shown by then (`ContinueRun.seen`) is said again to the successor, in the same order: requests to
# cancel, also because its time is up or its parent has ended, updates, and what became of promises. Signals are kept
# until the code takes them, so of those it is the ones that were not taken. An update that the code was shown is its
# own to answer.

SAID = (history.UpdateRequested, history.RunCancelRequested)
"""Facts that hold for whichever run goes on."""


class CarriedOver(NamedTuple):
    """The beginning of the successor."""

    facts: list[Fact]
    """Shown to its code after its beginning."""
    settled: list[PromiseSettled]
    """Answers to promises that the code waited for and has not seen; `id` is the promise's in the old run."""


def carried_over(events: Iterable[Event], command: ContinueRun) -> CarriedOver:
    """Return what a run leaves, from those of its events that are signals, or that it has not been shown."""
    left = dict(command.signals)
    facts: list[Fact] = []
    settled: list[PromiseSettled] = []
    for event in events:
        what = event.what
        if isinstance(what, history.SignalReceived):
            left[what.name] = left.get(what.name, 0) - 1
            if left[what.name] < 0:
                facts.append(what)
        elif event.number <= command.seen:
            continue
        elif isinstance(what, SAID):
            facts.append(what)
        elif isinstance(what, PromiseSettled):
            settled.append(what)
    return CarriedOver(facts, settled)


def ignores_cancel(events: Iterable[Event], command: ContinueRun, began_at: float) -> bool:
    """Say whether a run continues that began with a request to cancel itself, and never waited to hear of it.

    Its successor would do the same, and could never be cancelled: so that one is ended without its code.
    """
    return command.seen == 1 and any(
        event.at <= began_at and isinstance(event.what, history.RunCancelRequested) for event in events
    )


def with_seen(command: ContinueRun, through: int) -> ContinueRun:
    """Return the command of a worker that does not say what its code was shown: everything that it was sent."""
    return command if command.seen else ContinueRun(command.payload, command.signals, through)
