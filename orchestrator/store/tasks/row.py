"""The columns of a task, defined once: statements that create, end and reopen tasks derive their columns from here.

A new column that clients set is a field of `NewTask`, a column in `store/tables` and a migration. A column that an
ended task keeps is marked as `KEPT` there. Fields whose columns have another name or type are in `_SPECIAL_FIELDS`.
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
    """The SQL value of the column; the parameter replaces the braces."""


_SPECIAL_FIELDS = {
    "priority": Field("priority", "smallint", "coalesce({}, 0)"),
    "delay": Field("wake_at", "double precision", _AFTER_NOW),
    "expires": Field("expires_at", "double precision", _AFTER_NOW),
    "unique": Field("unique_key", "text"),
    "parent": Field("parent_id", "uuid"),
}


_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]


def _field(name: str) -> Field:
    return _SPECIAL_FIELDS.get(name) or Field(name, tasks.c[name].type.compile(_DIALECT).lower())


NEW: Mapping[str, Field] = {
    "unique_key" if name == "unique" else name: _field(name) for name in NewTask.__struct_fields__
}
"""By parameter name, which is the attribute of `NewTask`."""

CARRIED = ", ".join(column.name for column in tasks.columns if column.info is KEPT)
"""The columns that a row keeps when it moves between `tasks` and `ended_tasks`."""


def insert_ended(source: str, *, but: Collection[str] = (), **values: str) -> str:
    """Return an INSERT into `ended_tasks`: columns come from `source` or `values`; columns in `but` are left out."""
    stored = {
        column.name: values.get(column.name, column.name) for column in ended_tasks.columns if column.name not in but
    }
    return f"INTO orchestrator.ended_tasks ({', '.join(stored)}) SELECT {', '.join(stored.values())} FROM {source}"


ATTEMPT = "orchestrator.attempts (task_id, attempt, outcome, error, worker, started_at, ended_at)"


REOPENED = "reopened"
"""A key added to the error of an attempt that had ended its task: the task was retried afterwards."""


def archive_last_attempt(source: str) -> str:
    """Return a statement that stores the last attempts of ended tasks that are being retried."""
    return f"""INSERT INTO {ATTEMPT}
    SELECT id, attempt, status, error || '{{"{REOPENED}": true}}', worker, started_at, ended_at FROM {source}
        ON CONFLICT DO NOTHING"""


_values = attrgetter(*NEW)
_PRIORITY, _DELAY = list(NEW).index("priority"), list(NEW).index("delay")


def parameters(task: NewTask) -> list[Any]:
    """Return the values of `NEW`; None for options that the task does not use."""
    values = [*_values(task)]
    values[_PRIORITY] = values[_PRIORITY] or None
    if values[_DELAY] <= 0:
        values[_DELAY] = None
    return values


def value_of(name: str, source: str, now: str = "now()") -> str:
    """Return the SQL value of a parameter's column, selected from `source`."""
    return NEW[name].value.format(source, now=now)


# -- tasks and runs that a run creates


def join_run(identifier: str) -> str:
    """Return a join with the run of this id, if it exists; the expressions below refer to the join."""
    return f"""LEFT JOIN LATERAL (
           SELECT id, trace, headers FROM orchestrator.runs WHERE id = {identifier} LIMIT 1) AS run ON true"""


SPAN_OF_RUN = """CASE WHEN %(has_spans)s::boolean
            THEN overlay(run.trace PLACING right(replace(run.id::text, '-', ''), 16) FROM 37 FOR 16)
            ELSE run.trace END"""
"""The traceparent of a run's task or child; null if the run is not traced.

If the leader exports spans of runs (`has_spans`), the parent is the run's span, whose id is the second half of the
run's id (`orchestrator/trace_context.py`). Otherwise the parent is the span that started the run.
"""


def with_headers_of_run(options: str) -> str:
    """Return an SQL expression: the options with the headers of the run. Headers in the options take precedence."""
    headers = f"run.headers || coalesce({options} -> 'headers', '{{}}'::jsonb)"
    merged = f"coalesce({options}, '{{}}'::jsonb) || jsonb_build_object('headers', {headers})"
    return f"CASE WHEN run.headers IS NULL THEN {options} ELSE {merged} END"
