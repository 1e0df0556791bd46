"""Attempts of tasks, their errors, and the releases of the application that ran them."""

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
    """What went wrong in an attempt."""

    kind: str
    """The type of the exception."""
    message: str
    """Its text."""
    traceback: str
    """The remote traceback, or nothing."""
    data: dict[str, Any]
    """What the exception knew beside its text."""


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt of a task."""

    attempt: int
    """Its number, the fence."""
    outcome: str
    """`failed`, `lost`, `postponed` or `returned` where another attempt followed; of the last one, `lost` or
    the state of the task."""
    error: ErrorView | None
    """What went wrong."""
    worker: str | None
    """The worker that had it."""
    started_at: datetime | None
    """When it began; None if it never did, or nobody could say."""
    ended_at: datetime | None
    """When it ended; None while it is in flight."""
    release: str | None = None
    """The release of the application that ran it, if that has a name."""
    reopened: bool = False
    """The task had ended with it, and somebody asked for another one."""


def error_view(known: TaskError | Mapping[str, str] | None) -> ErrorView | None:
    """Return an error, maybe as it is stored, as it is shown."""
    error = known if isinstance(known, TaskError) else TaskError.stored(known)
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
    """Return the recorded attempts, and the one that is in flight or ended the task."""
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
    releases = releases_of(connection, [one.worker for one in attempts if one.worker is not None])
    return [replace(one, release=releases.get(one.worker or "")) for one in attempts] if releases else attempts


_MOST_RETURNED = 100
"""Attempts in a row that were dispatched for nothing; more are numbers that were left out."""
_RETURNED = (
    "was dispatched, and handed back before it began: its worker stopped or had no room, or Redis lost the message"
)
_LEFT_OUT = "are left out: Postgres had lost commits, and attempts count from a higher number on"


def unbegun(attempts: Sequence[AttemptView], last: int) -> dict[int, str]:
    """Return why attempts up to the last one are in no record, by number, or by the first of numbers left out."""
    found: dict[int, str] = {}
    for before, after in pairwise([0, *(one.attempt for one in attempts), last + 1]):
        missing = range(before + 1, after)
        if len(missing) > _MOST_RETURNED:
            found[missing[0]] = f"{missing[0]:,} to {missing[-1]:,} {_LEFT_OUT}"
        else:
            found |= dict.fromkeys(missing, _RETURNED)
    return found


# -- releases


@Statement.function("""
SELECT /* insights.releases.of_workers */ worker, release FROM orchestrator.worker_releases
 WHERE worker = ANY(%(workers)s::text[])
""")
def releases_of(connection: Connection, workers: Collection[str]) -> dict[str, str]:
    """Return the releases of these workers, where they have said one."""


class Release(NamedTuple):
    """A release, and when the first worker of it started."""

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
    """Return the releases that came since then, and when the first worker of each started."""
