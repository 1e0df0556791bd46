"""Cancels runs and what they started, thousands at a time; and retries failed runs of workflows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.dag.composed import PREFIX as COMPOSED
from orchestrator.domain.runs import TERMINATED, TIMED_OUT
from orchestrator.domain.states import RunState
from orchestrator.store.runs.transitions import COUNTERS, RunRow, sources
from orchestrator.store.sql import Prepared, Statement
from orchestrator.store.tasks.row import archive_last_attempt


@Prepared.function(f"""
UPDATE /* cancels.mark */ orchestrator.runs
   SET cancelling = true, reason = CASE WHEN code AND %(code)s::boolean THEN '{TERMINATED}' ELSE reason END
 WHERE id = ANY(%(ids)s::uuid[]) AND status IN ('pending', 'running') AND NOT cancelling
   AND (%(code)s::boolean OR NOT code OR status = 'pending')
RETURNING id
""")
def mark_cancelling(connection: Connection, ids: Sequence[bytes], *, code: bool = False) -> list[bytes]:
    """Mark runs as cancelling; their tasks are cancelled in slices. With `code`, running code is terminated, too.

    Code that has not begun has nothing to clean up, and is always cancelled.
    """


class Late(NamedTuple):
    """A run that has timed out."""

    id: bytes
    must_notify_code: bool
    """Whether the code must be notified, and has a grace period to end."""


@Prepared.function(f"""
WITH /* cancels.time_out */ due AS MATERIALIZED (
    SELECT id, code, shown, stuck, reason IS NOT DISTINCT FROM '{TIMED_OUT}' AS over FROM orchestrator.runs
     WHERE deadline <= %(now)s::timestamptz AND status = 'running' AND ended_at IS NULL AND NOT cancelling
     ORDER BY deadline LIMIT %(limit)s
), judged AS (
    SELECT due.id, due.code AND NOT due.over AS must_notify_code,
           NOT due.code OR due.over AND due.stuck IS NULL AND (own.id IS NULL OR unheard.number IS NULL) AS ends
      FROM due
      LEFT JOIN LATERAL (
           SELECT id FROM orchestrator.tasks WHERE id = due.id AND status = 'pending' LIMIT 1) AS own ON true
      LEFT JOIN LATERAL (
           SELECT number FROM orchestrator.histories
            WHERE run_id = due.id AND number > due.shown AND kind = 'run_cancel_requested' LIMIT 1) AS unheard ON true
)
UPDATE orchestrator.runs r
   SET reason = '{TIMED_OUT}', cancelling = late.ends,
       deadline = CASE WHEN NOT late.ends THEN %(now)s::timestamptz + %(grace)s * interval '1 second'
                       WHEN NOT r.code THEN r.deadline END
  FROM judged late
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = late.id LIMIT 1) AS found
 WHERE r.ctid = found.place
RETURNING r.id, late.must_notify_code
""")
def time_out(connection: Connection, now: datetime, limit: int, grace: float) -> list[Late]:
    """Mark runs that have timed out; their tasks are cancelled in slices, and then the runs fail.

    A run of code is cancelled only after its grace period. That is extended while the code could not react: the run is
    stuck, or no worker has run the turn.
    """


@Prepared.function(f"""
WITH /* cancels.mark_below */ RECURSIVE below (id, code, is_given) AS (
    SELECT given.id, r.code, true FROM unnest(%(ids)s::uuid[]) AS given(id)
     CROSS JOIN LATERAL (SELECT code FROM orchestrator.runs WHERE id = given.id LIMIT 1) AS r
     UNION ALL
    SELECT c.id, c.code, false FROM below
     CROSS JOIN LATERAL (
           SELECT id, code FROM orchestrator.runs
            WHERE parent_run = below.id AND ended_at IS NULL AND NOT cancelling AND NOT detached OFFSET 0) AS c
     WHERE NOT below.code
)
UPDATE orchestrator.runs r
   SET cancelling = true, status = CASE WHEN found.is_new THEN 'cancelled' ELSE r.status END,
       ended_at = CASE WHEN found.is_new THEN %(now)s::timestamptz END
  FROM (SELECT id FROM below WHERE NOT is_given LIMIT %(limit)s) AS next
 CROSS JOIN LATERAL (
       SELECT ctid AS place, status = 'pending' AND open = 0 AND NOT code AS is_new
         FROM orchestrator.runs WHERE id = next.id LIMIT 1) AS found
 WHERE r.ctid = found.place
RETURNING {COUNTERS}
""")
def cancel_descendants(connection: Connection, ids: Sequence[bytes], now: datetime, limit: int) -> list[RunRow]:
    """Cancel all descendants of runs that are being cancelled.

    Descendants that have not begun end at once. Children of runs of code follow when the parent ends, according to
    their close policy.
    """


@Prepared.function("""
SELECT /* cancels.next */ id FROM orchestrator.runs
 WHERE cancelling AND ended_at IS NULL AND id > %(after)s::uuid ORDER BY id LIMIT %(limit)s
