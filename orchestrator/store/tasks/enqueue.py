"""Inserts tasks. Every client may do this, in its own transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Engine, TwoPhaseTransaction

from orchestrator.domain.tasks.task import NewTask
from orchestrator.store import copying, driver
from orchestrator.store.batches import Batch
from orchestrator.store.copying import encode_field
from orchestrator.store.other_drivers import DriverConnection
from orchestrator.store.sql import Prepared, Statement
from orchestrator.store.tasks.row import NEW, SPAN_OF_RUN, join_run, parameters, value_of, with_headers_of_run
from orchestrator.store.tasks.transitions import arrivals


def insert_task(connection: Connection, task: NewTask) -> bool:
    """Insert one standalone task. Return False if its unique key is taken. Works with any SQLAlchemy driver.

    This is a single statement, whatever the task needs, so it is atomic without a transaction.
    """
    row = _row(task)
    is_created = bool(_insert(tuple(row))(connection, row))
    return is_created or task.unique is None


def insert_alone(engine: Engine, task: NewTask) -> None:
    """Insert one standalone task without a unique key on an engine in autocommit mode; it is stored on return."""
    statement, row = _statement_for(_other_options(task))
    statement.run_prepared(engine, row | {"id": task.id, "payload": task.payload})


_OTHER_OPTIONS = [name for name in NewTask.__struct_fields__ if name not in ("id", "payload")]
_other_options = attrgetter(*_OTHER_OPTIONS)


@lru_cache(maxsize=256)
def _statement_for(options: tuple[Any, ...]) -> tuple[Statement[UUID], dict[str, Any]]:
    """Return the statement that inserts tasks which differ only in id and payload, and their common parameters."""
    row = _row(NewTask(id=b"", payload=b"", **dict(zip(_OTHER_OPTIONS, options, strict=True))))
    return _insert(tuple(row)), row


def _row(task: NewTask) -> dict[str, Any]:
    """Return the parameters of an insert. Unused parameters are not sent: parsing them takes Postgres time."""
    row = {name: value for name, value in zip(NEW, parameters(task), strict=True) if value is not None}
    if task.unique is not None:
        row |= {"scope": task.unique.scope, "period": task.unique.period}
    return row


@cache
def _insert(names: tuple[str, ...]) -> Statement[UUID]:
    """Return the statement that inserts a task with these parameters, and a request if it is ready in a lane."""
    used = [name for name in names if name in NEW]
    title = " ".join(["enqueue.insert", *used[4:]])
    columns = ", ".join(NEW[name].column for name in used)
    values = ", ".join(value_of(name, f"%({name})s::{NEW[name].type}") for name in used)
    is_arriving = "lane" in names and "delay" not in names
    if "unique_key" not in names and not is_arriving:
        return Statement[UUID](f"INSERT /* {title} */ INTO orchestrator.tasks ({columns}) VALUES ({values})")
    steps = [f"created AS (INSERT INTO orchestrator.tasks ({columns}) SELECT {values} RETURNING id)"]
    if "unique_key" in names:
        steps = [
            f"held AS ({_HOLD})",
            f"created AS (INSERT INTO orchestrator.tasks ({columns}) SELECT {values} FROM held RETURNING id)",
        ]
    if is_arriving:
        steps.append(f"arrived AS ({arrivals('created')})")
    return Statement[UUID](f"WITH /* {title} */ {', '.join(steps)} SELECT id FROM created")


_HOLD = """
    INSERT INTO orchestrator.unique_keys (key, task_id, scope, until)
    VALUES (%(unique_key)s, %(id)s::uuid, %(scope)s, now() + %(period)s::double precision * interval '1 second')
        ON CONFLICT (key) DO NOTHING
    RETURNING key
