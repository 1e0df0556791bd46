"""Every error that the package raises on purpose, in one tree.

    OrchestratorError
    ├── ConfigurationError        a setting is missing or wrong
    │   └── SchemaError           the database is not at the version this release needs
    ├── Forbidden                 a key of the HTTP API is good, but not for this
    ├── InvalidTask               a task, its options or its arguments cannot be accepted
    │   ├── UnknownTask           no task of that name is registered
    │   ├── UnknownOption         no option of that name exists, of a task or of a workflow (also a TypeError)
    │   └── PayloadError          an argument or result cannot be serialised, or is too large
    │       └── StateTooLarge     a run cannot keep what was sent to it beside what it keeps already
    ├── Duplicate                 another task has the unique key; carries its id
    ├── InvalidWorkflow           a workflow definition or its parameters cannot be accepted
    │   └── ExpressionError       an expression cannot be read, or does not fit the values it is given
    ├── Unavailable               Postgres or the payload store is away; nothing was written, trying again helps
    ├── Uncertain                 the connection broke during a write, which may have been done or not
    ├── NotFound                  no task or run has that id
    ├── WrongState                the task or run is in a state that does not allow this
    ├── ResultTimeout             the result did not come in the time the caller gave (also a TimeoutError)
    ├── TaskEnded                 a result was asked of a task that has none
    │   ├── TaskFailed            it failed; carries the remote error and traceback
    │   ├── TaskCancelled         it was cancelled
    │   └── TaskSkipped           an upstream failed or its branch was not taken
    ├── RunFailed                 results were asked of a run that did not succeed
    ├── WorkflowFailed            raised inside a workflow to fail its run
    ├── OperationFailed           a side effect of a workflow raised; carries its error
    ├── HandlerError              a query or an update of a run of code has no answer
    │   ├── UnknownHandler        the code answers none of that name
    │   ├── InvalidArguments      its arguments do not fit the handler, which was not called
    │   ├── UpdateRefused         its validator refused it, and the handler was not called
    │   └── HandlerFailed         the handler raised, or what it returned cannot be told
    ├── PromiseRejected           somebody rejected the promise that a workflow waited for
    ├── NotDeterministic          a workflow called what replay could not repeat
    ├── DeterminismViolation      the code of a workflow no longer fits the history of a run
    ├── AttemptOver               raised inside a task whose transaction came too late; nothing of it was kept
    ├── TaskTimeout               raised inside a task whose time is up (also a TimeoutError)
    ├── SoftTimeout               raised inside a task that should come to an end (also a TimeoutError)
    ├── TaskAborted               raised inside a task that was cancelled
    ├── RetryLater                a task raises it to be tried again after a while, which is not a failure
    └── GiveUp                    a task raises it to fail at once, whatever tries are left

A message names the thing, what was expected, what was found, and what to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from types import MappingProxyType
from typing import Any


class OrchestratorError(Exception):
    """Base of every error raised on purpose by this package."""

    data: Mapping[str, Any] = MappingProxyType({})
    """What it knows beside its text, as plain data; of a remote error, the attributes that the exception had."""


class ConfigurationError(OrchestratorError):
    """A setting is missing or wrong."""


class SchemaError(ConfigurationError):
    """The database schema is not at the version that this release needs."""


class Forbidden(OrchestratorError):
    """The HTTP API knows the key, or the user, and does not let them do this: for its scope, or what it is for."""


class InvalidTask(OrchestratorError):
    """A task, its options or its arguments cannot be accepted; nothing was written."""


class UnknownTask(InvalidTask):
    """No task of that name is registered."""


class PayloadError(InvalidTask):
    """An argument or a result cannot be serialised, or is too large."""


class StateTooLarge(PayloadError):
    """A run cannot keep what was sent to it beside what it keeps already; nothing was written, and the run goes on."""


class Duplicate(OrchestratorError):
    """Another task has the unique key; nothing was written. `task_id` is that task's id."""

    def __init__(self, message: str, task_id: str = "") -> None:
        super().__init__(message)
        self.task_id = task_id

    @classmethod
    def other_call(cls, key: str, task_id: str, difference: str = "another name or other arguments") -> Duplicate:
        """Say that an idempotency key belongs to another call."""
        return cls(
            f"Task {task_id} was enqueued under the key {key!r} with {difference}; this one was not enqueued. A "
            f"repeated call is the same in all of that, and another one needs a key of its own.",
            task_id,
        )


