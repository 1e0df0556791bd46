"""What people have set for a queue: paused or not, its limits, how long it keeps what has ended.

Anyone may write it; the inbox tells the leader.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, text

from orchestrator.domain.limits import Rate
from orchestrator.store import inbox
from orchestrator.store.inbox import Wish
from orchestrator.store.statement import Statement
from orchestrator.store.transitions import identifier

_NOBODY = bytes(16)


class QueueRow(NamedTuple):
    """The settings of one queue."""

    name: str
    paused: bool = False
    concurrency: int | None = None
    rate: Rate | None = None


_READ = "SELECT name, paused, concurrency, rate, burst FROM orchestrator.queues ORDER BY name"


def read(connection: Connection) -> list[QueueRow]:
    """Return every queue for which something is set."""
    return [
        QueueRow(row[0], row[1], row[2], Rate(row[3], 1.0, row[4]) if row[3] else None)
        for row in connection.exec_driver_sql(_READ)
    ]


_PAUSE = text(
    """
    INSERT INTO orchestrator.queues (name, paused) VALUES (:name, :paused)
        ON CONFLICT (name) DO UPDATE SET paused = excluded.paused
    """
)


def set_paused(connection: Connection, name: str, paused: bool) -> None:
    """Pause or resume a queue; needs a transaction."""
    connection.execute(_PAUSE, {"name": name, "paused": paused})
    inbox.add(connection, Wish.QUEUES, _NOBODY)


_LIMIT = text(
    """
    INSERT INTO orchestrator.queues (name, concurrency, rate, burst) VALUES (:name, :concurrency, :rate, :burst)
        ON CONFLICT (name) DO UPDATE
       SET concurrency = excluded.concurrency, rate = excluded.rate, burst = excluded.burst
    """
)


def set_limits(connection: Connection, name: str, concurrency: int | None, rate: Rate | None) -> None:
    """Limit a queue, or lift its limits; needs a transaction."""
    per_second = rate.count / rate.per if rate else None
    limits = {"concurrency": concurrency, "rate": per_second, "burst": rate.size if rate else None}
    connection.execute(_LIMIT, {"name": name, **limits})
    inbox.add(connection, Wish.QUEUES, _NOBODY)


_RETAIN = text(
    """
    INSERT INTO orchestrator.queues (name, retention_success, retention_failed) VALUES (:name, :success, :failed)
        ON CONFLICT (name) DO UPDATE
       SET retention_success = excluded.retention_success, retention_failed = excluded.retention_failed
    """
)


def set_retention(connection: Connection, name: str, success: float | None, failed: float | None) -> None:
    """Set for how many seconds a queue's tasks are kept: 0 for ever, None as the settings say."""
    connection.execute(_RETAIN, {"name": name, "success": success, "failed": failed})


def ask_purge(connection: Connection, name: str) -> None:
    """Ask the leader to cancel what waits in a queue now."""
    inbox.add(connection, Wish.PURGE, _NOBODY, msgspec.json.encode({"queue": name}).decode())


_WAITING = Statement(
    """
SELECT id::text FROM orchestrator.tasks
 WHERE queue = %(queue)s::text AND status = 'pending' AND created_at <= %(before)s::timestamptz LIMIT %(limit)s
"""
)


def waiting_tasks(connection: Connection, queue: str, before: datetime, limit: int) -> list[bytes]:
    """Return a slice of the tasks that have waited in a queue since before a time."""
    rows: Any = _WAITING(connection, {"queue": queue, "before": before, "limit": limit})
    return [identifier(row[0]) for row in rows]


_OPEN = "SELECT count(*) FROM orchestrator.tasks WHERE queue = %(queue)s"


def open_tasks(connection: Connection, queue: str) -> int:
    """Return how many tasks of a queue have not ended."""
    number: int = connection.exec_driver_sql(_OPEN, {"queue": queue}).scalar_one()
    return number
