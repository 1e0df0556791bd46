"""Celery's exceptions. Those that mean the same as one of ours are ours, under Celery's name."""

from __future__ import annotations

import numbers
from datetime import datetime
from typing import Any

from orchestrator.errors import ConfigurationError, OrchestratorError, PayloadError, RetryLater
from orchestrator.errors import ResultTimeout as TimeoutError  # Celery's name
from orchestrator.errors import SoftTimeout as SoftTimeLimitExceeded
from orchestrator.errors import TaskTimeout as TimeLimitExceeded

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


class ImproperlyConfigured(CeleryError, ConfigurationError):
    """A setting is wrong, or means something that does not exist here."""


class NotCovered(CeleryError, OrchestratorError, NotImplementedError):
    """A part of Celery that has no counterpart here; the message says what to use."""

    def __init__(self, what: str = "", instead: str | None = None) -> None:
        is_whole = instead is None  # it comes from a worker
        super().__init__(what if is_whole else f"{what} is not covered by orchestrator.compat.celery. {instead}")


class AttributeNotCovered(NotCovered, AttributeError):
    """The same of an attribute, so that `hasattr` says that it is not there."""

    def __init__(self, what: str = "", instead: str | None = None) -> None:
        super().__init__(what, instead and f"{instead[0].upper()}{instead[1:].rstrip('.')}.")


class Refused:
    """An attribute that classes of Celery have, and those here refuse."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._what = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        raise AttributeNotCovered(self._what, self._instead)


class EncodeError(CeleryError, PayloadError):
    """A value cannot be an argument or a result: it is no data, or too large. Kombu's error of that name."""


class OperationalError(CeleryError):
    """The broker cannot be reached. Ours is raised as `orchestrator.Unavailable`."""


class TaskError(CeleryError):
    """Base of errors about tasks."""


class QueueNotFound(KeyError, TaskError):
    """No queue of that name is declared."""


class NotRegistered(KeyError, TaskError):
    """No task of that name is registered."""

    def __repr__(self) -> str:
        return f"NotRegistered({', '.join(map(repr, self.args))})"


class AlreadyRegistered(TaskError):
    """Another task has that name."""


class InvalidTaskError(TaskError):
    """A task or its call cannot be accepted."""


class MaxRetriesExceededError(TaskError):
    """A task asked for one retry more than it may have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.task_args = kwargs.pop("task_args", [])
        self.task_kwargs = kwargs.pop("task_kwargs", {})
        super().__init__(*args)


class TaskRevokedError(TaskError):
    """The task was revoked, or had expired before it began."""


class ChordError(TaskError):
    """A task of a chord's header failed, so its body was not run."""


class WorkerLostError(CeleryError):
    """The process of a task died too often."""


class TaskPredicate(CeleryError):
    """What a task raises to say how it goes on."""


class Retry(TaskPredicate):
    """The task is to be run again."""

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
    """The task has no result: its state stays what `update_state` made of it."""


class Replaced(Ignore):
    """Another task or composition gives the result; `reference` leads to it."""

    reference: dict[str, Any]


class Reject(TaskPredicate):
    """The task is dropped, or put back into its queue."""

    def __init__(self, reason: Any = None, requeue: bool = False) -> None:
        self.reason = reason
        self.requeue = requeue
        super().__init__(reason, requeue)


class Again(RetryLater):
    """How a retry is reported to the scheduler; `data` holds the exception of it."""