"""

_NOTIFY = Statement[None]("SELECT /* enqueue.notify */ pg_notify(%(channel)s, '')")


def notify_on_commit(connection: Connection, namespace: str) -> None:
    """Wake the scheduler of a namespace when this transaction commits.

    Postgres cannot prepare a transaction with a notification; after a two-phase commit, the safety scan finds the work.
    """
    if isinstance(connection, DriverConnection) or not isinstance(connection.get_transaction(), TwoPhaseTransaction):
        _NOTIFY(connection, channel=namespace)


_VARYING = ("id", "payload", "delay", "expires", "run_id", "position", "unique_key")
"""Fields that differ between tasks of a batch; the rest is mostly the same."""
_UNUSED = "parent"
"""A field that tasks inserted with COPY do not have."""
_COMMON = tuple(name for name in NEW if name not in _VARYING and name != _UNUSED)
_common_fields = attrgetter(*_COMMON)
_COPY = Statement[None](f"""
COPY /* enqueue.copy */ orchestrator.tasks ({", ".join(NEW[name].column for name in (*_VARYING, *_COMMON))}) FROM STDIN
""")
_COPY_CHUNK = 250
"""Tasks that are encoded at a time, while Postgres stores the tasks before them."""
_MAX_PART = 1_000_000
"""Characters after which a part of a chunk is sent on its own: a timeout counts from part to part."""
_ARRIVALS = Statement[None]("""
INSERT /* enqueue.arrivals */ INTO orchestrator.inbox (kind, target, body)
SELECT 'arrival', id, 'true' FROM unnest(%(ids)s::uuid[]) AS first(id)
""")
_LANES = Statement[None](
    "INSERT /* enqueue.lanes */ INTO orchestrator.inbox (kind, target) SELECT 'lanes', %(id)s::uuid"
)
_MAX_ARRIVALS = 100


def copy_tasks(connection: Connection, tasks: Iterable[NewTask], now: datetime | None = None) -> int:
    """Insert any number of tasks in bounded memory (needs psycopg2); return their number.

    Their unique keys, if any, are already taken. None of them has a parent: the leader inserts tasks that a task
    enqueues. `now` is the leader's time.
    """
    texts = _Texts(connection, tasks, now)
    copying.copy(connection, _COPY.sql, texts)
    if len(texts.first_in_lane) > _MAX_ARRIVALS:
        _LANES(connection, id=bytes(16))
    elif texts.first_in_lane:
        _ARRIVALS(connection, ids=texts.first_in_lane.values())
    return texts.count


@Statement.function("SELECT /* enqueue.now */ now()")
def _clock(connection: Connection) -> datetime:
    """Return the time of the transaction."""


class _Texts:
    """Tasks as COPY texts. Common fields are encoded once; the clock is read only if a task needs it."""

    def __init__(self, connection: Connection, tasks: Iterable[NewTask], now: datetime | None) -> None:
        self.count = 0
        self.first_in_lane: dict[tuple[str, str, int], bytes] = {}
        """One ready task of each lane, for arrival requests; collecting stops just above `_MAX_ARRIVALS`."""
        self._connection = connection
        self._tasks = tasks
        self._now = now
        self._encoded: dict[tuple[Any, ...], str] = {}

    def __iter__(self) -> Iterator[str]:
        rows = iter(self._tasks)
        while chunk := [*islice(rows, _COPY_CHUNK)]:
            if self._now is None and any(task.delay > 0 or task.expires is not None for task in chunk):
                yield ""  # ends the open COPY, so that the clock can be read
                self._now = _clock(self._connection)
            lines: list[str] = []
            size = 0
            for line in self._lines(chunk):
                lines.append(line)
                size += len(line)
                if size > _MAX_PART:
                    yield "".join(lines)
                    lines, size = [], 0
            if lines:
                yield "".join(lines)
            self.count += len(chunk)
            for task in chunk:
                if task.lane is not None and task.delay <= 0 and len(self.first_in_lane) <= _MAX_ARRIVALS:
                    self.first_in_lane.setdefault((task.queue, task.lane, task.priority), task.id)

    def _lines(self, tasks: Iterable[NewTask]) -> Iterator[str]:
        encoded, now = self._encoded, self._now
        last: tuple[Any, ...] | None = None
        common = ""
        for task in tasks:
            fields = _common_fields(task)
            if fields != last:
                last, common = (
                    fields,
                    encoded.get(fields) or encoded.setdefault(fields, "\t".join(map(encode_field, fields))),
                )
            if now is not None and (task.delay > 0 or task.expires is not None):
                times = f"{_time_after(now, task.delay if task.delay > 0 else None)}\t{_time_after(now, task.expires)}"
            else:
                times = "\\N\t\\N"
            run_id = "\\N" if task.run_id is None else task.run_id.hex()
            position = "\\N" if task.position is None else task.position
            key = "\\N" if task.unique is None else encode_field(task.unique.key)
            yield f"{task.id.hex()}\t\\\\x{task.payload.hex()}\t{times}\t{run_id}\t{position}\t{key}\t{common}\n"


def _time_after(now: datetime, seconds: float | None) -> str:
    return "\\N" if seconds is None else (now + timedelta(seconds=seconds)).isoformat()


# A worker may report enqueued tasks twice, and such a task may even have ended in between.
_NEW = Batch("n", ", ".join([*(f"{name} {field.type}" for name, field in NEW.items()), "attempt int"]))
_STORED = {
    **{field.column: value_of(name, f"n.{name}", "%(now)s::timestamptz") for name, field in NEW.items()},
    "attempt": "n.attempt",
    "trace": f"coalesce(n.trace, {SPAN_OF_RUN})",
    "options": with_headers_of_run("n.options"),
}


def creating(returning: str, **columns: str) -> str:
    """Return an INSERT of the tasks of `create_tasks`, skipping existing tasks; `columns` replace or add values."""
    stored = _STORED | columns
    return f"""INSERT INTO orchestrator.tasks AS t ({", ".join(stored)})
    SELECT {", ".join(stored.values())}
      FROM {_NEW} {join_run("n.run_id")}
     WHERE (SELECT true FROM orchestrator.ended_tasks WHERE id = n.id LIMIT 1) IS NULL
        ON CONFLICT (id) DO NOTHING
    RETURNING {returning}"""


_CREATE = Prepared[None](f"""
WITH /* enqueue.create_tasks */ created AS (
    {creating("id, lane, wake_at")}
)
{arrivals("created WHERE lane IS NOT NULL AND wake_at IS NULL")}
""")


class Creation(NamedTuple):
    """Tasks whose insert is deferred and that are ready at once: a claim may insert them as claimed instead."""

    insert: driver.Deferred
    """The deferred insert."""
    tasks: Sequence[NewTask]
    rows: Mapping[str, Any]
    has_spans: bool
    queues: Counter[str]
    """The number of these tasks by queue."""


def create_tasks(
    connection: Connection,
    tasks: Sequence[NewTask],
    now: datetime,
    attempts: Mapping[bytes, int] | None = None,
    *,
    has_spans: bool = False,
    is_gathered: bool = False,
) -> Creation | None:
    """Insert tasks that running tasks enqueued or that runs create; existing tasks stay unchanged.

    `attempts` has the last attempt numbers of tasks that are created again. Tasks of a run get its headers and belong
    to its trace, below the run's span if the leader `has_spans`. With `is_gathered`, the insert is deferred to the next
    statement; if all tasks are ready at once, return the `Creation`.
    """
    last_attempts = attempts or {}
    rows = _NEW([*parameters(task), last_attempts.get(task.id, 0)] for task in tasks)
    if not is_gathered:
        _CREATE(connection, rows, now=now, has_spans=has_spans)
        return None
    deferred = _CREATE.defer(connection, rows, now=now, has_spans=has_spans)
    if any(task.delay > 0 or task.lane is not None or task.unique is not None for task in tasks):
        return None
    return Creation(deferred, tasks, rows, has_spans, Counter(task.queue for task in tasks))
