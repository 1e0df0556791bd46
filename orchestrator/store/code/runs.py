"""Runs of workflows as code: their creation, their chains of successors, and their end.

Each run has a turn task with the run's id: `blockers = 1` while the code waits, and 0 when events are to be shown to
it. The end of the turn task determines the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import chain, takewhile
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.code.attributes import Scalar, attributes_of
from orchestrator.domain.code.history import HistoryItem
from orchestrator.domain.ids import is_derived, successor_id
from orchestrator.domain.plain import stored_json
from orchestrator.domain.runs import CONTINUATION_REASONS, RESET
from orchestrator.store.batches import Batch
from orchestrator.store.code.histories import event_of, event_rows, first_event
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs.creation import NewCode, NewRun
from orchestrator.store.sql import Prepared, Row, Statement, columns_of


def new_run(
    run_id: bytes,
    events: Sequence[HistoryItem],
    *,
    version: int | None = None,
    pinned: bool = False,
    times: Sequence[float] = (),
) -> NewRun:
    """Return a new run of code; its history begins with `events`, the first of which is `RunStarted`, at these `times`.

    The run may continue with another version of the code than it started with. A pinned run keeps its version: its turn
    task has the version in its name, which only workers with that version know.
    """
    started = events[0]
    assert isinstance(started, history.RunStarted)
    version = version or started.version
    return NewRun(
        id=run_id,
        name=started.workflow,
        workflow=started.workflow,
        version=version,
        code=NewCode(
            task=f"{started.workflow}@{version}" if pinned else started.workflow,
            queue=started.queue,
            events=event_rows(run_id, events),
            times=times,
        ),
        attributes=stored_json(attributes) if (attributes := attributes_of(events)) else None,
    )


_CHANGED = Batch("n", "id uuid, changes jsonb")
_SET_ATTRIBUTES = Prepared[None](f"""
UPDATE /* code_runs.set_attributes */ orchestrator.runs r
   SET attributes = nullif(jsonb_strip_nulls(coalesce(r.attributes, '{{}}') || n.changes), '{{}}')
  FROM {_CHANGED}
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = n.id LIMIT 1) AS found
 WHERE r.ctid = found.place
""")


def set_attributes(connection: Connection, changed: Mapping[bytes, Mapping[str, Scalar | None]]) -> None:
    """Change attributes of runs; None removes an attribute."""
    _SET_ATTRIBUTES(connection, _CHANGED((run, stored_json(changes)) for run, changes in changed.items()))


@Prepared.function("""
WITH /* code_runs.forget */ timers AS (
    DELETE FROM orchestrator.timers WHERE run_id = ANY(%(ids)s::uuid[])
), promises AS (
    DELETE FROM orchestrator.promises WHERE run_id = ANY(%(ids)s::uuid[])
)
DELETE FROM orchestrator.resolutions WHERE run_id = ANY(%(ids)s::uuid[])
""")
def forget(connection: Connection, ids: Sequence[bytes]) -> None:
    """Delete timers, promises and resolutions of ended runs."""


class OpenChild(NamedTuple):
    """A child run that ends with its parent."""

    id: bytes
    terminates: bool
    """Whether to end the child without running its code."""


@Prepared.function("""
SELECT /* code_runs.children */ c.id, c.terminates FROM unnest(%(parents)s::uuid[]) AS parent(id)
 CROSS JOIN LATERAL (
       SELECT id, terminates FROM orchestrator.runs
        WHERE parent_run = parent.id AND code AND ended_at IS NULL AND NOT detached OFFSET 0) AS c
