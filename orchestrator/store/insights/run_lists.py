"""Lists of runs: filters, sort orders with an index, and pages that scan a bounded number of rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Literal, NamedTuple
from uuid import UUID

from msgspec import Meta, Struct
from msgspec.structs import replace
from sqlalchemy import Connection

from orchestrator.domain.code import attributes
from orchestrator.domain.plain import stored_json
from orchestrator.domain.runs import TERMINATED
from orchestrator.domain.states import ShownRunState
from orchestrator.store.insights.arguments import IN_RUN, NONE, Needles
from orchestrator.store.insights.runs import COLUMNS, RunView, columns
from orchestrator.store.insights.tasks import MAX_LIST_SECONDS
from orchestrator.store.sql import Row, Statement


class RunFilter(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Conditions on runs. A condition that is None matches every run."""

    statuses: tuple[ShownRunState, ...] = ()
    """Any of these states. Stuck runs are also running or pending, and terminated runs cancelled."""
    workflow: str | None = None
    """The workflow of the runs."""
    version: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """The version of the workflow."""
    name: str | None = None
    """The name of the runs."""
    tags: tuple[str, ...] = ()
    """Tags that the runs must all have."""
    attributes: tuple[str, ...] = ()
    """Attributes that the runs must all have: `stage=paid`, `stage!=paid`, `total>=100`."""
    parent: UUID | None = None
    """The run that started the runs."""
    stuck: bool = False
    """Only runs whose code no longer fits their history."""
    unreplayed: bool = False
    """Only open runs of code that no live worker has replayed: their last worker has ended, and ran an older release
    than the newest, if workers report releases."""
    since: datetime | None = None
    """Created at this time or later."""
    until: datetime | None = None
    """Created before this time."""
    within: str = ""
    """A prefix of the workflow's name."""
    part: str | None = None
    """A part of the name of the workflow or the run; case is ignored."""


# Matching runs may be rare: each page scans a bounded number of runs, and the next page continues there.
MAX_SCANNED = 10_000
"""Runs that are scanned for one page."""
RunSort = Literal["-when", "when", "-ended", "ended", "-workflow", "workflow"]
"""By creation, end or workflow; a minus reverses. Only ended runs have an end, and not all have a workflow."""
_FIRST, _LAST = UUID(int=0), UUID(int=2**128 - 1)
_HORIZON = """
SELECT /* insights.runs.horizon{name} */ id FROM orchestrator.runs WHERE {within} ORDER BY {order}
OFFSET %(most)s LIMIT 1
"""
_UNREPLAYED = f"""
SELECT r.id FROM orchestrator.runs r JOIN orchestrator.tasks t ON t.id = r.id
 WHERE r.code AND r.ended_at IS NULL AND r.workflow IS NOT NULL AND r.stuck IS NULL AND t.worker IS NOT NULL
   AND NOT EXISTS (SELECT FROM orchestrator.workers w WHERE w.id = t.worker AND w.state NOT IN ('dead', 'stopped'))
   AND NOT EXISTS (SELECT FROM orchestrator.worker_releases w WHERE w.worker = t.worker AND w.release = (
                   SELECT release FROM orchestrator.worker_releases ORDER BY started_at DESC LIMIT 1))
 LIMIT {MAX_SCANNED}"""
# Parameters arrive as literals, so the planner drops unused conditions.
_PAGE = f"""
SELECT /* insights.runs.list{{name}} */ * FROM (SELECT {COLUMNS} FROM orchestrator.runs
 WHERE {{within}}
   AND id <> ALL (ARRAY(SELECT run_id FROM orchestrator.deletions))
   AND (%(statuses)s::text[] IS NULL OR status = ANY(%(statuses)s::text[])
        OR ('stuck' = ANY(%(statuses)s::text[]) AND stuck IS NOT NULL AND ended_at IS NULL)
        OR ('terminated' = ANY(%(statuses)s::text[]) AND status = 'cancelled' AND reason = '{TERMINATED}'))
   AND (%(name)s::text IS NULL OR name = %(name)s::text)
   AND (%(of_workflow)s::text IS NULL OR workflow = %(of_workflow)s::text)
   AND (%(version)s::bigint IS NULL OR version = %(version)s::bigint)
   AND (%(tags)s::text[] IS NULL OR (tags <> '{{{{}}}}' AND tags @> %(tags)s::text[]))
   AND (%(attributes)s::jsonb IS NULL OR (attributes IS NOT NULL AND attributes @> %(attributes)s::jsonb))
   AND (%(ranges)s::jsonpath IS NULL OR jsonb_path_match(attributes, %(ranges)s::jsonpath, '{{{{}}}}', true))
   AND (%(parent)s::uuid IS NULL OR parent_run = %(parent)s::uuid)
   AND (NOT %(stuck)s OR (stuck IS NOT NULL AND ended_at IS NULL))
   AND (NOT %(unreplayed)s OR id = ANY (ARRAY({_UNREPLAYED})))
   AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s::timestamptz)
   AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s::timestamptz)
   AND (%(within)s::text = '' OR starts_with(workflow, %(within)s::text))
   AND (%(part)s::text IS NULL OR strpos(lower(name), lower(%(part)s::text)) > 0
        OR strpos(lower(workflow), lower(%(part)s::text)) > 0)
   AND {IN_RUN}
 ORDER BY {{order}} LIMIT %(limit)s) AS page ORDER BY {{shown}}
"""
_NEWEST = "created_at DESC, id DESC"


