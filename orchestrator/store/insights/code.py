"""Runs of workflows as code: what they were given, what they wait for, and what came of them."""

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
from orchestrator.domain.runs import GOES_ON
from orchestrator.sealing import CALL, reveal
from orchestrator.store.code import histories, reads
from orchestrator.store.code.histories import first_event
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.insights.attempts import ErrorView, error_view
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.tasks import DELAYED, NOBODY

_MOST = 10
"""Of each kind that is open, so many are shown."""
_MOST_UNSEEN = 1_000
"""Messages that are counted."""


@dataclass(frozen=True, kw_only=True)
class OpenView:
    """Something that a run has asked for, and that has not ended."""

    kind: str
    """promise, run (another one, whose end it waits for), timer, task or child."""
    name: str
    """What the code calls it; of a timer maybe nothing."""
    id: UUID
    """Its id; of a task or a child, the one to look at."""
    due: datetime | None
    """When a timer fires, or a delayed task is due."""
    status: str | None
    """Where a task or a child stands."""


@dataclass(frozen=True, kw_only=True)
class ResetView:
    """Which run another one repeats."""

    run: UUID
    """That run."""
    to: int
    """The last of its events that is repeated."""
    reason: str
    """Why, if somebody said so."""


@dataclass(frozen=True, kw_only=True)
class CodeView:
    """What a run of code has beside its counters. Values are encoded, as they are stored."""

    payload: bytes
    """Its arguments."""
    result: bytes | None
    """What it returned."""
    error: ErrorView | None
    """How it failed."""
    state: Mapping[str, bytes]
    """What its code has set for people to see."""
    turn: str | None
    """Its code is `waiting`, `ready` for a worker, `unknown` to all workers, or `running`; None when it has ended."""
    places: tuple[str, ...]
    """Where in the code it waits, as the worker said that ran it last."""
    signals: tuple[str, ...]
    """Names of signals that it waits for."""
    updates: tuple[str, ...]
    """Names of updates that have no answer yet."""
    waits_for: tuple[OpenView, ...]
    """The first of what it has asked for that has not ended."""
    more: bool
    """There is more of that."""
    reset: ResetView | None = None
    """Which run it repeats, if it was made by a reset."""
    run: UUID | None = None
    """Its id; None from a server of the previous release."""
    handlers: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """What its code answers: `query`, `update` or `signal`, the name, and the names of the arguments."""
    unseen: int = 0
    """How many signals and updates its code has not been shown; a thousand stands for more."""


_NOW = Statement[Row](f"""
SELECT /* insights.code.now */ CASE WHEN r.ended_at IS NOT NULL THEN NULL
            WHEN t.status <> 'pending' THEN 'running'
            WHEN {NOBODY} THEN 'unknown'
            WHEN t.blockers > 0 THEN 'waiting' ELSE 'ready' END AS turn, r.waiting,
       (SELECT count(*) FROM (
               SELECT FROM orchestrator.histories WHERE run_id = r.id AND number > r.shown AND r.ended_at IS NULL
                  AND kind IN ('signal_received', 'update_requested') LIMIT {_MOST_UNSEEN}) AS new) AS unseen
  FROM orchestrator.runs r LEFT JOIN orchestrator.tasks t ON t.id = r.id
 WHERE r.id = %(run)s::uuid AND r.code
""")
_OPEN = Statement[OpenView](f"""
(SELECT /* insights.code.open */ CASE WHEN r.id IS NULL THEN 'promise' ELSE 'run' END AS kind,
        coalesce(r.name, p.name) AS name, coalesce(r.id, p.id) AS id, NULL::timestamptz AS due, r.status
   FROM orchestrator.promises p
   LEFT JOIN orchestrator.runs r ON r.id = CASE WHEN p.name ~ '^{WAIT}[0-9a-f-]{{36}}$' THEN substr(p.name, 5)::uuid END
  WHERE p.run_id = %(run)s::uuid ORDER BY p.ordinal LIMIT {_MOST + 1})
 UNION ALL
(SELECT 'timer', '', id, due, NULL FROM orchestrator.timers
  WHERE run_id = %(run)s::uuid ORDER BY due LIMIT {_MOST + 1})
 UNION ALL
(SELECT 'task', name, id, CASE WHEN {DELAYED} THEN wake_at END, status FROM orchestrator.tasks
  WHERE run_id = %(run)s::uuid AND id <> run_id ORDER BY id LIMIT {_MOST + 1})
 UNION ALL
(SELECT 'child', name, id, NULL, CASE WHEN stuck IS NULL THEN status ELSE 'stuck' END FROM orchestrator.runs
  WHERE parent_run = %(run)s::uuid AND ended_at IS NULL ORDER BY id LIMIT {_MOST + 1})
""")


def show_code(connection: Connection, run: UUID) -> CodeView | None:
    """Return what there is to see of a run of code, or None if it is no such run."""
    row = _NOW.first(connection, run=run.hex)
    outcome = reads.outcome(connection, run.bytes)
    if row is None or outcome is None:
        return None
    open_ = _OPEN(connection, run=run.hex)
    has_timers = any(view.kind == "timer" for view in open_)
    payload, state, timers = b"", dict[str, bytes](), dict[bytes, str]()
    reset: ResetView | None = None
    for what in histories.said_by_code(connection, run.bytes, with_timers=has_timers):
        match what:
            case history.RunStarted():
                payload = reveal(what.payload, CALL)
            case history.RunReset(run=other, to=to, reason=reason):
                reset = ResetView(run=UUID(bytes=other), to=to, reason=reason)
            case history.StateSet(key=key, value=value, attribute=""):
                state[key] = reveal(value)
            case history.StateCleared(key=key, is_attribute=False):
                state.pop(key, None)
            case history.TimerStarted():
                timers[what.id] = what.name
    shown = [
        view
        for kind in ("promise", "run", "timer", "task", "child")
        for view in [one for one in open_ if one.kind == kind][:_MOST]
    ]
    waiting = row.waiting or {}
    return CodeView(
        payload=payload,
        result=reveal(outcome.result) if outcome.reason not in GOES_ON else None,
        error=error_view(outcome.error),
        state=state,
        turn=row.turn,
        places=tuple(waiting.get("places", ())),
        signals=tuple(waiting.get("signals", ())),
        updates=tuple(waiting.get("updates", ())),
        waits_for=tuple(_named(view, timers) for view in shown),
        more=len(shown) < len(open_),
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
