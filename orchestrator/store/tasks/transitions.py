"""Every change of a task's state, one statement each, guarded by state and attempt.

Only the leader calls these, inside the tick's transaction. Each statement returns the rows that it changed, and
everything that follows (counters, announcements) derives from those rows. The guards derive from the transition table.
Claims (pending → dispatched) are in `claims.py`; retries of ended tasks, which take keys, are in `revival.py`.

A planner trap, tested: in a join with an `unnest` that Postgres cannot estimate, above all if it believes the table to
be empty, Postgres may scan all tasks and loop over the whole batch for each. So each row is found by a subquery that
cannot be reordered, and updated by ctid. That is safe because only the leader changes rows, with one exception: a
worker may complete its attempt at any moment. So every statement that takes an attempt away checks `completion` again
on the row that it writes. (When a row has moved while its writer waited, Postgres rechecks conditions on columns, but
before late 2025 not the one on ctid.) A transaction may also keep a row locked for long, so callers lock rows first,
without waiting (`locks.py`); the start of an attempt that is already completing is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, exc

from orchestrator.domain.states import IN_FLIGHT_STATES, TaskState, sources_of
from orchestrator.store.batches import Batch, Blob, Json, Seconds
from orchestrator.store.sql import Prepared, columns_of
from orchestrator.store.tasks.row import ATTEMPT, CARRIED, insert_ended


def among(states: Iterable[TaskState]) -> str:
    """Return states as an SQL list for IN."""
    return "({})".format(", ".join(f"'{state}'" for state in states))


def current_attempt(
    states: Iterable[TaskState] = IN_FLIGHT_STATES, columns: str = "ctid AS place", lock: str = ""
) -> str:
    """Return a join that finds the row of each reported attempt `r` that is still current, as `found.place`."""
    return f"""CROSS JOIN LATERAL (
           SELECT {columns} FROM orchestrator.tasks
            WHERE id = r.id AND attempt = r.attempt AND status IN {among(states)} LIMIT 1 {lock}) AS found"""


def arrivals(ready: str) -> str:
    """Return a statement that inserts an ARRIVAL request for each task that is ready in a lane."""
    return f"INSERT INTO orchestrator.inbox (kind, target) SELECT 'arrival', id FROM {ready}"


class Moved(NamedTuple):
    """A task whose state a statement has changed."""

    id: bytes
    state: str
    queue: str
    run_id: bytes | None
    attempt: int
    before: str
    """The previous state."""
    name: str = ""
    """The name of the task; empty for turn tasks."""
    step: str | None = None
    """The workflow step of the task."""
    lane: str | None = None
    unique_key: str | None = None
    callbacks: Any = None
    """Callbacks to create when the task ends, as JSON."""
    trace: str | None = None
    """The traceparent of the task, if callbacks follow."""
    headers: Any = None
    """The headers of the task, if callbacks follow and it has headers."""

    @property
    def is_turn_task(self) -> bool:
        """Return whether this is the turn task of a run of a workflow as code."""
        return self.run_id == self.id

    @property
    def is_single(self) -> bool:
        """Return whether the end affects only waiting clients: the task has no run, limit, key or callbacks."""
        return self.run_id is None and self.lane is None and self.unique_key is None and self.callbacks is None


# -- dispatched → running


class AttemptStart(NamedTuple):
    id: bytes
    attempt: int
    age: float
    worker: str


_STARTS = Batch("r", AttemptStart)


def _start_statement(name: str) -> str:
    return f"""
UPDATE /* {name} */ orchestrator.tasks t
   SET status = 'running', started_at = %(now)s::timestamptz - r.age * interval '1 second', worker = r.worker
  FROM {_STARTS}
 {current_attempt(sources_of(TaskState.RUNNING), lock="FOR UPDATE SKIP LOCKED")}
 WHERE t.ctid = found.place
