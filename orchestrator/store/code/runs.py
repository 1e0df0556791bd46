"""Runs of workflows as code: how they begin, get stuck, and end.

Each has a task of its own, with the id of the run, that carries the turns of its code: `blockers = 1` while the code
waits, 0 when it has something to be shown. How that task ends is how the run ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain, zip_longest
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.code.history import HistoryItem
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs.verdict import GOES_ON
from orchestrator.store.code.histories import event_rows
from orchestrator.store.sql import Batch, Prepared, Statement


class NewCodeRun(NamedTuple):
    """A run that is to be started."""

    id: bytes
    events: Sequence[HistoryItem]
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
    """It is held to its version: its turn task bears that in its name, which only workers with that version know."""
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
        """What its turn task is called."""
        return (
            f"{self.started.workflow}@{self.version or self.started.version}" if self.pinned else self.started.workflow
        )

    @property
    def started(self) -> history.RunStarted:
        first = self.events[0]
        assert isinstance(first, history.RunStarted)
        return first


_GIVEN = Batch(
    "g",
    "id uuid, workflow text, version int, queue text, count int, timeout double precision, parent uuid, position int, "
    "child_id uuid, detached boolean, tags jsonb, name text, shown int, reason text, cancelling boolean, "
    "schedule text, fire_time timestamptz, called text",
)
_EVENTS = Batch("e", "run_id uuid, place int, kind text, data bytea, at double precision")


def _starting(name: str) -> str:
    return f"""
WITH /* {name} */ given AS MATERIALIZED (
    SELECT * FROM {_GIVEN}
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
      FROM moment, {_EVENTS}
      JOIN created ON created.id = e.run_id
), own AS (
    INSERT INTO orchestrator.tasks (id, name, queue, run_id, payload)
    SELECT g.id, g.name, g.queue, g.id, ''::bytea FROM given g JOIN created ON created.id = g.id
)
SELECT id FROM created
"""


_START = Prepared[bytes](_starting("code_runs.start"))
_START_FROM_CLIENT = Statement[UUID](_starting("code_runs.start_from_client"))


def start(connection: Connection, runs: Sequence[NewCodeRun], now: datetime | None = None) -> set[bytes]:
    """Create runs with the beginning of their histories; return those that did not exist."""
    given = _GIVEN(
        (
            run.id,
            run.started.workflow,
            run.version or run.started.version,
            run.started.queue,
            len(run.events),
            run.timeout,
            run.parent,
            run.position,
            run.child_id,
            run.detached,
            run.tags,
            run.task_name,
            run.shown,
            run.reason,
            run.cancelling,
            run.schedule,
            run.fire_time,
            run.name,
        )
        for run in runs
    )
    events = _EVENTS((*row, at) for run in runs for row, at in zip_longest(event_rows(run.id, run.events), run.times))
    if now is not None:
        return set(_START(connection, given, events, now=now))
    # A client may sit behind a pooler, where nothing that was prepared can be found again.
    return {run.bytes for run in _START_FROM_CLIENT(connection, given, events, now=now)}


_FORGET = Prepared[None]("""
WITH /* code_runs.forget */ timers AS (
    DELETE FROM orchestrator.timers WHERE run_id = ANY(%(ids)s::uuid[])
), promises AS (
    DELETE FROM orchestrator.promises WHERE run_id = ANY(%(ids)s::uuid[])
)
DELETE FROM orchestrator.resolutions WHERE run_id = ANY(%(ids)s::uuid[])
""")


def forget(connection: Connection, ids: Sequence[bytes]) -> None:
    """Forget what runs waited for that have ended."""
    _FORGET(connection, ids=ids)


_CHILDREN = Prepared[bytes]("""
SELECT /* code_runs.children */ c.id FROM unnest(%(ids)s::uuid[]) AS parent(id)
 CROSS JOIN LATERAL (
       SELECT id FROM orchestrator.runs
        WHERE parent_run = parent.id AND code AND ended_at IS NULL AND NOT detached OFFSET 0) AS c
""")


def children(connection: Connection, parents: Sequence[bytes]) -> list[bytes]:
    """Return the open child runs that do not outlive these runs."""
    return _CHILDREN(connection, ids=parents)


_CLOSING = Prepared[bytes](
    "SELECT /* code_runs.closing */ id FROM orchestrator.runs WHERE closing ORDER BY id LIMIT %(limit)s"
)
_CLOSED = Prepared[None](
    "UPDATE /* code_runs.closed */ orchestrator.runs SET closing = false WHERE id = ANY(%(ids)s::uuid[])"
)


def closing(connection: Connection, limit: int) -> list[bytes]:
    """Return runs that have ended and may have open tasks."""
    return _CLOSING(connection, limit=limit)


def closed(connection: Connection, runs: Sequence[bytes]) -> None:
    """Note that nothing is open any more in runs that have ended."""
    _CLOSED(connection, ids=runs)


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


_CONTINUED = Prepared[Predecessor]("""
SELECT /* code_runs.continued */ r.id, r.parent_run AS parent, r.parent_position AS position,
       coalesce(r.child_id, r.id) AS child_id, r.detached, r.tags::text[] AS tags,
       extract(epoch FROM r.deadline - %(now)s::timestamptz)::double precision AS timeout, r.workflow, r.version,
       t.queue, t.name <> r.workflow AS pinned, r.reason, r.cancelling, r.schedule, r.fire_time::text AS fire_time,
       r.name, extract(epoch FROM r.created_at)::double precision AS began_at
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 CROSS JOIN LATERAL (SELECT queue, name FROM orchestrator.ended_tasks WHERE id = wanted.id LIMIT 1) AS t
""")


def predecessors(connection: Connection, runs: Sequence[bytes], now: datetime) -> list[Predecessor]:
    """Return what the successors of runs take over that are about to end: their turn tasks have."""
    return _CONTINUED(connection, ids=runs, now=now)


_FURTHEST = 256
"""Runs of a chain that are looked at together: one that continues all the time has thousands."""
_CONTINUING = Prepared[bytes](f"""
SELECT /* code_runs.continuing */ wanted.id FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs WHERE id = wanted.id AND code AND reason IN {GOES_ON} LIMIT 1) AS r
""")


def latest(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return, for each of these runs, the one in which it goes on now: itself, where it goes on in no other."""
    last = {run: run for run in runs}
    moving, reach = list(last), 1
    while moving:
        chains = {run: _chain(last[run], reach) for run in moving}
        continued = set(_CONTINUING(connection, ids=chain.from_iterable(chains.values())))
        for run, some in chains.items():
            last[run] = next((one for one in some if one not in continued), successor_id(some[-1]))
        moving = [run for run, some in chains.items() if some[-1] in continued]
        reach = min(4 * reach, _FURTHEST)
    return last


def _chain(run: bytes, length: int) -> list[bytes]:
    """Return a run, and those in which it would go on one after another."""
    chain = [run]
    while len(chain) < length:
        chain.append(successor_id(chain[-1]))
    return chain
