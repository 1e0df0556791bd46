"""Creating tasks and runs. Anyone may do this, in a transaction of their own."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine, TextClause, TwoPhaseTransaction, text

from orchestrator.domain.tasks.task import NewTask
from orchestrator.store import arrays, driver
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import arrivals

_COLUMNS = {
    "id": ("id", "CAST({} AS uuid)"),
    "name": ("name", "{}"),
    "queue": ("queue", "{}"),
    "payload": ("payload", "{}"),
    "priority": ("priority", "{}"),
    "delay": ("wake_at", "now() + CAST({} AS double precision) * interval '1 second'"),
    "options": ("options", "CAST({} AS jsonb)"),
    "lane": ("lane", "{}"),
    "expires": ("expires_at", "now() + CAST({} AS double precision) * interval '1 second'"),
    "unique_key": ("unique_key", "{}"),
    "callbacks": ("callbacks", "CAST({} AS jsonb)"),
}
"""By parameter, the column that it sets, and how."""


def insert_task(connection: Connection, task: NewTask) -> bool:
    """Create one standalone task, unless its key is taken; say whether it was. Any SQLAlchemy driver will do.

    It is one statement whatever the task needs, so that it happens as a whole or not at all without a transaction.
    """
    row = _row(task)
    if task.unique is None:
        connection.execute(_insert_text(tuple(row)), row)
        return True
    statement = _insert_text(tuple(row), with_key=True)
    key = {"scope": task.unique.scope, "period": task.unique.period}
    return connection.execute(statement, row | key).first() is not None


def insert_alone(engine: Engine, task: NewTask) -> None:
    """Create one standalone task without a unique key, by itself; it is stored when this returns."""
    row = _row(task)
    driver.execute(engine, _insert_sql(tuple(row), "%({})s"), row)


def _row(task: NewTask) -> dict[str, Any]:
    """Return the parameters of an insert. What a task does not use is not sent: parsing it takes Postgres time."""
    row: dict[str, Any] = {"id": task.id.hex(), "name": task.name, "queue": task.queue, "payload": task.payload}
    if task.priority:
        row["priority"] = task.priority
    if task.delay > 0:
        row["delay"] = task.delay
    if task.options is not None:
        row["options"] = task.options
    if task.lane is not None:
        row["lane"] = task.lane
    if task.expires is not None:
        row["expires"] = task.expires
    if task.unique is not None:
        row["unique_key"] = task.unique.key
    if task.callbacks is not None:
        row["callbacks"] = task.callbacks
    return row


@cache
def _insert_text(names: tuple[str, ...], *, with_key: bool = False) -> TextClause:
    return text(_insert_sql(names, ":{}", with_key=with_key))


@cache
def _insert_sql(names: tuple[str, ...], mark: str, *, with_key: bool = False) -> str:
    """Return the statement that creates a task with these parameters, and tells the leader if it is ready in a lane."""
    columns = ", ".join(_COLUMNS[name][0] for name in names)
    values = ", ".join(_COLUMNS[name][1].format(mark.format(name)) for name in names)
    is_arriving = "lane" in names and "delay" not in names
    if not with_key and not is_arriving:
        return f"INSERT INTO orchestrator.tasks ({columns}) VALUES ({values})"
    steps = [f"created AS (INSERT INTO orchestrator.tasks ({columns}) SELECT {values} RETURNING id)"]
    if with_key:
        marks = {name: mark.format(name) for name in ("unique_key", "id", "scope", "period")}
        steps = [
            f"held AS ({_HOLD.format(**marks)})",
            f"created AS (INSERT INTO orchestrator.tasks ({columns}) SELECT {values} FROM held RETURNING id)",
        ]
    if is_arriving:
        steps.append(f"arrived AS ({arrivals('created')})")
    return f"WITH {', '.join(steps)} SELECT id FROM created"


_HOLD = """
    INSERT INTO orchestrator.unique_keys (key, task_id, scope, until)
    VALUES ({unique_key}, CAST({id} AS uuid), {scope}, now() + CAST({period} AS double precision) * interval '1 second')
        ON CONFLICT (key) DO NOTHING
    RETURNING key
"""


_NOTIFY = text("SELECT pg_notify(:channel, '')")


def notify_on_commit(connection: Connection, namespace: str) -> None:
    """Wake the scheduler of a namespace when, and only when, this transaction commits.

    Postgres prepares no transaction that has notified somebody; what two phases commit, the safety scan finds.
    """
    if isinstance(connection.get_transaction(), TwoPhaseTransaction):
        return
    connection.execute(_NOTIFY, {"channel": namespace})


_COPY = """
COPY orchestrator.tasks
     (id, payload, name, queue, priority, options, lane, callbacks, wake_at, expires_at, run_id, position) FROM STDIN
