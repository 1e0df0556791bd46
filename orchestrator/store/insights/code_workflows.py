"""Workflows as code that workers announce or that have open runs, and these runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.store.code.histories import first_event
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.sql import Row, Statement


@dataclass(frozen=True, kw_only=True)
class DrainingVersion:
    """A version of a workflow as code that is not its newest, and that open runs hold."""

    version: int
    """Its number."""
    open_runs: int
    """How many hold it."""
    oldest: str
    """The id of the oldest of these runs."""
    since: datetime
    """When that one was created."""
    served: bool
    """Whether a live worker has it; else its runs go on with another version, or wait if they are pinned."""


@dataclass(frozen=True, kw_only=True)
class CodeWorkflowView:
    """A workflow as code that a live worker has, or of which a run is open."""

    name: str
    """Its name."""
    versions: tuple[int, ...]
    """Those that live workers have, and those of open runs, in order."""
    workers: int
    """Live workers that have it."""
    open_runs: int
    """Its runs that have not ended."""
    draining: tuple[DrainingVersion, ...] = ()
    """Older versions that open runs hold, oldest first."""


_LIST = Statement[Row](f"""
WITH /* insights.code_workflows.list */ open AS (
    SELECT name, array_agg(version) AS versions, sum(runs)::bigint AS runs,
           jsonb_agg(jsonb_build_object('version', version, 'open_runs', runs, 'oldest', oldest, 'since', since)
                     ORDER BY version) AS held
      FROM (SELECT workflow AS name, version, count(*) AS runs, min(created_at) AS since,
                   (array_agg(id ORDER BY id))[1] AS oldest
              FROM orchestrator.runs WHERE code AND ended_at IS NULL AND workflow IS NOT NULL
             GROUP BY workflow, version) AS of_version
     GROUP BY name
), announced AS (
    SELECT found[1] AS name, array_agg(DISTINCT found[2]::int) AS versions, count(DISTINCT id) AS workers
      FROM orchestrator.workers CROSS JOIN LATERAL unnest(names) AS known
     CROSS JOIN LATERAL regexp_match(known, '^(.*)@([0-9]{{1,9}})$') AS found
     WHERE state = 'live' AND {IS_FRESH} AND found IS NOT NULL GROUP BY found[1]
)
SELECT name, coalesce(announced.versions, '{{}}') AS served, coalesce(open.versions, '{{}}') AS versions,
       coalesce(workers, 0) AS workers, coalesce(runs, 0) AS open_runs, coalesce(held, '[]') AS held
  FROM announced FULL JOIN open USING (name) WHERE starts_with(name, %(within)s::text) ORDER BY name
""")


def list_code_workflows(connection: Connection, within: str = "") -> list[CodeWorkflowView]:
    """Return the workflows as code that live workers have announced, and those that have open runs.

    Those whose names begin with `within`, that is.
    """
    return [_view(row) for row in _LIST(connection, within=within)]


def _view(row: Row) -> CodeWorkflowView:
    versions = tuple(sorted({*row.served, *row.versions}))
    draining = [held | {"served": held["version"] in row.served} for held in row.held if held["version"] < versions[-1]]
    return CodeWorkflowView(
        name=row.name,
        versions=versions,
        workers=row.workers,
        open_runs=row.open_runs,
        draining=msgspec.convert(draining, tuple[DrainingVersion, ...]),
    )


_OPEN = Statement[Row]("""
SELECT /* insights.code_workflows.open */ r.id, r.workflow, r.version, t.name <> r.workflow AS pinned
  FROM orchestrator.runs r JOIN orchestrator.tasks t ON t.id = r.id
 WHERE r.code AND r.ended_at IS NULL AND r.workflow = ANY(%(workflows)s::text[])
   AND (%(since)s::timestamptz IS NULL OR r.created_at >= %(since)s::timestamptz)
 ORDER BY r.id