"""


_START = Prepared[None](_start_statement("tasks.start"))
_START_TOLD = Prepared[Moved](
    _start_statement("tasks.start_told")
    + "RETURNING "
    + columns_of(Moved, "t", last="name", state="'running'", before="'dispatched'")
)


def start(connection: Connection, rows: Sequence[AttemptStart], now: datetime, *, notify: bool = False) -> list[Moved]:
    """Mark attempts as running; return them only if live events need them (`notify`)."""
    if notify:
        return _START_TOLD(connection, _STARTS(rows), now=now)
    _START(connection, _STARTS(rows), now=now)
    return []


# -- in flight → pending


class Requeue(NamedTuple):
    """An attempt whose task returns to pending."""

    id: bytes
    attempt: int
    delay: float = 0.0
    failures: int = 0
    losses: int = 0
    alone: bool = False
    outcome: str | None = None
    """`failed`, `lost` or `postponed`; None for a returned attempt, stored as `returned` if it had started."""
    error: Json | None = None
    worker: str | None = None
    duration: Seconds | None = None
    hold: str | None = None


_ATTEMPTS = Batch("r", Requeue)
_REQUEUE = Prepared[Moved](f"""
WITH /* tasks.requeue */ back AS (
    UPDATE orchestrator.tasks t
       SET status = 'pending', hold = r.hold,
           wake_at = CASE WHEN r.delay > 0 THEN %(now)s::timestamptz + r.delay * interval '1 second' END,
           failures = t.failures + r.failures, losses = t.losses + r.losses, alone = t.alone OR r.alone,
           dispatched_at = NULL, started_at = NULL, worker = NULL,
           ready_at = CASE WHEN t.trace IS NOT NULL THEN %(now)s::timestamptz END,
           expires_at = CASE WHEN r.outcome IS NULL THEN t.expires_at END
      FROM {_ATTEMPTS}
     {current_attempt(sources_of(TaskState.PENDING)[:2], "ctid AS place, started_at AS began, worker AS runner")}
     WHERE t.ctid = found.place AND t.completion IS NULL
    RETURNING t.id, t.queue, t.run_id, t.attempt, t.name, t.step, t.lane, t.wake_at, r.outcome, r.error, r.duration,
              found.began, coalesce(r.worker, found.runner) AS worker
), kept AS (
    INSERT INTO {ATTEMPT}
    SELECT id, attempt, coalesce(outcome, 'returned'), error, worker,
           coalesce(%(now)s::timestamptz - duration * interval '1 second', began), %(now)s::timestamptz
      FROM back WHERE outcome IS NOT NULL OR (began IS NOT NULL AND run_id IS DISTINCT FROM id)
), arrived AS (
    {arrivals("back WHERE wake_at IS NULL AND lane IS NOT NULL")}
)
SELECT {columns_of(Moved, last="lane", state="'pending'", before="'dispatched'")} FROM back
""")


def requeue(connection: Connection, rows: Sequence[Requeue], now: datetime) -> list[Moved]:
    """Return the tasks of attempts to pending, and add failures and losses."""
    return _REQUEUE(connection, _ATTEMPTS(rows), now=now)


class Adoption(NamedTuple):
    """An attempt whose worker has found that an executor runs the task."""

    id: bytes
    attempt: int
    executor: Json


_ADOPTIONS = Batch("r", Adoption)
_ADOPT = Prepared[None](f"""
UPDATE /* tasks.adopt */ orchestrator.tasks t
   SET options = coalesce(t.options, '{{}}'::jsonb) || jsonb_build_object('executor', r.executor::jsonb)
  FROM {_ADOPTIONS}
 {current_attempt(sources_of(TaskState.PENDING)[:2])}
 WHERE t.ctid = found.place AND NOT coalesce(t.options ? 'executor', false)
