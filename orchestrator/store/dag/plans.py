"""What the leader reads and writes of runs that have a definition."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.names import scoped
from orchestrator.domain.plain import is_same, read_json, stored_json
from orchestrator.errors import Duplicate
from orchestrator.store import arrays
from orchestrator.store.runs.trees import ByTurns
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier


class WorkflowRun(NamedTuple):
    """A run of a definition."""

    id: bytes
    workflow: str
    version: int
    params: dict[str, Any]
    state: bytes | None
    fire_time: datetime
    """The time that it is for: that of its schedule, or when it was started."""
    tags: tuple[str, ...] = ()
    depth: int = 0
    root: bytes = b""
    """The run at the beginning of those that started each other: it may be this one."""
    cancelling: bool = False


_LOAD = Statement(
    """
SELECT r.id::text, r.workflow, r.version, r.params::text, r.state, coalesce(r.fire_time, r.created_at), r.tags,
       r.depth, coalesce(r.root, r.id)::text, r.cancelling
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 WHERE r.workflow IS NOT NULL AND NOT r.code
"""
)


def load(connection: Connection, ids: Sequence[bytes]) -> list[WorkflowRun]:
    """Return those of these runs that have a definition."""
    rows = _LOAD(connection, {"ids": arrays.uuids(ids)})
    return [
        WorkflowRun(
            identifier(row[0]),
            row[1],
            row[2],
            read_json(row[3] or "{}"),
            None if row[4] is None else bytes(row[4]),
            row[5],
            tuple(row[6]),
            row[7],
            identifier(row[8]),
            row[9],
        )
        for row in rows
    ]


_VERSIONS = Statement(
    """
SELECT r.id::text, r.workflow, r.version FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 WHERE r.workflow IS NOT NULL AND NOT r.code
"""
)


def versions(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, tuple[str, int]]:
    """Return which version of which workflow these are runs of, as far as they have a definition."""
    rows = _VERSIONS(connection, {"ids": arrays.uuids(ids)})
    return {identifier(row[0]): (row[1], row[2]) for row in rows}


def expanding() -> ByTurns:
    """Return what finds the runs of which more tasks are to be created."""
    return ByTurns("runs", "expanding", "id::text")


# Of up to hundreds of thousands of rows: nothing is sent with each that stands in the question, and none are sorted.
_OUTPUTS = Statement(
    """
SELECT wanted.number, e.position, e.result
  FROM unnest(%(runs)s::uuid[], %(steps)s::text[]) WITH ORDINALITY AS wanted(run_id, step, number)
 CROSS JOIN LATERAL (
       SELECT position, CASE WHEN status = 'success' THEN result END AS result FROM orchestrator.ended_tasks
        WHERE run_id = wanted.run_id AND step = wanted.step OFFSET 0) AS e
"""
)

Key = tuple[bytes, str]
"""A run and the name of a step."""
Results = list[tuple[int, bytes | None]]
"""Positions and results, in any order."""


def outputs(connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
    """Return positions and results of the tasks of steps; None for a task that did not succeed."""
    return _results(_OUTPUTS, connection, keys)


_CHILD_OUTPUTS = Statement(
    """
SELECT wanted.number, r.parent_position, r.output
  FROM unnest(%(runs)s::uuid[], %(steps)s::text[]) WITH ORDINALITY AS wanted(run_id, step, number)
 CROSS JOIN LATERAL (
       SELECT parent_position, output FROM orchestrator.runs
        WHERE parent_run = wanted.run_id AND parent_step = wanted.step OFFSET 0) AS r
"""
)


def child_outputs(connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
    """Return positions and outputs of the child runs of steps."""
    return _results(_CHILD_OUTPUTS, connection, keys)


def _results(statement: Statement, connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
    found: list[Results] = [[] for _ in keys]
    parameters = {"runs": arrays.uuids(run for run, _ in keys), "steps": [step for _, step in keys]}
    for number, position, result in statement(connection, parameters):
        found[number - 1].append((position, None if result is None else bytes(result)))
    return dict(zip(keys, found, strict=True))


_SIZES = Statement(
    """