def _ordered_by(column: str) -> dict[str, str]:
    """Return the SQL parts of a list in the order of a column; the cursor and the horizon are runs."""
    at = f"(SELECT {column} FROM orchestrator.runs WHERE id = %({{0}})s::uuid), %({{0}})s::uuid"
    return {
        "name": f"_by_{column}",
        "within": f"""{column} IS NOT NULL
   AND (%(before)s = %(end)s OR ({column}, id) < ({at.format("before")}))
   AND (%(horizon)s = %(farthest_end)s OR ({column}, id) >= ({at.format("horizon")}))""",
        "order": f"{column} DESC, id DESC",
        "shown": f"{column} DESC, id DESC",
    }


# Names are compared together with ids, so that only the index of workflows fits: otherwise the planner may scan all
# newer runs of other workflows.
_ORDERS = {
    "when": {
        "name": "",
        "within": "id < %(before)s::uuid AND id >= %(horizon)s::uuid",
        "order": "id DESC",
        "shown": _NEWEST,
    },
    "of workflow": {
        "name": "_of_workflow",
        "within": """workflow IS NOT NULL AND (workflow, id) < (%(workflow)s::text, %(before)s::uuid)
   AND (workflow, id) >= (%(workflow)s::text, %(horizon)s::uuid)""",
        "order": "workflow DESC, id DESC",
        "shown": _NEWEST,
    },
    "ended": _ordered_by("ended_at"),
    "workflow": _ordered_by("workflow"),
}
_NEWEST_FIRST = {
    name: (Statement[UUID](_HORIZON.format(**parts)), Statement[Row](_PAGE.format(**parts)))
    for name, parts in _ORDERS.items()
}
_OLDEST_FIRST = {
    name: (farthest.oldest_first(), listing.oldest_first()) for name, (farthest, listing) in _NEWEST_FIRST.items()
}


class RunningTask(NamedTuple):
    """A running task of a run."""

    id: UUID
    run_id: UUID
    attempt: int


@Statement.function("""
SELECT /* insights.runs.running_tasks */ id, run_id, attempt FROM orchestrator.tasks
 WHERE run_id = ANY(%(ids)s::uuid[]) AND status = 'running' LIMIT 500
""")
def running_tasks(connection: Connection, ids: Sequence[bytes]) -> list[RunningTask]:
    """Return up to 500 running tasks of runs."""


class FailedRuns(NamedTuple):
    """The number of failed runs."""

    runs: int
    is_part: bool
    """Whether only the last `MAX_SCANNED` ended runs were scanned."""


@Statement.function(f"""
SELECT /* insights.runs.count_failed */ count(*) FILTER (WHERE status = 'failed'
       AND (%(within)s::text = '' OR starts_with(workflow, %(within)s::text))) AS runs,
       count(*) = {MAX_SCANNED} AS is_part
  FROM (SELECT status, workflow FROM orchestrator.runs WHERE ended_at >= %(since)s::timestamptz
         ORDER BY ended_at DESC LIMIT {MAX_SCANNED}) AS ended
""")
def count_failed_runs(connection: Connection, since: datetime, within: str = "") -> FailedRuns:
    """Return the number of runs that have failed since then."""


class RunPage(NamedTuple):
    """A page of the matching runs."""

    runs: list[RunView]
    next: UUID | None
    """The `before` of the next page; None on the last page."""


