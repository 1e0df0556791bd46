"""Creating tasks and runs. Anyone may do this, in a transaction of their own."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice

from sqlalchemy import Connection, text

from orchestrator.domain.task import NewTask
from orchestrator.store import arrays
from orchestrator.store.statement import Statement

_INSERT_TASK = text(
    """
    INSERT INTO orchestrator.tasks (id, name, queue, priority, wake_at, payload, options)
    VALUES (CAST(:id AS uuid), :name, :queue, :priority, now() + CAST(:delay AS double precision) * interval '1 second',
            :payload, CAST(:options AS jsonb))
    """
)


def insert_task(connection: Connection, task: NewTask) -> None:
    """Create one standalone task; any SQLAlchemy driver will do."""
    connection.execute(
        _INSERT_TASK,
        {
            "id": task.id.hex(),
            "name": task.name,
            "queue": task.queue,
            "priority": task.priority,
            "delay": task.delay if task.delay > 0 else None,
            "payload": task.payload,
            "options": task.options,
        },
    )


_NOTIFY = text("SELECT pg_notify('orchestrator', '')")


def notify_on_commit(connection: Connection) -> None:
    """Wake the scheduler when, and only when, this transaction commits."""
    connection.execute(_NOTIFY)


_COPY = """
COPY orchestrator.tasks (id, name, queue, priority, wake_at, payload, options, run_id, position) FROM STDIN
"""
_COPY_CHUNK = 5_000


def copy_tasks(connection: Connection, tasks: Iterable[NewTask]) -> int:
    """Create any number of tasks in bounded memory (needs psycopg2); return how many."""
    now: datetime = connection.exec_driver_sql("SELECT now()").scalar_one()
    cursor = connection.connection.cursor()
    count = 0
    rows = iter(tasks)
    while chunk := list(islice(rows, _COPY_CHUNK)):
        cursor.copy_expert(_COPY, io.StringIO("".join(_copy_lines(chunk, now))))
        count += len(chunk)
    return count


def _copy_lines(tasks: Iterable[NewTask], now: datetime) -> Iterator[str]:
    for task in tasks:
        wake_at = (now + timedelta(seconds=task.delay)).isoformat() if task.delay > 0 else "\\N"
        options = _escape(task.options) if task.options else "\\N"
        run_id = task.run_id.hex() if task.run_id else "\\N"
        position = "\\N" if task.position is None else task.position
        yield (
            f"{task.id.hex()}\t{_escape(task.name)}\t{_escape(task.queue)}\t{task.priority}\t{wake_at}"
            f"\t\\\\x{task.payload.hex()}\t{options}\t{run_id}\t{position}\n"
        )


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


# What a worker reports may be reported twice, and the task may even have ended in between.
_ADOPT = Statement(
    """
INSERT INTO orchestrator.tasks (id, name, queue, priority, wake_at, payload, options, run_id, step, position)
SELECT n.id, n.name, n.queue, n.priority, %(now)s::timestamptz + n.delay * interval '1 second', n.payload, n.options,
       n.run_id, n.step, n.position
  FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[],
              %(delays)s::double precision[], %(payloads)s::bytea[], %(options)s::jsonb[], %(runs)s::uuid[],
              %(steps)s::text[], %(positions)s::int[])
       AS n(id, name, queue, priority, delay, payload, options, run_id, step, position)
 WHERE (SELECT true FROM orchestrator.ended_tasks WHERE id = n.id LIMIT 1) IS NULL
    ON CONFLICT (id) DO NOTHING
"""
)


def adopt_tasks(connection: Connection, tasks: Sequence[NewTask], now: datetime) -> None:
    """Create tasks that running tasks enqueued or runs have come to; those that exist already stay as they are."""
    _ADOPT(
        connection,
        {
            "now": now,
            "ids": arrays.uuids(task.id for task in tasks),
            "names": [task.name for task in tasks],
            "queues": [task.queue for task in tasks],
            "priorities": arrays.numbers(task.priority for task in tasks),
            "delays": arrays.numbers(task.delay if task.delay > 0 else None for task in tasks),
            "payloads": arrays.blobs(task.payload for task in tasks),
            "options": [task.options for task in tasks],
            "runs": arrays.uuids(task.run_id for task in tasks),
            "steps": [task.step for task in tasks],
            "positions": arrays.numbers(task.position for task in tasks),
        },
    )


_INSERT_RUN = """
INSERT INTO orchestrator.runs (id, name, total, open) VALUES (%(id)s::uuid, %(name)s, %(total)s, %(total)s)
"""


def insert_run(connection: Connection, run_id: bytes, name: str, total: int) -> None:
    """Create a run of `total` tasks."""
    connection.exec_driver_sql(_INSERT_RUN, {"id": run_id.hex(), "name": name, "total": total})