SELECT wanted.number, coalesce(CASE WHEN wanted.of_runs THEN (
       SELECT sum(octet_length(output)) FROM orchestrator.runs
        WHERE parent_run = wanted.run_id AND parent_step = wanted.step) ELSE (
       SELECT sum(octet_length(result)) FROM orchestrator.ended_tasks
        WHERE run_id = wanted.run_id AND step = wanted.step AND status = 'success') END, 0)::bigint
  FROM unnest(%(runs)s::uuid[], %(steps)s::text[], %(of_runs)s::boolean[])
       WITH ORDINALITY AS wanted(run_id, step, of_runs, number)
"""
)


def output_sizes(connection: Connection, of_tasks: Sequence[Key], of_runs: Sequence[Key]) -> dict[Key, int]:
    """Return how many bytes the outputs of steps have: of those that are tasks, and of those that are child runs."""
    keys = [*of_tasks, *of_runs]
    parameters = {
        "runs": arrays.uuids(run for run, _ in keys),
        "steps": [step for _, step in keys],
        "of_runs": arrays.numbers([False] * len(of_tasks) + [True] * len(of_runs)),
    }
    return {keys[number - 1]: size for number, size in _SIZES(connection, parameters)}


class NewRun(NamedTuple):
    """A run of a definition that is to be started."""

    id: bytes
    name: str
    workflow: str
    version: int
    params: str
    timeout: float | None = None
    tags: tuple[str, ...] = ()
    key: str | None = None
    lane: str | None = None
    lane_limit: int | None = None
    parent_run: bytes | None = None
    parent_step: str | None = None
    parent_position: int | None = None
    schedule: str | None = None
    fire_time: str | None = None
    depth: int = 0
    root: bytes | None = None
    """The first of the runs that started each other, and at last this one."""


_START = """
INSERT INTO orchestrator.runs (id, name, workflow, version, params, total, open, timeout, deadline, tags, key, lane,
                               lane_limit, parent_run, parent_step, parent_position, schedule, fire_time, depth, root)
SELECT n.id, n.name, n.workflow, n.version, n.params, 0, 0, n.timeout, now() + n.timeout * interval '1 second',
       ARRAY(SELECT jsonb_array_elements_text(n.tags)), n.key, n.lane, n.lane_limit,
       n.parent_run, n.parent_step, n.parent_position, n.schedule, n.fire_time, n.depth, n.root
  FROM jsonb_to_recordset(%(runs)s::jsonb)
       AS n(id uuid, name text, workflow text, version int, params jsonb, timeout float8, tags jsonb, key text,
            lane text, lane_limit int, parent_run uuid, parent_step text, parent_position int, schedule text,
            fire_time timestamptz, depth int, root uuid)
    ON CONFLICT DO NOTHING
RETURNING id::text
"""


def start(connection: Connection, runs: Sequence[NewRun]) -> list[bytes]:
    """Create runs; return those that did not exist. An id or key that is there already is left alone."""
    rows = [
        run._asdict()
        | {
            "id": run.id.hex(),
            "params": msgspec.Raw(run.params.encode()),
            "parent_run": run.parent_run.hex() if run.parent_run else None,
            "root": run.root.hex() if run.root else None,
        }
        for run in runs
    ]
    found = connection.exec_driver_sql(_START, {"runs": msgspec.json.encode(rows).decode()})
    return [identifier(row[0]) for row in found]


_SAVE_OUTPUTS = Statement(
    """
UPDATE orchestrator.runs r SET output = n.output
  FROM unnest(%(ids)s::uuid[], %(outputs)s::bytea[]) AS n(id, output)
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = n.id LIMIT 1) AS found
 WHERE r.ctid = found.place
