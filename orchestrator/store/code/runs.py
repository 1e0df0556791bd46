"""Runs of workflows as code: how they begin, get stuck, and end.

Each has a task of its own, with the id of the run, that carries the turns of its code: `blockers = 1` while the code
waits, 0 when it has something to be shown. How that task ends is how the run ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs.verdict import TIMED_OUT
from orchestrator.domain.states import ENDED_RUN_STATES, RunState, run_sources_of
from orchestrator.store import arrays
from orchestrator.store.code.histories import What, event_parameters
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier

CONTINUED = "continued"
"""The reason of a run that went on in another, with a history of its own."""
RESET = "reset"
"""The reason of a run that was open when it was reset, and went on in the run that repeats it."""
GOES_ON = (CONTINUED, RESET)

_START = Statement(
    """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(workflows)s::text[], %(versions)s::int[], %(queues)s::text[],
                         %(counts)s::int[], %(timeouts)s::double precision[], %(parents)s::uuid[],
                         %(positions)s::int[], %(child_ids)s::uuid[], %(detached)s::boolean[], %(tags)s::jsonb[],
                         %(names)s::text[], %(shown)s::int[], %(reasons)s::text[], %(cancelling)s::boolean[],
                         %(schedules)s::text[], %(fire_times)s::timestamptz[], %(called)s::text[])
             AS g(id, workflow, version, queue, count, timeout, parent, position, child_id, detached, tags, name, shown,
                  reason, cancelling, schedule, fire_time, called)
), moment AS (
    SELECT coalesce(%(now)s::timestamptz, now()) AS now
), created AS (
    INSERT INTO orchestrator.runs (id, name, status, total, open, created_at, started_at, workflow, version, deadline,
                                   parent_run, parent_position, child_id, detached, tags, code, last_event, shown,
                                   reason, cancelling, schedule, fire_time, root, depth)
    SELECT g.id, coalesce(g.called, g.workflow), 'running', 0, 0, moment.now, moment.now, g.workflow, g.version,
           moment.now + g.timeout * interval '1 second', g.parent, g.position, g.child_id, g.detached,
           ARRAY(SELECT jsonb_array_elements_text(g.tags)), true, g.count, g.shown, g.reason, g.cancelling,
           g.schedule, g.fire_time, coalesce(above.root, above.id), coalesce(above.depth + 1, 0)
      FROM moment, given g LEFT JOIN LATERAL (
           SELECT id, root, depth FROM orchestrator.runs WHERE id = g.parent LIMIT 1) AS above ON true
        ON CONFLICT (id) DO NOTHING
    RETURNING id
), kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT e.run_id, e.place, coalesce(to_timestamp(e.at), moment.now), e.kind, e.data
      FROM moment, unnest(%(event_runs)s::uuid[], %(places)s::int[], %(kinds)s::text[], %(data)s::bytea[],
                          %(times)s::double precision[]) AS e(run_id, place, kind, data, at)
      JOIN created ON created.id = e.run_id
), own AS (
    INSERT INTO orchestrator.tasks (id, name, queue, run_id, payload)
    SELECT g.id, g.name, g.queue, g.id, ''::bytea FROM given g JOIN created ON created.id = g.id
)
SELECT id::text FROM created
"""
)


class NewCodeRun(NamedTuple):
    """A run that is to be started."""

    id: bytes
    events: Sequence[What]
    """How its history begins: with `RunStarted`."""
    timeout: float | None = None
    position: int | None = None
    """Of a child: which one it is of its parent's."""
    child_id: bytes | None = None
    """The id under which the parent waits for it, if that is not its own."""
    detached: bool = False
    tags: str = "[]"
    """JSON."""
    pinned: bool = False
    """It is held to its version: its own task bears that in its name, which only workers with that version know."""
    parent: bytes | None = None
    """The run that waits for it, which may be another than the one that started it."""
    times: Sequence[float] = ()
    """When the first of its events happened, in Unix seconds; all others do so now."""
    shown: int = 0
    """The last of its events that code has been shown: where it repeats another run."""
    reason: str | None = None
    """Why it will have ended, if that is certain: the time is up of the run that it goes on from."""
    cancelling: bool = False
    """It is to be ended without asking its code, as the run that it goes on from was."""
    schedule: str | None = None
    """What started it, or the run that it goes on from: the key of a schedule."""
    fire_time: str | None = None
    name: str | None = None
    """What it is called, for people to read, if that is not its workflow's name."""
    version: int | None = None
    """The version of the code that it goes on with, if that is not the one that it was started with."""

    @property
    def task_name(self) -> str:
        """What its own task is called."""
        return (
            f"{self.started.workflow}@{self.version or self.started.version}" if self.pinned else self.started.workflow
        )

    @property
    def started(self) -> history.RunStarted:
        first = self.events[0]
        assert isinstance(first, history.RunStarted)
        return first


