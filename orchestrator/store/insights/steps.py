"""The steps of one run: its pinned definition, the state of its plan, and the times of its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.state import ENDED, DagState, Fan, StepState
from orchestrator.domain.states import ENDED_RUN_STATES, IN_FLIGHT_STATES
from orchestrator.sealing import reveal_text
from orchestrator.store.dag import workflows
from orchestrator.store.insights.attempts import ErrorView, error_view
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.columns import one_of


@dataclass(frozen=True, kw_only=True)
class StepView:
    """One step of a run."""

    name: str
    """The name of the step in the workflow."""
    kind: str
    """`task`, or `workflow` if the step starts child runs."""
    calls: str
    """The task or workflow of the step."""
    state: str
    """waiting, open, success, failed, skipped or cancelled."""
    fan_out: bool
    """Whether the number of tasks depends on data."""
    total: int | None
    """The number of tasks; None for a fan-out whose size was never known."""
    ended: int
    """Tasks that have ended."""
    failed: int
    """Tasks that failed."""
    reason: str | None
    """Why the step was skipped, or failed without a task."""
    depends_on: tuple[str, ...]
    """The steps that must end before this one."""
    started_at: datetime | None
    """When the first task began."""
    ended_at: datetime | None
    """When the last task ended; None while the step is open."""
    error: ErrorView | None
    """The error of the first failed task."""


class StepTimes(NamedTuple):
    started_at: datetime | None = None
    ended_at: datetime | None = None
    error: Mapping[str, str] | None = None


def _began(retried_at: str) -> str:
    """Return SQL of the start of a step: the first start since the run's retry, if there is one."""
    return f"coalesce(min(started_at) FILTER (WHERE started_at >= {retried_at}), min(started_at))"


_RETRIED = "(SELECT retried_at FROM orchestrator.runs WHERE id = %(run)s::uuid)"
# The run comes first, then a row for each step with tasks or child runs, all in one snapshot. The error of a failed
# step is looked up by index, so only tracebacks that are displayed are read.
_STEPS = Statement[Row](f"""
WITH /* insights.steps */ ended AS (
    SELECT step, min(started_at) AS first_at, min(started_at) FILTER (WHERE started_at >= {_RETRIED}) AS started_at,
           max(ended_at) AS ended_at, min(position) FILTER (WHERE status = 'failed') AS failed
      FROM orchestrator.ended_tasks WHERE run_id = %(run)s::uuid AND step IS NOT NULL GROUP BY step
), moments AS (
    SELECT * FROM ended
     UNION ALL
    SELECT step, min(started_at), min(started_at) FILTER (WHERE started_at >= {_RETRIED}), NULL, NULL
      FROM orchestrator.tasks WHERE run_id = %(run)s::uuid AND step IS NOT NULL GROUP BY step
     UNION ALL
    SELECT parent_step, min(coalesce(retried_at, started_at)), NULL, max(ended_at), NULL
      FROM orchestrator.runs WHERE parent_run = %(run)s::uuid GROUP BY parent_step
), steps AS (
    SELECT step, coalesce(min(started_at), min(first_at)) AS started_at, max(ended_at) AS ended_at,
           min(failed) AS failed
      FROM moments GROUP BY step
)
SELECT status, state, NULL AS step, NULL::timestamptz AS started_at, NULL::timestamptz AS ended_at, NULL::jsonb AS error
  FROM orchestrator.runs WHERE id = %(run)s::uuid
 UNION ALL
SELECT NULL, NULL, step, started_at, ended_at,
       CASE WHEN failed IS NOT NULL THEN
           (SELECT e.error FROM orchestrator.ended_tasks e
             WHERE e.run_id = %(run)s::uuid AND e.step = steps.step AND e.position = steps.failed LIMIT 1) END
  FROM steps
""")


def list_steps(connection: Connection, run: UUID, *, definition: Definition | None = None) -> list[StepView]:
    """Return the steps of a run in the order of its definition; empty if the run has no definition, or if the
    definition or the plan cannot be decoded (then the run is stuck).

    The definition of a run never changes: a caller that polls may pass it.
    """
    try:
        definition = definition or workflows.of_run(connection, run.bytes)
    except msgspec.DecodeError:
        return []
    if definition is None:
        return []
    run_row, *rows = _STEPS(connection, run=run.hex)
    times = {row.step: StepTimes(row.started_at, row.ended_at, row.error) for row in rows}
    try:
        plan = _plan(definition, run_row.status, run_row.state)
    except msgspec.DecodeError:
        return []
    return [
        view_of(step, StepState(plan.steps[index]), plan.fans.get(index), plan.reasons.get(index), times.get(step.name))
        for index, step in enumerate(definition.steps)
    ]


