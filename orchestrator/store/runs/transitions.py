"""State changes of runs, and their counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.runs import CONTINUATION_REASONS, TERMINATED, TIMED_OUT, RunCounters
from orchestrator.domain.states import ENDED_RUN_STATES, RunState, run_sources_of
from orchestrator.store.batches import Batch
from orchestrator.store.runs.pending_changes import RoundRobin
from orchestrator.store.sql import Prepared, columns_of


class RunRow(NamedTuple):
    """A run, as the leader sees it."""

    id: bytes
    status: str
    cancelling: bool
    total: int
    open: int
    success: int
    failed: int
    cancelled: int
    skipped: int
    workflow: str | None = None
    reason: str | None = None
    lane: str | None = None
    parent_run: bytes | None = None
    parent_step: str | None = None
    code: bool = False
    """Whether the run is of a workflow as code: only its code ends it."""
    child_id: bytes = b""
    """The id under which the parent's code waits for this run's code."""
    trace: str | None = None
    """The traceparent of the run's parent span."""
    created: float | None = None
    """For a traced run: its creation time in Unix seconds."""
    flow: bool = False
    """Whether the run is of a flow, whose planner ends it."""
    is_retry: bool = False
    """Whether the run has begun before, and a person retries it."""

    @property
    def state(self) -> RunState:
        return RunState(self.status)

    @property
    def counters(self) -> RunCounters:
        return RunCounters(
            total=self.total,
            open=self.open,
            success=self.success,
            failed=self.failed,
            cancelled=self.cancelled,
            skipped=self.skipped,
        )

    @property
    def kind(self) -> str | None:
        """The kind of workflow: dag, flow or code; None without a workflow."""
        return "code" if self.code else "flow" if self.flow else "dag" if self.workflow is not None else None

    @property
    def has_successor(self) -> bool:
        """Return whether the run continues in another run, for which clients wait instead."""
        return self.code and self.reason in CONTINUATION_REASONS


COUNTERS = columns_of(
    RunRow,
    "r",
    but=("is_retry",),
    child_id="coalesce(r.child_id, r.id)",
    created="CASE WHEN r.trace IS NOT NULL THEN extract(epoch FROM r.created_at)::double precision END",
)
"""The columns of a `RunRow`."""

# A run whose lane is full is parked: it is not tried again until a run of the lane ends. Its timeout begins when the
# run begins; the deadline set at its creation is for leaders of the previous release.
_BEGIN = f"""
WITH /* {{name}} */ next AS MATERIALIZED (
    SELECT r.id, lane, lane_limit, started_at, root, parent_run,
           coalesce(timeout, extract(epoch FROM deadline - created_at)) AS timeout
      FROM unnest(%(ids)s::uuid[]) AS wanted(id)
     CROSS JOIN LATERAL (
           SELECT * FROM orchestrator.runs
            WHERE id = wanted.id AND status = 'pending' AND NOT parked AND NOT cancelling LIMIT 1) AS r
), held AS MATERIALIZED (
    SELECT lane, (SELECT count(*) FROM {{holders}} WHERE lane = wanted.lane AND status = 'running') AS number
      FROM (SELECT DISTINCT lane FROM next WHERE lane IS NOT NULL) AS wanted
), admitted AS (
    SELECT n.id, n.timeout, n.started_at,
           coalesce((SELECT cancelling AND ended_at IS NULL FROM orchestrator.runs WHERE id = n.root), false)
           OR coalesce((SELECT cancelling AND ended_at IS NULL FROM orchestrator.runs WHERE id = n.parent_run), false)
           AS over,
           n.lane IS NULL
           OR n.lane_limit > held.number + row_number() OVER (PARTITION BY n.lane ORDER BY n.id) - 1 AS free
      FROM next n LEFT JOIN held USING (lane)
)
UPDATE orchestrator.runs r
   SET status = CASE WHEN a.over THEN 'cancelled' WHEN a.free THEN 'running' ELSE r.status END,
       ended_at = CASE WHEN a.over THEN %(now)s::timestamptz END,
       started_at = coalesce(a.started_at, CASE WHEN a.free AND NOT a.over THEN %(now)s::timestamptz END),
       retried_at = CASE WHEN a.started_at IS NOT NULL AND a.free AND NOT a.over THEN %(now)s::timestamptz
                         ELSE r.retried_at END,
       timeout = a.timeout,
       deadline = CASE WHEN a.free THEN %(now)s::timestamptz + a.timeout * interval '1 second' END,
       parked = NOT a.free AND NOT a.over,
       cancelling = a.over
  FROM admitted a
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = a.id LIMIT 1) AS found
 WHERE r.ctid = found.place
RETURNING {COUNTERS}, a.started_at IS NOT NULL AS is_retry
"""
_BEGIN_ALONE = Prepared[RunRow](_BEGIN.format(name="runs.begin", holders="orchestrator.runs"))
_BEGIN_SHARED = Prepared[RunRow](_BEGIN.format(name="runs.begin_shared", holders="orchestrator.all_runs"))


