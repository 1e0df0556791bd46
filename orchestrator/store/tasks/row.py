"""The row of a task, described once: the statements that create, end and reopen tasks derive their columns from here.

A new column that clients set is a field of `NewTask`, a line of `NEW`, a column in `store/tables.py` and a migration.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from orchestrator.domain.tasks.task import NewTask
from orchestrator.store.tables import KEPT, tasks

_AFTER_NOW = "{now} + {} * interval '1 second'"


class Field(NamedTuple):
    """How a field of a new task is stored."""

    column: str
    type: str
    value: str = "{}"
    """What the column is set to, with the parameter in place of the braces."""


NEW: Mapping[str, Field] = {
    "id": Field("id", "uuid"),
    "name": Field("name", "text"),
    "queue": Field("queue", "text"),
    "payload": Field("payload", "bytea"),
    "priority": Field("priority", "smallint", "coalesce({}, 0)"),
    "delay": Field("wake_at", "double precision", _AFTER_NOW),
    "options": Field("options", "jsonb"),
    "run_id": Field("run_id", "uuid"),
    "position": Field("position", "int"),
    "step": Field("step", "text"),
    "lane": Field("lane", "text"),
    "expires": Field("expires_at", "double precision", _AFTER_NOW),
    "unique_key": Field("unique_key", "text"),
    "callbacks": Field("callbacks", "jsonb"),
    "trace": Field("trace", "text"),
    "parent": Field("parent_id", "uuid"),
}
"""By the name of the parameter, which is that of the attribute of `NewTask`."""

CARRIED = ", ".join(column.name for column in tasks.columns if column.info is KEPT)
"""The columns that a row keeps when it moves between `tasks` and `ended_tasks`."""

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