def start(connection: Connection, runs: Sequence[NewCodeRun], now: datetime | None = None) -> set[bytes]:
    """Create runs with the beginning of their histories; return those that did not exist."""
    parameters = {
        "now": now,
        "ids": arrays.uuids(run.id for run in runs),
        "workflows": [run.started.workflow for run in runs],
        "versions": arrays.numbers(run.version or run.started.version for run in runs),
        "queues": [run.started.queue for run in runs],
        "counts": arrays.numbers(len(run.events) for run in runs),
        "timeouts": arrays.numbers(run.timeout for run in runs),
        "parents": arrays.uuids(run.parent for run in runs),
        "positions": arrays.numbers(run.position for run in runs),
        "child_ids": arrays.uuids(run.child_id for run in runs),
        "detached": arrays.numbers(run.detached for run in runs),
        "tags": [run.tags for run in runs],
        "names": [run.task_name for run in runs],
        "shown": arrays.numbers(run.shown for run in runs),
        "reasons": [run.reason for run in runs],
        "cancelling": arrays.numbers(run.cancelling for run in runs),
        "schedules": [run.schedule for run in runs],
        "fire_times": [run.fire_time for run in runs],
        "called": [run.name for run in runs],
        **event_parameters((run.id, run.events) for run in runs),
        "times": arrays.numbers(
            at for run in runs for at in (*run.times, *[None] * (len(run.events) - len(run.times)))
        ),
    }
    # A client may sit behind a pooler, where nothing that was prepared can be found again.
    rows = _START(connection, parameters) if now is not None else connection.exec_driver_sql(_START.sql, parameters)
    return {identifier(row[0]) for row in rows}


def _sources() -> str:
    return " OR ".join(
        "(e.state = '{}' AND r.status IN ({}))".format(
            state, ", ".join(f"'{source}'" for source in run_sources_of(state))
        )
        for state in ENDED_RUN_STATES
    )


_END = Statement(
    f"""
WITH ended AS (
    UPDATE orchestrator.runs r
       SET status = CASE WHEN e.state = 'cancelled' AND r.reason = '{TIMED_OUT}' THEN 'failed' ELSE e.state END,
           ended_at = %(now)s::timestamptz, reason = coalesce(e.reason, r.reason), closing = r.open > 0, stuck = NULL,
           waiting = NULL
      FROM unnest(%(ids)s::uuid[], %(states)s::text[], %(reasons)s::text[]) AS e(id, state, reason)
     WHERE r.id = e.id AND r.code AND ({_sources()})
    RETURNING r.id, r.status, r.open, r.parent_run, coalesce(r.child_id, r.id) AS child_id, r.workflow
), timers AS (
    DELETE FROM orchestrator.timers WHERE run_id = ANY(%(ids)s::uuid[])
), promises AS (
    DELETE FROM orchestrator.promises WHERE run_id = ANY(%(ids)s::uuid[])
), resolutions AS (
    DELETE FROM orchestrator.resolutions WHERE run_id = ANY(%(ids)s::uuid[])
)
SELECT id::text, status, open, parent_run::text, child_id::text, workflow FROM ended
"""
)


class EndedRun(NamedTuple):
    """A run that has just ended."""

    id: bytes
    state: str
    open: int
    """Its tasks and children that have not ended."""
    parent: bytes | None
    child_id: bytes
    workflow: str


def end(connection: Connection, ends: Iterable[tuple[bytes, RunState, str | None]], now: datetime) -> list[EndedRun]:
    """End runs, each in its state and for its reason, if any; what they waited for is forgotten."""
    rows = list(ends)
    parameters = {
        "now": now,
        "ids": arrays.uuids(run for run, _, _ in rows),
        "states": [str(state) for _, state, _ in rows],
        "reasons": [reason for _, _, reason in rows],
    }
    return [
        EndedRun(identifier(row[0]), row[1], row[2], identifier(row[3]) or None, identifier(row[4]), row[5])
        for row in _END(connection, parameters)
    ]


_CHILDREN = Statement(
    """
SELECT c.id::text FROM unnest(%(ids)s::uuid[]) AS parent(id)
 CROSS JOIN LATERAL (
       SELECT id FROM orchestrator.runs
        WHERE parent_run = parent.id AND code AND ended_at IS NULL AND NOT detached OFFSET 0) AS c
"""
)


def children(connection: Connection, parents: Sequence[bytes]) -> list[bytes]:
    """Return the open child runs that do not outlive these runs."""
    return [identifier(row[0]) for row in _CHILDREN(connection, {"ids": arrays.uuids(parents)})]


_CLOSING = Statement("SELECT id::text FROM orchestrator.runs WHERE closing ORDER BY id LIMIT %(limit)s")
_CLOSED = Statement("UPDATE orchestrator.runs SET closing = false WHERE id = ANY(%(ids)s::uuid[])")


