"""Runs and how far they have come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code import attributes
from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.limits.names import scoped
from orchestrator.domain.plain import stored_json
from orchestrator.domain.runs.verdict import TERMINATED
from orchestrator.domain.states import RunState
from orchestrator.sealing import open_json, open_text, reveal_text
from orchestrator.store.code import keys as run_keys
from orchestrator.store.flow.reads import OF_OPTIONS
from orchestrator.store.insights.failures import error_line
from orchestrator.store.sql import Row, Statement, columns_of


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run."""

    id: UUID
    """Its id, which sorts by the time of its creation."""
    name: str
    """The name that its caller gave it."""
    status: str
    """Where it stands."""
    cancelling: bool
    """It is to be cancelled; its tasks are being ended."""
    total: int
    """How many tasks it has."""
    open: int
    """Tasks that have not ended."""
    success: int
    """Tasks that returned."""
    failed: int
    """Tasks that failed."""
    cancelled: int
    """Tasks that were cancelled."""
    skipped: int
    """Tasks that never ran because of others."""
    created_at: datetime
    """When it was created."""
    started_at: datetime | None
    """When the scheduler began it."""
    ended_at: datetime | None
    """When its last task ended."""
    workflow: str | None
    """The workflow that it is a run of."""
    version: int | None
    """The version of the workflow that it is pinned to."""
    tags: tuple[str, ...]
    """What it can be found by."""
    key: str | None
    """Its idempotency key, or the chosen id of a run of code."""
    reason: str | None
    """Why it did not succeed, where no task says so."""
    parent_run: UUID | None
    """The run that started it."""
    parent_step: str | None
    """The step of that run."""
    stuck: Mapping[str, Any] | None = None
    """Why its code cannot go on with its history: kind, message, event, difference."""

    @property
    def shown_status(self) -> str:
        """Its state in the words of people: a run of code may be stuck, or was terminated."""
        if self.stuck is not None and self.ended_at is None:
            return "stuck"
        return TERMINATED if self.status == RunState.CANCELLED and self.reason == TERMINATED else self.status


@dataclass(frozen=True, kw_only=True)
class RunDetail(RunView):
    """All that is known of one run but its tasks."""

    params: Mapping[str, Any] | str
    """What it was started with, and defaults; a text that says so if they are sealed with a key that is not here."""
    code: bool = False
    """It is a run of a workflow as code."""
    schedule: str | None = None
    """What started it: workflow/name, or workflow/name#backfill."""
    fire_time: datetime | None = None
    """The time that it is for, if a schedule or a run before it says so."""
    limit: int | None = None
    """How many runs that share its limit may run at once."""
    held_by: tuple[UUID, ...] = ()
    """While it waits for that limit: the first of the runs that hold it."""
    flow: bool = False
    """It is a run of a flow graph."""
    parent_task: UUID | None = None
    """The task that started it."""
    attributes: Mapping[str, Any] | None = None
    """What its code has set for lists to be filtered by."""


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Which runs to list; what is not given does not matter."""

    statuses: tuple[RunState, ...] = ()
    """Any of these states."""
    workflow: str | None = None
    """Of this workflow."""
    name: str | None = None
    """This name."""
    tags: tuple[str, ...] = ()
    """With all of these tags."""
    attributes: tuple[str, ...] = ()
    """With all of these attributes: `stage=paid`."""
    parent: UUID | None = None
    """Started by this run."""
    stuck: bool = False
    """Only those whose code no longer fits their history."""
    since: datetime | None = None
    """Created at this time or later."""
    until: datetime | None = None
    """Created before this time."""
    within: str = ""
    """Of a workflow whose name begins so."""
    part: str | None = None
    """With this in the name of the workflow, or of the run, in any case."""


_COLUMNS = columns_of(RunView)

# What is asked for may be rare: each page looks at so many runs, and the next one goes on behind them.
MOST_LOOKED_AT = 10_000
"""Runs that are looked at for one page."""
_FIRST, _LAST = UUID(int=0), UUID(int=2**128 - 1)
_FARTHEST = """
SELECT /* {name} */ id FROM orchestrator.runs WHERE {within} ORDER BY {order} OFFSET %(most)s LIMIT 1
"""
# Parameters arrive as literals, so the planner drops the conditions that are not asked for.
_PAGE = f"""
SELECT /* {{name}} */ * FROM (SELECT {_COLUMNS} FROM orchestrator.runs
 WHERE {{within}}
   AND (%(statuses)s::text[] IS NULL OR status = ANY(%(statuses)s::text[]))
   AND (%(name)s::text IS NULL OR name = %(name)s::text)
   AND (%(tags)s::text[] IS NULL OR (tags <> '{{{{}}}}' AND tags @> %(tags)s::text[]))
   AND (%(attributes)s::jsonb IS NULL OR (attributes IS NOT NULL AND attributes @> %(attributes)s::jsonb))
   AND (%(parent)s::uuid IS NULL OR parent_run = %(parent)s::uuid)
   AND (NOT %(stuck)s OR (stuck IS NOT NULL AND ended_at IS NULL))
   AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s::timestamptz)
   AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s::timestamptz)
   AND (%(within)s::text = '' OR starts_with(workflow, %(within)s::text))
   AND (%(part)s::text IS NULL OR strpos(lower(name), lower(%(part)s::text)) > 0
        OR strpos(lower(workflow), lower(%(part)s::text)) > 0)
 ORDER BY {{order}} LIMIT %(limit)s) AS page ORDER BY created_at DESC, id DESC
