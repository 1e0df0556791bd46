"""The history of a code run: an append-only list of numbered events.

There are three families:

    facts      the run started, a task ended, a timer fired, a signal arrived …: what the code cannot compute
    records    the commands of the code, in the order of the batch
    markers    `ActivationApplied`: the records that follow come from code that had seen the facts up to `through`;
               `RunReset` and `Reopened`: only in runs that were reset (`domain/code/resets.py`)

**Replay.** The code is shown the facts in order, one by one, and runs after each until it can do no more. Records are
not shown, but compared with the commands of the code (see `domain/code/commands.py`). So the behavior of the code
depends on the facts alone. It does not matter how many facts came with one activation, in which batch a command was
sent, or whether the workflow was cached in between.

**Markers** tell replay how far the code had come. Reactions to facts up to the last marker's `through` are repetitions:
logging is off, and `patched` takes the old branch unless the history has a `PatchRecorded`. A fact can arrive during an
activation; it is then stored before the marker, but its number is above `through`.

**Ends.** If the code returns or fails although signals or updates have arrived that it was not shown, the leader
discards that turn and appends a marker with `ended`. The code is replayed and shown these messages before the fact at
which it ended, or together with that fact if it is a message itself. So it handles them, or ignores them knowingly. The
marker makes the new order part of the history.

A side effect (`ctx.run`) in such a turn is not repeated: the leader records it, and all commands before it, after the
marker. The code is shown everything up to that side effect as before, and the messages when it awaits the result. If it
ends without awaiting it, only its handlers get the messages. Later commands of the turn are discarded, because the code
may now act differently.

**Time** in the code is the time of the last fact that it was shown. The leader reads the clock once per tick.
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
    """The run started. Always event 1."""

    workflow: str
    version: int
    payload: bytes
    """The arguments, encoded like a task's."""
    queue: str = "default"
    """The default queue of the run's tasks."""
    parent: bytes | None = None
    """The parent, if this is a child run."""
    continued_from: bytes | None = None
    """The run that continued as this one."""
    origin: bytes | None = None
    """The first of the runs from which this one was reset. Its random numbers and UUIDs are repeated."""
    attributes: str = ""
    """The initial attributes, as JSON."""
    first: bytes | None = None
    """The first run of the chain that continued up to this one. None if it is this run."""


class TaskCompleted(_Returned, frozen=True):
    """A scheduled task returned."""


class TaskFailed(_Failed, frozen=True):
    """A scheduled task failed, without retries left."""


class TaskCancelled(OfId, frozen=True):
    """A scheduled task was cancelled, by the code or by a user."""


class TimerFired(OfId, frozen=True):
    """A timer was due."""


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
    """The run to start if the run with the chosen id ends before its code has seen the signal."""

    id: bytes
    key: str
    """The chosen id, as in `run_keys`."""
    workflow: str
    version: int
    payload: bytes
    queue: str
    timeout: float | None = None
    tags: str = "[]"
    """The run's tags, as JSON."""
    pinned: bool = False
    trace: str | None = None
    headers: str | None = None
    """The run's headers, as JSON."""
    attributes: str = ""
    """The run's initial attributes, as JSON."""


class SignalReceived(Message, frozen=True):
    """A signal arrived."""

    name: str
    value: bytes
    otherwise: RunWanted | None = None


class UpdateRequested(Message, frozen=True):
    """An update was requested. `id` is the id of the request."""

    id: bytes
    name: str
    payload: bytes


class RunCancelRequested(Message, frozen=True):
    """A cancel was requested, or the run timed out."""

    reason: str = ""


# -- markers


class ActivationApplied(Message, frozen=True):
    """The code had been shown all facts up to number `through`. The records that follow are its commands."""

    through: int
    accepted: list[str] = []
    """Ids of updates whose handlers started in this turn and had not answered at its end."""
    ended: int = 0
    """The event at which the code ended in a discarded turn, because it had not seen all messages; `through` is 0.
    Among the events from that one up to this marker, messages are shown first; if a side effect follows, after it."""


class RunReset(Message, frozen=True):
    """The events above are a copy of another run up to its event `to`. The events below are this run's own."""

    run: bytes
    """The copied run."""
    to: int
    reason: str = ""
    """The reason, for display."""


