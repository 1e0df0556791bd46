"""Runs with a definition, for the leader; new runs; and results that a rerun keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator import sealing
from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.dag.scope import EvaluationBudget, Scope
from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.lane_limits import scoped
from orchestrator.domain.plain import is_same, read_json, stored_json
from orchestrator.errors import Duplicate
from orchestrator.sealing import VALUE, Vault
from orchestrator.store.batches import Batch
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.runs.pending_changes import RoundRobin
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks.row import insert_ended


class WorkflowRun(NamedTuple):
    id: bytes
    workflow: str
    version: int
    params: dict[str, Any]
    state: bytes | None
    fire_time: datetime
    """The time that the run is for: the schedule's fire time, or else its creation."""
    tags: tuple[str, ...] = ()
    depth: int = 0
    root: bytes = b""
    """The topmost ancestor, or the run itself."""
    cancelling: bool = False
    expanding: bool = False
    """Whether the run had more to start or create than one tick has room for."""
    headers: str | None = None
    """JSON."""
    params_size: int = 0
    """Characters of the stored parameters."""


_LOAD = Prepared[Row]("""
SELECT /* dags.load */ r.id, r.workflow, r.version, r.params::text AS params, r.state,
       coalesce(r.fire_time, r.created_at) AS fire_time, r.tags, r.depth, coalesce(r.root, r.id) AS root, r.cancelling,
       r.expanding, r.headers::text AS headers
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 WHERE r.workflow IS NOT NULL AND NOT r.code AND NOT r.flow
""")


def load(connection: Connection, ids: Sequence[bytes]) -> list[WorkflowRun]:
    """Return the runs that have a definition."""
    rows = _LOAD(connection, ids=ids)
    return [
        WorkflowRun(*row)._replace(
            params=read_params(row.params or "{}"), tags=tuple(row.tags), params_size=len(row.params or "")
        )
        for row in rows
    ]


def read_params(text: str) -> Any:
    """Return stored parameters; a sealed value if this process lacks the data key."""
    return sealing.open_json(read_json(text))


def sealed(run: NewRun, vault: Vault | None) -> NewRun:
    """Return a new run with its parameters and initial state sealed."""
    if vault is None:
        return run
    state = None if run.state is None else vault.seal(VALUE, run.state)
    return run._replace(params=None if run.params is None else vault.seal_json(run.params), state=state)


_VERSIONS = Prepared[Row]("""
SELECT /* dags.versions */ r.id, r.workflow, r.version, coalesce(pg_column_size(r.params), 0) AS size
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 WHERE r.workflow IS NOT NULL AND NOT r.code AND NOT r.flow
""")


class Version(NamedTuple):
    """The definition of a run, and the stored size of its parameters in bytes, if requested."""

    workflow: str
    version: int
    size: int = 0


def versions(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, Version]:
    """Return the workflow versions of the runs that have a definition."""
    return {row.id: Version(row.workflow, row.version, row.size) for row in _VERSIONS(connection, ids=ids)}


def expanding() -> RoundRobin:
    """Return a finder of runs that have more tasks to create."""
    return RoundRobin("runs.expanding", "runs", "expanding", "id")


Key = tuple[bytes, str]
"""A run and the name of a step."""
Results = list[tuple[int, bytes | None]]
"""Positions and results, in any order."""
_Output = tuple[int, int, bytes | None]

# Up to hundreds of thousands of rows: each has only a number instead of its key, and rows are not sorted.
_STEPS = Batch("wanted", "number int, run_id uuid, step text")
_OUTPUTS = Prepared[_Output](f"""
SELECT /* dags.outputs */ wanted.number, e.position, e.result
  FROM {_STEPS}
 CROSS JOIN LATERAL (
       SELECT position, CASE WHEN status = 'success' THEN result END AS result FROM orchestrator.ended_tasks
        WHERE run_id = wanted.run_id AND step = wanted.step OFFSET 0) AS e
""")


