"""What the code of a workflow asks for. A batch of commands is all that leaves an activation.

Commands are queued while the code runs and leave together when it suspends or ends. The leader applies a batch in one
transaction: for each command it does what is asked and appends the event of `domain/code/history.py` that records it.

**Ids.** Everything that can be waited for has an id derived from (run, kind, ordinal): `command_id`. The ordinal counts
the commands of one kind within the run, from 1, and advances on replay too. So the n-th task of the code meets the
n-th task of the history whatever else happens in between, a batch that is applied twice changes nothing, and an id that
exists already under another name is a determinism violation, not a second task.

**Ends.** `CompleteRun`, `FailRun`, `CancelRun` and `ContinueRun` end the run; one of them, if any, is the last of its
batch. What is still open then is cancelled, except for detached children.

Messages are MessagePack arrays, as in `domain/tasks/task.py`: new fields go last, with a default.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from orchestrator.domain.ids import derived_id
from orchestrator.domain.tasks.task import NewTask, TaskError

Kind = Literal["task", "timer", "promise", "child", "operation", "state", "signal"]
"""Kinds of commands with ordinals of their own."""
OnCancel = Literal["cancel", "wait", "abandon"]
ClosePolicy = Literal["cancel", "terminate", "abandon"]
"""What becomes of a child when its parent ends."""


_REFUSALS = ("unknown", "arguments", "refused")
"""Phases of an update before its handler."""


class Message(
    msgspec.Struct, frozen=True, array_like=True, tag=lambda name: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
):
    """A command or an event: an array that begins with its name, `schedule_task`."""


class OfId(Message, frozen=True):
    """A command without fields beside its subject."""

    id: bytes


def command_size(command: Command) -> int:
    """Return about how many bytes a command takes in a message."""
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
    """Create this task of the run; `task.position` is the ordinal."""

    ordinal: int
    task: NewTask
    digest: str = ""
    """Of its arguments, so that replay notices if they have become others; empty where they cannot be compared."""

    @property
    def id(self) -> bytes:
        return self.task.id

    @property
    def name(self) -> str:
        return self.task.name


class CancelTask(OfId, frozen=True):
    """Cancel a task that the code no longer waits for, if it is still open."""


class StartTimer(Message, frozen=True):
    """Append `TimerFired` this many seconds after the leader has taken the command: no wait is shorter than asked."""

    ordinal: int
    id: bytes
    seconds: float
    since: float
    """The Unix time of the event at which the code asked for it; for `is_again`, when it was first taken."""
    name: str = ""
    """For people to read; a timer need not have one."""
    is_again: bool = False
    """It was open in the run from which this one was reset, and is due when it was due there."""

    def due(self, now: float) -> float:
        """Return the Unix time at which it is due, if the command is taken now."""
        return (self.since if self.is_again else max(self.since, now)) + self.seconds


class CancelTimer(OfId, frozen=True):
    """Forget the timer, if it has not fired."""


class CreatePromise(Message, frozen=True):
    """Let the world resolve or reject a promise of this name; of several that are open, the oldest comes first."""

    ordinal: int
    id: bytes
    name: str
    schema: str = ""
    """The JSON Schema of its type; empty where it may be anything, or only the code knows."""


class CancelPromise(OfId, frozen=True):
    """The code no longer waits for the promise; a later resolution is refused."""


class StartChildRun(Message, frozen=True):
    """Start a run of a code workflow with this id."""

    ordinal: int
    id: bytes
    workflow: str
    payload: bytes
    """Its arguments, encoded like those of a task."""
    name: str = ""
    """For people to read; the workflow's own name where nothing else was given."""
    version: int | None = None
    """The version to run, or None for the newest that the fleet has."""
    queue: str | None = None
    timeout: float | None = None
    """Seconds that the run may take."""
    detached: bool = False
    """It goes on when the parent ends."""
    digest: str = ""
    """Of its arguments, as in `ScheduleTask`."""
    terminates: bool = False
    """When the parent ends, it ends without its code."""
    pinned: bool = False
    """It waits for workers that have its version."""


class CancelChildRun(OfId, frozen=True):
    """Ask the child to cancel itself, if it is still open; its end comes as an event like any other."""


class RecordOperation(Message, frozen=True):
    """Remember what a side effect gave, so that replay need not have it again."""

    ordinal: int
    name: str
    result: bytes | None = None
    error: TaskError | None = None


class SetState(Message, frozen=True):
    """Show this value under the run's state."""

    ordinal: int
    key: str
    value: bytes
    attribute: str = ""
    """Of an attribute of the run: the value as JSON, which lists are filtered by."""


class ClearState(Message, frozen=True):
    """Show nothing under this key any more. It shares its ordinals with `SetState`."""

    ordinal: int
    key: str
    is_attribute: bool = False


class SignalRun(Message, frozen=True):
    """Send a signal to another run, or to the one in which that goes on; once, whatever is replayed.

    A signal of the name `CANCEL` is a request to cancel (`domain/code/other_runs.py`).
    """

    ordinal: int
    run: bytes
    name: str
    value: bytes
    digest: str = ""
    """Of the value, as in `ScheduleTask`."""
    id: bytes | None = None
    """Under which the code waits for what becomes of it; None if it does not."""
    key: str = ""
    """The chosen id of the run, as `run_keys` has it, if that is all that is known of it."""


class RecordPatch(Message, frozen=True):
    """Remember that this run took the new branch of a change to its code."""

    name: str


class AnswerUpdate(Message, frozen=True):
    """Send the answer of an update to its sender."""

    id: bytes
    result: bytes | None = None
    error: TaskError | None = None

    @property
    def was_refused(self) -> bool:
        """Say whether no handler was run: none has the name, its arguments did not fit, or its validator raised."""
        return self.error is not None and self.error.phase in _REFUSALS


class CompleteRun(Message, frozen=True):
    """The code returned."""

    result: bytes


class FailRun(Message, frozen=True):
    """The code raised."""

    error: TaskError


class CancelRun(Message, frozen=True):
    """The code was asked to cancel itself, and has done so."""


class ContinueRun(Message, frozen=True):
    """End this run and go on in a new one of the same workflow, with a new history.

    What was said to the old run and its code has not heard is said to the new one (`domain/code/ends.py`);
    `signals` says how many of each name the code took.
    """

    payload: bytes
    signals: dict[str, int] = {}
    seen: int = 0
    """The number of the last event that the code was shown: those that came with it after its end are not."""


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
