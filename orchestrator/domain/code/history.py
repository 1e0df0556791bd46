"""What happened in a run of a code workflow: an append-only list of numbered events.

There are three families:

    facts      the run began, a task ended, a timer fired, a signal came …: what the code could not know by itself
    records    what the code commanded, one per command, in the order of the batch
    marks      `ActivationApplied`: the batch of records that follows was made by code that had seen `through`;
               and what only a run has that was reset: `RunReset`, `Reopened` (`domain/code/resets.py`)

**Replay.** The code is shown the facts one by one, in order, and runs after each until nothing is left to do. Records
are never shown; they are what the code's commands are compared with (`domain/code/commands.py` says how). So what the
code does is a function of the facts alone: it makes no difference how many of them came with one activation, in which
batch a command left, or whether the workflow was cached in between.

**Marks** tell replay how far the code had come. What it does in answer to a fact up to the last mark's `through` was
done before: the log stays silent, and `patched` takes the old branch unless the history says otherwise. A fact can
arrive while an activation is out; it then stands before the mark and is beyond its `through`.

**Ends.** If the code returns or fails, and there are signals or updates that it was not shown, nothing of that turn
counts, and the leader appends a mark with `ended`. The code is replayed, and is shown these messages before the fact
at which it ended, or together with it if that is a message, too: so it acts upon them, or leaves them knowingly. The
mark makes the new order a part of the history. No record of the turn is kept, because the code may now do something
else at the same place; so `ctx.run` may run again, as after the loss of a worker.

**Time** in the code is the time of the fact that it was last shown, read by the leader once per tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from orchestrator.domain.code import commands
from orchestrator.domain.code.commands import Message, OfId
from orchestrator.domain.tasks.task import TaskError


class _Returned(OfId, frozen=True):
    result: bytes


class _Failed(OfId, frozen=True):
    error: TaskError


# -- facts


class RunStarted(Message, frozen=True):
    """The run began; always event 1."""

    workflow: str
    version: int
    payload: bytes
    """The arguments, encoded like those of a task."""
    queue: str = "default"
    """Where its tasks go that ask for no other queue."""
    parent: bytes | None = None
    """The run that started this one as its child."""
    continued_from: bytes | None = None
    """The run that this one goes on from."""
    origin: bytes | None = None
    """The first of the runs that this one was reset from: it repeats that one's random numbers and UUIDs."""
    attributes: str = ""
    """Those that it begins with, as JSON."""
    first: bytes | None = None
    """The first of the runs that went on in one another up to this one; None if it is that itself."""


class TaskCompleted(_Returned, frozen=True):
    """A scheduled task returned."""


class TaskFailed(_Failed, frozen=True):
    """A scheduled task failed for good."""


class TaskCancelled(OfId, frozen=True):
    """A scheduled task was cancelled, by the code itself or by a person."""


class TimerFired(OfId, frozen=True):
    """A timer came due."""


class PromiseResolved(Message, frozen=True):
    """A promise was resolved."""

    id: bytes
    value: bytes


class PromiseRejected(_Failed, frozen=True):
    """A promise was rejected."""


class ChildCompleted(_Returned, frozen=True):
    """A child run returned."""


class ChildFailed(_Failed, frozen=True):
    """A child run failed, or could not be started."""


class ChildCancelled(OfId, frozen=True):
    """A child run was cancelled."""


class RunWanted(msgspec.Struct, frozen=True, array_like=True):
    """The run that is to begin with a signal if the one that has the chosen id ends before its code is shown it."""

    id: bytes
    key: str
    """The chosen id, as `run_keys` has it."""
    workflow: str
    version: int
    payload: bytes
    queue: str
    timeout: float | None = None
    tags: str = "[]"
    """JSON."""
    pinned: bool = False
    trace: str | None = None
    headers: str | None = None
    """JSON."""
    attributes: str = ""
    """JSON."""


class SignalReceived(Message, frozen=True):
    """A signal arrived."""

    name: str
    value: bytes
    otherwise: RunWanted | None = None


class UpdateRequested(Message, frozen=True):
    """An update was requested; `id` is the request's own."""

    id: bytes
    name: str
    payload: bytes


class RunCancelRequested(Message, frozen=True):
    """A cancel of the run was requested, or it timed out."""

    reason: str = ""


# -- marks


class ActivationApplied(Message, frozen=True):
    """The code had been shown every fact up to number `through`; the records that follow are its commands."""

    through: int
    accepted: list[str] = []
    """Ids of updates whose handlers began in this turn and had not answered at its end."""
    ended: int = 0
    """The event at which the code ended in a turn that does not count, because messages had come that it had not seen.
    No records follow, and `through` is 0. From that event up to this mark, the code is shown the messages first."""


class RunReset(Message, frozen=True):
    """The events above are a copy of another run up to its event `to`; those that follow are this run's own."""

    run: bytes
    """That other run."""
    to: int
    reason: str = ""
    """Why, for people to read."""


