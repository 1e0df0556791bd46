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

**Time** in the code is the time of the fact that it was last shown, read by the leader once per tick.
"""

from __future__ import annotations

import msgspec

from orchestrator.domain.code import commands
from orchestrator.domain.tasks.task import TaskError

# -- facts


class RunStarted(msgspec.Struct, frozen=True, array_like=True, tag="run_started"):
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


class TaskCompleted(msgspec.Struct, frozen=True, array_like=True, tag="task_completed"):
    """A scheduled task returned."""

    id: bytes
    result: bytes


class TaskFailed(msgspec.Struct, frozen=True, array_like=True, tag="task_failed"):
    """A scheduled task failed for good."""

    id: bytes
    error: TaskError


class TaskCancelled(msgspec.Struct, frozen=True, array_like=True, tag="task_cancelled"):
    """A scheduled task was cancelled, by the code itself or by a person."""

    id: bytes


class TimerFired(msgspec.Struct, frozen=True, array_like=True, tag="timer_fired"):
    """A timer came due."""

    id: bytes


class PromiseResolved(msgspec.Struct, frozen=True, array_like=True, tag="promise_resolved"):
    """Somebody kept the promise."""

    id: bytes
    value: bytes


class PromiseRejected(msgspec.Struct, frozen=True, array_like=True, tag="promise_rejected"):
    """Somebody broke the promise."""

    id: bytes
    error: TaskError


class ChildCompleted(msgspec.Struct, frozen=True, array_like=True, tag="child_completed"):
    """A child run returned."""

    id: bytes
    result: bytes


class ChildFailed(msgspec.Struct, frozen=True, array_like=True, tag="child_failed"):
    """A child run failed, or could not be started."""

    id: bytes
    error: TaskError


class ChildCancelled(msgspec.Struct, frozen=True, array_like=True, tag="child_cancelled"):
    """A child run was cancelled."""

    id: bytes


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


class SignalReceived(msgspec.Struct, frozen=True, array_like=True, tag="signal_received"):
    """Somebody sent a signal."""

    name: str
    value: bytes
    otherwise: RunWanted | None = None


class UpdateRequested(msgspec.Struct, frozen=True, array_like=True, tag="update_requested"):
    """Somebody asked for an update and waits for its answer; `id` is the request's own."""

    id: bytes
    name: str
    payload: bytes


class RunCancelRequested(msgspec.Struct, frozen=True, array_like=True, tag="run_cancel_requested"):
    """Somebody asked the run to cancel itself. Its time may also be up."""

    reason: str = ""


# -- marks


class ActivationApplied(msgspec.Struct, frozen=True, array_like=True, tag="activation_applied"):
    """The code had been shown every fact up to number `through`; the records that follow are its commands."""

    through: int


class RunReset(msgspec.Struct, frozen=True, array_like=True, tag="run_reset"):
    """What stands above is a copy of another run up to its event `to`; what follows is this run's own."""

    run: bytes
    """That other run."""
    to: int
    reason: str = ""
    """Why, for people to read."""


class Reopened(msgspec.Struct, frozen=True, array_like=True, tag="reopened"):
    """Stands in a copy for the record of something that was open when the copy ends: the code commands it again."""

    what: str
    """For people to read: `task 3 ship`."""


# -- records


class TaskScheduled(msgspec.Struct, frozen=True, array_like=True, tag="task_scheduled"):
    """By `ScheduleTask`."""

    ordinal: int
    id: bytes
    name: str
    digest: str = ""
    """Of its arguments; empty in histories that were recorded before there were any."""


class TaskCancelRequested(msgspec.Struct, frozen=True, array_like=True, tag="task_cancel_requested"):
    """By `CancelTask`."""

    id: bytes


class TimerStarted(msgspec.Struct, frozen=True, array_like=True, tag="timer_started"):
    """By `StartTimer`."""

    ordinal: int
    id: bytes
    seconds: float
    name: str = ""


class TimerCancelled(msgspec.Struct, frozen=True, array_like=True, tag="timer_cancelled"):
    """By `CancelTimer`."""

    id: bytes


class PromiseCreated(msgspec.Struct, frozen=True, array_like=True, tag="promise_created"):
    """By `CreatePromise`."""

    ordinal: int
    id: bytes
    name: str


class PromiseCancelled(msgspec.Struct, frozen=True, array_like=True, tag="promise_cancelled"):
    """By `CancelPromise`."""

    id: bytes