""")
def following(connection: Connection, after: bytes, limit: int) -> list[bytes]:
    """Return the runs after an id that are being cancelled."""


@Prepared.function("""
SELECT /* cancels.open_tasks */ id FROM orchestrator.tasks WHERE run_id = ANY(%(ids)s::uuid[]) LIMIT %(limit)s
""")
def open_tasks(connection: Connection, ids: Sequence[bytes], limit: int) -> list[bytes]:
    """Return up to `limit` open tasks of runs."""


class Part(NamedTuple):
    """An open run of a composition."""

    id: bytes
    status: str


@Prepared.function(f"""
WITH /* cancels.parts */ RECURSIVE parts (id, status) AS (
    SELECT id, status FROM orchestrator.runs
     WHERE id = ANY(%(ids)s::uuid[]) AND ended_at IS NULL AND starts_with(workflow, '{COMPOSED}')
     UNION ALL
    SELECT c.id, c.status FROM parts
     CROSS JOIN LATERAL (
           SELECT id, status FROM orchestrator.runs
            WHERE parent_run = parts.id AND ended_at IS NULL AND starts_with(workflow, '{COMPOSED}') OFFSET 0) AS c
)
SELECT id, status FROM parts
""")
def open_parts(connection: Connection, ids: Sequence[bytes]) -> list[Part]:
    """Return those of these runs that are open compositions, and the open compositions within them."""


@Prepared.function("""
SELECT /* cancels.not_running */ t.id FROM unnest(%(ids)s::uuid[], %(steps)s::text[]) AS wanted(run, step)
 CROSS JOIN LATERAL (
       SELECT id FROM orchestrator.tasks
        WHERE run_id = wanted.run AND status <> 'running' AND (wanted.step IS NULL OR step = wanted.step) OFFSET 0) AS t
 LIMIT %(limit)s
""")
def not_running(connection: Connection, ids: Sequence[bytes], steps: Sequence[str | None], limit: int) -> list[bytes]:
    """Return up to `limit` open tasks of runs, or of one step each, that are not running."""


class AtRest(NamedTuple):
    """A run that is being cancelled and has nothing open: its remaining tasks were never created."""

    id: bytes
    is_with_parent: bool
    """Whether the parent is being cancelled too, so it need not be notified."""


@Prepared.function("""
SELECT /* cancels.at_rest */ r.id, coalesce(
       (SELECT cancelling AND ended_at IS NULL AND stuck IS NULL AND NOT code
          FROM orchestrator.runs WHERE id = r.parent_run), false) AS is_with_parent
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT id, parent_run FROM orchestrator.runs
        WHERE id = wanted.id AND cancelling AND ended_at IS NULL AND NOT code AND stuck IS NULL LIMIT 1) AS r
 WHERE (SELECT 1 FROM orchestrator.tasks WHERE run_id = wanted.id LIMIT 1) IS NULL
   AND (SELECT 1 FROM orchestrator.runs
         WHERE parent_run = wanted.id AND ended_at IS NULL AND NOT detached LIMIT 1) IS NULL
""")
def without_open_work(connection: Connection, ids: Sequence[bytes]) -> list[AtRest]:
    """Return the runs among these that are being cancelled and have neither open tasks nor open child runs."""


# -- retries of failed runs of workflows, for the leader (see `domain/dag/state.py`)

_BACK = "status = 'pending', ended_at = NULL, reason = NULL, cancelling = false, parked = false, deadline = NULL"
_UNSUCCESSFUL = sources(RunState.PENDING)


@Prepared.function(f"""
UPDATE /* run_retries.requeue */ orchestrator.runs SET {_BACK}
 WHERE ctid = ANY (ARRAY(
       SELECT found.place FROM unnest(%(ids)s::uuid[]) AS wanted(id)
        CROSS JOIN LATERAL (
              SELECT ctid AS place, status, workflow, code, parent_step
                FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS found
        WHERE found.status = 'failed' AND found.workflow IS NOT NULL AND NOT found.code AND found.parent_step IS NULL))
RETURNING id
""")
def requeue(connection: Connection, ids: Sequence[bytes]) -> set[bytes]:
    """Return failed runs of workflows to pending, like new runs; return their ids."""


_HAS_WORKFLOW = Prepared[bool](
    "SELECT /* run_retries.has_workflow */ workflow IS NOT NULL FROM orchestrator.runs WHERE id = %(run)s::uuid"
)


def has_workflow(connection: Connection, run: bytes) -> bool:
    """Return whether a run has a workflow, so that its state depends on a plan and not only on its tasks."""
    return _HAS_WORKFLOW.first(connection, run=run) is True


_REQUEUE_CHILDREN = Prepared[bytes](f"""
UPDATE /* run_retries.requeue_children */ orchestrator.runs SET {_BACK}
 WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM orchestrator.runs
        WHERE parent_run = %(run)s::uuid AND parent_step = %(step)s AND status IN {_UNSUCCESSFUL}
              AND ended_at <= %(until)s::timestamptz LIMIT %(limit)s))
