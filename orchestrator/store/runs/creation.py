"""Creates runs: of many tasks, of definitions, of flows and of code. Every client may do this, in a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import zip_longest
from operator import attrgetter
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.states import RunState
from orchestrator.references import MARK
from orchestrator.store import copying, payloads
from orchestrator.store.batches import Batch, Blob, Json
from orchestrator.store.copying import encode_field
from orchestrator.store.sql import Prepared, Statement, array_of
from orchestrator.store.tasks.row import SPAN_OF_RUN, join_run


class NewRun(NamedTuple):
    """A new run of any kind: the columns of its row, and its code.

    A new column is a field here, a column in `store/tables` and a migration.
    """

    id: bytes
    name: str
    total: int = 0
    """The number of tasks that the run begins with."""
    workflow: str | None = None
    version: int | None = None
    params: Json | None = None
    timeout: float | None = None
    tags: Json = "[]"
    key: str | None = None
    """The idempotency key."""
    lane: str | None = None
    lane_limit: int | None = None
    parent_run: bytes | None = None
    """The run that waits for this one; another run may have started it."""
    parent_step: str | None = None
    parent_position: int | None = None
    child_id: bytes | None = None
    """The id under which the parent waits for this run, if that is not the run's own id."""
    detached: bool = False
    terminates: bool = False
    schedule: str | None = None
    """The key of the schedule; a run that continues another one as new inherits it."""
    fire_time: Annotated[str, "timestamptz"] | None = None
    depth: int | None = None
    """The number of ancestors; if None, a run of code derives it from its parent."""
    root: bytes | None = None
    """The topmost ancestor."""
    shown: int = 0
    """The last history event that the code has seen; used when the run repeats another run."""
    reason: str | None = None
    """The reason for the end, if it is already certain: the run continues one that has timed out."""
    cancelling: bool = False
    """Whether to end the run without running its code: the run continues one that is being cancelled."""
    trace: str | None = None
    """The traceparent of the parent span; a child run without one belongs to its parent's trace."""
    flow: bool = False
    """Whether the run is of a flow graph."""
    parent_task: bytes | None = None
    """The task that started the run."""
    state: Blob | None = None
    """For a flow: its state before it begins. For a run that has `begun`: the state of its plan."""
    headers: Json | None = None
    """Headers for the run's tasks and child runs; a child run without headers inherits its parent's."""
    attributes: Json | None = None
    """For a run of code: the attributes that lists are filtered by."""
    begun: bool = False
    """Whether the run starts in state running, together with its first tasks. Code without a lane always does."""
    code: NewCode | None = None
    """For a workflow as code. Not a column, so this is the last field."""


class NewCode(NamedTuple):
    """Rows that are created together with a run of code."""

    task: str
    """The name of the turn task."""
    queue: str
    events: Sequence[tuple[bytes, int, str, bytes]]
    """The first events of the history: rows of `histories.EVENTS`."""
    times: Sequence[float] = ()
    """Times of the first of these events, in Unix seconds; the remaining events happen now."""


_NEW = Batch("n", NewRun, but="code")
_TURNS = Batch("c", "id uuid, task text, queue text, last_event int")
_EVENTS = Batch("e", "run_id uuid, place int, kind text, data bytea, at double precision")
_NOW = "coalesce(%(now)s::timestamptz, now())"
_WAITS = "n.lane IS NOT NULL AND NOT n.begun"
"""For code: the run stays pending, and its turn task blocked, until the lane has room."""


def _creating(name: str, source: str, **values: str) -> str:
    created = _NEW.into(
        "runs",
        f"{source} {join_run('n.parent_run')}",
        but=("begun",),
        open="n.total",
        deadline=f"{_NOW} + n.timeout * interval '1 second'",
        tags="ARRAY(SELECT jsonb_array_elements_text(n.tags))",
        created_at=_NOW,
        trace=f"coalesce(n.trace, {SPAN_OF_RUN})",
        headers="coalesce(n.headers, run.headers)",
        **values,
    )
    return f"""
WITH /* {name} */ created AS (
    INSERT {created}
        ON CONFLICT DO NOTHING
    RETURNING id, status, trace, headers
)"""


def _creating_plain(name: str, source: str = str(_NEW)) -> str:
    created = _creating(
        name,
        source,
        depth="coalesce(n.depth, 0)",
        status="CASE WHEN n.begun THEN 'running' ELSE 'pending' END",
        started_at=f"CASE WHEN n.begun THEN {_NOW} END",
    )
    return f"{created} SELECT id FROM created"