class Reopened(Message, frozen=True):
    """Replaces, in a copied history, the record of something that was still open there: the code commands it again."""

    what: str
    """Kind, ordinal and name: `task 3 ship`."""


# -- records; those that keep all fields of their command inherit from it


class TaskScheduled(Message, frozen=True):
    """The record of `ScheduleTask`."""

    ordinal: int
    id: bytes
    name: str
    digest: str = ""
    """A hash of the arguments. Empty in histories of earlier releases."""


class TaskCancelRequested(OfId, frozen=True):
    """The record of `CancelTask`."""


class TimerStarted(Message, frozen=True):
    """The record of `StartTimer`."""

    ordinal: int
    id: bytes
    seconds: float
    name: str = ""


class TimerCancelled(OfId, frozen=True):
    """The record of `CancelTimer`."""


class PromiseCreated(commands.CreatePromise, frozen=True):
    """The record of `CreatePromise`."""


class PromiseCancelled(OfId, frozen=True):
    """The record of `CancelPromise`."""


class ChildStarted(Message, frozen=True):
    """The record of `StartChildRun`."""

    ordinal: int
    id: bytes
    workflow: str
    name: str = ""
    detached: bool = False
    digest: str = ""
    """A hash of the arguments, as in `TaskScheduled`."""


class ChildCancelRequested(OfId, frozen=True):
    """The record of `CancelChildRun`."""


class OperationRecorded(commands.RecordOperation, frozen=True):
    """The record of `RecordOperation`."""


class StateSet(commands.SetState, frozen=True):
    """The record of `SetState`."""


class StateCleared(commands.ClearState, frozen=True):
    """The record of `ClearState`."""


class SignalSent(Message, frozen=True):
    """The record of `SignalRun`."""

    ordinal: int
    run: bytes
    """The run that was addressed. Its successor may have got the signal."""
    name: str
    digest: str = ""
    """A hash of the value, as in `TaskScheduled`."""
    id: bytes | None = None
    """If the code waits for the outcome, the `id` of the `PromiseSettled` that reports it."""
    key: str = ""
    """The chosen id by which the run was addressed, if any."""


class PatchRecorded(commands.RecordPatch, frozen=True):
    """The record of `RecordPatch`."""


class UpdateAnswered(commands.AnswerUpdate, frozen=True):
    """The record of `AnswerUpdate`."""


class RunCompleted(commands.CompleteRun, frozen=True):
    """The record of `CompleteRun`."""


class RunFailed(commands.FailRun, frozen=True):
    """The record of `FailRun`."""


class RunCancelled(Message, frozen=True):
    """The record of `CancelRun`."""


class RunContinued(commands.ContinueRun, frozen=True):
    """The record of `ContinueRun`."""


Outcome = TaskCompleted | TaskFailed | TaskCancelled | ChildCompleted | ChildFailed | ChildCancelled
"""The end of a task or a child run. `id` is the id by which the code knows it."""
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
    """An event of a history."""

    number: int
    """The number, from 1 without gaps."""
    at: float
    """The Unix time of the tick that appended it. Copied events keep the original time."""
    what: HistoryItem


def weight(what: HistoryItem) -> int:
    """Return the size of a fact's value in bytes, or 0."""
    match what:
        case TaskCompleted(result=value) | ChildCompleted(result=value) | PromiseResolved(value=value):
            return len(value)
        case SignalReceived(value=value) | RunStarted(payload=value) | UpdateRequested(payload=value):
            return len(value)
        case _:
            return 0


_RECORDS: dict[type, type[Record]] = dict(zip(get_args(commands.Command), get_args(Record), strict=True))
"""The record type of each command type. Both unions have the same order."""


def record(command: commands.Command) -> Record:
    """Return the event that records an applied command."""
    kind = _RECORDS[type(command)]
    return kind(*(getattr(command, name) for name in kind.__struct_fields__))


def seen_events(events: Sequence[Event]) -> list[Event]:
    """Return a history without facts that the code never saw. Empty if it saw none."""
    last = max((event.what.through for event in events if isinstance(event.what, ActivationApplied)), default=0)
    facts = get_args(Fact)
    return [event for event in events if event.number <= last or not isinstance(event.what, facts)] if last else []