RETURNING id
""")


def requeue_children(connection: Connection, run: bytes, step: str, until: datetime, limit: int) -> int:
    """Return a step's child runs to pending that had not succeeded by `until`; return their number."""
    return len(_REQUEUE_CHILDREN(connection, run=run, step=step, until=until, limit=limit))


@Prepared.function(f"""
SELECT /* run_retries.with_children */ wanted.step FROM unnest(%(steps)s::text[]) AS wanted(step)
 WHERE (SELECT true FROM orchestrator.runs
         WHERE parent_run = %(run)s::uuid AND parent_step = wanted.step AND status IN {_UNSUCCESSFUL} LIMIT 1)
""")
def with_children(connection: Connection, run: bytes, steps: Sequence[str]) -> set[str]:
    """Return the steps that have a child run to retry."""


@Statement.function("""
SELECT /* run_retries.parent */ parent_run::text, parent_step FROM orchestrator.runs
 WHERE id = %(run)s::uuid AND parent_step IS NOT NULL
""")
def parent_of(connection: Connection, run: bytes) -> tuple[str, str] | None:
    """Return the parent run and the step of a run."""


class EndedIn(NamedTuple):
    """The run of an ended task, with what decides whether the task can be retried on its own (see `revival`)."""

    run: str
    status: str
    is_code: bool
    is_flow: bool
    is_cancelled: bool
    has_workflow: bool
    is_whole: bool
    """Whether a failed run is retried as a whole: it timed out, has a limit, or is a step of another run."""


@Statement.function("""
SELECT /* run_retries.ended_in */ e.run_id::text AS run, r.status, r.code AS is_code, r.flow AS is_flow,
       r.cancelling AS is_cancelled, r.workflow IS NOT NULL AS has_workflow,
       r.lane IS NOT NULL OR r.parent_step IS NOT NULL OR (r.cancelling AND r.workflow IS NOT NULL) AS is_whole
  FROM orchestrator.ended_tasks e JOIN orchestrator.runs r ON r.id = e.run_id
 WHERE e.id = %(task)s::uuid
""")
def ended_in(connection: Connection, task: bytes) -> EndedIn | None:
    """Return the run of an ended task."""


@Prepared.function("""
SELECT /* run_retries.unfinished */ id FROM orchestrator.ended_tasks
 WHERE run_id = %(run)s::uuid AND step = %(step)s AND status IN ('failed', 'cancelled', 'skipped')
       AND ended_at <= %(until)s::timestamptz
 ORDER BY position LIMIT %(limit)s
""")
def unfinished_tasks(connection: Connection, run: bytes, step: str, until: datetime, limit: int) -> list[bytes]:
    """Return the first tasks of a step that had not succeeded by `until`."""


@Prepared.function("""
SELECT /* run_retries.created */ wanted.step,
       (SELECT count(*) FROM orchestrator.ended_tasks WHERE run_id = %(run)s::uuid AND step = wanted.step)
       + (SELECT count(*) FROM orchestrator.tasks WHERE run_id = %(run)s::uuid AND step = wanted.step)
       + (SELECT count(*) FROM orchestrator.runs WHERE parent_run = %(run)s::uuid AND parent_step = wanted.step)
  FROM unnest(%(steps)s::text[]) AS wanted(step)
""")
def created(connection: Connection, run: bytes, steps: Sequence[str]) -> dict[str, int]:
    """Return the number of tasks and child runs of each step."""


# Attempts of deleted tasks go to the attempts table, so that a task created again continues their numbers and no late
# report of an old attempt matches it.
@Prepared.function(f"""
WITH /* run_retries.take_back */ old AS (
    DELETE FROM orchestrator.ended_tasks WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.ended_tasks
            WHERE run_id = %(run)s::uuid AND step = ANY(%(steps)s::text[]) LIMIT %(limit)s))
    RETURNING *
), history AS (
    {archive_last_attempt("old WHERE attempt > 0")}
), orphaned AS (
    UPDATE orchestrator.runs SET parent_step = NULL WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.runs
            WHERE parent_run = %(run)s::uuid AND parent_step = ANY(%(steps)s::text[])
            LIMIT %(limit)s))
    RETURNING id
)
SELECT count(*) FROM (SELECT id FROM old UNION ALL SELECT id FROM orphaned) AS gone
""")
def delete_to_replan(connection: Connection, run: bytes, steps: Sequence[str], limit: int) -> int:
    """Delete a slice of the tasks of steps to plan again, and detach child runs; return the number of rows."""


@Prepared.function("""
SELECT /* run_retries.past */ wanted.id, past.attempt FROM unnest(%(tasks)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT max(attempt) AS attempt FROM orchestrator.attempts WHERE task_id = wanted.id) AS past
 WHERE past.attempt IS NOT NULL
""")
def past_attempts(connection: Connection, tasks: Sequence[bytes]) -> dict[bytes, int]:
    """Return the last stored attempts of tasks that will be created again."""