def _creating_code(name: str) -> str:
    source = f"""{_TURNS} JOIN {_NEW} USING (id)
      LEFT JOIN LATERAL (
           SELECT id, root, depth FROM orchestrator.runs
            WHERE id = n.parent_run AND n.depth IS NULL LIMIT 1) AS above ON true"""
    created = _creating(
        name,
        source,
        depth="coalesce(n.depth, above.depth + 1, 0)",
        root="coalesce(n.root, above.root, above.id)",
        status=f"CASE WHEN {_WAITS} THEN 'pending' ELSE 'running' END",
        started_at=f"CASE WHEN NOT ({_WAITS}) THEN {_NOW} END",
        code="true",
        last_event="c.last_event",
    )
    return f"""{created}, kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT e.run_id, e.place, coalesce(to_timestamp(e.at), {_NOW}), e.kind, e.data
      FROM {_EVENTS} JOIN created ON created.id = e.run_id
), own AS (
    INSERT INTO orchestrator.tasks (id, name, queue, run_id, payload, blockers, trace, options)
    SELECT c.id, c.task, c.queue, c.id, ''::bytea, CASE created.status WHEN 'pending' THEN 1 ELSE 0 END, created.trace,
           CASE WHEN created.headers IS NOT NULL THEN jsonb_build_object('headers', created.headers) END
      FROM {_TURNS} JOIN created ON created.id = c.id
)
SELECT id FROM created
"""


# Clients may use a pooler, where prepared statements get lost.
_CREATE = Prepared[bytes](_creating_plain("runs.create"))
_CREATE_FROM_CLIENT = Statement[UUID](_creating_plain("runs.create_from_client"))
_CREATE_DEFINED = Statement[UUID](
    _creating_plain(
        "runs.create_defined",
        f"""{_NEW} JOIN orchestrator.workflows d
    ON d.name = n.workflow AND d.version = n.version AND d.deleted_at IS NULL""",
    )
)
_CREATE_CODE = Prepared[bytes](_creating_code("runs.create_code"))
_CREATE_CODE_FROM_CLIENT = Statement[UUID](_creating_code("runs.create_code_from_client"))


_COPIED = ("id", "params", "key", "schedule", "trace")
"""Columns that differ between runs of a schedule; the remaining columns are mostly the same."""
_COMMON = ("name", "workflow", "version", "timeout", "fire_time")
_COPY = Statement[None](f"""
COPY /* runs.copy */ orchestrator.runs
({", ".join((*_COPIED, *_COMMON))}, total, open, state, tags, deadline, created_at, started_at, status) FROM STDIN
""")
_common = attrgetter(*_COMMON, "tags")


def copy_begun(connection: Connection, runs: Iterable[tuple[NewRun, bytes]], now: datetime) -> None:
    """Insert runs of definitions that have begun with one task, each with the state of its plan (needs psycopg2).

    They have no parent and no lane. This is three times as fast as `create`, and fails for all if one id or key exists.
    """
    encoded: dict[tuple[Any, ...], str] = {}
    lines = []
    for run, state in runs:
        fields = (*_common(run), state)
        if fields not in encoded:
            deadline = None if run.timeout is None else now + timedelta(seconds=run.timeout)
            tags = array_of(msgspec.json.decode(run.tags, type=list[str]))
            constants = (1, 1, f"\\x{state.hex()}", tags, deadline, now, now, RunState.RUNNING)
            encoded[fields] = "\t".join(map(encode_field, (*fields[:-2], *constants)))
        params, key, schedule, trace = map(encode_field, (run.params, run.key, run.schedule, run.trace))
        lines.append(f"{run.id.hex()}\t{params}\t{key}\t{schedule}\t{trace}\t{encoded[fields]}\n")
    copying.copy(connection, _COPY.sql, ["".join(lines)])


def create_defined(connection: Connection, run: NewRun) -> bool:
    """Insert a run for a client. Return False if the definition does not exist, or the id or key exists already."""
    return bool(_CREATE_DEFINED(connection, _NEW([run[:-1]]), now=None, has_spans=False))


def create(
    connection: Connection, runs: Sequence[NewRun], now: datetime | None = None, *, has_spans: bool = False
) -> set[bytes]:
    """Insert runs; those of code with their turn tasks and first history events.

    Return the ids of inserted runs: a run whose id or key exists is skipped. `now` is the leader's time; clients pass
    None. A child run belongs to its parent's trace, below the parent run's span if the leader `has_spans`.
    """
    of_code = [(run, run.code) for run in runs if run.code is not None]
    plain = [run for run in runs if run.code is None]
    created: set[bytes] = set()
    if plain:
        rows = _NEW(run[:-1] for run in plain)
        if now is not None:
            created.update(_CREATE(connection, rows, now=now, has_spans=has_spans))
        else:
            created.update(run.bytes for run in _CREATE_FROM_CLIENT(connection, rows, now=None, has_spans=has_spans))
    if of_code:
        events = [row for _, code in of_code for row in code.events]
        if any(MARK in data for *_, data in events):
            payloads.keep_named(connection, events)
        batches = (
            _NEW(run[:-1] for run, _ in of_code),
            _TURNS((run.id, code.task, code.queue, len(code.events)) for run, code in of_code),
            _EVENTS((*row, at) for _, code in of_code for row, at in zip_longest(code.events, code.times)),
        )
        if now is not None:
            created.update(_CREATE_CODE(connection, *batches, now=now, has_spans=has_spans))
        else:
            stored = _CREATE_CODE_FROM_CLIENT(connection, *batches, now=None, has_spans=has_spans)
            created.update(run.bytes for run in stored)
    return created
