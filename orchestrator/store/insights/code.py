"""Runs of workflows as code: their arguments, what they wait for, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.code.other_runs import WAIT
from orchestrator.domain.runs import CONTINUATION_REASONS
from orchestrator.sealing import CALL, reveal
from orchestrator.store.code import histories, reads
from orchestrator.store.code.histories import first_event
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.insights.attempts import ErrorView, error_view
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.tasks import DELAYED, NOBODY

_MAX_ITEMS = 10
"""Open items of each type to return."""
_MAX_UNSEEN = 1_000
"""Unseen messages to count."""


@dataclass(frozen=True, kw_only=True)
class OpenView:
    """An item that a run has requested and that has not ended."""

    kind: str
    """promise, run (another run whose end is awaited), timer, task or child."""
    name: str
    """The name in the code; possibly empty for a timer."""
    id: UUID
    """The id; for a task or a child run, its own id."""
    due: datetime | None
    """When a timer fires, or a delayed task is due."""
    status: str | None
    """The state of a task or a child run."""


@dataclass(frozen=True, kw_only=True)
class ResetView:
    """The run that a reset repeats."""

    run: UUID
    """The repeated run."""
    to: int
    """The last event that is repeated."""
    reason: str
    """The reason, if one was given."""


@dataclass(frozen=True, kw_only=True)
class CodeView:
    """The code side of a run. Values are encoded, as stored."""

    payload: bytes
    """The arguments."""
    result: bytes | None
    """The returned value."""
    error: ErrorView | None
    """The error of a failed run."""
    state: Mapping[str, bytes]
    """Values that the code has set for people to see."""
    turn: str | None
    """`waiting`, `ready` for a worker, `unknown` to all workers, or `running`; None if the run has ended."""
    places: tuple[str, ...]
    """Places in the code at which it waits, as the last worker reported them."""
    signals: tuple[str, ...]
    """Names of the signals that the code waits for."""
    updates: tuple[str, ...]
    """Names of updates without an answer yet."""
    waits_for: tuple[OpenView, ...]
    """The first requested items that have not ended."""
    more: bool
    """Whether there are further items."""
    reset: ResetView | None = None
    """The repeated run, if a reset made this run."""
    run: UUID | None = None
    """The id of the run; None from a server of the previous release."""
    handlers: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """Handlers of the code: `query`, `update` or `signal`, the name, and the argument names."""
    unseen: int = 0
    """Signals and updates that the code has not seen, counted up to a thousand."""


_NOW = Statement[Row](f"""
SELECT /* insights.code.now */ CASE WHEN r.ended_at IS NOT NULL THEN NULL
            WHEN t.status <> 'pending' THEN 'running'
            WHEN {NOBODY} THEN 'unknown'
            WHEN t.blockers > 0 THEN 'waiting' ELSE 'ready' END AS turn, r.waiting,
       (SELECT count(*) FROM (
               SELECT FROM orchestrator.histories WHERE run_id = r.id AND number > r.shown AND r.ended_at IS NULL
                  AND kind IN ('signal_received', 'update_requested') LIMIT {_MAX_UNSEEN}) AS new) AS unseen
  FROM orchestrator.runs r LEFT JOIN orchestrator.tasks t ON t.id = r.id
 WHERE r.id = %(run)s::uuid AND r.code
""")
_OPEN = Statement[OpenView](f"""
(SELECT /* insights.code.open */ CASE WHEN r.id IS NULL THEN 'promise' ELSE 'run' END AS kind,
        coalesce(r.name, p.name) AS name, coalesce(r.id, p.id) AS id, NULL::timestamptz AS due, r.status
   FROM orchestrator.promises p
   LEFT JOIN orchestrator.runs r ON r.id = CASE WHEN p.name ~ '^{WAIT}[0-9a-f-]{{36}}$' THEN substr(p.name, 5)::uuid END
  WHERE p.run_id = %(run)s::uuid ORDER BY p.ordinal LIMIT {_MAX_ITEMS + 1})
 UNION ALL
(SELECT 'timer', '', id, due, NULL FROM orchestrator.timers
  WHERE run_id = %(run)s::uuid ORDER BY due LIMIT {_MAX_ITEMS + 1})
 UNION ALL
(SELECT 'task', name, id, CASE WHEN {DELAYED} THEN wake_at END, status FROM orchestrator.tasks
  WHERE run_id = %(run)s::uuid AND id <> run_id ORDER BY id LIMIT {_MAX_ITEMS + 1})
 UNION ALL
(SELECT 'child', name, id, NULL, CASE WHEN stuck IS NULL THEN status ELSE 'stuck' END FROM orchestrator.runs
  WHERE parent_run = %(run)s::uuid AND ended_at IS NULL ORDER BY id LIMIT {_MAX_ITEMS + 1})
