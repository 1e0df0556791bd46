"""Runs and their progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.composed import PREFIX, is_composed
from orchestrator.domain.limits.lane_limits import scoped
from orchestrator.domain.runs import TERMINATED
from orchestrator.domain.states import RunState
from orchestrator.sealing import open_json, open_text, reveal_text
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code.histories import arguments
from orchestrator.store.flow.reads import OF_FUNCTIONS, OF_OPTIONS
from orchestrator.store.insights.failures import error_line
from orchestrator.store.sql import Row, Statement, columns_of


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run."""

    id: UUID
    """The id of the run; ids sort by the time of creation."""
    name: str
    """The name given by the caller."""
    status: str
    """The state."""
    cancelling: bool
    """Whether the run is being cancelled; its tasks are being ended."""
    total: int
    """The number of tasks."""
    open: int
    """Tasks that have not ended."""
    success: int
    """Tasks that succeeded."""
    failed: int
    """Tasks that failed."""
    cancelled: int
    """Tasks that were cancelled."""
    skipped: int
    """Tasks that never ran because of other tasks."""
    created_at: datetime
    """When the run was created."""
    started_at: datetime | None
    """When the scheduler began the run."""
    ended_at: datetime | None
    """When the last task ended."""
    workflow: str | None
    """The workflow of the run."""
    version: int | None
    """The version of the workflow to which the run is pinned."""
    tags: tuple[str, ...]
    """Tags by which the run can be found."""
    key: str | None
    """The idempotency key, or the chosen id of a run of code."""
    reason: str | None
    """The reason for an unsuccessful end, if no task has it."""
    parent_run: UUID | None
    """The run that started this one."""
    parent_step: str | None
    """The step of the parent run."""
    stuck: Mapping[str, Any] | None = None
    """Why the code does not fit its history: kind, message, event, difference."""
    retried_at: datetime | None = None
    """When the run last began again because of a retry."""

    @property
    def began_at(self) -> datetime | None:
        """When the run last began: the time before a retry is not part of its duration."""
        return self.retried_at or self.started_at

    @property
    def shown_status(self) -> str:
        """The state for people: a run of code may be stuck, or was terminated."""
        if self.stuck is not None and self.ended_at is None:
            return "stuck"
        return TERMINATED if self.status == RunState.CANCELLED and self.reason == TERMINATED else self.status


@dataclass(frozen=True, kw_only=True)
class RunDetail(RunView):
    """One run in full, without its tasks."""

    params: Mapping[str, Any] | str
    """The parameters, defaults included; a text if they are sealed with a key that is not here."""
    code: bool = False
    """Whether the run is of a workflow as code."""
    schedule: str | None = None
    """The schedule that started the run: workflow/name, or workflow/name#backfill."""
    fire_time: datetime | None = None
    """The time that the run is for, if a schedule or an earlier run set it."""
    limit: int | None = None
    """The limit on concurrent runs in the run's concurrency group."""
    held_by: tuple[UUID, ...] = ()
    """The first runs that use up this limit, while the run waits for it."""
    flow: bool = False
    """Whether the run is of a flow graph."""
    parent_task: UUID | None = None
    """The task that started the run."""
    attributes: Mapping[str, Any] | None = None
    """Attributes set by the code, by which lists can be filtered."""


_OWN_ID = f"""coalesce(key, (SELECT {run_keys.OWN_ID}
       FROM orchestrator.run_keys k WHERE k.run_id = runs.id LIMIT 1))"""
COLUMNS = columns_of(RunView, key=_OWN_ID)
_FIND = Statement[Row](f"""
SELECT /* insights.runs.find */ {COLUMNS} FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[])
""")


def find_runs(connection: Connection, ids: Sequence[bytes]) -> list[RunView]:
    """Return the runs that exist."""
    return [RunView(**columns(row)) for row in _FIND(connection, ids=ids)]


@Statement.function(
    "SELECT /* insights.runs.of_code */ id FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[]) AND code"
)
def runs_of_code(connection: Connection, ids: Sequence[bytes]) -> frozenset[UUID]:
    """Return the runs of workflows as code among these."""