def outputs(connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
    """Return positions and results of the tasks of steps; the result is None for a task that did not succeed."""
    return _results(_OUTPUTS, connection, keys)


_CHILD_OUTPUTS = Prepared[_Output](f"""
SELECT /* dags.child_outputs */ wanted.number, r.parent_position, r.output
  FROM {_STEPS}
 CROSS JOIN LATERAL (
       SELECT parent_position, output FROM orchestrator.runs
        WHERE parent_run = wanted.run_id AND parent_step = wanted.step OFFSET 0) AS r
""")


def child_outputs(connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
    """Return positions and outputs of the child runs of steps."""
    return _results(_CHILD_OUTPUTS, connection, keys)


def _results(statement: Prepared[_Output], connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
    results: list[Results] = [[] for _ in keys]
    for number, position, result in statement(connection, _STEPS((at, *key) for at, key in enumerate(keys))):
        results[number].append((position, result))
    return dict(zip(keys, results, strict=True))


_STEPS_TO_SIZE = Batch("wanted", "number int, run_id uuid, step text, of_runs boolean")
_SIZES = Prepared[tuple[int, int]](f"""
SELECT /* dags.sizes */ wanted.number, coalesce(CASE WHEN wanted.of_runs THEN (
       SELECT sum(octet_length(output)) FROM orchestrator.runs
        WHERE parent_run = wanted.run_id AND parent_step = wanted.step) ELSE (
       SELECT sum(octet_length(result)) FROM orchestrator.ended_tasks
        WHERE run_id = wanted.run_id AND step = wanted.step AND status = 'success') END, 0)::bigint
  FROM {_STEPS_TO_SIZE}
""")


def output_sizes(connection: Connection, of_tasks: Sequence[Key], of_runs: Sequence[Key]) -> dict[Key, int]:
    """Return the bytes of the outputs of steps, whose items are tasks (`of_tasks`) or child runs (`of_runs`)."""
    keys = [*of_tasks, *of_runs]
    sized = [(number, *key, number >= len(of_tasks)) for number, key in enumerate(keys)]
    return {keys[number]: size for number, size in _SIZES(connection, _STEPS_TO_SIZE(sized))}


_NEW_OUTPUTS = Batch("n", "id uuid, output bytea")
_SAVE_OUTPUTS = Prepared[None](f"""
UPDATE /* dags.save_outputs */ orchestrator.runs r SET output = n.output
  FROM {_NEW_OUTPUTS}
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = n.id LIMIT 1) AS found
 WHERE r.ctid = found.place
""")


def save_outputs(connection: Connection, outputs: Mapping[bytes, bytes]) -> None:
    """Store the outputs of child runs, for their parents."""
    _SAVE_OUTPUTS(connection, _NEW_OUTPUTS(outputs.items()))


_MAX_KEY = 200


def new_run(
    definition: Definition,
    version: int,
    run_id: bytes,
    params: Mapping[str, Any],
    tags: Iterable[str] = (),
    *,
    budget: EvaluationBudget | None = None,
    key: str | None = None,
    schedule: str | None = None,
    fire_time: str | None = None,
) -> NewRun:
    """Return a new run of a definition; `tags` are added to those of the definition.

    Evaluating the concurrency key is charged to the budget.
    """
    limit = definition.concurrency
    lane_key: Any = ""
    if limit is not None and limit.key:
        names = Scope({"params": params}, budget)
        names.budget.begin()
        lane_key = parse_template(limit.key).render(names)
    return NewRun(
        id=run_id,
        name=definition.description if is_composed(definition.name) else definition.name,
        workflow=definition.name,
        version=version,
        params=stored_json(params),
        timeout=definition.timeout,
        tags=stored_json((*definition.tags, *tags)),
        key=key,
        lane=_lane(definition.name, str(lane_key)) if limit is not None else None,
        lane_limit=limit.limit if limit is not None else None,
        schedule=schedule,
        fire_time=fire_time,
    )


def _lane(name: str, key: str) -> str:
    """Return the name of a concurrency group; a key too long for an index is replaced by its digest."""
    if len(key) > _MAX_KEY:
        key = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return scoped(name, key)


_BY_KEY = Statement[tuple[UUID, str]]("""
SELECT /* dags.by_key */ id, params::text FROM orchestrator.runs WHERE key = %(key)s AND workflow = %(workflow)s
""")


def by_key(connection: Connection, workflow: str, key: str) -> bytes | None:
    """Return the run of a workflow with an idempotency key."""
    found = _BY_KEY.first(connection, workflow=workflow, key=key)
    return None if found is None else found[0].bytes


def find_same(connection: Connection, run: NewRun, given: Container[str]) -> bytes | None:
    """Return the run with the same idempotency key; raise `Duplicate` if it has other parameters.

    Only parameters that were `given` are compared: defaults may depend on the time.
    """
    found = _BY_KEY.first(connection, workflow=run.workflow, key=run.key)
    if found is None:
        return None
    holder, stored_params, params = found[0].bytes, read_params(found[1]), read_json(run.params or "{}")
    if isinstance(stored_params, msgspec.msgpack.Ext) or all(  # sealed, and cannot be compared here
        name in stored_params and is_same(stored_params[name], value) for name, value in params.items() if name in given
    ):
        return holder
    raise Duplicate(
        f"Run {to_text(holder)} of workflow {run.workflow!r} was started under the key {run.key!r} with different "
        f"parameters; this run was not started. A repeated start must have the same parameters; a different start "
        f"needs its own key.",
        to_text(holder),
    )


_RESULTS_OF_RUN = Statement[Row]("""
SELECT /* dags.results_of_run */ step, position, CASE WHEN status = 'success' THEN result END AS result
  FROM orchestrator.ended_tasks
 WHERE run_id = %(run)s::uuid AND step IS NOT NULL AND (%(steps)s::text[] IS NULL OR step = ANY(%(steps)s::text[]))
 UNION ALL
SELECT parent_step, parent_position, output FROM orchestrator.runs
 WHERE parent_run = %(run)s::uuid AND parent_step IS NOT NULL AND status = 'success'
   AND (%(steps)s::text[] IS NULL OR parent_step = ANY(%(steps)s::text[]))
""")


def results_of_run(
    connection: Connection, run: bytes, steps: Sequence[str] | None = None
) -> dict[str, list[tuple[int, bytes | None]]]:
    """Return positions and results of a run's tasks and child runs by step; the result is None without success."""
    by_step: dict[str, list[tuple[int, bytes | None]]] = {}
    for row in _RESULTS_OF_RUN(connection, run=run, steps=steps):
        by_step.setdefault(row.step, []).append((row.position, None if row.result is None else bytes(row.result)))
    return by_step


# A new id with the prefix of the new run's id, as all ids of the run's tasks have.
_ID_IN_NEW_RUN = "(left(%(new)s::uuid::text, 14) || '8' || right(gen_random_uuid()::text, 21))::uuid"
_NOT_COPIED = ("reason", "error", "lane", "unique_key", "callbacks", "trace", "parent_id")
"""Columns whose values refer to the run that created the task."""
_COPY = insert_ended("orchestrator.ended_tasks", but=_NOT_COPIED, id=_ID_IN_NEW_RUN, run_id="%(new)s::uuid")
_KEEP_TASKS = Statement[None](f"""
INSERT /* dags.keep_tasks */ {_COPY}
 WHERE run_id = %(run)s::uuid AND step = ANY(%(steps)s::text[])
""")
_KEEP_RUNS = Statement[None](f"""
INSERT /* dags.keep_runs */ INTO orchestrator.runs
       (id, name, status, total, open, success, failed, cancelled, skipped, created_at, started_at, ended_at, workflow,
        version, params, state, parent_run, parent_step, parent_position, output)
SELECT {_ID_IN_NEW_RUN}, name, status, total, open, success, failed, cancelled, skipped, created_at, started_at,
       ended_at, workflow, version, params, state, %(new)s::uuid, parent_step, parent_position, output
  FROM orchestrator.runs WHERE parent_run = %(run)s::uuid AND parent_step = ANY(%(steps)s::text[])
""")
_KEEP_STATE = Statement[None]("""
UPDATE /* dags.keep_state */ orchestrator.runs SET state = %(state)s WHERE id = %(new)s::uuid AND status = 'pending'
""")


def copy_results(connection: Connection, run: bytes, new: bytes, steps: Sequence[str], state: bytes) -> None:
    """Copy the results of some steps of a run into a new run that has not begun, in the caller's transaction."""
    _KEEP_TASKS(connection, run=run, new=new, steps=steps)
    _KEEP_RUNS(connection, run=run, new=new, steps=steps)
    _KEEP_STATE(connection, new=new, state=state)
