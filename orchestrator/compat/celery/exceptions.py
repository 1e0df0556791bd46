"""Celery's exceptions, with Celery's base classes, which decide what `except` and `autoretry_for` catch."""

from __future__ import annotations

import numbers
from datetime import datetime
from typing import Any

from orchestrator.errors import (
    ConfigurationError,
    OrchestratorError,
    PayloadError,
    RetryLater,
    SoftTimeout,
    TaskTimeout,
)

__all__ = [
    "AlreadyRegistered",
    "CeleryError",
    "ChordError",
    "EncodeError",
    "Ignore",
    "ImproperlyConfigured",
    "InvalidTaskError",
    "MaxRetriesExceededError",
    "NotCovered",
    "NotRegistered",
    "OperationalError",
    "QueueNotFound",
    "Reject",
    "Retry",
    "SoftTimeLimitExceeded",
    "TaskError",
    "TaskPredicate",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TimeoutError",
    "WorkerLostError",
]


class CeleryError(Exception):
    """Base of Celery's errors."""


class TimeoutError(CeleryError):  # Celery's name
    """A result was not available in time. Like the next two, no OSError, as the native exceptions are."""


class TimeLimitExceeded(Exception):
    """Raised in a task at its hard time limit."""

    def __str__(self) -> str:
        return super().__str__() or "ran longer than its timeout"  # raised in a thread, it has no message


class SoftTimeLimitExceeded(Exception):
    """Raised in a task at its soft time limit."""

    def __str__(self) -> str:
        return super().__str__() or "ran longer than its soft timeout"


INTERRUPTIONS = {SoftTimeout: SoftTimeLimitExceeded, TaskTimeout: TimeLimitExceeded}
"""What is raised in a task, by the native exception."""


class ImproperlyConfigured(CeleryError, ConfigurationError):
    """A setting is invalid, or has no counterpart here."""


class NotCovered(CeleryError, OrchestratorError, NotImplementedError):
    """A part of Celery without a counterpart here; the message names the alternative."""

    def __init__(self, what: str = "", instead: str | None = None) -> None:
        is_complete = instead is None  # a worker has raised it with the complete message
        super().__init__(what if is_complete else f"{what} is not covered by orchestrator.compat.celery. {instead}")


class AttributeNotCovered(NotCovered, AttributeError):
    """NotCovered for an attribute; `hasattr` returns False because of the base AttributeError."""

    def __init__(self, what: str = "", instead: str | None = None) -> None:
        super().__init__(what, instead and f"{instead[0].upper()}{instead[1:].rstrip('.')}.")


class Refused:
    """Descriptor for an attribute of a Celery class that raises AttributeNotCovered."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._what = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeNotCovered(self._what, self._instead)


class EncodeError(CeleryError, PayloadError):
    """A value cannot be an argument or a result: it has no encoding or is too large. Kombu's exception of that name."""


class OperationalError(CeleryError):
    """The broker cannot be reached. Raised as `orchestrator.Unavailable` here."""


class TaskError(CeleryError):
    """Base of errors about tasks."""


class QueueNotFound(KeyError, TaskError):
    """No queue of this name is declared."""


class NotRegistered(KeyError, TaskError):
    """No task of this name is registered."""

    def __repr__(self) -> str:
        return f"NotRegistered({', '.join(map(repr, self.args))})"


class AlreadyRegistered(TaskError):
    """Another task has this name."""


class InvalidTaskError(TaskError):
    """A task or its call is invalid."""


class MaxRetriesExceededError(TaskError):
    """A task asked for more retries than its limit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.task_args = kwargs.pop("task_args", [])
        self.task_kwargs = kwargs.pop("task_kwargs", {})
        super().__init__(*args)


class TaskRevokedError(TaskError):
    """The task was revoked, or expired before its start."""


class ChordError(TaskError):
    """A task of a chord's header failed, so the body was not run."""


class WorkerLostError(CeleryError):
    """The processes that ran the task died too often."""


class TaskPredicate(CeleryError):
    """Base of the exceptions with which a task controls what happens next."""


class Retry(TaskPredicate):
    """Run the task again later."""

    def __init__(
        self,
        message: str | None = None,
        exc: BaseException | None = None,
        when: float | datetime | None = None,
        is_eager: bool = False,
        sig: Any = None,
        **kwargs: Any,
    ) -> None:
        self.message = message
        self.exc = exc
        self.when = when
        self.is_eager = is_eager
        self.sig = sig
        super().__init__(message, exc, when, **kwargs)

    def humanize(self) -> str:
        return f"in {self.when}s" if isinstance(self.when, numbers.Number) else f"at {self.when}"

    def __str__(self) -> str:
        if self.message:
            return self.message
        return f"Retry {self.humanize()}{f': {self.exc!r}' if self.exc else ''}"


class Ignore(TaskPredicate):
    """End the task without a result; its state is the last one from `update_state`."""


class Replaced(Ignore):
    """Another task or composition provides the result; `reference` identifies it."""

    reference: dict[str, Any]


class Reject(TaskPredicate):
    """Drop the task, or return it to its queue."""

    def __init__(self, reason: Any = None, requeue: bool = False) -> None:
        self.reason = reason
        self.requeue = requeue
        super().__init__(reason, requeue)


class Again(RetryLater):
    """Reports a retry to the scheduler; `data` holds the exception that caused it."""