"""
)


def save_outputs(connection: Connection, outputs: Mapping[bytes, bytes]) -> None:
    """Keep what child runs give to their parents."""
    _SAVE_OUTPUTS(connection, {"ids": arrays.uuids(outputs), "outputs": arrays.blobs(outputs.values())})


_LONGEST_KEY = 200


def new_run(definition: Definition, version: int, run_id: bytes, params: Mapping[str, Any]) -> NewRun:
    """Return a run of a definition as it is inserted."""
    limit = definition.concurrency
    key = parse_template(limit.key).render({"params": params}) if limit is not None and limit.key else ""
    return NewRun(
        id=run_id,
        name=definition.name,
        workflow=definition.name,
        version=version,
        params=stored_json(params),
        timeout=definition.timeout,
        tags=definition.tags,
        lane=_lane(definition.name, str(key)) if limit is not None else None,
        lane_limit=limit.limit if limit is not None else None,
    )


def _lane(name: str, key: str) -> str:
    """Return the name of a lane; a key that is too long for an index stands there as its digest."""
    if len(key) > _LONGEST_KEY:
        key = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return scoped(name, key)


_BY_KEY = "SELECT id::text, params::text FROM orchestrator.runs WHERE key = %(key)s AND workflow = %(workflow)s"


def find_same(connection: Connection, run: NewRun, given: Container[str]) -> bytes | None:
    """Return the run that has the idempotency key of one to be started, unless that was `given` other parameters.

    Those that nobody gives may depend on the time.
    """
    row = connection.exec_driver_sql(_BY_KEY, {"workflow": run.workflow, "key": run.key}).one_or_none()
    if row is None:
        return None
    holder, known, wanted = identifier(row[0]), read_json(row[1]), read_json(run.params)
    if all(name in known and is_same(known[name], value) for name, value in wanted.items() if name in given):
        return holder
    raise Duplicate(
        f"Run {to_text(holder)} of workflow {run.workflow!r} was started under the key {run.key!r} with other "
        f"parameters; this one was not started. A repeated start has the same parameters, and another one needs a key "
        f"of its own.",
        to_text(holder),
    )


_RESULTS_OF_RUN = """
SELECT step, position, CASE WHEN status = 'success' THEN result END FROM orchestrator.ended_tasks
 WHERE run_id = %(run)s::uuid AND step IS NOT NULL
 UNION ALL
SELECT parent_step, parent_position, output FROM orchestrator.runs
 WHERE parent_run = %(run)s::uuid AND parent_step IS NOT NULL AND status = 'success'
"""


def results_of_run(connection: Connection, run: bytes) -> dict[str, list[tuple[int, bytes | None]]]:
    """Return, by step, positions and results of the tasks and child runs of a run; None if one did not succeed."""
    found: dict[str, list[tuple[int, bytes | None]]] = {}
    for step, position, result in connection.exec_driver_sql(_RESULTS_OF_RUN, {"run": run.hex()}):
        found.setdefault(step, []).append((position, None if result is None else bytes(result)))
    return found


# An id beside that of the new run, as those of all its tasks are.
_BESIDE_NEW = "(left(%(new)s::uuid::text, 14) || '8' || right(gen_random_uuid()::text, 21))::uuid"
_KEEP_TASKS = f"""
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, run_id, step,
       position, payload, options, result, worker, created_at, started_at, ended_at)
SELECT {_BESIDE_NEW}, seq, name, queue, priority, status, attempt, failures, losses, %(new)s::uuid, step,
       position, payload, options, result, worker, created_at, started_at, ended_at
  FROM orchestrator.ended_tasks WHERE run_id = %(run)s::uuid AND step = ANY(%(steps)s)
"""
_KEEP_RUNS = f"""
INSERT INTO orchestrator.runs (id, name, status, total, open, success, failed, cancelled, skipped, created_at,
       started_at, ended_at, workflow, version, params, state, parent_run, parent_step, parent_position, output)
SELECT {_BESIDE_NEW}, name, status, total, open, success, failed, cancelled, skipped, created_at, started_at,
       ended_at, workflow, version, params, state, %(new)s::uuid, parent_step, parent_position, output
  FROM orchestrator.runs WHERE parent_run = %(run)s::uuid AND parent_step = ANY(%(steps)s)
"""
_KEEP_STATE = "UPDATE orchestrator.runs SET state = %(state)s WHERE id = %(new)s::uuid AND status = 'pending'"


def keep(connection: Connection, run: bytes, new: bytes, steps: Sequence[str], state: bytes) -> None:
    """Copy what some steps of a run came to into a new run that has not begun, in the caller's transaction."""
    parameters = {"run": run.hex(), "new": new.hex(), "steps": list(steps)}
    connection.exec_driver_sql(_KEEP_TASKS, parameters)
    connection.exec_driver_sql(_KEEP_RUNS, parameters)
    connection.exec_driver_sql(_KEEP_STATE, parameters | {"state": state})