# A run of code ends with its turn task. For other runs, look at the first tasks, and then at the last failures before
# the end of the run: a run may have a million tasks.
_ERRORS = Statement[Row]("""
SELECT /* insights.runs.errors */ r.id, e.kind, e.message FROM orchestrator.runs r
 CROSS JOIN LATERAL (
       SELECT error->>'kind' AS kind, error->>'message' AS message FROM (
           (SELECT status, error FROM orchestrator.ended_tasks WHERE id = r.id)
            UNION ALL
           (SELECT status, error FROM orchestrator.ended_tasks WHERE run_id = r.id LIMIT 200)
            UNION ALL
           (SELECT status, error FROM (
                SELECT run_id, status, error FROM orchestrator.ended_tasks
                 WHERE status <> 'success' AND ended_at <= r.ended_at ORDER BY ended_at DESC LIMIT 500) AS last
             WHERE run_id = r.id)) AS looked_at
        WHERE status = 'failed' AND error IS NOT NULL LIMIT 1) AS e
 WHERE r.id = ANY(%(ids)s::uuid[])
""")


def errors_of_runs(connection: Connection, runs: Sequence[UUID]) -> dict[UUID, str]:
    """Return one-line errors of the runs that failed because of a task."""
    rows = _ERRORS(connection, ids=[run.bytes for run in runs]) if runs else ()
    return {row.id: error_line(row) for row in rows}


_HOLDERS = Statement[UUID]("""
SELECT /* insights.runs.holders */ id FROM orchestrator.runs
 WHERE lane = (SELECT lane FROM orchestrator.runs WHERE id = %(id)s::uuid) AND status = 'running'
 ORDER BY id LIMIT 10
""")
_SHOW = Statement[Row](f"""
SELECT /* insights.runs.show */ {columns_of(RunDetail, but=("held_by",), key=_OWN_ID, limit="lane_limit")}
  FROM orchestrator.runs WHERE id = %(id)s::uuid
""")


class RunNote(NamedTuple):
    """Data that distinguishes a run from others in a list."""

    id: UUID
    own_id: str | None
    """The idempotency key, or the chosen id of a run of code."""
    schedule: str | None
    fire_time: datetime | None
    parent_task: UUID | None
    params: Mapping[str, Any] | None
    """The parameters; None if they are large or empty, or for a run of code."""
    start: bytes | None
    """The encoded arguments of a run of code; None if they are large."""
    is_plain: bool
    """Whether no argument of the run's tasks is declared as secret: its definition has no `redact` patterns, and it has
    no relatives. A run of code or a flow counts if none of its tasks has patterns and they are few."""
    error: str = ""
    """The error, if a task made the run fail."""


_MAX_TASKS = 100
"""Tasks of a run of code that a list examines."""
_OF_CODE = " UNION ALL ".join(
    f"SELECT options, row_number() OVER () AS number FROM (SELECT options FROM orchestrator.{table}"
    f" WHERE run_id = listed.id LIMIT {_MAX_TASKS + 1}) AS first"
    for table in ("tasks", "ended_tasks")
)
_NOTES = Statement[RunNote](f"""
WITH /* insights.runs.notes */ listed AS MATERIALIZED (
    SELECT id, workflow, version, {_OWN_ID} AS own_id, schedule, fire_time, parent_task,
           CASE WHEN octet_length(params::text) <= %(most)s THEN params END AS params, code,
           (SELECT data FROM orchestrator.histories h
             WHERE runs.code AND h.run_id = runs.id AND h.number = 1 AND octet_length(data) <= %(most)s) AS start,
           flow, parent_run IS NULL AND parent_task IS NULL AND coalesce(root, id) = id AS is_alone
      FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[])
), guarded AS MATERIALIZED (
    SELECT w.name, w.version, false AS flow
      FROM (SELECT DISTINCT workflow, version FROM listed WHERE is_alone AND NOT code AND NOT flow) AS l
      JOIN orchestrator.workflows w ON w.name = l.workflow AND w.version = l.version
     WHERE jsonb_path_exists(
           w.definition, '$.steps[*] ? (exists (@.registered.{OF_OPTIONS}) || @.workflow != null)')
     UNION ALL
    SELECT f.name, f.version, true FROM (SELECT DISTINCT workflow, version FROM listed WHERE is_alone AND flow) AS l
      JOIN orchestrator.flows f ON f.name = l.workflow AND f.version = l.version
     WHERE jsonb_path_exists(f.definition, '{OF_FUNCTIONS}')
)
SELECT id, own_id, schedule, fire_time, parent_task, params, start,
       is_alone AND workflow IS NOT NULL AND CASE WHEN code OR flow
           THEN (SELECT true FROM orchestrator.runs child WHERE child.parent_run = listed.id LIMIT 1) IS NULL
            AND (SELECT true FROM ({_OF_CODE}) AS task WHERE task.number > {_MAX_TASKS}
                    OR task.options ?| '{{redact,inherited}}' LIMIT 1) IS NULL ELSE true END
       AND NOT EXISTS (
           SELECT FROM guarded g WHERE g.name = workflow AND g.version = listed.version AND g.flow = listed.flow)
       AS is_plain
  FROM listed
""")