_TASK = """ id FROM orchestrator.{} WHERE run_id = %(run)s::uuid AND step = %(step)s::text
   AND (position = %(index)s::int OR (position IS NULL AND %(index)s::int = 0))
"""
_STEP_TASK = Statement[UUID](f"""
SELECT /* insights.step_task */{_TASK.format("tasks")} UNION ALL SELECT{_TASK.format("ended_tasks")} LIMIT 1
""")


def find_step_task(connection: Connection, run: UUID, step: str, index: int) -> UUID | None:
    """Return the task of a step; for a fan-out, the task at this index."""
    return _STEP_TASK.first(connection, run=run.hex, step=step, index=index)


_FAILED_TASK = Statement[UUID]("""
SELECT /* insights.steps.failed_task */ id FROM orchestrator.ended_tasks
 WHERE run_id = %(run)s::uuid AND step = %(step)s::text AND status = 'failed' ORDER BY position LIMIT 1
""")


def find_failed_task(connection: Connection, run: UUID, step: str) -> UUID | None:
    """Return the first failed task of a step."""
    return _FAILED_TASK.first(connection, run=run.hex, step=step)


class StepStates(NamedTuple):
    """The states of a run's steps."""

    id: UUID
    status: str
    began_at: datetime | None
    ended_at: datetime | None
    states: Mapping[str, str]
    """By step name; empty if the definition was not read or the plan cannot be decoded."""
    seconds: Mapping[str, float] = MappingProxyType({})
    """Durations of ended steps by name, in seconds; empty for very large runs."""


_STATES = Statement[Row]("""
SELECT /* insights.steps.states */ id, status, version, state, total,
       coalesce(retried_at, started_at) AS began_at, ended_at
  FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[]) AND NOT code AND NOT flow ORDER BY id
""")
_SECONDS = Statement[Row](f"""
SELECT /* insights.steps.seconds */ run_id, step,
       extract(epoch FROM max(ended_at) - {_began("retried_at")})::double precision AS seconds
  FROM (SELECT id AS run_id, retried_at FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[])) AS runs
  JOIN orchestrator.ended_tasks USING (run_id)
 WHERE run_id = ANY(%(ids)s::uuid[]) AND step IS NOT NULL GROUP BY run_id, step
""")
_SECONDS_OF_STEPS = Statement[tuple[str, float | None]](f"""
SELECT /* insights.steps.seconds_of_steps */ step,
       extract(epoch FROM max(ended_at) - {_began(_RETRIED)})::double precision AS seconds
  FROM (SELECT step, started_at, ended_at FROM orchestrator.ended_tasks
         WHERE run_id = %(run)s::uuid AND step = ANY(%(steps)s::text[])
         UNION ALL
        SELECT parent_step, coalesce(retried_at, started_at), ended_at FROM orchestrator.runs
         WHERE parent_run = %(run)s::uuid AND parent_step = ANY(%(steps)s::text[])) AS found
 GROUP BY step
""")
# For tasks with a limit of their own or of their queue: the last end of another task under the same limit, while the
# task existed and had not begun. Ends long before that are not examined.
_TASKS_OF_STEPS = """SELECT step, id, queue, lane, options, created_at, started_at, status FROM orchestrator.{}
         WHERE run_id = %(run)s::uuid AND step = ANY(%(steps)s::text[]) AND coalesce(position, 0) = 0"""
_SHARES = """CASE
            WHEN t.lane IS NULL THEN queue = t.queue
            WHEN t.options ?| '{total_concurrency,total_rate}'
                 THEN split_part(lane, '|', 1) = split_part(t.lane, '|', 1)
            ELSE lane = t.lane END"""