class Begun(NamedTuple):
    """Pending runs, by what happened when the leader tried to begin them."""

    running: list[RunRow]
    waiting: list[RunRow]
    """Runs that were parked because their lane is full."""
    cancelled: list[RunRow]
    """Descendants of a run that is being cancelled."""


def begin_or_park(connection: Connection, now: datetime, ids: Sequence[bytes], *, is_shared: bool = False) -> Begun:
    """Start the pending runs among these as far as their lanes have room, and park the rest.

    Descendants of a run that is being cancelled are cancelled instead, so no run tree grows faster than it is
    cancelled. Lanes that are shared with other shards must be locked first (`ancestry.py`).
    """
    by_state: dict[RunState, list[RunRow]] = {RunState.RUNNING: [], RunState.PENDING: [], RunState.CANCELLED: []}
    for row in (_BEGIN_SHARED if is_shared else _BEGIN_ALONE)(connection, now=now, ids=ids):
        by_state[row.state].append(row)
    return Begun(*by_state.values())


class Pending(NamedTuple):
    """A run that waits to begin, and its workflow."""

    id: bytes
    workflow: str | None
    version: int | None
    """For a DAG only: the cost of planning a flow is not known before, and code needs no plan."""
    lane: str | None
    """The concurrency group of the run."""


def pending() -> RoundRobin:
    """Return a finder of pending runs."""
    return RoundRobin(
        "runs.pending",
        "runs",
        "status = 'pending' AND NOT parked AND NOT cancelling",
        "id, workflow, CASE WHEN NOT flow AND NOT code THEN version END AS version, lane",
    )


def begin(connection: Connection, now: datetime, limit: int) -> list[RunRow]:
    """Start pending runs as far as their lanes have room; return the started ones."""
    return begin_or_park(connection, now, [run.id for run in pending()(connection, limit)]).running


_ROOMS = Batch("ended", "lane text, room int")
_UNPARK = Prepared[None](f"""
UPDATE /* runs.unpark */ orchestrator.runs SET parked = false
 WHERE ctid = ANY (ARRAY(
       SELECT next.ctid FROM {_ROOMS}
        CROSS JOIN LATERAL (
              SELECT ctid FROM orchestrator.runs
               WHERE lane = ended.lane AND ended_at IS NULL AND status = 'pending' AND parked
               ORDER BY id LIMIT ended.room) AS next))
""")


def unpark(connection: Connection, ended: Mapping[str, int]) -> None:
    """Unpark as many runs of each lane as runs of the lane have ended."""
    _UNPARK(connection, _ROOMS(ended.items()))


_COUNTED = ("total", "opened", "success", "failed", "cancelled", "skipped")
_DELTAS = Batch("d", f"id uuid, {' int, '.join(_COUNTED)} int, state bytea, expanding boolean")
_CHANGE = f"""orchestrator.runs r
   SET total = r.total + d.total, open = r.open + d.opened, success = r.success + d.success,
       failed = r.failed + d.failed, cancelled = r.cancelled + d.cancelled, skipped = r.skipped + d.skipped,
       state = coalesce(d.state, r.state), expanding = coalesce(d.expanding, r.expanding)
  FROM {_DELTAS}
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = d.id LIMIT 1) AS found
 WHERE r.ctid = found.place
RETURNING {COUNTERS}"""
_COUNT = Prepared[RunRow](f"UPDATE /* runs.count */ {_CHANGE}")
# Usually most runs continue, and reading a row of each would take the leader longer than writing all of them.
_SETTLE = Prepared[RunRow](f"""
WITH /* runs.settle */ counted AS (UPDATE {_CHANGE})
SELECT * FROM counted WHERE code OR (open = 0 AND NOT flow)
""")