def closing(connection: Connection, limit: int) -> list[bytes]:
    """Return runs that have ended and may have open tasks."""
    return [identifier(row[0]) for row in _CLOSING(connection, {"limit": limit})]


def closed(connection: Connection, runs: Sequence[bytes]) -> None:
    """Note that nothing is open any more in runs that have ended."""
    _CLOSED(connection, {"ids": arrays.uuids(runs)})


_CONTINUED = Statement(
    """
SELECT r.id::text, r.parent_run::text, r.parent_position, coalesce(r.child_id, r.id)::text, r.detached, r.tags::text[],
       extract(epoch FROM r.deadline - %(now)s::timestamptz)::double precision, r.workflow, r.version, t.queue,
       t.name <> r.workflow, r.reason, r.cancelling, r.schedule, r.fire_time::text, r.name,
       extract(epoch FROM r.created_at)::double precision
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 CROSS JOIN LATERAL (SELECT queue, name FROM orchestrator.ended_tasks WHERE id = wanted.id LIMIT 1) AS t
"""
)


class Predecessor(NamedTuple):
    """A run that goes on in another."""

    id: bytes
    parent: bytes | None
    position: int | None
    child_id: bytes
    detached: bool
    tags: list[str]
    timeout: float | None
    """Seconds that are left of its time."""
    workflow: str
    version: int
    queue: str
    pinned: bool
    reason: str | None
    cancelling: bool
    schedule: str | None
    fire_time: str | None
    name: str
    began_at: float


def predecessors(connection: Connection, runs: Sequence[bytes], now: datetime) -> list[Predecessor]:
    """Return what the successors of runs take over that are about to end: their own tasks have."""
    rows = _CONTINUED(connection, {"ids": arrays.uuids(runs), "now": now})
    return [
        Predecessor(identifier(row[0]), identifier(row[1]) or None, row[2], identifier(row[3]), *row[4:])
        for row in rows
    ]


_FURTHEST = 256
"""Runs of a chain that are looked at together: one that continues all the time has thousands."""
_CONTINUING = Statement(
    f"""
SELECT wanted.id::text FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs WHERE id = wanted.id AND code AND reason IN {GOES_ON} LIMIT 1) AS r
"""
)


def latest(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return, for each of these runs, the one in which it goes on now: itself, where it goes on in no other."""
    last = {run: run for run in runs}
    moving, reach = list(last), 1
    while moving:
        chains = {run: _chain(last[run], reach) for run in moving}
        ids = arrays.uuids(one for chain in chains.values() for one in chain)
        continued = {identifier(row[0]) for row in _CONTINUING(connection, {"ids": ids})}
        for run, chain in chains.items():
            last[run] = next((one for one in chain if one not in continued), successor_id(chain[-1]))
        moving = [run for run, chain in chains.items() if chain[-1] in continued]
        reach = min(4 * reach, _FURTHEST)
    return last


def _chain(run: bytes, length: int) -> list[bytes]:
    """Return a run, and those in which it would go on one after another."""
    chain = [run]
    while len(chain) < length:
        chain.append(successor_id(chain[-1]))
    return chain


_TIMED_OUT = Statement(
    f"""
WITH due AS MATERIALIZED (
    SELECT id, shown, stuck, reason IS NOT DISTINCT FROM '{TIMED_OUT}' AS over FROM orchestrator.runs
     WHERE deadline <= %(now)s::timestamptz AND ended_at IS NULL AND code AND NOT cancelling
     ORDER BY deadline LIMIT %(limit)s
), judged AS (
    SELECT due.id, due.over, due.over AND due.stuck IS NULL AND (own.id IS NULL OR unheard.number IS NULL) AS ends
      FROM due
      LEFT JOIN LATERAL (
           SELECT id FROM orchestrator.tasks WHERE id = due.id AND status = 'pending' LIMIT 1) AS own ON true
      LEFT JOIN LATERAL (
           SELECT number FROM orchestrator.histories
            WHERE run_id = due.id AND number > due.shown AND kind = 'run_cancel_requested' LIMIT 1) AS unheard ON true
)
UPDATE orchestrator.runs r
   SET reason = '{TIMED_OUT}', cancelling = due.ends,
       deadline = CASE WHEN NOT due.ends THEN %(now)s::timestamptz + %(grace)s * interval '1 second' END
  FROM judged due
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = due.id LIMIT 1) AS found
 WHERE r.ctid = found.place
RETURNING r.id::text, due.over
"""
)


def time_out(connection: Connection, now: datetime, limit: int, grace: float) -> list[bytes]:
    """Return runs whose time is up, once. Those whose grace is over, too, are to be ended without asking their code.

    A run is excused, for another grace, while its code could not know: it is stuck, or no worker has come for it.
    """
    rows = _TIMED_OUT(connection, {"now": now, "limit": limit, "grace": grace})
    return [identifier(row[0]) for row in rows if not row[1]]