class InvalidWorkflow(OrchestratorError):
    """A workflow definition or the parameters of a run cannot be accepted; nothing was written."""


class UnknownOption(InvalidTask, InvalidWorkflow, TypeError):
    """No option of that name exists."""


class ExpressionError(InvalidWorkflow):
    """An expression cannot be read, or does not fit the values it is given."""


class Unavailable(OrchestratorError):
    """Postgres or the payload store is away. Nothing was written, so the same call may be made again."""


class Uncertain(OrchestratorError):
    """The connection to Postgres broke during a write: look whether it was done before making the call again."""


class NotFound(OrchestratorError):
    """No task or run has that id."""

    sought: tuple[str, str] | None = None
    """Whether a task or a run was looked for, and by which id, where that is all that is wrong."""

    @classmethod
    def by_id(cls, what: str, identifier: str) -> NotFound:
        """Say that there is no task or run of this id, or none any more."""
        error = cls(
            f"No {what} has the id {identifier}. If one had, it may have been pruned: the settings retention_success "
            f"and retention_failed say how long what has ended is kept."
        )
        error.sought = what, identifier
        return error


class WrongState(OrchestratorError):
    """The task or run is in a state that does not allow what was asked."""


class ResultTimeout(OrchestratorError, TimeoutError):
    """The result did not come within the time that the caller gave; the task goes on."""


class TaskEnded(OrchestratorError):
    """A result was asked of a task that ended without one."""