"""
_ANY = {"within": "id < %(before)s::uuid AND id >= %(horizon)s::uuid", "order": "id DESC"}
# Names are compared together with ids, so that only the index of workflows has the order, and the place to begin: else
# the walk may be past all newer runs of others.
_ONE = {
    "within": """workflow IS NOT NULL AND (workflow, id) < (%(workflow)s::text, %(before)s::uuid)
   AND (workflow, id) >= (%(workflow)s::text, %(horizon)s::uuid)""",
    "order": "workflow DESC, id DESC",
}
_HORIZON = Statement[UUID](_FARTHEST.format(name="insights.runs.horizon", **_ANY))
_HORIZON_OF_WORKFLOW = Statement[UUID](_FARTHEST.format(name="insights.runs.horizon_of_workflow", **_ONE))
_LIST = Statement[Row](_PAGE.format(name="insights.runs.list", **_ANY))
_LIST_OF_WORKFLOW = Statement[Row](_PAGE.format(name="insights.runs.list_of_workflow", **_ONE))


_OLDEST = {one: one.oldest_first() for one in (_HORIZON, _HORIZON_OF_WORKFLOW, _LIST, _LIST_OF_WORKFLOW)}


class RunPage(NamedTuple):
    """Some of the runs that match."""

    runs: list[RunView]
    next: UUID | None
    """The `before` of the page after this one; None if there are no more."""


def page_of_runs(
    connection: Connection, wanted: RunFilter, *, limit: int, before: UUID | None = None, oldest: bool = False
) -> RunPage:
    """Return the newest runs that match, newest first; or the oldest, oldest first.

    A page takes as long as any other, whatever one looks for: it looks at a bounded number of rows, and so may have few
    runs, or none, and yet not be the last.
    """
    end, farthest_end = (_FIRST, _LAST) if oldest else (_LAST, _FIRST)
    parameters = {
        "statuses": [str(state) for state in wanted.statuses] or None,
        "name": wanted.name,
        "workflow": wanted.workflow,
        "tags": list(wanted.tags) or None,
        "attributes": stored_json(attributes.wanted(wanted.attributes)) if wanted.attributes else None,
        "parent": wanted.parent and wanted.parent.hex,
        "stuck": wanted.stuck,
        "since": wanted.since,
        "until": wanted.until,
        "within": wanted.within,
        "part": wanted.part,
        "before": (before or end).hex,
        "limit": limit,
        "most": MOST_LOOKED_AT,
    }
    is_walked = (
        any((wanted.statuses, wanted.name, wanted.since, wanted.until, wanted.within, wanted.part))
        and not wanted.parent
    )
    farthest, listing = (_HORIZON, _LIST) if wanted.workflow is None else (_HORIZON_OF_WORKFLOW, _LIST_OF_WORKFLOW)
    if oldest:
        farthest, listing = _OLDEST[farthest], _OLDEST[listing]
    horizon = farthest.first(connection, parameters, horizon=farthest_end.hex) if is_walked else None
    found = [RunView(**_columns(row)) for row in listing(connection, parameters, horizon=(horizon or farthest_end).hex)]
    return RunPage(found, (max if oldest else min)(run.id for run in found) if len(found) == limit else horizon)


def list_runs(connection: Connection, wanted: RunFilter, *, limit: int = 50, before: UUID | None = None) -> RunPage:
    """Return as many runs that match as are asked for, if there are so many: page after page."""
    found: list[RunView] = []
    while True:
        page = page_of_runs(connection, wanted, limit=limit - len(found), before=before)
        found += page.runs
        before = page.next
        if before is None or len(found) == limit:
            return RunPage(found, before)


_FIND = Statement[Row](f"""
SELECT /* insights.runs.find */ {_COLUMNS} FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[])
""")


def find_runs(connection: Connection, ids: Sequence[bytes]) -> list[RunView]:
    """Return those of these runs that there are."""
    return [RunView(**_columns(row)) for row in _FIND(connection, ids=ids)]


@Statement.function(
    "SELECT /* insights.runs.of_code */ id FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[]) AND code"
)
def runs_of_code(connection: Connection, ids: Sequence[bytes]) -> frozenset[UUID]:
    """Return those of these runs that are of workflows as code."""


# A run of code ends with its own task. Of others, the first tasks are looked at: a run may have a million.
_ERRORS = Statement[Row]("""
SELECT /* insights.runs.errors */ r.id, e.kind, e.message FROM unnest(%(ids)s::uuid[]) AS r(id)
 CROSS JOIN LATERAL (
       SELECT error->>'kind' AS kind, error->>'message' AS message FROM (
           (SELECT status, error FROM orchestrator.ended_tasks WHERE id = r.id)
            UNION ALL
           (SELECT status, error FROM orchestrator.ended_tasks WHERE run_id = r.id LIMIT 200)) AS looked_at
        WHERE status = 'failed' AND error IS NOT NULL LIMIT 1) AS e