""")


class CodeRun(NamedTuple):
    """A run whose history can be replayed."""

    id: bytes
    workflow: str
    version: int
    pinned: bool


def open_runs(connection: Connection, workflows: Sequence[str], since: datetime | None) -> list[CodeRun]:
    """Return the open runs of these workflows, oldest first."""
    return _code_runs(_OPEN(connection, workflows=workflows, since=since))


def _code_runs(rows: Sequence[Row]) -> list[CodeRun]:
    return [CodeRun(row.id.bytes, row.workflow, row.version, row.pinned) for row in rows]


_SAMPLE = Statement[Row]("""
WITH /* insights.code_workflows.sample */ numbered AS (
    SELECT id, workflow, version,
           row_number() OVER (PARTITION BY workflow, version, ended_at IS NULL ORDER BY id DESC) AS by_age,
           row_number() OVER (PARTITION BY workflow, version ORDER BY last_event DESC, id) AS by_length
      FROM orchestrator.runs
     WHERE code AND shown > 0 AND (%(workflows)s::text[] = '{}' OR workflow = ANY(%(workflows)s::text[]))
       AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s::timestamptz)
)
SELECT n.id, n.workflow, n.version, t.name <> n.workflow AS pinned FROM numbered n
 CROSS JOIN LATERAL (SELECT name FROM orchestrator.tasks WHERE id = n.id
                      UNION ALL SELECT name FROM orchestrator.ended_tasks WHERE id = n.id LIMIT 1) AS t
 WHERE n.by_age <= %(limit)s OR n.by_length <= %(limit)s
 ORDER BY n.workflow, n.version, n.id
""")


def sample_runs(connection: Connection, workflows: Sequence[str], since: datetime | None, limit: int) -> list[CodeRun]:
    """Return so many of the newest open, the newest ended and the longest runs of each workflow and version.

    Without names, of all workflows. Runs whose code has not taken a turn are left out.
    """
    return _code_runs(_SAMPLE(connection, workflows=workflows, since=since, limit=limit))


@Statement.function("""
SELECT /* insights.code_workflows.open_others */ workflow, count(*) FROM orchestrator.runs
 WHERE code AND ended_at IS NULL AND NOT workflow = ANY(%(workflows)s::text[])
   AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s::timestamptz)
 GROUP BY workflow ORDER BY workflow
""")
def count_open_others(connection: Connection, workflows: Sequence[str], since: datetime | None) -> dict[str, int]:
    """Return how many runs of workflows that are none of these are open, by workflow."""


_ANNOUNCED = Statement[Row](f"""
SELECT /* insights.code_workflows.announced */ max(found[1]::int) AS version, array_agg(DISTINCT queue) AS queues
  FROM orchestrator.workers CROSS JOIN LATERAL unnest(names) AS known CROSS JOIN LATERAL unnest(queues) AS queue
 CROSS JOIN LATERAL regexp_match(substr(known, length(%(name)s::text) + 1), '^@([0-9]{{1,9}})$') AS found
 WHERE state = 'live' AND {IS_FRESH} AND starts_with(known, %(name)s::text) AND found IS NOT NULL
""")
_LAST_RUN = Statement[Row]("""
SELECT /* insights.code_workflows.last_run */ r.version, h.data
  FROM (SELECT id, version, code FROM orchestrator.runs WHERE workflow = %(name)s::text ORDER BY id DESC LIMIT 1) r
  JOIN orchestrator.histories h ON h.run_id = r.id AND h.number = 1 WHERE r.code
""")


class CodeStart(NamedTuple):
    """What a run of a workflow as code is started with by a caller that does not have its code."""

    version: int
    queue: str


def find_code_start(connection: Connection, name: str, default: str) -> CodeStart | None:
    """Return the newest version that live workers have, and a queue of theirs; else what the last run had.

    The queue of the last run goes before the `default`, and that before any other. None if nobody knows the workflow.
    """
    announced, last = _ANNOUNCED.first(connection, name=name), _LAST_RUN.first(connection, name=name)
    queues = [first_event(bytes(last.data)).queue, default] if last is not None else [default]
    if announced is not None and announced.version is not None:
        served = sorted(announced.queues)
        return CodeStart(announced.version, next((queue for queue in queues if queue in served), served[0]))
    return None if last is None else CodeStart(last.version, queues[0])
