"""All errors that the package raises on purpose, in one hierarchy.

    OrchestratorError
    ├── ConfigurationError        a setting is missing or wrong
    │   └── SchemaError           the database is not at the version this release needs
    ├── Forbidden                 an API key is valid, but lacks the permission
    ├── InvalidTask               a task, its options or its arguments are invalid
    │   ├── UnknownTask           no task of that name is registered
    │   ├── UnknownOption         a task or workflow has no option of that name (also a TypeError)
    │   └── PayloadError          an argument or result cannot be serialized, or is too large
    │       └── StateTooLarge     a message would exceed the size limit of a run's state
    ├── Duplicate                 another task has the unique key; carries its id
    ├── InvalidWorkflow           a workflow definition or its parameters are invalid
    │   └── ExpressionError       an expression cannot be parsed or evaluated
    ├── Unavailable               Postgres or the payload store is away; nothing was written, retrying is safe
    ├── Uncertain                 the connection broke during a write, which may have been committed
    ├── NotFound                  no task or run has that id
    ├── WrongState                the state of the task or run does not allow this
    ├── ResultTimeout             the result did not arrive within the caller's timeout (also a TimeoutError)
    ├── TaskEnded                 the result of a task was requested that has none
    │   ├── TaskFailed            it failed; carries the remote error and traceback
    │   ├── TaskCancelled         it was cancelled
    │   └── TaskSkipped           an upstream failed or its branch was not taken
    ├── RunFailed                 results of a run were requested that did not succeed
    ├── WorkflowFailed            raised inside a workflow to fail its run
    ├── OperationFailed           a side effect of a workflow raised; carries its error
    ├── HandlerError              a query or an update of a code run has no answer
    │   ├── UnknownHandler        the code has no handler of that name
    │   ├── InvalidArguments      its arguments do not fit the handler, which was not called
    │   ├── UpdateRefused         its validator refused it, and the handler was not called
    │   └── HandlerFailed         the handler raised, or its result cannot be encoded
    ├── PromiseRejected           the promise that a workflow waited for was rejected
    ├── NotDeterministic          a workflow called a function that replay cannot repeat
    ├── DeterminismViolation      the code of a workflow no longer fits the history of a run
    ├── AttemptOver               raised inside a task whose transaction came too late and was rolled back
    ├── TaskTimeout               raised inside a task whose timeout has passed (also a TimeoutError)
    ├── SoftTimeout               raised inside a task whose soft timeout has passed (also a TimeoutError)
    ├── TaskAborted               raised inside a task that was cancelled
    ├── RetryLater                raised by a task to run again later, which does not count as a failure
    └── GiveUp                    raised by a task to fail at once, without further retries

A message names the object, what was expected, what was found, and what to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from types import MappingProxyType
from typing import Any


class OrchestratorError(Exception):
    """Base class of all errors that this package raises on purpose."""

    data: Mapping[str, Any] = MappingProxyType({})
    """Structured data beside the message. For a remote error, the attributes of the exception."""


class ConfigurationError(OrchestratorError):
    """A setting is missing or wrong."""


class SchemaError(ConfigurationError):
    """The database schema is not at the version that this release needs."""


class Forbidden(OrchestratorError):
    """The HTTP API knows the key or user, but their scope does not allow this."""


class InvalidTask(OrchestratorError):
    """A task, its options or its arguments are invalid. Nothing was written."""


class UnknownTask(InvalidTask):
    """No task of that name is registered."""


class PayloadError(InvalidTask):
    """An argument or a result cannot be serialized, or is too large."""


class StateTooLarge(PayloadError):
    """A message would exceed the size limit of a run's state. Nothing was written, and the run continues."""


class Duplicate(OrchestratorError):
    """Another task has the unique key. Nothing was written. `task_id` is the id of that task."""

    def __init__(self, message: str, task_id: str = "") -> None:
        super().__init__(message)
        self.task_id = task_id

    @classmethod
    def other_call(
        cls, key: str, task_id: str, difference: str = "a different name or different arguments"
    ) -> Duplicate:
        """Return the error that an idempotency key belongs to a different call."""
        return cls(
            f"Task {task_id} was enqueued under the key {key!r} with {difference}; this task was not enqueued. A "
            f"repeated call must have the same name and arguments; a different call needs its own key.",
            task_id,
        )


class InvalidWorkflow(OrchestratorError):
    """A workflow definition or the parameters of a run are invalid. Nothing was written."""


class UnknownOption(InvalidTask, InvalidWorkflow, TypeError):
    """No option of that name exists."""


class ExpressionError(InvalidWorkflow):
    """An expression cannot be parsed or evaluated."""


class Unavailable(OrchestratorError):
    """Postgres or the payload store is away. Nothing was written, so the call can be retried safely."""


class Uncertain(OrchestratorError):
    """The connection to Postgres broke during a write. Check whether it was committed before you retry."""


class NotFound(OrchestratorError):
    """No task or run has that id."""

    sought: tuple[str, str] | None = None
    """`task` or `run`, and the id, if that is all that is wrong."""

    @classmethod
    def by_id(cls, what: str, identifier: str) -> NotFound:
        """Return the error that no task or run has this id, at least not any more."""
        error = cls(
            f"No {what} has the id {identifier}. It may have been pruned: the settings retention_success and "
            f"retention_failed set how long ended tasks and runs are kept."
        )
        error.sought = what, identifier
        return error