""")
def children(connection: Connection, parents: Sequence[bytes]) -> list[OpenChild]:
    """Return the open child runs that do not outlive these runs."""


@Prepared.function("SELECT /* code_runs.closing */ id FROM orchestrator.runs WHERE closing ORDER BY id LIMIT %(limit)s")
def closing(connection: Connection, limit: int) -> list[bytes]:
    """Return ended runs that may have open tasks."""


@Prepared.function(
    "UPDATE /* code_runs.closed */ orchestrator.runs SET closing = false WHERE id = ANY(%(runs)s::uuid[])"
)
def closed(connection: Connection, runs: Sequence[bytes]) -> None:
    """Mark ended runs as having no open tasks any more."""


@dataclass(frozen=True, kw_only=True)
class CodeRun:
    """A run of code with a successor, and the columns that the successor inherits."""

    id: bytes
    version: int
    pinned: bool
    name: str
    timeout: float | None
    parent_run: bytes | None
    parent_position: int | None
    child_id: bytes
    detached: bool
    terminates: bool
    tags: str
    """JSON."""
    schedule: str | None
    fire_time: str | None
    lane: str | None
    lane_limit: int | None
    trace: str | None
    headers: str | None

    def inherited_by(self, new: NewRun, **own: Any) -> NewRun:
        """Return the successor with the inherited columns, and with columns of its own."""
        columns = (field.name for field in fields(CodeRun) if field.name not in ("id", "version", "pinned"))
        return new._replace(**{name: getattr(self, name) for name in columns} | own)


INHERITED = columns_of(
    CodeRun,
    "r",
    but=("timeout",),
    pinned="t.name <> r.workflow",
    child_id="coalesce(r.child_id, r.id)",
    tags="array_to_json(r.tags)::text",
    fire_time="r.fire_time::text",
    headers="r.headers::text",
)
"""The columns of a run `r` with its turn task `t`, except the timeout, which depends on the reason."""


@dataclass(frozen=True, kw_only=True)
class Predecessor(CodeRun):
    """A run that continues in another, with its remaining time in seconds."""

    workflow: str
    queue: str
    reason: str | None
    cancelling: bool
    began_at: float
    attributes: str | None


@Prepared.function(f"""
SELECT /* code_runs.continued */ {INHERITED},
       extract(epoch FROM r.deadline - %(now)s::timestamptz)::double precision AS timeout, r.workflow, t.queue,
       r.reason, r.cancelling, extract(epoch FROM r.created_at)::double precision AS began_at,
       r.attributes::text AS attributes
  FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 CROSS JOIN LATERAL (SELECT queue, name FROM orchestrator.ended_tasks WHERE id = wanted.id LIMIT 1) AS t
""")
def predecessors(connection: Connection, runs: Sequence[bytes], now: datetime) -> list[Predecessor]:
    """Return the runs that are about to be continued; their turn tasks have ended."""


@Prepared.function("""
SELECT /* code_runs.of_code */ wanted.id FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT FROM orchestrator.runs WHERE id = wanted.id AND code LIMIT 1) AS r
""")
def of_code(connection: Connection, ids: Sequence[bytes]) -> set[bytes]:
    """Return the ids that are of runs of code: a turn task has the id of its run."""


_MAX_CHAIN_PART = 256
"""Runs of a chain to read at once: a run that often continues as new has thousands of successors."""
_CONTINUING = Prepared[bytes](f"""
SELECT /* code_runs.continuing */ wanted.id FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs WHERE id = wanted.id AND code AND reason IN {CONTINUATION_REASONS} LIMIT 1) AS r
""")


def latest(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return the current end of the chain of each run: the run itself if it was not continued."""
    last = {run: run for run in runs}
    unfinished, length = list(last), 1
    while unfinished:
        chains = {run: _chain(last[run], length) for run in unfinished}
        continued = set(_CONTINUING(connection, ids=chain.from_iterable(chains.values())))
        for run, members in chains.items():
            last[run] = next((link for link in members if link not in continued), successor_id(members[-1]))
        unfinished = [run for run, members in chains.items() if members[-1] in continued]
        length = min(4 * length, _MAX_CHAIN_PART)
    return last


def _chain(run: bytes, length: int) -> list[bytes]:
    """Return a run and the ids of its possible successors, in order."""
    chain = [run]
    while len(chain) < length:
        chain.append(successor_id(chain[-1]))
    return chain


_ORIGIN = Statement[Row]("""
SELECT /* code_runs.origin */ CASE WHEN r.parent_run IS NULL THEN r.child_id END AS first,
       CASE WHEN r.parent_run IS NOT NULL THEN h.data END AS begun
  FROM orchestrator.runs r JOIN orchestrator.histories h ON h.run_id = r.id AND h.number = 1
 WHERE r.id = %(run)s::uuid AND r.code
""")


def origin(connection: Connection, run: bytes) -> bytes:
    """Return the first run of the chain that ends here: the run itself if it continues none.

    A child run's `child_id` may change when another run takes the child over, so its history is read instead.
    """
    row = _ORIGIN.first(connection, run=run) if is_derived(run) else None
    if row is None:
        return run
    if row.begun is not None:
        return first_event(row.begun).first or run
    return run if row.first is None else row.first.bytes


