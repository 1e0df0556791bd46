"""How runs come to be: those of many tasks, of definitions and of code. Anyone may create them, in a transaction."""

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
from orchestrator.store.copying import copied
from orchestrator.store.sql import Prepared, Statement, array_of
from orchestrator.store.tasks.row import SPAN_OF_RUN, join_run


class NewRun(NamedTuple):
    """A run of any kind that is to be created: the columns of its row, and its code.

    A new column is a field here, a column in `store/tables` and a migration.
    """

    id: bytes
    name: str
    total: int = 0
    """Tasks that it has from the first."""
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
    """The run that waits for it, which may be another than the one that started it."""
    parent_step: str | None = None
    parent_position: int | None = None
    child_id: bytes | None = None
    """The id under which the parent waits for it, if that is not its own."""
    detached: bool = False
    terminates: bool = False
    schedule: str | None = None
    """The key of the schedule that started it, or that started the run that it goes on from."""
    fire_time: Annotated[str, "timestamptz"] | None = None
    depth: int | None = None
    """How many runs stand above it; where this is not given, a run of code reads it from its parent."""
    root: bytes | None = None
    """The first of these."""
    shown: int = 0
    """The last of its events that code has been shown: where it repeats another run."""
    reason: str | None = None
    """Why it will have ended, if that is certain: the time is up of the run that it goes on from."""
    cancelling: bool = False
    """It is to be ended without asking its code, as the run that it goes on from was."""
    trace: str | None = None
    """The span that it came of, as a W3C traceparent; a child run that is given none is part of its parent's trace."""
    flow: bool = False
    """Of a flow graph."""
    parent_task: bytes | None = None
    """The task that started it."""
    state: Blob | None = None
    """Of a flow: what it remembers before it has begun. Of a run that `begun`: what its plan does."""
    headers: Json | None = None
    """Texts that its tasks and child runs have, too; a child run that is given none has those of its parent."""
    attributes: Json | None = None
    """Of a run of code: what lists are filtered by."""
    begun: bool = False
    """It starts running; its first tasks are created with it. Code without a lane always does."""
    code: NewCode | None = None
    """Of a workflow as code. This is no column, and so it comes last."""


class NewCode(NamedTuple):
    """The rows that are created with a run of code."""

    task: str
    """The name of its turn task."""
    queue: str
    events: Sequence[tuple[bytes, int, str, bytes]]
    """How its history begins: rows of `histories.EVENTS`."""
    times: Sequence[float] = ()
    """When the first of these events happened, in Unix seconds; all others do so now."""


_NEW = Batch("n", NewRun, but="code")
_TURNS = Batch("c", "id uuid, task text, queue text, last_event int")
_EVENTS = Batch("e", "run_id uuid, place int, kind text, data bytea, at double precision")
_NOW = "coalesce(%(now)s::timestamptz, now())"
_WAITS = "n.lane IS NOT NULL AND NOT n.begun"
"""Of code: it is pending, and its turn task sleeps, until its lane has room."""


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


# A client may sit behind a pooler, where nothing that was prepared can be found again.
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
"""The columns in which runs of a schedule differ; the others are mostly the same."""
_COMMON = ("name", "workflow", "version", "timeout", "fire_time")
_COPY = Statement[None](f"""
COPY /* runs.copy */ orchestrator.runs
({", ".join((*_COPIED, *_COMMON))}, total, open, state, tags, deadline, created_at, started_at, status) FROM STDIN
""")
_common = attrgetter(*_COMMON, "tags")


def copy_begun(connection: Connection, runs: Iterable[tuple[NewRun, bytes]], now: datetime) -> None:
    """Create runs of definitions that have begun with one task, each with what its plan remembers (needs psycopg2).

    They are part of no other run and of no lane. This costs Postgres a third of what `create` does, and it refuses all
    of them where an id or a key exists.
    """
    written: dict[tuple[Any, ...], str] = {}
    lines = []
    for run, state in runs:
        kind = (*_common(run), state)
        if kind not in written:
            deadline = None if run.timeout is None else now + timedelta(seconds=run.timeout)
            tags = array_of(msgspec.json.decode(run.tags, type=list[str]))
            of_all = (1, 1, f"\\x{state.hex()}", tags, deadline, now, now, RunState.RUNNING)
            written[kind] = "\t".join(map(copied, (*kind[:-2], *of_all)))
        params, key, schedule, trace = map(copied, (run.params, run.key, run.schedule, run.trace))
        lines.append(f"{run.id.hex()}\t{params}\t{key}\t{schedule}\t{trace}\t{written[kind]}\n")
    copying.copy(connection, _COPY.sql, ["".join(lines)])


def create_defined(connection: Connection, run: NewRun) -> bool:
    """Create a run for a client if its definition is there, and neither its id nor its key; say whether it did."""
    return bool(_CREATE_DEFINED(connection, _NEW([run[:-1]]), now=None, has_spans=False))


def create(
    connection: Connection, runs: Sequence[NewRun], now: datetime | None = None, *, has_spans: bool = False
) -> set[bytes]:
    """Create runs, those of code with their turn tasks and the beginning of their histories.

    Return those that did not exist: an id or key that is there already is left alone. `now` is the leader's time;
    without it, this is a client. A child run is part of the trace of its parent: below the span of that, if the leader
    `has_spans` of runs.
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
