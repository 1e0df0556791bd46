"""The workers, for people: a copy of their heartbeats, releases and task parameters; and orders to drain."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.fleet.announced import SIGNALS, signals_among, unknown_signal
from orchestrator.domain.tasks.parameters import Parameter
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Prepared, Row, Statement

IS_FRESH = "seen_at > now() - interval '15 seconds'"
"""The leader copies heartbeats every few seconds; older rows are out of date."""

_MIRROR = Statement[None]("""
INSERT /* fleet.mirror */ INTO orchestrator.workers AS w
       (id, host, pid, queues, names, slots, running, state, started_at, seen_at, still_since, holds,
        parent, memory, parent_memory)
SELECT b.id, b.host, b.pid, ARRAY(SELECT jsonb_array_elements_text(b.queues)),
       ARRAY(SELECT jsonb_array_elements_text(b.names)), b.slots, b.running, b.state,
       to_timestamp(b.started_at), %(now)s::timestamptz, %(now)s::timestamptz - b.still * interval '1 second',
       ARRAY(SELECT jsonb_array_elements_text(b.holds)::uuid), b.parent, b.memory, b.parent_memory
  FROM jsonb_to_recordset(%(beats)s::jsonb)
       AS b(id text, host text, pid int, queues jsonb, names jsonb, slots int, running int, state text,
            started_at float8, still float8, holds jsonb, parent uuid, memory int8, parent_memory int8)
    ON CONFLICT (id) DO UPDATE
   SET queues = excluded.queues, names = excluded.names, slots = excluded.slots, running = excluded.running,
       state = excluded.state, seen_at = excluded.seen_at, still_since = excluded.still_since, holds = excluded.holds,
       parent = excluded.parent, memory = excluded.memory, parent_memory = excluded.parent_memory
""")


class WorkerRow(NamedTuple):
    id: str
    host: str
    pid: int
    queues: list[str]
    names: list[str]
    slots: int
    running: int
    state: str
    started_at: float
    still: float | None = None
    """Seconds for which the process has been hanging, if that is too long."""
    holds: Sequence[str] = ()
    """The first tasks of a hanging process."""
    parent: str | None = None
    """An id of one lifetime of the parent process; None if unknown."""
    memory: int | None = None
    """Resident memory of the process in bytes, if known."""
    parent_memory: int | None = None
    """Resident memory of the parent process in bytes, if known."""


def mirror(connection: Connection, workers: Sequence[WorkerRow], now: datetime) -> None:
    """Store heartbeats of workers."""
    beats = json.dumps([worker._asdict() for worker in workers])
    _MIRROR(connection, beats=beats, now=now)


_KEEP_RELEASES = Statement[None]("""
INSERT /* fleet.keep_releases */ INTO orchestrator.worker_releases (worker, release, started_at, until)
SELECT b.worker, b.release, to_timestamp(b.started_at), coalesce(%(until)s::timestamptz, 'infinity')
  FROM jsonb_to_recordset(%(beats)s::jsonb) AS b(worker text, release text, started_at float8)
 WHERE NOT EXISTS (SELECT FROM orchestrator.worker_releases AS known
                    WHERE known.worker = b.worker
                      AND known.until >= coalesce(%(until)s::timestamptz, 'infinity') - interval '1 day')
    ON CONFLICT (worker) DO UPDATE SET until = excluded.until
""")


class WorkerRelease(NamedTuple):
    """The release that one worker process runs."""

    worker: str
    release: str
    started_at: float


def keep_releases(connection: Connection, workers: Sequence[WorkerRelease], until: datetime | None) -> None:
    """Store which releases workers run, until the retention of their attempts ends; None keeps them for ever.

    While a worker lives, the time is extended once a day.
    """
    _KEEP_RELEASES(connection, beats=json.dumps([worker._asdict() for worker in workers]), until=until)


_DESCRIBE = Statement[None]("""
INSERT /* fleet.describe */ INTO orchestrator.task_parameters AS known (name, parameters)
SELECT key, value FROM jsonb_each(%(found)s::jsonb)
    ON CONFLICT (name) DO UPDATE SET parameters = excluded.parameters WHERE known.parameters <> excluded.parameters
""")


def describe(connection: Connection, announced: Sequence[Mapping[str, Sequence[Parameter]]]) -> None:
    """Store the parameters of tasks and workflows as code. Where workers differ, the last one wins."""
    by_name = {name: parameters for worker in announced for name, parameters in worker.items()}
    _DESCRIBE(connection, found=msgspec.json.encode(by_name).decode())


_PARAMETERS = Statement[tuple[str, str]]("""
SELECT /* fleet.parameters */ name, parameters::text FROM orchestrator.task_parameters
 WHERE name = ANY(%(names)s::text[])
