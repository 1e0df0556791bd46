"""Requests to the leader: inserted here, applied and deleted by the next tick."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Statement


class RequestKind(StrEnum):
    CANCEL_TASK = "cancel task"
    WITHDRAW_TASK = "withdraw task"
    """Cancel it if no worker was given it yet."""
    CANCEL_RUN = "cancel run"
    RETRY_TASK = "retry task"
    RETRY_RUN = "retry run"
    DELETE_RUN = "delete run"
    """Not for the leader's inbox: the table `deletions` has the run until a round of retention has removed it."""
    EVENT = "event"
    """The body has how far it has come, too: the last of those that were asked whether it starts them."""
    RUN_ENDED = "run ended"
    """Others wait for the end of the run; made by the leader with that end."""
    ARRIVAL = "arrival"
    """A task is ready in a lane; the body is true if it is the first of several."""
    LANES = "lanes"
    """So many lanes have something ready that it is best to look through them all."""
    QUEUES = "queues"
    """A queue was paused, resumed or limited."""
    DRAIN = "drain"
    """A worker is ordered to drain: the target is the id of its parent process."""
    PURGE = "purge"
    """Cancel what waits in a queue."""
    REDRIVE = "redrive"
    """Open failed tasks again that match a filter."""
    ENQUEUE = "enqueue"
    """A running task wants a task whose key must be unique."""
    SIGNAL = "signal"
    """This and the next are for runs of workflows as code."""
    RESOLVE = "resolve"
    REJECT = "reject"
    UPDATE = "update"
    QUERY = "query"
    TERMINATE = "terminate"
    """End a run without asking its code."""
    RESET = "reset"
    """Start a run that repeats another one up to an event."""
    FLOW_SIGNAL = "flow signal"
    """A value for a run of a flow: the body has its key, the value, who sent it and why."""
    COMPLETE_TASK = "complete task"
    """A task has completed in a transaction of its own; the body is how many seconds it took."""


class Request(NamedTuple):
    id: int
    kind: str
    target: bytes
    age: float
    """Seconds since it was made."""
    body: Any = None
    created_at: datetime | None = None
    """When it was made, by the clock of Postgres."""


_ADD = Statement[int]("""
INSERT /* inbox.add */ INTO orchestrator.inbox (kind, target, body)
VALUES (%(kind)s, %(target)s::uuid, %(body)s::jsonb) RETURNING id
""")


def add(connection: Connection, kind: RequestKind, target: bytes, body: str | None = None) -> int:
    """Ask the leader for a change; `body` is JSON. Return the id of the request, which is gone once it was applied."""
    return _ADD.one(connection, kind=str(kind), target=target, body=body)


class NewRequest(NamedTuple):
    """A request that the leader makes of itself."""

    target: bytes
    body: str
    """As JSON."""


_NEW = Batch("n", NewRequest)
_ADD_ALL = Prepared[None](f"""
INSERT /* inbox.add_all */ INTO orchestrator.inbox (kind, target, body)
SELECT %(kind)s, n.target, n.body::jsonb FROM {_NEW}
""")


def add_all(connection: Connection, kind: RequestKind, new: list[NewRequest]) -> None:
    """Have something done in a transaction of its own."""
    _ADD_ALL(connection, _NEW(new), kind=str(kind))


_IS_ASKED = Statement[bool]("""
SELECT /* inbox.is_asked */ EXISTS (
       SELECT FROM orchestrator.inbox
        WHERE kind = %(kind)s AND (%(target)s::uuid IS NULL OR target = %(target)s::uuid))
""")


def is_asked(connection: Connection, kind: RequestKind, target: bytes | None = None) -> bool:
    """Say whether requests of a kind, or those for one target, wait for the leader."""
    return _IS_ASKED.one(connection, kind=str(kind), target=target)


_BY_PEOPLE = (
    *(RequestKind.CANCEL_TASK, RequestKind.RETRY_TASK, RequestKind.REDRIVE, RequestKind.PURGE, RequestKind.DRAIN),
    *(RequestKind.CANCEL_RUN, RequestKind.RETRY_RUN, RequestKind.TERMINATE, RequestKind.FLOW_SIGNAL),
    *(RequestKind.SIGNAL, RequestKind.RESOLVE, RequestKind.REJECT),
)
_MOST_LOOKED_AT = 10_000


class Waiting(NamedTuple):
    """Requests that wait for the leader: the ids of the first and the last."""

    first: int
    last: int


_WAITING = Statement[Waiting](f"""
SELECT /* inbox.waiting */ min(id) AS first, max(id) AS last
  FROM (SELECT id, kind FROM orchestrator.inbox ORDER BY id LIMIT {_MOST_LOOKED_AT}) AS oldest
 WHERE kind = ANY(%(kinds)s::text[]) HAVING count(*) > 0
""")


def waiting(connection: Connection) -> Waiting | None:
    """Return which requests of kinds that people make wait for the leader; None if none does."""
    return _WAITING.first(connection, kinds=[str(kind) for kind in _BY_PEOPLE])


_HAS_REQUEST = Statement[bool]("""
SELECT /* inbox.has_request */ EXISTS (
       SELECT FROM orchestrator.inbox WHERE kind = %(kind)s AND body->>'request' = encode(%(request)s::bytea, 'base64'))
""")


def has_request(connection: Connection, kind: RequestKind, request: bytes) -> bool:
    """Say whether a request with this id of its sender's waits for the leader."""
    return _HAS_REQUEST.one(connection, kind=str(kind), request=request)


@Prepared.function("""
SELECT /* inbox.read */ id, kind, target, extract(epoch FROM now() - created_at)::double precision AS age, body,
       created_at
  FROM orchestrator.inbox ORDER BY id LIMIT %(limit)s
""")
def read(connection: Connection, limit: int) -> list[Request]:
    """Return the oldest requests."""


@Prepared.function("DELETE /* inbox.remove */ FROM orchestrator.inbox WHERE id = ANY(%(ids)s::bigint[])")
def remove(connection: Connection, ids: list[int]) -> None:
    """Forget requests that have been applied."""


@Prepared.function("""
UPDATE /* inbox.go_on */ orchestrator.inbox SET body = body || %(state)s::jsonb WHERE id = %(item)s::bigint
""")
def go_on(connection: Connection, item: int, state: str) -> None:
    """Keep a request that takes several ticks, and how far it has come, as JSON to be merged into its body."""
