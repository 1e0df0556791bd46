"""Inserts the tasks of many callers in one statement and one commit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

from sqlalchemy import Connection, Engine

from orchestrator.domain.tasks.task import NewTask
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Statement, Values
from orchestrator.store.tasks.row import NEW, parameters, value_of
from orchestrator.store.tasks.transitions import arrivals
from orchestrator.store.tasks.unique import TRY_LOCK

_TYPES = {name: field.type for name, field in NEW.items()} | {"scope": "text", "period": "double precision"}
"""The SQL type of each parameter."""
_ALWAYS = ("id", "name", "queue", "payload")
_MAX_TITLE = 60


def insert_shared(engine: Engine, tasks: Sequence[NewTask]) -> set[bytes]:
    """Insert standalone tasks in order, in one round trip; return the ids of tasks that did not get their unique keys.

    The statement waits for no key that another transaction may be taking: the caller then enqueues that task alone. Of
    two tasks with the same key, the first gets it.
    """
    statement, values = _prepared(tasks)
    stored = statement.run_on_engine(engine, values)
    keyed = {task.id for task in tasks if task.unique is not None}
    return keyed - {bytes.fromhex(id) for id in stored} if keyed else keyed


def insert_plain(connection: Connection, tasks: Sequence[NewTask]) -> None:
    """Insert standalone tasks without unique keys in order, in the caller's transaction."""
    statement, values = _prepared(tasks)
    statement(connection, values)


def _prepared(tasks: Sequence[NewTask]) -> tuple[Statement[str], Values]:
    columns = dict(zip(_TYPES, zip(*map(_row, tasks), strict=True), strict=True))
    used = {name for name, values in columns.items() if values.count(None) < len(values)}
    if "unique_key" in used:
        used.add("period")  # few of these tasks have a period
    names = tuple(name for name in _TYPES if name in used)
    batch, statement = _statement(names)
    return statement, batch(zip(*(columns[name] for name in names), strict=True))


def _row(task: NewTask) -> list[Any]:
    """Return the parameters of a task, None where unused: a parameter that no task uses is not sent."""
    unique = task.unique
    return [*parameters(task), unique and unique.scope, unique and unique.period]


@cache
def _statement(names: tuple[str, ...]) -> tuple[Batch, Statement[str]]:
    """Return the statement that inserts tasks with these parameters, and its batch."""
    batch = Batch("n", ", ".join(f"{name} {_TYPES[name]}" for name in names))
    used = {NEW[name].column: value_of(name, f"n.{name}") for name in names if name in NEW}
    title = _title([name for name in names if name not in _ALWAYS])
    into = f"INTO orchestrator.tasks ({', '.join(used)})"
    values = ", ".join(used.values())
    is_arriving, has_keys = "lane" in names, "unique_key" in names
    if not is_arriving and not has_keys:
        return batch, Statement[str](f"INSERT /* {title} */ {into} SELECT {values} FROM {batch}")
    steps = [f"n AS MATERIALIZED (SELECT * FROM {batch})"]
    mine = ""
    if has_keys:
        steps += [f"wanted AS MATERIALIZED ({_WANTED})", f"held AS ({_HOLD})"]
        mine = "WHERE n.unique_key IS NULL OR n.id IN (SELECT task_id FROM held)"
    steps.append(f"created AS (INSERT {into} SELECT {values} FROM n {mine} RETURNING id, lane, wake_at)")
    if is_arriving:
        steps.append(f"arrived AS ({arrivals('created WHERE lane IS NOT NULL AND wake_at IS NULL')})")
    ids = "SELECT replace(id::text, '-', '') FROM created"
    return batch, Statement[str](f"WITH /* {title} */ {', '.join(steps)} {ids}")


def _title(names: Sequence[str]) -> str:
    """Return the name of a statement with these parameters, short enough for Postgres to show all of it."""
    title = " ".join(["enqueue.shared", *names])
    return title if len(title) <= _MAX_TITLE else f"enqueue.shared {len(names)} {crc32(title.encode()):08x}"


_WANTED = f"""
    SELECT unique_key, id, scope, period, {TRY_LOCK.format(key="unique_key")} AS is_mine
      FROM n WHERE unique_key IS NOT NULL
"""
_HOLD = """
    INSERT INTO orchestrator.unique_keys (key, task_id, scope, until)
    SELECT unique_key, id, scope, now() + period * interval '1 second' FROM wanted WHERE is_mine
        ON CONFLICT (key) DO NOTHING
    RETURNING task_id
"""