class TaskFailed(TaskEnded):
    """The task failed. `kind` is the remote exception's type, `traceback` its text, and `data` its attributes."""

    def __init__(
        self, message: str, *, kind: str = "", traceback: str = "", data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.traceback = traceback
        self.data = dict(data or {})

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\nRemote traceback:\n{self.traceback.rstrip()}" if self.traceback else text


class TaskCancelled(TaskEnded):
    """The task was cancelled."""


class TaskSkipped(TaskEnded):
    """The task never ran: an upstream failed or its branch was not taken."""


class RunFailed(OrchestratorError):
    """Results were asked of a run that failed or was cancelled.

    Of a workflow as code, `kind` is the type of what its code raised, and `data` its attributes.
    """

    def __init__(self, message: str, *, kind: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = dict(data or {})


class WorkflowFailed(OrchestratorError):
    """Raised inside a workflow to fail its run with a message, and with data for its callers."""

    def __init__(self, *args: object, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(*args)
        self.data = dict(data or {})


class OperationFailed(OrchestratorError):
    """A side effect of a workflow raised. `kind` is the exception's type; on replay it fails the same way."""

    def __init__(self, message: str, *, kind: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = dict(data or {})


class HandlerError(OrchestratorError):
    """A query or an update of a run of code has no answer; its text names the error on the other side."""


class UnknownHandler(HandlerError):
    """The code of the run answers no query or update of that name."""


class InvalidArguments(HandlerError):
    """The arguments of a query or an update do not fit its handler, which was not called."""


class UpdateRefused(HandlerError):
    """The validator of an update refused it: its handler was not called, and nothing was done."""


class HandlerFailed(HandlerError):
    """The handler of a query or an update raised, or its result cannot be encoded."""


HANDLER_ERRORS: Mapping[str, type[HandlerError]] = {
    "unknown": UnknownHandler,
    "arguments": InvalidArguments,
    "refused": UpdateRefused,
    "failed": HandlerFailed,
}
"""By how far a query or an update came. Workers of the previous release do not say."""


class PromiseRejected(OrchestratorError):
    """Somebody rejected the promise that a workflow waited for."""


class NotDeterministic(OrchestratorError):
    """A workflow called what would give another answer on replay; the message names what to call instead."""


class DeterminismViolation(OrchestratorError):
    """The code of a workflow no longer fits the history of a run.

    `event` is the number of the event where they part, and `difference` shows both.
    """

    def __init__(self, message: str, event: int = 0, difference: str = "") -> None:
        super().__init__(message)
        self.event = event
        self.difference = difference

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.difference}" if self.difference else text


class AttemptOver(OrchestratorError):
    """Raised inside a task that would complete in a transaction, but whose attempt no longer counts."""


class TaskTimeout(OrchestratorError, TimeoutError):
    """Raised inside a task whose time is up."""

    def __str__(self) -> str:
        return super().__str__() or "ran longer than its timeout"  # raised in a thread from outside, it has no words


class SoftTimeout(OrchestratorError, TimeoutError):
    """Raised inside a task that has run for its soft timeout; it may be caught, to clean up or to return early."""

    def __str__(self) -> str:
        return super().__str__() or "ran longer than its soft timeout"


class TaskAborted(OrchestratorError):
    """Raised inside a running task that was cancelled."""


class RetryLater(OrchestratorError):
    """Raise it inside a task to be tried again after `seconds`. It is no failure, so it is charged to no policy."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not isinstance(seconds, (Real, Decimal)) or not 0 <= seconds <= 1e9:
            raise ValueError(f"RetryLater: expected the seconds to wait, from 0 to 1e9, found {seconds!r}")
        super().__init__(reason or f"asked to be tried again in {float(seconds):g} s")
        self.seconds: float = seconds


class GiveUp(OrchestratorError):
    """Raise it inside a task to fail at once, whatever tries are left, with data for its callers."""

    def __init__(self, *args: object, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(*args)
        self.data = dict(data or {})


_TYPE = "urn:orchestrator:error:"


def to_problem(error: OrchestratorError) -> tuple[str, dict[str, Any]]:
    """Return a stable name for the kind of an error, and its data beside its text, for HTTP."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    data: dict[str, Any] = {"attributes": dict(error.data)} if error.data else {}
    if isinstance(error, Duplicate) and error.task_id:
        data["task_id"] = error.task_id
    if isinstance(error, NotFound) and error.sought is not None:
        data["sought"] = list(error.sought)
    return _TYPE + kind, data


def from_problem(type_: str, text: str, data: Mapping[str, Any]) -> OrchestratorError | None:
    """Return an error from its form over HTTP; None if this release does not know its kind."""
    kind = globals().get(type_.removeprefix(_TYPE)) if type_.startswith(_TYPE) else None
    if not isinstance(kind, type) or not issubclass(kind, OrchestratorError) or kind is RetryLater:
        return None
    error = kind(text)
    if isinstance(error, Duplicate):
        error.task_id = str(data.get("task_id", ""))
    if isinstance(error, NotFound) and isinstance(data.get("sought"), list):
        what, identifier = data["sought"]
        error.sought = str(what), str(identifier)
    if isinstance(data.get("attributes"), dict):
        error.data = data["attributes"]
    return error


_MOST_COMPARED = 1_000
"""Names among which the nearest is looked for."""
_LONGEST_COMPARED = 200
_MOST_WORK = 300_000
"""Pairs of characters that are compared on the way: names of 17 characters with a thousand others, or long ones with
few. A million take some 0.1 seconds, and the leader may be the one who looks."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known name, or nothing."""
    if len(name) > _LONGEST_COMPARED:
        return ""
    some: list[str] = []
    work = 0
    for other in itertools.islice(known, _MOST_COMPARED):
        work += len(name) * min(len(other), _LONGEST_COMPARED)
        if work > _MOST_WORK:
            break
        if len(other) <= _LONGEST_COMPARED:
            some.append(other)
    from difflib import get_close_matches  # which a process without mistakes does without

    nearest = get_close_matches(name, some, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
