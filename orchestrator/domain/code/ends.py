"""The ends of code runs, and how other runs learn of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import Command, ContinueRun
from orchestrator.domain.code.history import Event, Fact, Outcome, PromiseSettled
from orchestrator.domain.runs import RAN_TOO_LONG, TERMINATED, WAS_TERMINATED, TurnTaskEnd
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import TaskError

C = TypeVar("C")
ENCODED_NONE = b"\xc0"
"""The encoded result None."""
PARENT_ASKS, PARENT_ENDED = "its parent asks for it", "its parent has ended"
"""Reasons of a child's cancel request, for its history."""
REQUESTED = "it was requested"
"""The reason of a cancel request from outside, for the history."""
MAX_REFUSALS = 100
"""How often in a row the end of a run is refused because of messages that its code has not seen."""
TOO_LATE = {"came_late": True}
"""Error data of an update that arrived too late: nothing of it was done, so another run may take it."""
REFUSABLE_ENDS = (commands.CompleteRun, commands.FailRun)
"""Ends that can be refused because of unseen messages."""
_FACTS = get_args(history.Fact)
_CANCELLED = TaskError("Cancelled", "Cancelled by request.")


def _effective_commands(batch: Sequence[Command]) -> Iterator[Command]:
    """Yield the commands of a batch that are executed rather than only recorded.

    If the batch ends the run, these are the commands that affect others: detached children, cancels of children,
    signals, answers and attributes. All other commands concern the run itself, whose end would cancel them at once.
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
    """The executed commands of batches, by kind: the leader executes each kind at once for all runs."""

    def __init__(self, batches: Mapping[bytes, Sequence[Command]]) -> None:
        self._by_kind: dict[type, list[tuple[bytes, Any]]] = defaultdict(list)
        for run, batch in batches.items():
            for command in _effective_commands(batch):
                self._by_kind[type(command)].append((run, command))

    def of(self, kind: type[C]) -> list[tuple[bytes, C]]:
        """Return the commands of a kind, each with its run."""
        return self._by_kind[kind]


def end_of(run: bytes, last: commands.EndCommand) -> TurnTaskEnd:
    """Return the end of the run's turn task for the last command of its code."""
    match last:
        case commands.CompleteRun(result=result):
            return TurnTaskEnd(run, TaskState.SUCCESS, result, None)
        case commands.FailRun(error=error):
            return TurnTaskEnd(run, TaskState.FAILED, None, error)
        case commands.CancelRun():
            return TurnTaskEnd(run, TaskState.CANCELLED, None, _CANCELLED)
        case commands.ContinueRun():
            return TurnTaskEnd(run, TaskState.SUCCESS, ENCODED_NONE, None)


def ends_too_early(report: Activated, unseen: Iterable[Event], *, has_messages: bool = False) -> bool:
    """Return whether the end of the code must be refused because of messages that it has not seen.

    `unseen` are the first events that it was not shown. `has_messages`: there are further ones not among the events
    yet. The end is accepted if the run continues as new and passes the messages on, if the next message is a cancel
    request, or if it is a signal that can start a run of its own. It is also accepted after some refusals in a row,
    because a flood of signals could keep the run open for ever, and from a worker that does not know refusals.
    """
    if not isinstance(report.commands[-1], REFUSABLE_ENDS) or not 0 <= report.refusals < MAX_REFUSALS:
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


def kept_of_refused(report: Activated) -> Sequence[Command]:
    """Return the commands of a turn with a refused end that count nevertheless: all up to its last side effect.

    Workers of older releases would show the code the unseen messages before that side effect.
    """
    done = (place for place, item in enumerate(report.commands, 1) if isinstance(item, commands.RecordOperation))
    return report.commands[: max(done, default=0)] if report.holds else []


class Stage(NamedTuple):
    """Facts that the code is shown together, because it once ended before it was shown all of them."""

    operation: int
    """The ordinal of the side effect whose result the code gets after the messages among the facts; 0 if none."""
    facts: list[Event]