"""
_COPY_CHUNK = 5_000
_ARRIVALS = text(
    "INSERT INTO orchestrator.inbox (kind, target, body)"
    " SELECT 'arrival', id, 'true' FROM unnest(CAST(:ids AS uuid[])) AS first(id)"
)
_LANES = text("INSERT INTO orchestrator.inbox (kind, target) SELECT 'lanes', CAST(:id AS uuid)")
_FEW_LANES = 100


def copy_tasks(connection: Connection, tasks: Iterable[NewTask]) -> int:
    """Create any number of tasks without unique keys in bounded memory (needs psycopg2); return how many."""
    count = 0
    first_in_lane: dict[tuple[str, str, int], bytes] = {}
    clock = partial(_clock, connection)
    rows = iter(tasks)
    while chunk := list(islice(rows, _COPY_CHUNK)):
        driver.copy(connection, _COPY, io.StringIO("".join(_copy_lines(chunk, clock))))
        count += len(chunk)
        for task in chunk:
            if task.lane is not None and task.delay <= 0 and len(first_in_lane) <= _FEW_LANES:
                first_in_lane.setdefault((task.queue, task.lane, task.priority), task.id)
    if len(first_in_lane) > _FEW_LANES:
        connection.execute(_LANES, {"id": bytes(16).hex()})
    elif first_in_lane:
        connection.execute(_ARRIVALS, {"ids": arrays.uuids(first_in_lane.values())})
    return count


def _clock(connection: Connection) -> datetime:
    """Return the time of the transaction."""
    now: datetime = connection.exec_driver_sql("SELECT now()").scalar_one()
    return now


def _copy_lines(tasks: Iterable[NewTask], clock: Callable[[], datetime]) -> Iterator[str]:
    """Yield tasks as lines of a COPY. What tasks have in common is written out once; the clock is asked if need be."""
    alike: dict[tuple[str, str, int, str | None, str | None, str | None], str] = {}
    now: datetime | None = None
    for task in tasks:
        kind = (task.name, task.queue, task.priority, task.options, task.lane, task.callbacks)
        common = alike.get(kind)
        if common is None:
            name, queue, priority, *others = kind
            common = alike[kind] = "\t".join([_escape(name), _escape(queue), str(priority), *map(_escape, others)])
        if task.delay > 0 or task.expires is not None:
            now = now or clock()
            times = f"{_time_after(now, task.delay if task.delay > 0 else None)}\t{_time_after(now, task.expires)}"
        else:
            times = "\\N\t\\N"
        run_id = "\\N" if task.run_id is None else task.run_id.hex()
        position = "\\N" if task.position is None else task.position
        yield f"{task.id.hex()}\t\\\\x{task.payload.hex()}\t{common}\t{times}\t{run_id}\t{position}\n"


def _time_after(now: datetime, seconds: float | None) -> str:
    return "\\N" if seconds is None else (now + timedelta(seconds=seconds)).isoformat()


def _escape(value: str | None) -> str:
    if value is None:
        return "\\N"
    return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


# What a worker reports may be reported twice, and the task may even have ended in between.
_ADOPT = Statement(
    f"""
WITH created AS (
    INSERT INTO orchestrator.tasks (id, name, queue, priority, wake_at, payload, options, run_id, step, position, lane,
                                    expires_at, unique_key, callbacks, attempt)
    SELECT n.id, n.name, n.queue, n.priority, %(now)s::timestamptz + n.delay * interval '1 second', n.payload,
           n.options, n.run_id, n.step, n.position, n.lane, %(now)s::timestamptz + n.expires * interval '1 second',
           n.unique_key, n.callbacks, n.attempt
      FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(queues)s::text[], %(priorities)s::smallint[],
                  %(delays)s::double precision[], %(payloads)s::bytea[], %(options)s::jsonb[], %(runs)s::uuid[],
                  %(steps)s::text[], %(positions)s::int[], %(lanes)s::text[], %(expires)s::double precision[],
                  %(unique_keys)s::text[], %(callbacks)s::jsonb[], %(attempts)s::int[])
           AS n(id, name, queue, priority, delay, payload, options, run_id, step, position, lane, expires, unique_key,
                callbacks, attempt)
     WHERE (SELECT true FROM orchestrator.ended_tasks WHERE id = n.id LIMIT 1) IS NULL
        ON CONFLICT (id) DO NOTHING
    RETURNING id, lane, wake_at
)
{arrivals("created WHERE lane IS NOT NULL AND wake_at IS NULL")}
"""
)


def adopt_tasks(
    connection: Connection, tasks: Sequence[NewTask], now: datetime, attempts: Mapping[bytes, int] | None = None
) -> None:
    """Create tasks that running tasks enqueued or runs have come to; those that exist already stay as they are.

    `attempts` of tasks that are created once more are where the numbers of theirs count on from.
    """
    past = attempts or {}
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
            "attempts": arrays.numbers(past.get(task.id, 0) for task in tasks),
        },
    )


_INSERT_RUN = """
INSERT INTO orchestrator.runs (id, name, total, open) VALUES (%(id)s::uuid, %(name)s, %(total)s, %(total)s)
    ON CONFLICT (id) DO NOTHING
"""


def insert_run(connection: Connection, run_id: bytes, name: str, total: int) -> bool:
    """Create a run of `total` tasks; False if there is one of this id."""
    parameters = {"id": run_id.hex(), "name": name, "total": total}
    return connection.exec_driver_sql(_INSERT_RUN, parameters).rowcount > 0