_MAX_EVENTS = 50_000
"""Events of a chain to search for a message: those of its newest runs, and of the first."""
_MAX_RESETS = 16
"""Consecutive resets of ended runs through which a run's messages are found."""


class _Link(NamedTuple):
    """A run of a chain."""

    id: bytes
    reason: str | None
    events: int


class Past(NamedTuple):
    """A chain of runs, and those of its runs whose histories are to be searched."""

    first: bytes
    runs: list[bytes]


_LINKS = Prepared[_Link]("""
SELECT /* code_runs.links */ wanted.id, r.reason, r.last_event AS events
  FROM unnest(%(ids)s::uuid[]) WITH ORDINALITY AS wanted(id, place)
 CROSS JOIN LATERAL (SELECT reason, last_event FROM orchestrator.runs WHERE id = wanted.id AND code LIMIT 1) AS r
 ORDER BY wanted.place
""")
_RESET_FROM = Statement[memoryview]("""
SELECT /* code_runs.reset_from */ data FROM orchestrator.histories
 WHERE run_id = %(run)s::uuid AND kind = 'run_reset' ORDER BY number DESC LIMIT 1
""")


def message_chains(connection: Connection, run: bytes) -> list[Past]:
    """Return the chains whose messages belong to a run, newest first.

    These are the run's own chain and, if it began with a reset of an ended run, the chain up to that run.
    """
    result: list[Past] = []
    end: bytes | None = None
    while len(result) < _MAX_RESETS:
        first = origin(connection, run)
        links = _links(connection, first)
        if end is None and not any(link.id == run for link in links):  # the first run is deleted
            links += _links(connection, run)
        before = [*takewhile(lambda link: link.id != end, links)]  # noqa: B023
        result.append(Past(first, _runs_to_search(before)))
        reset_event = _RESET_FROM.first(connection, run=first) if is_derived(first) else None
        if reset_event is None:
            break
        reset = event_of(bytes(reset_event))
        assert isinstance(reset, history.RunReset)
        run = end = reset.run
    return result


def _links(connection: Connection, run: bytes) -> list[_Link]:
    """Return a run and its successors, in order."""
    result: list[_Link] = []
    ahead = [run]
    while ahead:
        links = _LINKS(connection, ids=ahead)
        result += links
        goes_on = len(links) == len(ahead) and links[-1].reason in CONTINUATION_REASONS
        ahead = _chain(successor_id(ahead[-1]), min(4 * len(ahead), _MAX_CHAIN_PART)) if goes_on else []
    return result


def _runs_to_search(links: Sequence[_Link]) -> list[bytes]:
    """Return the runs to search, in order. A run that was reset while open has passed its messages on."""
    room = _MAX_EVENTS
    selected: list[bytes] = []
    for link in reversed(links):
        if link.reason != RESET and (room > 0 or link is links[0]):
            selected.append(link.id)
            room -= link.events
    return selected[::-1]


_SIGNAL_OPEN = Statement[UUID](f"""
INSERT /* code_runs.signal_open */ INTO orchestrator.inbox (kind, target, body)
SELECT '{RequestKind.SIGNAL}', s.id, s.body
  FROM unnest(%(ids)s::uuid[], %(bodies)s::jsonb[]) WITH ORDINALITY AS s(id, body, position)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs
        WHERE id = s.id AND code AND workflow = %(workflow)s AND (ended_at IS NULL OR reason = ANY(%(goes_on)s::text[]))
        LIMIT 1) AS run
 ORDER BY s.position
RETURNING target
""")


def signal_open(connection: Connection, workflow: str, signals: Sequence[tuple[bytes, str]]) -> set[bytes]:
    """Insert signals for open runs of a workflow into the inbox, in order; return the runs that got one."""
    ids, bodies = [run for run, _ in signals], [body for _, body in signals]
    reached = _SIGNAL_OPEN(connection, ids=ids, bodies=bodies, workflow=workflow, goes_on=[*CONTINUATION_REASONS])
    return {run.bytes for run in reached}


@Prepared.function("""
SELECT /* code_runs.known */ id FROM orchestrator.runs
 WHERE id = ANY(%(runs)s::uuid[]) AND code AND workflow = %(workflow)s
""")
def runs_of_workflow(connection: Connection, workflow: str, runs: Sequence[bytes]) -> list[bytes]:
    """Return the runs that are of a workflow."""
