"""Lists of runs: filters, orders that an index has, and pages that look at a bounded number of rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Literal, NamedTuple
from uuid import UUID

from msgspec import Meta
from sqlalchemy import Connection

from orchestrator.domain.code import attributes
from orchestrator.domain.plain import stored_json
from orchestrator.domain.runs import TERMINATED
from orchestrator.domain.states import ShownRunState
from orchestrator.store.insights.arguments import IN_RUN, NONE, Needles
from orchestrator.store.insights.runs import COLUMNS, RunView, columns
from orchestrator.store.insights.tasks import LONGEST_WALK
from orchestrator.store.sql import Row, Statement


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Which runs to list; what is not given does not matter."""

    statuses: tuple[ShownRunState, ...] = ()
    """Any of these states. Stuck runs are also running or pending, and terminated ones cancelled."""
    workflow: str | None = None
    """Of this workflow."""
    version: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Of this version of the workflow."""
    name: str | None = None
    """This name."""
    tags: tuple[str, ...] = ()
    """With all of these tags."""
    attributes: tuple[str, ...] = ()
    """With all of these attributes: `stage=paid`, `stage!=paid`, `total>=100`."""
    parent: UUID | None = None
    """Started by this run."""
    stuck: bool = False
    """Only those whose code no longer fits their history."""
    unreplayed: bool = False
    """Only open runs of code that no live worker has replayed: their last worker has ended, and was of an older release
    than the newest, if workers say theirs."""
    since: datetime | None = None
    """Created at this time or later."""
    until: datetime | None = None
    """Created before this time."""
    within: str = ""
    """Of a workflow whose name begins so."""
    part: str | None = None
    """With this in the name of the workflow, or of the run, in any case."""


# What is asked for may be rare: each page looks at so many runs, and the next one goes on behind them.
MOST_LOOKED_AT = 10_000
"""Runs that are looked at for one page."""
RunSort = Literal["-when", "when", "-ended", "ended", "-workflow", "workflow"]
"""By creation, end or workflow; a minus turns it round. A list by end has only ended runs, one by workflow only those
of a workflow."""
_FIRST, _LAST = UUID(int=0), UUID(int=2**128 - 1)
_FARTHEST = """
SELECT /* insights.runs.horizon{name} */ id FROM orchestrator.runs WHERE {within} ORDER BY {order}
OFFSET %(most)s LIMIT 1
"""
_UNREPLAYED = f"""
SELECT r.id FROM orchestrator.runs r JOIN orchestrator.tasks t ON t.id = r.id
 WHERE r.code AND r.ended_at IS NULL AND r.workflow IS NOT NULL AND r.stuck IS NULL AND t.worker IS NOT NULL
   AND NOT EXISTS (SELECT FROM orchestrator.workers w WHERE w.id = t.worker AND w.state NOT IN ('dead', 'stopped'))
   AND NOT EXISTS (SELECT FROM orchestrator.worker_releases w WHERE w.worker = t.worker AND w.release = (
                   SELECT release FROM orchestrator.worker_releases ORDER BY started_at DESC LIMIT 1))
 LIMIT {MOST_LOOKED_AT}"""
# Parameters arrive as literals, so the planner drops the conditions that are not asked for.
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
    """Return the parts of a list in the order of a column; the cursor and the horizon are runs of it."""
    at = f"(SELECT {column} FROM orchestrator.runs WHERE id = %({{0}})s::uuid), %({{0}})s::uuid"
    return {
        "name": f"_by_{column}",
        "within": f"""{column} IS NOT NULL
   AND (%(before)s = %(end)s OR ({column}, id) < ({at.format("before")}))
   AND (%(horizon)s = %(farthest_end)s OR ({column}, id) >= ({at.format("horizon")}))""",
        "order": f"{column} DESC, id DESC",
        "shown": f"{column} DESC, id DESC",
    }


# Names are compared together with ids, so that only the index of workflows has the order, and the place to begin: else
# the walk may be past all newer runs of others.
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
    name: (Statement[UUID](_FARTHEST.format(**parts)), Statement[Row](_PAGE.format(**parts)))
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
    """Return running tasks of runs."""


class FailedRuns(NamedTuple):
    """How many runs have failed."""

    runs: int
    is_part: bool
    """Only so many of the runs that ended last were looked at."""


@Statement.function(f"""
SELECT /* insights.runs.count_failed */ count(*) FILTER (WHERE status = 'failed'
       AND (%(within)s::text = '' OR starts_with(workflow, %(within)s::text))) AS runs,
       count(*) = {MOST_LOOKED_AT} AS is_part
  FROM (SELECT status, workflow FROM orchestrator.runs WHERE ended_at >= %(since)s::timestamptz
         ORDER BY ended_at DESC LIMIT {MOST_LOOKED_AT}) AS ended