""")


def show_code(connection: Connection, run: UUID) -> CodeView | None:
    """Return the code side of a run; None if the run is not of code."""
    row = _NOW.first(connection, run=run.hex)
    outcome = reads.outcome(connection, run.bytes)
    if row is None or outcome is None:
        return None
    open_ = _OPEN(connection, run=run.hex)
    has_timers = any(view.kind == "timer" for view in open_)
    payload, state, timers = b"", dict[str, bytes](), dict[bytes, str]()
    reset: ResetView | None = None
    for event in histories.events_by_code(connection, run.bytes, with_timers=has_timers):
        match event:
            case history.RunStarted():
                payload = reveal(event.payload, CALL)
            case history.RunReset(run=other, to=to, reason=reason):
                reset = ResetView(run=UUID(bytes=other), to=to, reason=reason)
            case history.StateSet(key=key, value=value, attribute=""):
                state[key] = reveal(value)
            case history.StateCleared(key=key, is_attribute=False):
                state.pop(key, None)
            case history.TimerStarted():
                timers[event.id] = event.name
    listed = [
        view
        for kind in ("promise", "run", "timer", "task", "child")
        for view in [item for item in open_ if item.kind == kind][:_MAX_ITEMS]
    ]
    waiting = row.waiting or {}
    return CodeView(
        payload=payload,
        result=reveal(outcome.result) if outcome.reason not in CONTINUATION_REASONS else None,
        error=error_view(outcome.error),
        state=state,
        turn=row.turn,
        places=tuple(waiting.get("places", ())),
        signals=tuple(waiting.get("signals", ())),
        updates=tuple(waiting.get("updates", ())),
        waits_for=tuple(_named(view, timers) for view in listed),
        more=len(listed) < len(open_),
        reset=reset,
        run=run,
        handlers=tuple((kind, name, tuple(names)) for kind, name, names in waiting.get("handlers", ())),
        unseen=row.unseen,
    )


def _named(view: OpenView, timers: Mapping[bytes, str]) -> OpenView:
    if view.kind != "timer":
        return view
    return OpenView(kind="timer", name=timers.get(view.id.bytes, ""), id=view.id, due=view.due, status=None)


# -- workflows as code that workers announce or that have open runs, and these runs


@dataclass(frozen=True, kw_only=True)
class DrainingVersion:
    """An older version of a workflow as code that open runs still use."""

    version: int
    """The version."""
    open_runs: int
    """The number of open runs."""
    oldest: str
    """The id of the oldest of these runs."""
    since: datetime
    """When the oldest run was created."""
    served: bool
    """Whether a live worker has the version; otherwise its runs use another version, or wait if they are pinned."""


@dataclass(frozen=True, kw_only=True)
class CodeWorkflowView:
    """A workflow as code that a live worker has, or that has an open run."""

    name: str
    """The name of the workflow."""
    versions: tuple[int, ...]
    """The versions of live workers and of open runs, in order."""
    workers: int
    """The number of live workers with the workflow."""
    open_runs: int
    """The number of open runs."""
    draining: tuple[DrainingVersion, ...] = ()
    """Older versions that open runs use, oldest first."""


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
    """Return the workflows as code that live workers have announced or that have open runs.

    Only names that begin with `within` count.
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


_OPEN_RUNS = Statement[Row]("""
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
    return _code_runs(_OPEN_RUNS(connection, workflows=workflows, since=since))


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
    """Return up to `limit` each of the newest open, the newest ended and the longest runs of each workflow and version.

    Empty `workflows` stand for all. Runs whose code has not taken a turn are left out.
    """
    return _code_runs(_SAMPLE(connection, workflows=workflows, since=since, limit=limit))


@Statement.function("""
SELECT /* insights.code_workflows.open_others */ workflow, count(*) FROM orchestrator.runs
 WHERE code AND ended_at IS NULL AND NOT workflow = ANY(%(workflows)s::text[])
   AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s::timestamptz)
 GROUP BY workflow ORDER BY workflow
""")
def count_open_others(connection: Connection, workflows: Sequence[str], since: datetime | None) -> dict[str, int]:
    """Return the numbers of open runs of all other workflows, by workflow."""


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
    """The version and queue with which a caller without the code starts a run of a workflow as code."""

    version: int
    queue: str


def find_code_start(connection: Connection, name: str, default: str) -> CodeStart | None:
    """Return the newest version of live workers and one of their queues; or else those of the last run.

    The last run's queue is preferred, then the `default`, then any queue. None if the workflow is unknown.
    """
    announced, last = _ANNOUNCED.first(connection, name=name), _LAST_RUN.first(connection, name=name)
    queues = [first_event(bytes(last.data)).queue, default] if last is not None else [default]
    if announced is not None and announced.version is not None:
        served = sorted(announced.queues)
        return CodeStart(announced.version, next((queue for queue in queues if queue in served), served[0]))
    return None if last is None else CodeStart(last.version, queues[0])