_LIMITED_UNTIL = Statement[tuple[str, datetime]](f"""
WITH /* insights.steps.limited_until */ in_flight AS MATERIALIZED (
    SELECT DISTINCT queue, lane FROM orchestrator.tasks WHERE {one_of(IN_FLIGHT_STATES)}
)
SELECT t.step, coalesce(freed.ended_at, waits.now) AS until
  FROM ({_TASKS_OF_STEPS.format("ended_tasks")} UNION ALL {_TASKS_OF_STEPS.format("tasks")}) AS t
  LEFT JOIN orchestrator.queues q ON q.name = t.queue
  LEFT JOIN LATERAL (
       SELECT ended_at FROM (
           SELECT id, queue, lane, ended_at FROM orchestrator.ended_tasks
            WHERE ended_at <= t.started_at AND ended_at > t.created_at ORDER BY ended_at DESC LIMIT 300) AS before
        WHERE id <> t.id AND {_SHARES} ORDER BY ended_at DESC LIMIT 1) AS freed ON true
  LEFT JOIN LATERAL (
       SELECT now() AS now FROM in_flight WHERE t.status = 'pending' AND {_SHARES} LIMIT 1) AS waits ON true
 WHERE (split_part(t.lane, '|', 1) <> '' OR (t.lane IS NULL AND (q.concurrency IS NOT NULL OR q.rate IS NOT NULL)))
   AND coalesce(freed.ended_at, waits.now) IS NOT NULL
""")
_FIRST_ATTEMPTS = Statement[tuple[str, datetime]](f"""
SELECT /* insights.steps.first_attempts */ t.step, min(a.started_at)
  FROM ({_TASKS_OF_STEPS.format("ended_tasks")} UNION ALL {_TASKS_OF_STEPS.format("tasks")}) AS t
  JOIN orchestrator.attempts a ON a.task_id = t.id AND a.outcome IN ('failed', 'lost')
 WHERE a.started_at IS NOT NULL GROUP BY t.step
""")
_MAX_TASKS = 20_000
"""Tasks whose times are read for a list of runs."""
_MAX_VERSIONS = 5
"""Versions of a workflow whose definitions are read for a list of its runs."""


def seconds_of_steps(connection: Connection, run: UUID, steps: Sequence[str]) -> dict[str, float | None]:
    """Return the durations of some steps of a run."""
    return dict(_SECONDS_OF_STEPS(connection, run=run.hex, steps=list(steps)))


def first_attempts(connection: Connection, run: UUID, steps: Sequence[str]) -> dict[str, datetime]:
    """Return the start of the first attempt of steps that needed another one; for a fan-out, of its first task."""
    return dict(_FIRST_ATTEMPTS(connection, run=run.hex, steps=list(steps)))


def limited_until(connection: Connection, run: UUID, steps: Sequence[str]) -> dict[str, datetime]:
    """Return until when steps waited, or wait, for a limit of their task or queue that other tasks used up."""
    return dict(_LIMITED_UNTIL(connection, run=run.hex, steps=list(steps)))


def states_of_runs(connection: Connection, workflow: str, runs: Sequence[UUID]) -> list[StepStates]:
    """Return the states of all steps of some runs of a workflow, oldest run first."""
    rows = _STATES(connection, ids=[run.bytes for run in runs])
    versions = sorted({row.version for row in rows}, reverse=True)[:_MAX_VERSIONS]
    definitions = {version: workflows.read(connection, workflow, version) for version in versions}
    seconds: dict[UUID, dict[str, float]] = {row.id: {} for row in rows}
    if sum(row.total for row in rows) <= _MAX_TASKS:
        for timing in _SECONDS(connection, ids=[row.id.bytes for row in rows]):
            seconds[timing.run_id][timing.step] = timing.seconds or 0.0
    result = []
    for row in rows:
        stored = definitions.get(row.version)
        states = {} if stored is None else _states(stored.definition, row.status, row.state)
        result.append(StepStates(row.id, row.status, row.began_at, row.ended_at, states, seconds[row.id]))
    return result


def _states(definition: Definition, status: str, state: Any) -> Mapping[str, str]:
    try:
        plan = _plan(definition, status, state)
    except msgspec.DecodeError:
        return {}
    return {step.name: StepState(plan.steps[index]).name.lower() for index, step in enumerate(definition.steps)}


def _plan(definition: Definition, status: str, state: Any) -> DagState:
    """Return the state of the plan. Steps that had not ended with the run count as cancelled."""
    planned = DagState(bytes(len(definition.steps)))
    if state is not None:
        planned = msgspec.msgpack.decode(bytes(state), type=DagState)
    if status not in ENDED_RUN_STATES:
        return planned
    plan = Plan(Graph(definition), planned)
    plan.close()
    return plan.state()


def view_of(step: Step, state: StepState, fan: Fan | None, reason: str | None, times: StepTimes | None) -> StepView:
    fan_out = step.foreach is not None or step.parallel is not None
    has_ended = state in ENDED
    total = fan.total if fan else (None if fan_out else 1)
    times = times or StepTimes()
    return StepView(
        name=step.name,
        kind="workflow" if step.workflow is not None else "task",
        calls=step.workflow or step.task or step.executor or "",
        state=state.name.lower(),
        fan_out=fan_out,
        total=total,
        ended=fan.ended if fan else int(has_ended and not fan_out),
        failed=fan.failed if fan else int(state is StepState.FAILED and not fan_out),
        reason=reason and reveal_text(reason),
        depends_on=step.depends_on,
        started_at=times.started_at,
        ended_at=times.ended_at if has_ended else None,
        error=error_view(times.error),
    )
