"""Requests to the leader: rows that the next tick applies and deletes."""

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
    """Cancel a task that is not dispatched yet."""
    CANCEL_RUN = "cancel run"
    WITHHOLD_RUN = "withhold run"
    """Start no further tasks of a composition, or not those of the step in the body. Running tasks continue."""
    RETRY_TASK = "retry task"
    RETRY_RUN = "retry run"
    DELETE_RUN = "delete run"
    """Stored in the table `deletions`, not in the inbox, until retention has deleted the run."""
    EVENT = "event"
    """An event for workflows. The body also has the last workflow whose triggers were checked."""
    RUN_ENDED = "run ended"
    """A run has ended for which others wait; the leader inserts this with the end."""
    ARRIVAL = "arrival"
    """A task is ready in a lane; the body is true if it is the first of several."""
    LANES = "lanes"
    """So many lanes have ready tasks that all lanes should be examined."""
    QUEUES = "queues"
    """A queue was paused, resumed or limited."""
    DRAIN = "drain"
    """Order a worker to drain; the target is the id of its parent process."""
    PURGE = "purge"
    """Cancel the pending tasks of a queue."""
    REDRIVE = "redrive"
    """Retry failed tasks that match a filter."""
    ENQUEUE = "enqueue"
    """A running task enqueues a task with a unique key."""
    SIGNAL = "signal"
    """This kind and the next five are for workflows as code."""
    RESOLVE = "resolve"
    REJECT = "reject"
    UPDATE = "update"
    QUERY = "query"
    TERMINATE = "terminate"
    """End a run without running its code."""
    RESET = "reset"
    """Start a run that repeats another run up to an event."""
    FLOW_SIGNAL = "flow signal"
    """A signal for a run of a flow; the body has the key, the value, the sender and the reason."""
    COMPLETE_TASK = "complete task"
    """A task completed in a transaction of its own; the body is the run time in seconds."""
    REPORT = "report"
    """A worker's report about a task whose row was locked; the body has the worker and the report."""


class Request(NamedTuple):
    id: int
    kind: str
    target: bytes
    age: float
    """Seconds since the request was made."""
    body: Any = None
    created_at: datetime | None = None
    """When the request was made, by the clock of Postgres."""


_ADD = Statement[int]("""
INSERT /* inbox.add */ INTO orchestrator.inbox (kind, target, body)
VALUES (%(kind)s, %(target)s::uuid, %(body)s::jsonb) RETURNING id
""")


def add(connection: Connection, kind: RequestKind, target: bytes, body: str | None = None) -> int:
    """Insert a request; `body` is JSON. Return its id; the leader deletes the row when it has applied the request."""
    return _ADD.one(connection, kind=str(kind), target=target, body=body)


class NewRequest(NamedTuple):
    """A request by the leader to itself."""

    target: bytes
    body: str
    """As JSON."""


_NEW = Batch("n", NewRequest)
_ADD_ALL = Prepared[None](f"""
INSERT /* inbox.add_all */ INTO orchestrator.inbox (kind, target, body)
SELECT %(kind)s, n.target, n.body::jsonb FROM {_NEW}
""")


def add_all(connection: Connection, kind: RequestKind, new: list[NewRequest]) -> None:
    """Insert requests of the leader, for later ticks."""
    _ADD_ALL(connection, _NEW(new), kind=str(kind))


_IS_PENDING = Statement[bool]("""
SELECT /* inbox.is_asked */ EXISTS (
       SELECT FROM orchestrator.inbox
        WHERE kind = %(kind)s AND (%(target)s::uuid IS NULL OR target = %(target)s::uuid))
""")


def is_pending(connection: Connection, kind: RequestKind, target: bytes | None = None) -> bool:
    """Return whether requests of this kind, or those for one target, are pending."""
    return _IS_PENDING.one(connection, kind=str(kind), target=target)


_BY_PEOPLE = (
    *(RequestKind.CANCEL_TASK, RequestKind.RETRY_TASK, RequestKind.REDRIVE, RequestKind.PURGE, RequestKind.DRAIN),
    *(RequestKind.CANCEL_RUN, RequestKind.RETRY_RUN, RequestKind.TERMINATE, RequestKind.FLOW_SIGNAL),
    *(RequestKind.SIGNAL, RequestKind.RESOLVE, RequestKind.REJECT),
)
_MAX_SCANNED = 10_000


class Waiting(NamedTuple):
    """The range of pending request ids."""

    first: int
    last: int


_WAITING = Statement[Waiting](f"""
SELECT /* inbox.waiting */ min(id) AS first, max(id) AS last
  FROM (SELECT id, kind FROM orchestrator.inbox ORDER BY id LIMIT {_MAX_SCANNED}) AS oldest
 WHERE kind = ANY(%(kinds)s::text[]) HAVING count(*) > 0
""")


def waiting(connection: Connection) -> Waiting | None:
    """Return the ids of the first and last pending request of the kinds that people make; None if there is none."""
    return _WAITING.first(connection, kinds=[str(kind) for kind in _BY_PEOPLE])


_HAS_REQUEST = Statement[bool]("""
SELECT /* inbox.has_request */ EXISTS (
       SELECT FROM orchestrator.inbox WHERE kind = %(kind)s AND body->>'request' = encode(%(request)s::bytea, 'base64'))
""")


def has_request(connection: Connection, kind: RequestKind, request: bytes) -> bool:
    """Return whether a request is pending that has this id from its sender."""
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
    """Delete requests that were applied."""


@Prepared.function("UPDATE /* inbox.move_back */ orchestrator.inbox SET id = DEFAULT WHERE id = ANY(%(ids)s::bigint[])")
def move_back(connection: Connection, ids: list[int]) -> None:
    """Move requests behind all others."""


@Prepared.function("""
UPDATE /* inbox.go_on */ orchestrator.inbox SET body = body || %(state)s::jsonb WHERE id = %(item)s::bigint
""")
def save_progress(connection: Connection, item: int, state: str) -> None:
    """Save the progress of a request that takes several ticks: merge the JSON `state` into its body."""
