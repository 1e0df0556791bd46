"""Commands of a workflow's code. An activation has no effects but a batch of commands.

Commands are collected while the code runs and sent together when it suspends or ends. The leader applies a batch in one
transaction: it executes each command and appends the event that records it (`domain/code/history.py`).

**Ids.** Tasks, timers, promises and children have ids derived from (run, kind, ordinal): `command_id`. The ordinal
counts the commands of one kind within the run, from 1, and also advances during replay. So the n-th task of the code
matches the n-th task of the history whatever else happens in between, and a batch that is applied twice changes
nothing. An id that exists with another name is a determinism violation, not a second task.

**Ends.** `CompleteRun`, `FailRun`, `CancelRun` and `ContinueRun` end the run and are always the last of their batch.
Everything that is still open is then cancelled, except detached children.

Messages are MessagePack arrays, as in `domain/tasks/task.py`: new fields go last, with a default.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from orchestrator.domain.ids import derived_id
from orchestrator.domain.tasks.task import NewTask, TaskError

Kind = Literal["task", "timer", "promise", "child", "operation", "state", "signal"]
"""Kinds of commands, each counted by ordinals of its own."""
OnCancel = Literal["cancel", "wait", "abandon"]
ClosePolicy = Literal["cancel", "terminate", "abandon"]
"""The effect of a parent's end on a child."""


_REFUSALS = ("unknown", "arguments", "refused")
"""Phases of an update before its handler runs."""


class Message(
    msgspec.Struct, frozen=True, array_like=True, tag=lambda name: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
):
    """A command or an event: a MessagePack array that starts with its name, such as `schedule_task`."""


class OfId(Message, frozen=True):
    """A command with only an id."""

    id: bytes


def command_size(command: Command) -> int:
    """Return the approximate size of a command in a message, in bytes."""
    match command:
        case ScheduleTask(task=task):
            return 300 + len(task.payload)
        case StartChildRun(payload=payload) | ContinueRun(payload=payload):
            return 300 + len(payload)
        case RecordOperation(result=result) | CompleteRun(result=result) | AnswerUpdate(result=result):
            return 300 + len(result or b"")
        case SetState(value=value) | SignalRun(value=value):
            return 300 + len(value)
        case _:
            return 300


def command_id(run: bytes, kind: Kind, ordinal: int) -> bytes:
    """Return the id of the `ordinal`-th command of a kind in a run."""
    return derived_id(run, kind, ordinal)


class ScheduleTask(Message, frozen=True):
    """Create a task of the run. `task.position` is the ordinal."""

    ordinal: int
    task: NewTask
    digest: str = ""
    """A hash of the arguments, with which replay detects changed arguments. Empty if they cannot be compared."""

    @property
    def id(self) -> bytes:
        return self.task.id

    @property
    def name(self) -> str:
        return self.task.name


class CancelTask(OfId, frozen=True):
    """Cancel a task that the code no longer waits for, if it is still open."""


class StartTimer(Message, frozen=True):
    """Append `TimerFired` this many seconds after the leader applies the command: no wait is shorter than requested."""

    ordinal: int
    id: bytes
    seconds: float
    since: float
    """The Unix time of the event at which the code started the timer. With `is_again`, when it was first applied."""
    name: str = ""
    """A name for display. Optional."""
    is_again: bool = False
    """The timer was open in the run from which this run was reset, and keeps its due time."""

    def due(self, now: float) -> float:
        """Return the Unix time at which the timer is due if the command is applied now."""
        return (self.since if self.is_again else max(self.since, now)) + self.seconds


class CancelTimer(OfId, frozen=True):
    """Remove the timer, if it has not fired."""


class CreatePromise(Message, frozen=True):
    """Create a promise that others settle by name. Of several with the same name, the oldest open one comes first."""

    ordinal: int
    id: bytes
    name: str
    schema: str = ""
    """The JSON Schema of its type. Empty if any value is allowed or only the code knows the type."""


class CancelPromise(OfId, frozen=True):
    """The code no longer waits for the promise. Later resolutions are refused."""


class StartChildRun(Message, frozen=True):
    """Start a run of a code workflow with this id."""

    ordinal: int
    id: bytes
    workflow: str
    payload: bytes
    """The arguments, encoded like a task's."""
    name: str = ""
    """A name for display. Default: the workflow's name."""
    version: int | None = None
    """The version to run. None for the newest version that any worker has."""
    queue: str | None = None
    timeout: float | None = None
    """Seconds that the run may take."""
    detached: bool = False
    """The child continues when its parent ends."""
    digest: str = ""
    """A hash of the arguments, as in `ScheduleTask`."""
    terminates: bool = False
    """When the parent ends, the child is terminated without running its code."""
    pinned: bool = False
    """The child waits for workers with its exact version."""


class CancelChildRun(OfId, frozen=True):
    """Request the child to cancel itself, if it is open. Its end is reported as an ordinary event."""


class RecordOperation(Message, frozen=True):
    """Record the outcome of a side effect, so that replay does not repeat it."""

    ordinal: int
    name: str
    result: bytes | None = None
    error: TaskError | None = None


class SetState(Message, frozen=True):
    """Publish a value under a key of the run's state."""

    ordinal: int
    key: str
    value: bytes
    attribute: str = ""
    """For an attribute of the run, the value as JSON, by which lists are filtered."""


class ClearState(Message, frozen=True):
    """Remove a key from the run's state. Shares its ordinals with `SetState`."""

    ordinal: int
    key: str
    is_attribute: bool = False


class SignalRun(Message, frozen=True):
    """Send a signal to another run or its successor, exactly once despite replays.

    A signal named `CANCEL` is a request to cancel (`domain/code/other_runs.py`).
    """

    ordinal: int
    run: bytes
    name: str
    value: bytes
    digest: str = ""
    """A hash of the value, as in `ScheduleTask`."""
    id: bytes | None = None
    """The id under which the code waits for the outcome. None if it does not wait."""
    key: str = ""
    """The run's chosen id, as in `run_keys`, if the code addresses the run by it."""


class RecordPatch(Message, frozen=True):
    """Record that this run took the new branch of a patch."""

    name: str


class AnswerUpdate(Message, frozen=True):
    """Send the answer to an update to its sender."""

    id: bytes
    result: bytes | None = None
    error: TaskError | None = None

    @property
    def was_refused(self) -> bool:
        """Whether no handler ran: it is unknown, the arguments did not fit, or the validator raised."""
        return self.error is not None and self.error.phase in _REFUSALS


class CompleteRun(Message, frozen=True):
    """The code returned."""

    result: bytes


class FailRun(Message, frozen=True):
    """The code raised."""

    error: TaskError


class CancelRun(Message, frozen=True):
    """The code ended after a cancel request."""


class ContinueRun(Message, frozen=True):
    """End this run and continue in a new run of the same workflow, with a new history.

    Messages to the old run that its code has not seen are passed to the new run (`domain/code/ends.py`). `signals`
    counts the signals that the code consumed, by name.
    """

    payload: bytes
    signals: dict[str, int] = {}
    seen: int = 0
    """The number of the last event that the code was shown. Events delivered with it but after the end are not."""


EndCommand = CompleteRun | FailRun | CancelRun | ContinueRun
Command = (
    ScheduleTask
    | CancelTask
    | StartTimer
    | CancelTimer
    | CreatePromise
    | CancelPromise
    | StartChildRun
    | CancelChildRun
    | RecordOperation
    | SetState
    | ClearState
    | SignalRun
    | RecordPatch
    | AnswerUpdate
    | EndCommand
)