""")


def errors_of_runs(connection: Connection, runs: Sequence[UUID]) -> dict[UUID, str]:
    """Return why those of these runs failed of which a task says so, in a line of a list."""
    rows = _ERRORS(connection, ids=[run.bytes for run in runs]) if runs else ()
    return {row.id: error_line(row) for row in rows}


_HOLDERS = Statement[UUID]("""
SELECT /* insights.runs.holders */ id FROM orchestrator.runs
 WHERE lane = (SELECT lane FROM orchestrator.runs WHERE id = %(id)s::uuid) AND status = 'running'
 ORDER BY id LIMIT 10
""")
_OWN_ID = f"""coalesce(key, (SELECT {run_keys.OWN_ID}
       FROM orchestrator.run_keys k WHERE k.run_id = runs.id LIMIT 1))"""
_SHOW = Statement[Row](f"""
SELECT /* insights.runs.show */ {columns_of(RunDetail, but=("held_by",), key=_OWN_ID, limit="lane_limit")}
  FROM orchestrator.runs WHERE id = %(id)s::uuid
""")


class RunNote(NamedTuple):
    """What tells a run from others in a list."""

    id: UUID
    own_id: str | None
    """Its idempotency key, or the chosen id of a run of code."""
    schedule: str | None
    fire_time: datetime | None
    parent_task: UUID | None
    params: Mapping[str, Any] | None
    """What it was started with; None if that is large, or nothing."""
    is_plain: bool
    """Nothing that its tasks were given is declared as secret: not in its definition, and it has no relatives."""
    error: str = ""
    """Why it failed, where a task says so."""


_NOTES = Statement[RunNote](f"""
WITH /* insights.runs.notes */ listed AS MATERIALIZED (
    SELECT id, workflow, version, {_OWN_ID} AS own_id, schedule, fire_time, parent_task,
           CASE WHEN octet_length(params::text) <= 2000 THEN params END AS params,
           NOT code AND NOT flow AND parent_run IS NULL AND parent_task IS NULL AND coalesce(root, id) = id
               AS is_alone
      FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[])
), guarded AS MATERIALIZED (
    SELECT w.name, w.version FROM (SELECT DISTINCT workflow, version FROM listed WHERE is_alone) AS l
      JOIN orchestrator.workflows w ON w.name = l.workflow AND w.version = l.version
     WHERE jsonb_path_exists(
           w.definition, '$.steps[*] ? (exists (@.registered.{OF_OPTIONS}) || @.workflow != null)')
)
SELECT id, own_id, schedule, fire_time, parent_task, params, is_alone AND workflow IS NOT NULL AND NOT EXISTS (
       SELECT FROM guarded g WHERE g.name = workflow AND g.version = listed.version) AS is_plain
  FROM listed
