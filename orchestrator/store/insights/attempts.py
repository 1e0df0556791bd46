"""Attempts of tasks, their errors, and the application releases that ran them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.sealed import reveal_error
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import LOST, TaskError
from orchestrator.sealing import is_sealed_text
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tasks.row import REOPENED


@dataclass(frozen=True, kw_only=True)
class ErrorView:
    """The error of an attempt."""

    kind: str
    """The type of the exception."""
    message: str
    """The message of the exception."""
    traceback: str
    """The remote traceback; empty if there is none."""
    data: dict[str, Any]
    """Attributes of the exception beside its message."""


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt of a task."""

    attempt: int
    """The number of the attempt."""
    outcome: str
    """`failed`, `lost`, `postponed` or `returned`; for the last attempt, `lost` or the state of the task."""
    error: ErrorView | None
    """The error of the attempt."""
    worker: str | None
    """The worker that had the attempt."""
    started_at: datetime | None
    """When the attempt began; None if it never began, or the time is unknown."""
    ended_at: datetime | None
    """When the attempt ended; None while it is in flight."""
    release: str | None = None
    """The application release of the worker, if it has a name."""
    reopened: bool = False
    """Whether the attempt had ended the task, and a retry was requested afterwards."""


def error_view(stored: TaskError | Mapping[str, str] | None) -> ErrorView | None:
    """Return an error, possibly in stored form, as it is displayed."""
    error = stored if isinstance(stored, TaskError) else TaskError.stored(stored)
    if error is None:
        return None
    error = reveal_error(error)
    return ErrorView(
        kind=error.kind,
        message=error.message,
        traceback=error.traceback,
        data={"sealed": error.data} if is_sealed_text(error.data) else error.attributes,
    )


_ATTEMPTS = Statement[Row](f"""
SELECT /* insights.tasks.attempts */ attempt, outcome, error, worker, started_at, ended_at,
       coalesce(error ? '{REOPENED}', outcome = 'cancelled') AS reopened
  FROM orchestrator.attempts WHERE task_id = %(id)s::uuid ORDER BY attempt
""")


def attempts_of(connection: Connection, task: Row, error: ErrorView | None) -> list[AttemptView]:
    """Return the stored attempts, and the one that is in flight or ended the task."""
    attempts = [
        AttemptView(**row._asdict() | {"error": error_view(row.error)}) for row in _ATTEMPTS(connection, id=task.id.hex)
    ]
    recorded = {attempt.attempt for attempt in attempts}
    if task.attempt not in recorded | {0} and task.status != TaskState.PENDING:
        last = AttemptView(
            attempt=task.attempt,
            outcome="lost" if task.reason == LOST else task.status,
            error=error,
            worker=task.worker,
            started_at=task.started_at,
            ended_at=task.ended_at,
        )
        attempts.append(last)
    releases = releases_of(connection, [attempt.worker for attempt in attempts if attempt.worker is not None])
    return (
        [replace(attempt, release=releases.get(attempt.worker or "")) for attempt in attempts] if releases else attempts
    )


_MAX_RETURNED = 100
"""A longer gap between attempts is not a series of returned attempts but numbers that were skipped."""
_RETURNED = (
    "was dispatched, and handed back before it began: its worker stopped or had no free slot, or Redis lost the message"
)
_LEFT_OUT = "do not exist: Postgres lost commits, and attempts continue from a higher number"


def unbegun(attempts: Sequence[AttemptView], last: int) -> dict[int, str]:
    """Return why attempt numbers up to `last` have no record: by number, or by the first number of a skipped range."""
    reasons: dict[int, str] = {}
    for missing in _gaps(attempts, last):
        if len(missing) > _MAX_RETURNED:
            reasons[missing[0]] = f"{missing[0]:,} to {missing[-1]:,} {_LEFT_OUT}"
        else:
            reasons |= dict.fromkeys(missing, _RETURNED)
    return reasons


def why_skipped(attempts: Sequence[AttemptView], last: int, number: int) -> str | None:
    """Return why no attempt has this number, if it was skipped, and which other numbers were skipped with it."""
    gap = next((missing for missing in _gaps(attempts, last) if number in missing), range(0))
    return unbegun(attempts, last)[gap[0]] if len(gap) > _MAX_RETURNED else None


def _gaps(attempts: Sequence[AttemptView], last: int) -> list[range]:
    """Return the numbers without a record between the attempts, up to the number `last`."""
    numbers = [0, *(attempt.attempt for attempt in attempts), last + 1]
    return [range(before + 1, after) for before, after in pairwise(numbers)]


# -- releases


@Statement.function("""
SELECT /* insights.releases.of_workers */ worker, release FROM orchestrator.worker_releases
 WHERE worker = ANY(%(workers)s::text[])
""")
def releases_of(connection: Connection, workers: Collection[str]) -> dict[str, str]:
    """Return the releases of these workers, as far as the workers reported one."""


class Release(NamedTuple):
    """A release, and the start time of its first worker."""

    name: str
    at: datetime


@Statement.function("""
SELECT /* insights.releases.last */ release AS name, min(started_at) AS at FROM orchestrator.worker_releases
 WHERE release = (SELECT release FROM orchestrator.worker_releases ORDER BY started_at DESC LIMIT 1)
 GROUP BY release
""")
def last_release(connection: Connection) -> Release | None:
    """Return the release of the worker that started last."""


@Statement.function("""
SELECT /* insights.releases.first_starts */ release, min(started_at) FROM orchestrator.worker_releases
 GROUP BY release HAVING min(started_at) >= %(since)s::timestamptz
""")
def first_starts(connection: Connection, since: datetime) -> dict[str, datetime]:
    """Return the releases whose first worker started since then, with that time."""