""")
def count_failed_runs(connection: Connection, since: datetime, within: str = "") -> FailedRuns:
    """Return how many runs have failed since then."""


class RunPage(NamedTuple):
    """Some of the runs that match."""

    runs: list[RunView]
    next: UUID | None
    """The `before` of the page after this one; None if there are no more."""


def page_of_runs(
    connection: Connection,
    wanted: RunFilter,
    *,
    limit: int,
    before: UUID | None = None,
    sort: RunSort = "-when",
    needles: Needles = NONE,
) -> RunPage:
    """Return the newest runs that match, newest first; or those of another order.

    A page takes as long as any other, whatever one looks for: it looks at a bounded number of rows, and so may have few
    runs, or none, and yet not be the last.
    """
    oldest = not sort.startswith("-")
    order = sort.removeprefix("-")
    if wanted.workflow is not None and order != "ended":
        order = "of workflow"
    if wanted.statuses == (ShownRunState.STUCK,):  # these have an index
        wanted = replace(wanted, statuses=(), stuck=True)
    end, farthest_end = (_FIRST, _LAST) if oldest else (_LAST, _FIRST)
    parameters = {
        "statuses": [str(state) for state in wanted.statuses] or None,
        "name": wanted.name,
        "workflow": wanted.workflow,
        "of_workflow": wanted.workflow if order == "ended" else None,
        "version": wanted.version,
        "tags": list(wanted.tags) or None,
        "attributes": stored_json(equal) if (equal := attributes.wanted(wanted.attributes)) else None,
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
        "most": MOST_LOOKED_AT,
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
    found = [RunView(**columns(row)) for row in listing(connection, parameters, horizon=(horizon or farthest_end).hex)]
    if len(found) < limit:
        return RunPage(found, horizon)
    if order in ("when", "of workflow"):
        return RunPage(found, (max if oldest else min)(run.id for run in found))
    return RunPage(found, found[-1].id)


def list_runs(
    connection: Connection, wanted: RunFilter, *, limit: int = 50, before: UUID | None = None, sort: RunSort = "-when"
) -> RunPage:
    """Return as many runs that match as are asked for, if so many are found page after page within a second."""
    found: list[RunView] = []
    last = time.monotonic() + LONGEST_WALK
    while True:
        page = page_of_runs(connection, wanted, limit=limit - len(found), before=before, sort=sort)
        found += page.runs
        before = page.next
        if before is None or len(found) == limit or time.monotonic() >= last:
            return RunPage(found, before)


# -- the last runs of workflows and flows


class LastRun(NamedTuple):
    """One of the last runs of a workflow or a flow."""

    workflow: str
    id: UUID
    status: str
    created_at: datetime
    began_at: datetime | None
    """When it began, or began again because it was retried."""
    ended_at: datetime | None


# A range of one name, because of `workflow = name` Postgres concludes that ids alone give the order: then it may walk
# the primary key, past all newer runs of others.
_NEWEST_RUNS = Statement[LastRun]("""
SELECT /* insights.last_runs */ r.* FROM unnest(%(workflows)s::text[]) AS w(name)
 CROSS JOIN LATERAL (
       SELECT workflow, id, status, created_at, coalesce(retried_at, started_at) AS began_at, ended_at
         FROM orchestrator.runs
        WHERE workflow >= w.name AND workflow <= w.name ORDER BY workflow DESC, id DESC LIMIT %(limit)s) AS r
 ORDER BY r.id
""")


def last_runs(connection: Connection, workflows: Iterable[str], limit: int) -> dict[str, list[LastRun]]:
    """Return so many of the last runs of each workflow, the oldest of them first; in one walk along their index."""
    found: dict[str, list[LastRun]] = {name: [] for name in workflows}
    for run in _NEWEST_RUNS(connection, workflows=list(found), limit=limit) if found else ():
        found[run.workflow].append(run)
    return found