""")


def parameters_of_all(connection: Connection, names: Collection[str]) -> dict[str, list[Parameter]]:
    """Return the parameters of tasks and workflows as code by name, as workers last announced them."""
    rows = _PARAMETERS(connection, names=[*names]) if names else ()
    return {name: msgspec.json.decode(stored, type=list[Parameter]) for name, stored in rows}


def parameters_of(connection: Connection, name: str) -> list[Parameter] | None:
    """Return the parameters of a task or workflow as code; None if no worker has announced them."""
    return parameters_of_all(connection, [name]).get(name)


_SIGNALS = Prepared[Row](f"""
WITH /* fleet.signals */ wanted AS MATERIALIZED (
    SELECT id, workflow FROM orchestrator.runs WHERE id = ANY(%(runs)s::uuid[])
), announced AS (
    SELECT DISTINCT workflow, ARRAY(SELECT said FROM unnest(names) AS said WHERE starts_with(said, '{SIGNALS}')
                                       AND right(said, length(workflow) + 1) = ' ' || workflow) AS said
      FROM (SELECT DISTINCT workflow FROM wanted) AS of_runs JOIN orchestrator.workers ON workflow = ANY(names)
     WHERE state = 'live' AND {IS_FRESH}
)
SELECT id, workflow, said FROM wanted JOIN announced USING (workflow)
""")


def unknown_signals(connection: Connection, sent: Collection[tuple[bytes, str]]) -> dict[tuple[bytes, str], str]:
    """Return the signals (run and name) that the run's workflow does not take, as live workers say, and why."""
    by_run: dict[bytes, tuple[str, list[list[str]]]] = {}
    for row in _SIGNALS(connection, runs=list({run for run, _ in sent})):
        by_run.setdefault(row.id, (row.workflow, []))[1].append(row.said)
    announced = {run: (workflow, signals_among(names)) for run, (workflow, names) in by_run.items()}
    return {
        (run, name): unknown_signal(announced[run][0], name, signals)
        for run, name in sent
        if run in announced and (signals := announced[run][1]) is not None and name not in signals
    }


_GONE = Statement[None]("""
UPDATE /* fleet.gone */ orchestrator.workers
   SET state = CASE WHEN state = 'draining' OR id = ANY(%(stopped)s::text[]) THEN 'stopped' ELSE 'dead' END,
       running = 0, still_since = NULL, holds = '{}'
 WHERE (state NOT IN ('dead', 'stopped') AND NOT (id = ANY(%(live)s::text[])))
    OR (state = 'dead' AND id = ANY(%(stopped)s::text[]))
""")
_FORGET = Statement[None]("""
DELETE /* fleet.forget */ FROM orchestrator.workers
 WHERE (state = 'dead' AND seen_at < %(now)s::timestamptz - interval '1 hour')
    OR (state = 'stopped' AND seen_at < %(now)s::timestamptz - interval '1 minute')
""")


def mark_gone(connection: Connection, live: Sequence[str], stopped: Sequence[str], now: datetime) -> None:
    """Mark workers that are not `live` as dead, or as stopped if they were draining or reported it. Delete dead workers
    after an hour, stopped ones after a minute."""
    _GONE(connection, live=live, stopped=stopped)
    _FORGET(connection, now=now)


_ASK_DRAIN = Statement[None](
    "INSERT /* fleet.ask_drain */ INTO orchestrator.drains (parent) VALUES (%(parent)s::uuid) ON CONFLICT DO NOTHING"
)


def request_drain(connection: Connection, parent: bytes) -> None:
    """Order a worker to drain, by the id of its parent process; needs a transaction.

    The row is durable: a leader of a release without drains drops the request, and the next leader finds the row.
    """
    _ASK_DRAIN(connection, parent=parent)
    inbox.add(connection, RequestKind.DRAIN, parent)


@Prepared.function("SELECT /* fleet.drains */ parent FROM orchestrator.drains")
def drains(connection: Connection) -> frozenset[bytes]:
    """Return the workers that are ordered to drain, by the ids of their parent processes."""


@Prepared.function("""
DELETE /* fleet.forget_drains */ FROM orchestrator.drains AS d
 WHERE d.asked_at < %(now)s::timestamptz - interval '1 day'
   AND NOT EXISTS (SELECT FROM orchestrator.workers AS w
                    WHERE w.parent = d.parent AND w.state NOT IN ('dead', 'stopped'))
""")
def forget_drains(connection: Connection, now: datetime) -> None:
    """Delete orders to drain that are more than a day old and whose workers are gone."""
