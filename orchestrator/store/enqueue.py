"""Creating tasks and runs. Anyone may do this, in a transaction of their own."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice

from sqlalchemy import Connection, text

from orchestrator.domain.task import NewTask
from orchestrator.store import arrays
from orchestrator.store.namespaces import in_namespace, namespace_of
from orchestrator.store.statement import Statement
from orchestrator.store.transitions import arrivals

_INSERT = """
    INSERT INTO orchestrator.tasks
           (id, name, queue, priority, wake_at, payload, options, lane, expires_at, unique_key, callbacks)
    SELECT CAST(:id AS uuid), :name, :queue, :priority, now() + CAST(:delay AS double precision) * interval '1 second',
           :payload, CAST(:options AS jsonb), :lane, now() + CAST(:expires AS double precision) * interval '1 second',
           :unique_key, CAST(:callbacks AS jsonb)
"""
_INSERT_TASK = text(_INSERT)
_INSERT_IN_LANE = text(
    f"""
    WITH created AS ({_INSERT} RETURNING id, wake_at), arrived AS ({arrivals("created WHERE wake_at IS NULL")})
    SELECT FROM created
    """
)
_INSERT_WITH_KEY = text(
    f"""
    WITH held AS (
        INSERT INTO orchestrator.unique_keys (key, task_id, scope, until)
        VALUES (:unique_key, CAST(:id AS uuid), :scope, now() + CAST(:period AS double precision) * interval '1 second')
            ON CONFLICT (key) DO NOTHING
        RETURNING key
    ), created AS ({_INSERT} FROM held RETURNING id, wake_at, lane),
    arrived AS ({arrivals("created WHERE wake_at IS NULL AND lane IS NOT NULL")})
    SELECT id FROM created
    """
)


def insert_task(connection: Connection, task: NewTask) -> bool:
    """Create one standalone task, unless its key is taken; say whether it was. Any SQLAlchemy driver will do.

    It is one statement whatever the task needs, so that it happens as a whole or not at all without a transaction.
    """
    parameters = {
        "id": task.id.hex(),
        "name": task.name,
        "queue": task.queue,
        "priority": task.priority,
        "delay": task.delay if task.delay > 0 else None,
        "payload": task.payload,
        "options": task.options,
        "lane": task.lane,
        "expires": task.expires,
        "unique_key": None,
        "callbacks": task.callbacks,
    }
    if task.unique is not None:
        key = {"unique_key": task.unique.key, "scope": task.unique.scope, "period": task.unique.period}
        return connection.execute(_INSERT_WITH_KEY, parameters | key).first() is not None
    connection.execute(_INSERT_TASK if task.lane is None else _INSERT_IN_LANE, parameters)
    return True


_NOTIFY = text("SELECT pg_notify(:channel, '')")


def notify_on_commit(connection: Connection, namespace: str) -> None:
    """Wake the scheduler of a namespace when, and only when, this transaction commits."""
    connection.execute(_NOTIFY, {"channel": namespace})


_COPY = """
COPY orchestrator.tasks
     (id, name, queue, priority, wake_at, payload, options, run_id, position, lane, expires_at, callbacks) FROM STDIN
"""
_COPY_CHUNK = 5_000
_ARRIVALS = text(arrivals("unnest(CAST(:ids AS uuid[])) AS arrived(id)"))
_LANES = text("INSERT INTO orchestrator.inbox (kind, target) SELECT 'lanes', CAST(:id AS uuid)")
_FEW_LANES = 100


def copy_tasks(connection: Connection, tasks: Iterable[NewTask]) -> int:
    """Create any number of tasks without unique keys in bounded memory (needs psycopg2); return how many."""
    now: datetime = connection.exec_driver_sql("SELECT now()").scalar_one()
    copy = in_namespace(_COPY, namespace_of(connection))
    cursor = connection.connection.cursor()
    count = 0
    first_in_lane: dict[tuple[str, str, int], bytes] = {}
    rows = iter(tasks)
    while chunk := list(islice(rows, _COPY_CHUNK)):
        cursor.copy_expert(copy, io.StringIO("".join(_copy_lines(chunk, now))))
        count += len(chunk)
        for task in chunk:
            if task.lane is not None and task.delay <= 0 and len(first_in_lane) <= _FEW_LANES:
                first_in_lane.setdefault((task.queue, task.lane, task.priority), task.id)
    if len(first_in_lane) > _FEW_LANES:
        connection.execute(_LANES, {"id": bytes(16).hex()})
    elif first_in_lane:
        connection.execute(_ARRIVALS, {"ids": arrays.uuids(first_in_lane.values())})
    return count


def _copy_lines(tasks: Iterable[NewTask], now: datetime) -> Iterator[str]:
    for task in tasks:
        wake_at = (now + timedelta(seconds=task.delay)).isoformat() if task.delay > 0 else "\\N"
        run_id = task.run_id.hex() if task.run_id else "\\N"
        position = "\\N" if task.position is None else task.position
        expires_at = "\\N" if task.expires is None else (now + timedelta(seconds=task.expires)).isoformat()
        yield (
            f"{task.id.hex()}\t{_escape(task.name)}\t{_escape(task.queue)}\t{task.priority}\t{wake_at}"
            f"\t\\\\x{task.payload.hex()}\t{_escape(task.options)}\t{run_id}\t{position}\t{_escape(task.lane)}"
            f"\t{expires_at}\t{_escape(task.callbacks)}\n"
        )


def _escape(value: str | None) -> str:
    if value is None:
        return "\\N"
    return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


# What a worker reports may be reported twice, and the task may even have ended in between.
_ADOPT = Statement(
    f"""
WITH created AS (
    INSERT INTO orchestrator.tasks (id, name, queue, priority, wake_at, payload, options, run_id, step, position, lane,
                                    expires_at, unique_key, callbacks)
    SELECT n.id, n.name, n.queue, n.priority, %(now)s::timestamptz + n.delay * interval '1 second', n.payload,
           n.options, n.run_id, n.step, n.position, n.lane, %(now)s::timestamptz + n.expires * interval '1 second',
           n.unique_key, n.callbacks
      FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[],
                  %(delays)s::double precision[], %(payloads)s::bytea[], %(options)s::jsonb[], %(runs)s::uuid[],
                  %(steps)s::text[], %(positions)s::int[], %(lanes)s::text[], %(expires)s::double precision[],
                  %(unique_keys)s::text[], %(callbacks)s::jsonb[])
           AS n(id, name, queue, priority, delay, payload, options, run_id, step, position, lane, expires, unique_key,
                callbacks)
     WHERE (SELECT true FROM orchestrator.ended_tasks WHERE id = n.id LIMIT 1) IS NULL
        ON CONFLICT (id) DO NOTHING
    RETURNING id, lane, wake_at
)
{arrivals("created WHERE lane IS NOT NULL AND wake_at IS NULL")}
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
            "lanes": [task.lane for task in tasks],
            "expires": arrays.numbers(task.expires for task in tasks),
            "unique_keys": [task.unique and task.unique.key for task in tasks],
            "callbacks": [task.callbacks for task in tasks],
        },
    )


_INSERT_RUN = """
INSERT INTO orchestrator.runs (id, name, total, open) VALUES (%(id)s::uuid, %(name)s, %(total)s, %(total)s)
"""


def insert_run(connection: Connection, run_id: bytes, name: str, total: int) -> None:
    """Create a run of `total` tasks."""
    connection.exec_driver_sql(_INSERT_RUN, {"id": run_id.hex(), "name": name, "total": total})