""")


def adopt_executors(connection: Connection, rows: Sequence[Adoption]) -> None:
    """Add executors to the options of tasks that named none, before their attempts end."""
    _ADOPT(connection, _ADOPTIONS(rows))


# -- open → ended: the row moves to ended_tasks


def _moved_to(state: TaskState) -> str:
    """Return the columns of `Moved` for ended tasks."""
    trace, headers = (
        f"CASE WHEN callbacks IS NOT NULL THEN {column} END" for column in ("trace", "options -> 'headers'")
    )
    return columns_of(Moved, state=f"'{state}'", before="status", trace=trace, headers=headers)


class Success(NamedTuple):
    """An attempt that succeeded."""

    id: bytes
    attempt: int
    result: Blob
    duration: Seconds
    worker: str


SUCCESSES = Batch("r", Success)
FOLLOWED = f"""
       SELECT FROM {SUCCESSES} CROSS JOIN LATERAL (
              SELECT FROM orchestrator.tasks
               WHERE id = r.id AND num_nonnulls(run_id, lane, unique_key, callbacks) > 0 LIMIT 1) AS followed"""
"""Selects successes whose end affects more than waiting clients: `Moved.is_single` is false."""
_ENDED = insert_ended(
    "gone",
    status="'success'",
    reason="NULL",
    error="NULL",
    started_at="%(now)s::timestamptz - duration * interval '1 second'",
    ended_at="%(now)s::timestamptz",
)


_KEPT_COLUMNS = ", ".join(f"t.{column}" for column in [*CARRIED.split(", "), "status", "failures", "losses"])


def succeeding(condition: str = "") -> str:
    """Return CTEs that end tasks whose current attempt succeeded, with an additional condition."""
    return f"""gone AS (
    DELETE FROM orchestrator.tasks t
     USING {SUCCESSES}
     {current_attempt(sources_of(TaskState.SUCCESS))}
     WHERE t.ctid = found.place {condition}
    RETURNING {_KEPT_COLUMNS}, coalesce(t.completion, r.result) AS result, r.duration, r.worker
), ended AS (
    INSERT {_ENDED}
)"""


SUCCEEDED = f"SELECT {_moved_to(TaskState.SUCCESS)} FROM gone"
_SINGLE = columns_of(Moved, last="name", state="'success'", before="status")
SINGLE_SUCCEEDED = f"SELECT {_SINGLE} FROM gone"
"""Like `SUCCEEDED`, for tasks whose end affects only waiting clients. Fewer columns save time in the driver."""
_SUCCEED = Prepared[Moved](f"""
WITH /* tasks.succeed */ {succeeding()}
{SUCCEEDED}
""")


_UNEXPECTED = "not as foreseen"


def all_of(changed: str) -> str:
    """Return the end of a statement whose result is not read; the statement fails unless it changes `number` rows."""
    return f"SELECT (CASE count(*) WHEN %(number)s::int THEN '1' ELSE '{_UNEXPECTED}' END)::int FROM {changed}"


def is_unforeseen(error: BaseException) -> bool:
    """Return whether a deferred statement failed because a task did not end as expected."""
    return isinstance(error, exc.DataError) and _UNEXPECTED in str(error.orig)


_SUCCEED_LATER = Prepared[None](f"""
WITH /* tasks.succeed_later */ {succeeding()}
{all_of("gone")}
""")
_SUCCEED_SINGLE_LATER = Prepared[None](f"""
WITH /* tasks.succeed_single_later */ {succeeding(f"AND NOT EXISTS ({FOLLOWED})")}
{all_of("gone")}
""")


def succeed(
    connection: Connection, rows: Sequence[Success], now: datetime, foreseen: Mapping[bytes, Moved] | None = None
) -> list[Moved]:
    """End tasks whose current attempt succeeded; with `foreseen` ends, defer that to the next statement."""
    if foreseen is None:
        return _SUCCEED(connection, SUCCESSES(rows), now=now)
    moved = [foreseen[row.id] for row in rows]
    statement = _SUCCEED_SINGLE_LATER if moved[0].is_single else _SUCCEED_LATER
    statement.defer(connection, SUCCESSES(rows), now=now, number=len(rows))
    return moved


class AttemptEnd(NamedTuple):
    """A task that ends without success."""

    id: bytes
    attempt: int | None
    """The attempt, which must be current and in flight; None ends the task in any state that allows it."""
    reason: str
    error: Json | None = None
    failures: int = 0
    losses: int = 0
    worker: str | None = None
    duration: Seconds | None = None


_ENDINGS = Batch("r", AttemptEnd)


def _end_statement(state: TaskState) -> Prepared[Moved]:
    kept = insert_ended(
        "gone",
        status=f"'{state}'",
        failures="failures + failed",
        losses="losses + lost",
        result="NULL",
        worker="coalesce(finisher, worker)",
        started_at="coalesce(%(now)s::timestamptz - duration * interval '1 second', started_at)",
        ended_at="%(now)s::timestamptz",
    )
    return Prepared[Moved](f"""
WITH /* tasks.end_{state} */ gone AS (
    DELETE FROM orchestrator.tasks t
     USING {_ENDINGS}
     CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.tasks
            WHERE id = r.id AND status IN {among(sources_of(state))}
              AND (r.attempt IS NULL OR (attempt = r.attempt AND status <> 'pending')) LIMIT 1) AS found
     WHERE t.ctid = found.place AND t.completion IS NULL
    RETURNING t.*, r.reason, r.error, r.failures AS failed, r.losses AS lost, r.duration, r.worker AS finisher
), kept AS (
    INSERT {kept}
)
SELECT {_moved_to(state)} FROM gone
""")


_END = {state: _end_statement(state) for state in (TaskState.FAILED, TaskState.CANCELLED, TaskState.SKIPPED)}


def end(connection: Connection, state: TaskState, rows: Sequence[AttemptEnd], now: datetime) -> list[Moved]:
    """End tasks as failed, cancelled or skipped."""
    return _END[state](connection, _ENDINGS(rows), now=now)