class WrongState(OrchestratorError):
    """The state of the task or run does not allow the request."""


class ResultTimeout(OrchestratorError, TimeoutError):
    """The result did not arrive within the caller's timeout. The task continues."""


class TaskEnded(OrchestratorError):
    """The result of a task was requested that ended without one."""


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
    """Results were requested of a run that failed or was cancelled.

    For a workflow as code, `kind` is the type of the exception that the code raised, and `data` its attributes.
    """

    def __init__(self, message: str, *, kind: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = dict(data or {})


class WorkflowFailed(OrchestratorError):
    """Raise this in a workflow to fail its run with a message, and with data for its callers."""

    def __init__(self, *args: object, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(*args)
        self.data = dict(data or {})


class OperationFailed(OrchestratorError):
    """A side effect of a workflow raised. `kind` is the type of the exception. Replay raises the same error."""

    def __init__(self, message: str, *, kind: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = dict(data or {})


class HandlerError(OrchestratorError):
    """A query or an update of a code run has no answer. The message names the remote error."""


class UnknownHandler(HandlerError):
    """The code of the run has no query or update of that name."""


class InvalidArguments(HandlerError):
    """The arguments of a query or an update do not fit its handler, which was not called."""


class UpdateRefused(HandlerError):
    """The validator of an update refused it. The handler was not called."""


class HandlerFailed(HandlerError):
    """The handler of a query or an update raised, or its result cannot be encoded."""


HANDLER_ERRORS: Mapping[str, type[HandlerError]] = {
    "unknown": UnknownHandler,
    "arguments": InvalidArguments,
    "refused": UpdateRefused,
    "failed": HandlerFailed,
}
"""By phase that the query or update reached. Workers of the previous release do not send it."""


class PromiseRejected(OrchestratorError):
    """The promise that a workflow waited for was rejected."""


class NotDeterministic(OrchestratorError):
    """A workflow called a function that could return another value on replay. The message names the replacement."""


class DeterminismViolation(OrchestratorError):
    """The code of a workflow no longer fits the history of a run.

    `event` is the number of the first differing event, and `difference` shows both sides.
    """

    def __init__(self, message: str, event: int = 0, difference: str = "") -> None:
        super().__init__(message)
        self.event = event
        self.difference = difference

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.difference}" if self.difference else text


class AttemptOver(OrchestratorError):
    """Raised inside a task that completes in a transaction, if its attempt is no longer current."""


class TaskTimeout(OrchestratorError, TimeoutError):
    """Raised inside a task whose timeout has passed."""

    def __str__(self) -> str:
        return super().__str__() or "ran longer than its timeout"  # raised in a thread from outside, it has no message


class SoftTimeout(OrchestratorError, TimeoutError):
    """Raised inside a task whose soft timeout has passed. Catch it to clean up or to return early."""

    def __str__(self) -> str:
        return super().__str__() or "ran longer than its soft timeout"


class TaskAborted(OrchestratorError):
    """Raised inside a running task that was cancelled."""


class RetryLater(OrchestratorError):
    """Raise this in a task to run it again after `seconds`. It does not count as a failure."""

    _is_failure = False
    """Whether it counts as a failure all the same: set by a subclass."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        if not isinstance(seconds, (Real, Decimal)) or not 0 <= seconds <= 1e9:
            raise ValueError(f"RetryLater: expected the seconds to wait, from 0 to 1e9, found {seconds!r}")
        super().__init__(reason or f"asked to be retried in {float(seconds):g} s")
        self.seconds: float = seconds


class GiveUp(OrchestratorError):
    """Raise this in a task to fail at once, without further retries, with data for its callers."""

    def __init__(self, *args: object, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(*args)
        self.data = dict(data or {})


_TYPE = "urn:orchestrator:error:"


def to_problem(error: OrchestratorError) -> tuple[str, dict[str, Any]]:
    """Return a stable name for the type of an error, and its structured data, for HTTP."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    data: dict[str, Any] = {"attributes": dict(error.data)} if error.data else {}
    if isinstance(error, Duplicate) and error.task_id:
        data["task_id"] = error.task_id
    if isinstance(error, NotFound) and error.sought is not None:
        data["sought"] = list(error.sought)
    return _TYPE + kind, data


def from_problem(type_: str, text: str, data: Mapping[str, Any]) -> OrchestratorError | None:
    """Return an error from its HTTP form, or None if this release does not know its type."""
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


_MAX_NAMES = 1_000
"""Names compared to find similar ones, at most."""
_MAX_LENGTH = 200
_MAX_COMPARISONS = 300_000
"""Pairs of characters compared, at most: names of 17 characters with a thousand others, or long ones with few. A
million take some 0.1 seconds, and the leader may be waiting."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the most similar known name, or an empty string."""
    if len(name) > _MAX_LENGTH:
        return ""
    candidates: list[str] = []
    comparisons = 0
    for candidate in itertools.islice(known, _MAX_NAMES):
        comparisons += len(name) * min(len(candidate), _MAX_LENGTH)
        if comparisons > _MAX_COMPARISONS:
            break
        if len(candidate) <= _MAX_LENGTH:
            candidates.append(candidate)
    from difflib import get_close_matches  # imported late: only needed for errors

    nearest = get_close_matches(name, candidates, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
