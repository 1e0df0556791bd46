"""Runs of workflows as code: how they begin, get stuck, and end.

Each has a task of its own, with the id of the run, that carries the turns of its code: `blockers = 1` while the code
waits, 0 when it has something to be shown. How that task ends is how the run ends.
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
from orchestrator.domain.runs import GOES_ON, RESET
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
    """Return a run of code that is to be created; its history begins with `RunStarted`, and these were the `times`.

    It may go on with another version of its code than it was started with. One that is pinned is held to its version:
    its turn task bears that in its name, which only workers with that version know.
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
    """Change attributes of runs; None removes one."""
    _SET_ATTRIBUTES(connection, _CHANGED((run, stored_json(some)) for run, some in changed.items()))


@Prepared.function("""
WITH /* code_runs.forget */ timers AS (
    DELETE FROM orchestrator.timers WHERE run_id = ANY(%(ids)s::uuid[])
), promises AS (
    DELETE FROM orchestrator.promises WHERE run_id = ANY(%(ids)s::uuid[])
)
DELETE FROM orchestrator.resolutions WHERE run_id = ANY(%(ids)s::uuid[])
""")
def forget(connection: Connection, ids: Sequence[bytes]) -> None:
    """Forget what runs waited for that have ended."""


class OpenChild(NamedTuple):
    """A child run that ends with its parent."""

    id: bytes
    terminates: bool
    """Without its code."""


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
    """Return runs that have ended and may have open tasks."""


@Prepared.function(
    "UPDATE /* code_runs.closed */ orchestrator.runs SET closing = false WHERE id = ANY(%(runs)s::uuid[])"
)
def closed(connection: Connection, runs: Sequence[bytes]) -> None:
    """Note that nothing is open any more in runs that have ended."""


@dataclass(frozen=True, kw_only=True)
class CodeRun:
    """A run of code that another one follows: what that one inherits."""

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
    """As JSON."""
    schedule: str | None
    fire_time: str | None
    lane: str | None
    lane_limit: int | None
    trace: str | None
    headers: str | None

    def inherited_by(self, new: NewRun, **own: Any) -> NewRun:
        """Return the run that follows, with the columns of this one and with its own."""
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
"""Of a run `r` with the turn task `t`; its timeout depends on why it is followed."""


@dataclass(frozen=True, kw_only=True)
class Predecessor(CodeRun):
    """A run that goes on in another, with the seconds that are left of its time."""

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
    """Return what the successors of runs take over that are about to end: their turn tasks have."""


@Prepared.function("""
SELECT /* code_runs.of_code */ wanted.id FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT FROM orchestrator.runs WHERE id = wanted.id AND code LIMIT 1) AS r
""")
def of_code(connection: Connection, ids: Sequence[bytes]) -> set[bytes]:
    """Return those of these ids of tasks that are runs of code: the turn task of a run has its id."""


_FURTHEST = 256
"""Runs of a chain that are looked at together: one that continues all the time has thousands."""
_CONTINUING = Prepared[bytes](f"""
SELECT /* code_runs.continuing */ wanted.id FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs WHERE id = wanted.id AND code AND reason IN {GOES_ON} LIMIT 1) AS r
""")


def latest(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return, for each of these runs, the one in which it goes on now: itself, where it goes on in no other."""
    last = {run: run for run in runs}
    moving, key_scope = list(last), 1
    while moving:
        chains = {run: _chain(last[run], key_scope) for run in moving}
        continued = set(_CONTINUING(connection, ids=chain.from_iterable(chains.values())))
        for run, some in chains.items():
            last[run] = next((one for one in some if one not in continued), successor_id(some[-1]))
        moving = [run for run, some in chains.items() if some[-1] in continued]
        key_scope = min(4 * key_scope, _FURTHEST)
    return last


def _chain(run: bytes, length: int) -> list[bytes]:
    """Return a run, and those in which it would go on one after another."""
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
    """Return the first of the runs that went on in one another up to this one: itself, where it continues none.

    The `child_id` of a child is its parent's, and changes when another run takes it over: its history says it.
    """
    found = _ORIGIN.first(connection, run=run) if is_derived(run) else None
    if found is None:
        return run
    if found.begun is not None:
        return first_event(found.begun).first or run
    return run if found.first is None else found.first.bytes


_MOST_EVENTS = 50_000
"""Events of a chain that are searched for a message: those of its newest runs, and of the first."""
_MOST_RESETS = 16
"""Resets of ended runs, one after another, whose messages a run knows."""


class _Link(NamedTuple):
    """A run of a chain."""

    id: bytes
    reason: str | None
    events: int


class Past(NamedTuple):
    """A chain of runs, and those of them whose histories have the messages."""

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


def pasts(connection: Connection, run: bytes) -> list[Past]:
    """Return the chains whose messages a run knows, newest first.

    They are its own and, if the first run of that repeats one that had ended, those up to the one which was reset.
    """
    found: list[Past] = []
    end: bytes | None = None
    while len(found) < _MOST_RESETS:
        first = origin(connection, run)
        links = _links(connection, first)
        if end is None and not any(link.id == run for link in links):  # the first is forgotten
            links += _links(connection, run)
        before = [*takewhile(lambda link: link.id != end, links)]  # noqa: B023
        found.append(Past(first, _searched(before)))
        again = _RESET_FROM.first(connection, run=first) if is_derived(first) else None
        if again is None:
            break
        mark = event_of(bytes(again))
        assert isinstance(mark, history.RunReset)
        run = end = mark.run
    return found


def _links(connection: Connection, run: bytes) -> list[_Link]:
    """Return a run, and those in which it went on one after another."""
    found: list[_Link] = []
    ahead = [run]
    while ahead:
        links = _LINKS(connection, ids=ahead)
        found += links
        goes_on = len(links) == len(ahead) and links[-1].reason in GOES_ON
        ahead = _chain(successor_id(ahead[-1]), min(4 * len(ahead), _FURTHEST)) if goes_on else []
    return found


def _searched(links: Sequence[_Link]) -> list[bytes]:
    """Return the runs that are searched, in order; one that was reset while it was open has left all to the next."""
    room = _MOST_EVENTS
    few: list[bytes] = []
    for link in reversed(links):
        if link.reason != RESET and (room > 0 or link is links[0]):
            few.append(link.id)
            room -= link.events
    return few[::-1]


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
    """Put signals for open runs of a workflow into the inbox, in their order; return these runs."""
    ids, bodies = [run for run, _ in signals], [body for _, body in signals]
    reached = _SIGNAL_OPEN(connection, ids=ids, bodies=bodies, workflow=workflow, goes_on=[*GOES_ON])
    return {run.bytes for run in reached}


@Prepared.function("""
SELECT /* code_runs.known */ id FROM orchestrator.runs
 WHERE id = ANY(%(runs)s::uuid[]) AND code AND workflow = %(workflow)s
""")
def known(connection: Connection, workflow: str, runs: Sequence[bytes]) -> list[bytes]:
    """Return those of these runs that are of a workflow."""