class ChildStarted(msgspec.Struct, frozen=True, array_like=True, tag="child_started"):
    """By `StartChildRun`."""

    ordinal: int
    id: bytes
    workflow: str
    name: str = ""
    detached: bool = False
    digest: str = ""
    """Of its arguments, as in `TaskScheduled`."""


class ChildCancelRequested(msgspec.Struct, frozen=True, array_like=True, tag="child_cancel_requested"):
    """By `CancelChildRun`."""

    id: bytes


class OperationRecorded(msgspec.Struct, frozen=True, array_like=True, tag="operation_recorded"):
    """By `RecordOperation`."""

    ordinal: int
    name: str
    result: bytes | None = None
    error: TaskError | None = None


class StateSet(msgspec.Struct, frozen=True, array_like=True, tag="state_set"):
    """By `SetState`."""

    ordinal: int
    key: str
    value: bytes


class StateCleared(msgspec.Struct, frozen=True, array_like=True, tag="state_cleared"):
    """By `ClearState`."""

    ordinal: int
    key: str


class SignalSent(msgspec.Struct, frozen=True, array_like=True, tag="signal_sent"):
    """By `SignalRun`."""

    ordinal: int
    run: bytes
    """Whom it was sent to, which may have gone on in another run."""
    name: str
    digest: str = ""
    """Of the value, as in `TaskScheduled`."""


class PatchRecorded(msgspec.Struct, frozen=True, array_like=True, tag="patch_recorded"):
    """By `RecordPatch`."""

    name: str


class UpdateAnswered(msgspec.Struct, frozen=True, array_like=True, tag="update_answered"):
    """By `AnswerUpdate`."""

    id: bytes
    result: bytes | None = None
    error: TaskError | None = None


class RunCompleted(msgspec.Struct, frozen=True, array_like=True, tag="run_completed"):
    """By `CompleteRun`."""

    result: bytes


class RunFailed(msgspec.Struct, frozen=True, array_like=True, tag="run_failed"):
    """By `FailRun`."""

    error: TaskError


class RunCancelled(msgspec.Struct, frozen=True, array_like=True, tag="run_cancelled"):
    """By `CancelRun`."""


class RunContinued(msgspec.Struct, frozen=True, array_like=True, tag="run_continued"):
    """By `ContinueRun`."""

    payload: bytes
    signals: dict[str, int] = {}
    seen: int = 0


Outcome = TaskCompleted | TaskFailed | TaskCancelled | ChildCompleted | ChildFailed | ChildCancelled
"""What came of a task or a child run; `id` is the one that the code knows it by."""
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


def record(command: commands.Command) -> Record:
    """Return the event that records a command which has been applied."""
    match command:
        case commands.ScheduleTask(ordinal=ordinal, task=task, digest=digest):
            return TaskScheduled(ordinal, task.id, task.name, digest)
        case commands.CancelTask(id=id):
            return TaskCancelRequested(id)
        case commands.StartTimer(ordinal=ordinal, id=id, seconds=seconds, name=name):
            return TimerStarted(ordinal, id, seconds, name)
        case commands.CancelTimer(id=id):
            return TimerCancelled(id)
        case commands.CreatePromise(ordinal=ordinal, id=id, name=name):
            return PromiseCreated(ordinal, id, name)
        case commands.CancelPromise(id=id):
            return PromiseCancelled(id)
        case commands.StartChildRun(ordinal=ordinal, id=id, workflow=workflow, name=name, detached=detached):
            return ChildStarted(ordinal, id, workflow, name, detached, command.digest)
        case commands.CancelChildRun(id=id):
            return ChildCancelRequested(id)
        case commands.RecordOperation(ordinal=ordinal, name=name, result=result, error=error):
            return OperationRecorded(ordinal, name, result, error)
        case commands.SetState(ordinal=ordinal, key=key, value=value):
            return StateSet(ordinal, key, value)
        case commands.ClearState(ordinal=ordinal, key=key):
            return StateCleared(ordinal, key)
        case commands.SignalRun(ordinal=ordinal, run=run, name=name, digest=digest):
            return SignalSent(ordinal, run, name, digest)
        case commands.RecordPatch(name=name):
            return PatchRecorded(name)
        case commands.AnswerUpdate(id=id, result=result, error=error):
            return UpdateAnswered(id, result, error)
        case commands.CompleteRun(result=result):
            return RunCompleted(result)
        case commands.FailRun(error=error):
            return RunFailed(error)
        case commands.CancelRun():
            return RunCancelled()
        case commands.ContinueRun(payload=payload, signals=signals, seen=seen):
            return RunContinued(payload, signals, seen)