class Reopened(Message, frozen=True):
    """Stands in a copy for the record of something that was open when the copy ends: the code commands it again."""

    what: str
    """Its kind, number and name: `task 3 ship`."""


# -- records; one that keeps all that its command says has the fields of that


class TaskScheduled(Message, frozen=True):
    """By `ScheduleTask`."""

    ordinal: int
    id: bytes
    name: str
    digest: str = ""
    """Of its arguments; empty in histories that were recorded before there were any."""


class TaskCancelRequested(OfId, frozen=True):
    """By `CancelTask`."""


class TimerStarted(Message, frozen=True):
    """By `StartTimer`."""

    ordinal: int
    id: bytes
    seconds: float
    name: str = ""


class TimerCancelled(OfId, frozen=True):
    """By `CancelTimer`."""


class PromiseCreated(commands.CreatePromise, frozen=True):
    """By `CreatePromise`."""


class PromiseCancelled(OfId, frozen=True):
    """By `CancelPromise`."""


class ChildStarted(Message, frozen=True):
    """By `StartChildRun`."""

    ordinal: int
    id: bytes
    workflow: str
    name: str = ""
    detached: bool = False
    digest: str = ""
    """Of its arguments, as in `TaskScheduled`."""


class ChildCancelRequested(OfId, frozen=True):
    """By `CancelChildRun`."""


class OperationRecorded(commands.RecordOperation, frozen=True):
    """By `RecordOperation`."""


class StateSet(commands.SetState, frozen=True):
    """By `SetState`."""


class StateCleared(commands.ClearState, frozen=True):
    """By `ClearState`."""


class SignalSent(Message, frozen=True):
    """By `SignalRun`."""

    ordinal: int
    run: bytes
    """The run it was sent to, which may have gone on in another run."""
    name: str
    digest: str = ""
    """Of the value, as in `TaskScheduled`."""
    id: bytes | None = None
    """If the code waits for what becomes of it: the `id` of the `PromiseSettled` that says so."""
    key: str = ""
    """The chosen id of the run, if it was sent by that."""


class PatchRecorded(commands.RecordPatch, frozen=True):
    """By `RecordPatch`."""


class UpdateAnswered(commands.AnswerUpdate, frozen=True):
    """By `AnswerUpdate`."""


class RunCompleted(commands.CompleteRun, frozen=True):
    """By `CompleteRun`."""


class RunFailed(commands.FailRun, frozen=True):
    """By `FailRun`."""


class RunCancelled(Message, frozen=True):
    """By `CancelRun`."""


class RunContinued(commands.ContinueRun, frozen=True):
    """By `ContinueRun`."""


Outcome = TaskCompleted | TaskFailed | TaskCancelled | ChildCompleted | ChildFailed | ChildCancelled
"""The end of a task or a child run; `id` is the one that the code knows it by."""
PromiseSettled = PromiseResolved | PromiseRejected
Fact = RunStarted | Outcome | TimerFired | PromiseSettled | SignalReceived | UpdateRequested | RunCancelRequested
EndRecord = RunCompleted | RunFailed | RunCancelled | RunContinued
Record = (
    TaskScheduled
    | TaskCancelRequested
    | TimerStarted
    | TimerCancelled
    | PromiseCreated
    | PromiseCancelled
    | ChildStarted
    | ChildCancelRequested
    | OperationRecorded
    | StateSet
    | StateCleared
    | SignalSent
    | PatchRecorded
    | UpdateAnswered
    | EndRecord
)
Marker = ActivationApplied | RunReset | Reopened
HistoryItem = Fact | Record | Marker


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One line of a history."""

    number: int
    """From 1, without gaps."""
    at: float
    """Unix seconds: the time of the tick that appended it; a copy keeps that of the original."""
    what: HistoryItem


def weight(what: HistoryItem) -> int:
    """Return how many bytes the value has that a fact brings, if it brings any."""
    match what:
        case TaskCompleted(result=value) | ChildCompleted(result=value) | PromiseResolved(value=value):
            return len(value)
        case SignalReceived(value=value) | RunStarted(payload=value) | UpdateRequested(payload=value):
            return len(value)
        case _:
            return 0


_RECORDS: dict[type, type[Record]] = dict(zip(get_args(commands.Command), get_args(Record), strict=True))
"""By command, what records it: each stands in the place of the other."""


def record(command: commands.Command) -> Record:
    """Return the event that records a command which has been applied: what it says, as far as that is kept."""
    kind = _RECORDS[type(command)]
    return kind(*(getattr(command, name) for name in kind.__struct_fields__))


def shown_events(events: Sequence[Event]) -> list[Event]:
    """Return a history without facts that the code of the run never saw; nothing if it saw none."""
    last = max((event.what.through for event in events if isinstance(event.what, ActivationApplied)), default=0)
    facts = get_args(Fact)
    return [event for event in events if event.number <= last or not isinstance(event.what, facts)] if last else []