def stages(events: Sequence[Event]) -> dict[int, list[Stage]]:
    """Group the facts from each refused end up to its marker; return the group of each fact, by number.

    If code that was shown a group ended too early again, the group grows. A side effect begins a new stage of it.
    """
    facts = [event for event in events if isinstance(event.what, _FACTS)]
    refused: list[tuple[history.ActivationApplied, int, int]] = []
    for event in events:
        match event.what:
            case history.ActivationApplied() as marker:
                refused.append((marker, event.number, 0))
            case history.OperationRecorded(ordinal=ordinal) if refused:
                refused[-1] = *refused[-1][:2], ordinal
    groups: dict[int, list[Stage]] = {}
    for marker, number, operation in refused:
        if not marker.ended:
            continue
        first = facts[_place(facts, marker.ended) : _place(facts, marker.ended + 1)]
        group = groups.setdefault(marker.ended, [Stage(0, first)])
        last = max((stage.facts[-1].number for stage in group if stage.facts), default=marker.ended)
        later = facts[_place(facts, last + 1) : _place(facts, number)]
        if operation:
            group.append(Stage(operation, later))
        else:
            group[-1].facts.extend(later)
        groups.update((fact.number, group) for fact in later)
    return groups


def _place(facts: Sequence[Event], number: int) -> int:
    return bisect_left(facts, number, key=lambda fact: fact.number)


def run_state(end: TurnTaskEnd, timed_out: bool) -> RunState:
    """Return the state of a run whose turn task has ended. A run cancelled because of its timeout has failed."""
    return RunState.FAILED if timed_out and end.state == TaskState.CANCELLED else RunState(end.state)


def run_error(end: TurnTaskEnd, state: str, reason: str | None = None) -> TaskError | None:
    """Return the error of a run that ended in this state."""
    if reason == TERMINATED:
        return WAS_TERMINATED
    return RAN_TOO_LONG if state == RunState.FAILED and end.state == TaskState.CANCELLED else end.error


def child_outcome(child: bytes, state: str, end: TurnTaskEnd) -> Outcome:
    """Return the event for the parent of an ended run. `child` is the id by which the parent knows it."""
    if state == RunState.SUCCESS:
        return history.ChildCompleted(child, end.result or ENCODED_NONE)
    if state == RunState.CANCELLED:
        return history.ChildCancelled(child)
    return history.ChildFailed(child, run_error(end, state) or TaskError("Failed", "The run failed."))


def task_outcome(task: bytes, state: str, result: bytes | None, error: TaskError | None) -> Outcome:
    """Return the event for the code whose task has ended."""
    if state == TaskState.SUCCESS:
        return history.TaskCompleted(task, result or ENCODED_NONE)
    if state == TaskState.FAILED:
        return history.TaskFailed(task, error or TaskError("Failed", "The task failed."))
    return history.TaskCancelled(task)


# -- messages that a run that continues as new passes to its successor.
#
# All messages that the code had not been shown by its end (`ContinueRun.seen`) are passed on in the same order: cancel
# requests (also those caused by a timeout or the parent's end), updates, and settled promises. Signals are passed on if
# the code had not consumed them. Updates that the code was shown are not passed on: it had to answer them itself.

SAID = (history.UpdateRequested, history.RunCancelRequested)
"""Unseen facts that are passed on as they are."""


class CarriedOver(NamedTuple):
    """The first events of the successor."""

    facts: list[Fact]
    """Facts after its start."""
    settled: list[PromiseSettled]
    """Settled promises that the code waited for and has not seen, with their ids in the old run."""


def carried_over(events: Iterable[Event], command: ContinueRun) -> CarriedOver:
    """Return what a run passes on. `events` are its signals and the events that it was not shown."""
    counts = dict(command.signals)
    facts: list[Fact] = []
    settled: list[PromiseSettled] = []
    for event in events:
        what = event.what
        if isinstance(what, history.SignalReceived):
            counts[what.name] = counts.get(what.name, 0) - 1
            if counts[what.name] < 0:
                facts.append(what)
        elif event.number <= command.seen:
            continue
        elif isinstance(what, SAID):
            facts.append(what)
        elif isinstance(what, PromiseSettled):
            settled.append(what)
    return CarriedOver(facts, settled)


def ignores_cancel(events: Iterable[Event], command: ContinueRun, began_at: float) -> bool:
    """Return whether a run continues as new that started with a cancel request and never waited to see it.

    Its successor would do the same and could never be cancelled, so it is ended without running its code.
    """
    return command.seen == 1 and any(
        event.at <= began_at and isinstance(event.what, history.RunCancelRequested) for event in events
    )


def with_seen(command: ContinueRun, through: int) -> ContinueRun:
    """Return the command with `seen` set. Workers of older releases do not set it: their code saw all events sent."""
    return command if command.seen else ContinueRun(command.payload, command.signals, through)