Delta = Mapping[str, int]
"""The change of each counter: total, opened, success, failed, cancelled, skipped."""
Plans = Mapping[bytes, tuple[bytes, bool]]
"""By run: the state of its planner, and whether more of its tasks have to be created."""


def count(connection: Connection, deltas: Mapping[bytes, Delta], plans: Plans | None = None) -> list[RunRow]:
    """Change the counters of runs and save their plans; each run occurs once, however many of its tasks changed."""
    return _COUNT(connection, _DELTAS(_rows(deltas, plans or {})))


def settle(
    connection: Connection, deltas: Mapping[bytes, Delta], plans: Plans, *, is_gathered: bool = False
) -> list[RunRow]:
    """Like `count`, but return only runs that have nothing open, and all runs of code. Flows end by themselves.

    With `is_gathered`, something is open in each run, and the statement is deferred to the next one.
    """
    if is_gathered:
        _SETTLE.defer(connection, _DELTAS(_rows(deltas, plans)))
        return []
    return _SETTLE(connection, _DELTAS(_rows(deltas, plans)))


def _rows(deltas: Mapping[bytes, Delta], plans: Plans) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for run, delta in deltas.items():
        get = delta.get
        counted = get("total", 0), get("opened", 0), get("success", 0), get("failed", 0), get("cancelled", 0)
        rows.append((run, *counted, get("skipped", 0), *plans.get(run, (None, None))))
    return rows


def sources(state: RunState) -> str:
    """Return the states from which a run may change to `state`, for SQL."""
    return "({})".format(", ".join(f"'{source}'" for source in run_sources_of(state)))


def _may_end() -> str:
    return " OR ".join(f"(e.state = '{state}' AND r.status IN {sources(state)})" for state in ENDED_RUN_STATES)


# What a run of code leaves open is cancelled in slices. What other runs leave open was never created.
_ENDS = Batch("e", "id uuid, state text, reason text")
_END = Prepared[RunRow](f"""
UPDATE /* runs.end */ orchestrator.runs r
   SET status = CASE WHEN e.state = 'cancelled' AND r.reason = '{TIMED_OUT}' THEN 'failed' ELSE e.state END,
       ended_at = %(now)s::timestamptz, parked = false, expanding = false,
       reason = coalesce(e.reason, CASE WHEN r.reason <> '{TERMINATED}' OR e.state = 'cancelled' THEN r.reason END),
       closing = r.code AND r.open > 0, stuck = NULL, waiting = NULL,
       cancelled = CASE WHEN r.code THEN r.cancelled ELSE r.cancelled + r.open END,
       open = CASE WHEN r.code THEN r.open ELSE 0 END
  FROM {_ENDS}
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = e.id LIMIT 1) AS found
 WHERE r.ctid = found.place AND ({_may_end()})
RETURNING {COUNTERS}
""")


def end(connection: Connection, ends: Iterable[tuple[bytes, RunState, str | None]], now: datetime) -> list[RunRow]:
    """End runs, each with its state and reason, if any; return the runs that this call ended.

    A run that is cancelled because it timed out becomes failed.
    """
    return _END(connection, _ENDS(ends), now=now)


@Prepared.function(f"""
UPDATE /* runs.reopen */ orchestrator.runs
   SET status = 'running', ended_at = NULL, reason = NULL, deadline = NULL, retried_at = %(now)s::timestamptz
 WHERE id = ANY(%(ids)s::uuid[]) AND status IN {sources(RunState.RUNNING)} AND status <> 'pending' AND NOT code
""")
def reopen(connection: Connection, ids: Sequence[bytes], now: datetime) -> None:
    """Return ended runs to running, because some of their tasks were retried."""


@Prepared.function("""
SELECT /* runs.retryable */ id FROM orchestrator.ended_tasks
 WHERE run_id = %(run)s::uuid AND status IN ('failed', 'skipped', 'cancelled') AND ended_at <= %(until)s::timestamptz
       AND (SELECT workflow IS NULL FROM orchestrator.runs WHERE id = %(run)s::uuid)
 LIMIT %(limit)s
""")
def retryable_tasks(connection: Connection, run: bytes, until: datetime, limit: int) -> list[bytes]:
    """Return up to `limit` tasks of a run without a workflow that had not succeeded by `until`."""