def page_of_runs(
    connection: Connection,
    wanted: RunFilter,
    *,
    limit: int,
    before: UUID | None = None,
    sort: RunSort = "-when",
    needles: Needles = NONE,
) -> RunPage:
    """Return the first matching runs in an order, by default newest first.

    A page scans a bounded number of rows, so it may have few runs or none without being the last.
    """
    oldest = not sort.startswith("-")
    order = sort.removeprefix("-")
    if wanted.workflow is not None and order != "ended":
        order = "of workflow"
    if wanted.statuses == (ShownRunState.STUCK,):  # stuck runs have an index
        wanted = replace(wanted, statuses=(), stuck=True)
    end, farthest_end = (_FIRST, _LAST) if oldest else (_LAST, _FIRST)
    parameters = {
        "statuses": [str(state) for state in wanted.statuses] or None,
        "name": wanted.name,
        "workflow": wanted.workflow,
        "of_workflow": wanted.workflow if order == "ended" else None,
        "version": wanted.version,
        "tags": list(wanted.tags) or None,
        "attributes": stored_json(equal) if (equal := attributes.parse_filters(wanted.attributes)) else None,
        "ranges": (ranges := attributes.ranges(wanted.attributes)),
        "parent": wanted.parent and wanted.parent.hex,
        "stuck": wanted.stuck,
        "unreplayed": wanted.unreplayed,
        "since": wanted.since,
        "until": wanted.until,
        "within": wanted.within,
        "part": wanted.part,
        "before": (before or end).hex,
        "end": end.hex,
        "farthest_end": farthest_end.hex,
        "limit": limit,
        "most": MAX_SCANNED,
    } | needles.parameters
    is_walked = wanted != RunFilter() or bool(needles.data)
    if order in (
        "when",
        "of workflow",
    ):  # an index finds the tags, attributes, children, stuck and unreplayed runs, but no ranges
        walked = (wanted.statuses, wanted.name, wanted.version, wanted.since, wanted.until, wanted.within, wanted.part)
        is_walked = (any(walked) or ranges is not None or bool(needles.data)) and not wanted.parent
    farthest, listing = (_OLDEST_FIRST if oldest else _NEWEST_FIRST)[order]
    horizon = farthest.first(connection, parameters, horizon=farthest_end.hex) if is_walked else None
    runs = [RunView(**columns(row)) for row in listing(connection, parameters, horizon=(horizon or farthest_end).hex)]
    if len(runs) < limit:
        return RunPage(runs, horizon)
    if order in ("when", "of workflow"):
        return RunPage(runs, (max if oldest else min)(run.id for run in runs))
    return RunPage(runs, runs[-1].id)


def list_runs(
    connection: Connection,
    wanted: RunFilter,
    *,
    limit: int = 50,
    before: UUID | None = None,
    sort: RunSort = "-when",
) -> RunPage:
    """Return up to `limit` matching runs, reading pages for up to a second."""
    runs: list[RunView] = []
    last = time.monotonic() + MAX_LIST_SECONDS
    while True:
        page = page_of_runs(connection, wanted, limit=limit - len(runs), before=before, sort=sort)
        runs += page.runs
        before = page.next
        if before is None or len(runs) == limit or time.monotonic() >= last:
            return RunPage(runs, before)


# -- the last runs of workflows and flows


class LastRun(NamedTuple):
    """One of the last runs of a workflow or a flow."""

    workflow: str
    id: UUID
    status: str
    created_at: datetime
    began_at: datetime | None
    """The time of the last start: the first one, or that of the last retry."""
    ended_at: datetime | None


# A range of one name, because with `workflow = name` the planner knows that ids alone give the order, and may scan the
# primary key through all newer runs of other workflows.
_NEWEST_RUNS = Statement[LastRun]("""
SELECT /* insights.last_runs */ r.* FROM unnest(%(workflows)s::text[]) AS w(name)
 CROSS JOIN LATERAL (
       SELECT workflow, id, status, created_at, coalesce(retried_at, started_at) AS began_at, ended_at
         FROM orchestrator.runs
        WHERE workflow >= w.name AND workflow <= w.name ORDER BY workflow DESC, id DESC LIMIT %(limit)s) AS r
 ORDER BY r.id
""")


def last_runs(connection: Connection, workflows: Iterable[str], limit: int) -> dict[str, list[LastRun]]:
    """Return up to `limit` of the last runs of each workflow, oldest first, in one index scan for each."""
    by_workflow: dict[str, list[LastRun]] = {name: [] for name in workflows}
    for run in _NEWEST_RUNS(connection, workflows=list(by_workflow), limit=limit) if by_workflow else ():
        by_workflow[run.workflow].append(run)
    return by_workflow
