"""The row of a task, described once: the statements that create, end and reopen tasks derive their columns from here.

A new column that clients set is a field of `NewTask`, a column in `store/tables` and a migration. One that an ended
task keeps is marked as `KEPT` there. A field that is stored otherwise than it is has a line in `_OTHERWISE`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy.dialects import postgresql

from orchestrator.domain.tasks.task import NewTask
from orchestrator.store.tables.columns import KEPT
from orchestrator.store.tables.tasks import ended_tasks, tasks

_AFTER_NOW = "{now} + {} * interval '1 second'"


class Field(NamedTuple):
    """How a field of a new task is stored."""

    column: str
    type: str
    value: str = "{}"
    """The value of the column, with the parameter in place of the braces."""


_OTHERWISE = {
    "priority": Field("priority", "smallint", "coalesce({}, 0)"),
    "delay": Field("wake_at", "double precision", _AFTER_NOW),
    "expires": Field("expires_at", "double precision", _AFTER_NOW),
    "unique": Field("unique_key", "text"),
    "parent": Field("parent_id", "uuid"),
}


_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]


def _field(name: str) -> Field:
    return _OTHERWISE.get(name) or Field(name, tasks.c[name].type.compile(_DIALECT).lower())


NEW: Mapping[str, Field] = {
    "unique_key" if name == "unique" else name: _field(name) for name in NewTask.__struct_fields__
}
"""By the name of the parameter, which is that of the attribute of `NewTask`."""

CARRIED = ", ".join(column.name for column in tasks.columns if column.info is KEPT)
"""The columns that a row keeps when it moves between `tasks` and `ended_tasks`."""


def insert_ended(source: str, *, but: Collection[str] = (), **values: str) -> str:
    """Return an INSERT into `ended_tasks`: each column as the source has it or as a value says, all `but` some."""
    stored = {one.name: values.get(one.name, one.name) for one in ended_tasks.columns if one.name not in but}
    return f"INTO orchestrator.ended_tasks ({', '.join(stored)}) SELECT {', '.join(stored.values())} FROM {source}"


ATTEMPT = "orchestrator.attempts (task_id, attempt, outcome, error, worker, started_at, ended_at)"


REOPENED = "reopened"
"""Beside the error of an attempt that had ended its task: the next one was asked for."""


def archive_last_attempt(source: str) -> str:
    """Return a statement that keeps the attempts which ended tasks, when somebody has these tried again."""
    return f"""INSERT INTO {ATTEMPT}
    SELECT id, attempt, status, error || '{{"{REOPENED}": true}}', worker, started_at, ended_at FROM {source}
        ON CONFLICT DO NOTHING"""


_values = attrgetter(*NEW)
_PRIORITY, _DELAY = list(NEW).index("priority"), list(NEW).index("delay")


def parameters(task: NewTask) -> list[Any]:
    """Return the values of `NEW`, None where a task does not use one."""
    values = [*_values(task)]
    values[_PRIORITY] = values[_PRIORITY] or None
    if values[_DELAY] <= 0:
        values[_DELAY] = None
    return values


def value_of(name: str, source: str, now: str = "now()") -> str:
    """Return what the column of a parameter is set to from a source."""
    return NEW[name].value.format(source, now=now)


# -- what comes of runs


def join_run(identifier: str) -> str:
    """Return a join with the run of this id, of which there may be none; the expressions below are about it."""
    return f"""LEFT JOIN LATERAL (
           SELECT id, trace, headers FROM orchestrator.runs WHERE id = {identifier} LIMIT 1) AS run ON true"""


SPAN_OF_RUN = """CASE WHEN %(has_spans)s::boolean
            THEN overlay(run.trace PLACING right(replace(run.id::text, '-', ''), 16) FROM 37 FOR 16)
            ELSE run.trace END"""
"""The traceparent of what comes of the run, null where that is not traced.

Where the leader `has_spans` of runs, that is the span of the run, whose id is the second half of the run's own
(`orchestrator/trace_context.py`); else it is the span that the run came of.
"""


def with_headers_of_run(options: str) -> str:
    """Return an expression: options with the headers of the run; those of the options themselves go first."""
    headers = f"run.headers || coalesce({options} -> 'headers', '{{}}'::jsonb)"
    merged = f"coalesce({options}, '{{}}'::jsonb) || jsonb_build_object('headers', {headers})"
    return f"CASE WHEN run.headers IS NULL THEN {options} ELSE {merged} END"
