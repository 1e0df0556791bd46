"""Runs of workflows as code, for clients: outcomes, what runs wait for, and reruns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.runs import RAN_TOO_LONG, TERMINATED, TIMED_OUT, WAS_TERMINATED
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.histories import first_event
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.sql import Prepared, Row, Statement

_OUTCOME = Statement[Row]("""
SELECT /* code_reads.outcome */ r.status, r.reason, t.result, t.error, r.stuck, t.status AS task_status
  FROM orchestrator.runs r LEFT JOIN orchestrator.ended_tasks t ON t.id = r.id
 WHERE r.id = %(id)s::uuid AND r.code
""")


class CodeRunOutcome(NamedTuple):
    """The state of a run and, once it has ended, its result or error."""

    status: str
    reason: str | None
    result: bytes | None
    error: TaskError | None
    stuck: dict[str, Any] | None


def outcome(connection: Connection, run: bytes) -> CodeRunOutcome | None:
    """Return the outcome of a run of a workflow as code; None if there is no such run."""
    row = _OUTCOME.first(connection, id=run)
    if row is None:
        return None
    return _outcome_of(row)


def _outcome_of(row: Row) -> CodeRunOutcome:
    error = TaskError.stored(row.error)
    if row.status == RunState.FAILED and row.task_status == TaskState.CANCELLED:
        error = RAN_TOO_LONG
    elif row.status == RunState.CANCELLED and row.reason == TERMINATED:
        error = WAS_TERMINATED
    return CodeRunOutcome(row.status, row.reason, None if row.result is None else bytes(row.result), error, row.stuck)


_OUTCOMES = Prepared[Row]("""
SELECT /* code_reads.outcomes */ r.id, r.status, r.reason, t.result, t.error, r.stuck, t.status AS task_status
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
  LEFT JOIN LATERAL (
       SELECT result, error, status FROM orchestrator.ended_tasks WHERE id = r.id AND r.code LIMIT 1) AS t ON true
""")


def outcomes(connection: Connection, runs: Collection[bytes]) -> dict[bytes, CodeRunOutcome]:
    """Return the outcomes of runs of any kind that exist; only runs of code have results."""
    return {row.id: _outcome_of(row) for row in _OUTCOMES(connection, ids=runs)} if runs else {}


_WAITING = Statement[dict[str, Any] | None](
    "SELECT /* code_reads.waiting */ waiting FROM orchestrator.runs WHERE id = %(id)s::uuid"
)


def waiting(connection: Connection, run: bytes) -> dict[str, Any]:
    """Return what the run's code was waiting for after its last turn, as its worker reported it; empty if unknown."""
    return _WAITING.first(connection, id=run) or {}


class Answering(NamedTuple):
    """The number of workers that could answer a query of a run."""

    workflow: str
    queue: str
    workers: int


@Statement.function(f"""
SELECT /* code_reads.answering */ r.workflow, t.queue,
       (SELECT count(*) FROM orchestrator.workers
         WHERE state = 'live' AND {IS_FRESH} AND t.queue = ANY(queues) AND r.workflow = ANY(names)) AS workers
  FROM orchestrator.runs r
 CROSS JOIN LATERAL (SELECT queue FROM orchestrator.tasks WHERE id = r.id
                      UNION ALL SELECT queue FROM orchestrator.ended_tasks WHERE id = r.id LIMIT 1) AS t
 WHERE r.id = %(run)s::uuid
""")
def answering_workers(connection: Connection, run: bytes) -> Answering | None:
    """Return the number of live workers that have the code of a run."""


_ATTRIBUTES = Statement[dict[str, Any] | None](
    "SELECT /* code_reads.attributes */ attributes FROM orchestrator.runs WHERE id = %(id)s::uuid"
)


def attributes(connection: Connection, run: bytes) -> dict[str, Any]:
    return _ATTRIBUTES.first(connection, id=run) or {}


_REPEATED = Statement[Row](f"""
SELECT /* code_reads.repeated */ h.data, array_to_json(r.tags)::text AS tags, t.name <> r.workflow AS pinned,
       r.version, r.name, r.headers::text AS headers,
       extract(epoch FROM CASE WHEN r.reason = '{TIMED_OUT}' THEN told.at ELSE r.deadline END
                          - r.created_at)::double precision AS timeout
  FROM orchestrator.runs r JOIN orchestrator.histories h ON h.run_id = r.id AND h.number = 1
 CROSS JOIN LATERAL (SELECT name FROM orchestrator.tasks WHERE id = r.id
                      UNION ALL SELECT name FROM orchestrator.ended_tasks WHERE id = r.id LIMIT 1) AS t
 CROSS JOIN LATERAL (SELECT min(at) AS at FROM orchestrator.histories
                      WHERE run_id = r.id AND kind = 'run_cancel_requested'
                        AND position('{TIMED_OUT}'::bytea IN data) > 0) AS told
 WHERE r.id = %(id)s::uuid AND r.code
""")


def rerun_of(connection: Connection, run: bytes, new: bytes) -> NewRun | None:
    """Return a new run that repeats all of another one, with as much time; None if the run is not of code."""
    row = _REPEATED.first(connection, id=run)
    if row is None:
        return None
    old = first_event(bytes(row.data))
    started = history.RunStarted(old.workflow, row.version, old.payload, old.queue, attributes=old.attributes)
    rerun = code_runs.new_run(new, [started], pinned=row.pinned)
    return rerun._replace(timeout=row.timeout, tags=row.tags, name=row.name, headers=row.headers)