""")


def notes_of_runs(connection: Connection, runs: Sequence[UUID]) -> dict[UUID, RunNote]:
    """Return what tells these runs apart."""
    rows = _NOTES(connection, ids=[run.bytes for run in runs]) if runs else ()
    return {row.id: row._replace(params=_shown_params(row.params) if row.params else None) for row in rows}


_BY_KEY = Statement[UUID]("""
SELECT /* insights.runs.by_key */ id FROM orchestrator.runs WHERE key = %(key)s
 UNION
SELECT run_id FROM orchestrator.run_keys WHERE key = ANY(%(keys)s::text[]) LIMIT %(limit)s
""")


def runs_by_key(
    connection: Connection, key: str, workflows: Iterable[str], limit: int, within: str = ""
) -> list[RunView]:
    """Return runs with this idempotency key, and runs of these workflows as code with this id of their own."""
    keys = [scoped(workflow, key) for workflow in workflows]
    ids = _BY_KEY(connection, key=key, keys=keys, limit=limit)
    found = find_runs(connection, [run.bytes for run in ids]) if ids else []
    return [run for run in found if (run.workflow or "").startswith(within)]


def show_run(connection: Connection, run: UUID) -> RunDetail | None:
    """Return a run, or None if there is none of that id."""
    row = _SHOW.first(connection, id=run.hex)
    if row is None:
        return None
    # The arguments of a composition are shown with its tasks.
    columns = _columns(row) | {"params": {} if is_composed(row.workflow) else _shown_params(row.params or {})}
    waits = row.status == RunState.PENDING and row.limit is not None
    held_by = _HOLDERS(connection, id=run.hex) if waits else ()
    return RunDetail(**columns | {"held_by": tuple(held_by)})


_SEALED = "(sealed)"
"""Stands for the parameters that cannot be opened here; no parameter has this name."""


def _shown_params(stored: Any) -> Any:
    """Return parameters, opened if they are sealed; if that fails, sealed: the caller may have the key."""
    opened = open_json(stored)
    return opened if isinstance(opened, dict) else {_SEALED: stored}


def readable_params(params: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    """Return the parameters of a run for people: opened where this process can, else a text that says so."""
    sealed = params.get(_SEALED) if isinstance(params, Mapping) else None
    if not isinstance(sealed, str):
        return params
    text = open_text(sealed)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])  # a client over HTTP that has the key has opened it
    except msgspec.MsgspecError:
        return text


def _columns(row: Any) -> dict[str, Any]:
    stuck = row.stuck and {
        name: reveal_text(text) if isinstance(text, str) else text for name, text in row.stuck.items()
    }
    return {**row._asdict(), "tags": tuple(row.tags), "stuck": stuck}