def notes_of_runs(connection: Connection, runs: Sequence[UUID], most: int = 2_000) -> dict[UUID, RunNote]:
    """Return data that distinguishes these runs, with arguments of at most `most` bytes."""
    rows = _NOTES(connection, ids=[run.bytes for run in runs], most=most) if runs else ()
    return {
        row.id: row._replace(
            params=shown_params(row.params) if row.params else None,
            start=None if row.start is None else arguments(bytes(row.start)),
        )
        for row in rows
    }


_MAX_WORKFLOWS = 500
"""Workflows among whose runs a chosen id is looked for."""
# One index probe for each workflow, however many runs it has. Names of compositions, which end in hexadecimal digits,
# are skipped.
_WORKFLOWS = Statement[str](f"""
WITH /* insights.runs.workflows */ RECURSIVE known (name) AS (
    (SELECT workflow FROM orchestrator.runs WHERE workflow >= %(within)s::text ORDER BY workflow LIMIT 1)
     UNION ALL
    SELECT (SELECT workflow FROM orchestrator.runs
             WHERE workflow > CASE WHEN starts_with(known.name, '{PREFIX}') THEN '{PREFIX}g' ELSE known.name END
             ORDER BY workflow LIMIT 1)
      FROM known WHERE known.name IS NOT NULL
)
SELECT name FROM known WHERE name IS NOT NULL AND NOT starts_with(name, '{PREFIX}') LIMIT {_MAX_WORKFLOWS}
""")
_BY_KEY = Statement[UUID]("""
SELECT /* insights.runs.by_key */ id FROM orchestrator.runs WHERE key = %(key)s
 UNION
SELECT run_id FROM orchestrator.run_keys WHERE key = ANY(%(keys)s::text[]) LIMIT %(limit)s
""")


def workflows_with_runs(connection: Connection, within: str = "") -> list[str]:
    """Return the first workflows, by name, that have runs and whose names begin with `within`."""
    return [name for name in _WORKFLOWS(connection, within=within) if name.startswith(within)]


def runs_by_key(connection: Connection, key: str, limit: int, within: str = "") -> list[RunView]:
    """Return runs with this idempotency key or chosen id; `workflow/id` selects one workflow."""
    keys = [key, *(scoped(workflow, key) for workflow in workflows_with_runs(connection, within))]
    ids = _BY_KEY(connection, key=key, keys=keys, limit=limit)
    runs = find_runs(connection, [run.bytes for run in ids]) if ids else []
    return [run for run in runs if (run.workflow or "").startswith(within)]


def show_run(connection: Connection, run: UUID) -> RunDetail | None:
    """Return a run; None if it does not exist."""
    row = _SHOW.first(connection, id=run.hex)
    if row is None:
        return None
    # The arguments of a composition are displayed with its tasks.
    fields = columns(row) | {"params": {} if is_composed(row.workflow) else shown_params(row.params or {})}
    waits = row.status == RunState.PENDING and row.limit is not None
    held_by = _HOLDERS(connection, id=run.hex) if waits else ()
    return RunDetail(**fields | {"held_by": tuple(held_by)})


_SEALED = "(sealed)"
"""The name under which parameters are returned that cannot be opened here; no parameter has this name."""


def shown_params(stored: Any) -> Any:
    """Return stored parameters, opened if possible; otherwise sealed, because the caller may have the key."""
    opened = open_json(stored)
    return opened if isinstance(opened, dict) else {_SEALED: stored}


def readable_params(params: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    """Return the parameters of a run for people: opened if this process can, or else a text that says why not."""
    sealed = params.get(_SEALED) if isinstance(params, Mapping) else None
    if not isinstance(sealed, str):
        return params
    text = open_text(sealed)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])  # an HTTP client with the key has opened them
    except msgspec.MsgspecError:
        return text


def columns(row: Any) -> dict[str, Any]:
    """Return the fields of a `RunView` from a row."""
    stuck = row.stuck and {
        name: reveal_text(text) if isinstance(text, str) else text for name, text in row.stuck.items()
    }
    return {**row._asdict(), "tags": tuple(row.tags), "stuck": stuck}
