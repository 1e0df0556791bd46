"""Claims ready tasks for dispatch, as far as there is room: pending → dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.states import TaskState, sources_of
from orchestrator.store.batches import Batch
from orchestrator.store.driver import channel
from orchestrator.store.sql import Prepared, columns_of
from orchestrator.store.tables.tasks import READY_PLAIN
from orchestrator.store.tasks.enqueue import Creation, creating
from orchestrator.store.tasks.transitions import Moved, among


def _next_attempt(last: str) -> str:
    """Return the SQL of a task's next attempt number, above the fence: lower numbers may be in use."""
    return f"greatest({last}, (SELECT max(fence) FROM orchestrator.leases)) + 1"


class Claimed(NamedTuple):
    """A task that was just claimed for dispatch."""

    id: bytes
    attempt: int
    name: str
    payload: bytes
    queue: str
    options: str | None
    run_id: bytes | None
    position: int | None
    alone: bool
    failures: int = 0
    lane: str | None = None
    unique_key: str | None = None
    priority: int = 0
    details: bytes | None = None
    """Details that an earlier attempt saved."""
    seq: int = 0
    worker: str | None = None
    """For a turn task: the worker that has the run's code in memory."""
    trace: str | None = None
    """The traceparent of the task's parent span."""
    ready: float | None = None
    """For a traced task: the time at which it became ready, in Unix seconds."""
    to: str | None = None
    """The worker to send the task to; None lets any worker of the queue take it."""

    @property
    def is_turn_task(self) -> bool:
        """Return whether this is the task of a turn: a run's turn task has the run's id."""
        return self.run_id == self.id


_CLAIMED = columns_of(
    Claimed,
    "t",
    but=("to",),
    options="t.options::text",
    ready="""CASE WHEN t.trace IS NOT NULL
               THEN extract(epoch FROM coalesce(t.ready_at, t.created_at))::double precision END""",
)


def claiming(name: str, ctids: str) -> Prepared[Claimed]:
    """Return a statement that claims the rows at an array of ctids: pending → dispatched."""
    return Prepared[Claimed](f"""
UPDATE /* {name} */ orchestrator.tasks t
   SET status = 'dispatched', attempt = {_next_attempt("t.attempt")}, dispatched_at = %(now)s::timestamptz
 WHERE t.ctid = ANY ({ctids})
   AND t.status IN {among(sources_of(TaskState.DISPATCHED))}
RETURNING {_CLAIMED}
""")


_ROOMS = Batch("queue", "name text, room int")
_CLAIM = claiming(
    "tasks.claim",
    f"""ARRAY(
       SELECT next.ctid
         FROM {_ROOMS}
        CROSS JOIN LATERAL (
              SELECT ctid FROM orchestrator.tasks
               WHERE queue = queue.name AND {READY_PLAIN}
               ORDER BY priority DESC, seq
               LIMIT queue.room) AS next)""",
)


def claim(connection: Connection, rooms: dict[str, int], now: datetime) -> list[Claimed]:
    """Claim the most urgent ready tasks of each queue, as far as the queue has room; return the most urgent first."""
    return most_urgent_first(_CLAIM(connection, _ROOMS(rooms.items()), now=now))


_NEXT = f"SELECT queue FROM orchestrator.tasks WHERE {READY_PLAIN}"
_ORDER = "ORDER BY queue, priority DESC, seq LIMIT 1"


@Prepared.function(f"""
WITH /* tasks.ready_queues */ RECURSIVE found AS (
    ({_NEXT} {_ORDER})
    UNION ALL
    SELECT following.* FROM found CROSS JOIN LATERAL ({_NEXT} AND queue > found.queue {_ORDER}) AS following
)
SELECT queue FROM found LIMIT %(most)s::int
""")
def ready_queues(connection: Connection, most: int) -> list[str]:
    """Return the first queues with ready tasks outside of lanes, with one index step for each."""


_CREATED = creating(
    _CLAIMED, status="'dispatched'", attempt=_next_attempt("n.attempt"), dispatched_at="%(now)s::timestamptz"
)
_CREATE = Prepared[tuple[Any, ...]](f"""
WITH /* tasks.create_claimed */ created AS ({_CREATED})
SELECT created.*, (
       SELECT true FROM unnest(%(queues)s::text[]) AS queue(name)
        CROSS JOIN LATERAL (
              SELECT FROM orchestrator.tasks WHERE queue = queue.name AND {READY_PLAIN} LIMIT 1) AS next
        LIMIT 1) IS NULL AS is_all
  FROM created
""")


def create_claimed(
    connection: Connection,
    creation: Creation,
    queues: Iterable[str],
    now: datetime,
    commit: Callable[[], None] | None = None,
) -> tuple[list[Claimed], bool]:
    """Insert tasks as claimed if their insert is still deferred. Return whether no other task is ready in these queues.

    `commit` is called first, to let the statement also commit.
    """
    if not channel(connection).take_back(creation.insert):
        return [], False
    if commit is not None:
        commit()
    rows = _CREATE(connection, creation.rows, has_spans=creation.has_spans, queues=list(queues), now=now)
    return [Claimed(*row[:-1]) for row in rows], bool(rows) and rows[0][-1]


def successes_of(creation: Creation, claimed: Iterable[Claimed]) -> list[Moved]:
    """Return tasks of runs that were created as claimed, as they will be after success."""
    attempts = {task.id: task.attempt for task in claimed}
    return [
        Moved(new.id, "success", new.queue, new.run_id, attempts[new.id], "dispatched", new.name, new.step)
        for new in creation.tasks
        if new.run_id is not None and new.callbacks is None and new.id in attempts
    ]


def most_urgent_first(claimed: Iterable[Claimed]) -> list[Claimed]:
    """Return claims in the order of dispatch."""
    return sorted(claimed, key=lambda task: (-task.priority, task.seq))


def by_queue(claimed: Iterable[Claimed]) -> dict[str, list[Claimed]]:
    """Return claims by queue, in the same order."""
    claims: dict[str, list[Claimed]] = {}
    for task in claimed:
        claims.setdefault(task.queue, []).append(task)
    return claims


class ClaimPosition(NamedTuple):
    """The position at which a claim has ended: all ready tasks before it were claimed."""

    priority: int
    seq: int
    emptied: bool
    """Whether less urgent tasks up to `seq` were also claimed."""


def _after(condition: str) -> str:
    return f"""(SELECT ctid, priority, seq FROM orchestrator.tasks
                 WHERE queue = queue.name AND {READY_PLAIN} AND seq > queue.seq AND {condition}
                 ORDER BY priority DESC, seq LIMIT queue.room)"""


# Three probes instead of one: each begins where its part of the index has new tasks.
_POSITIONS = Batch("queue", "name text, room int, priority int, seq bigint, emptied boolean")
_CLAIM_AFTER = claiming(
    "tasks.claim_behind",
    f"""ARRAY(
       SELECT next.ctid
         FROM {_POSITIONS}
        CROSS JOIN LATERAL (
              SELECT ctid FROM (
                {_after("priority > queue.priority")} UNION ALL
                {_after("priority = queue.priority")} UNION ALL
                {_after("priority < queue.priority AND queue.emptied")}) AS parts
               ORDER BY priority DESC, seq LIMIT queue.room) AS next)""",
)


def claim_behind(
    connection: Connection, rooms: dict[str, int], positions: Mapping[str, ClaimPosition], now: datetime
) -> list[Claimed]:
    """Claim like `claim`, but only tasks after each queue's position."""
    marked = [(queue, room, *positions[queue]) for queue, room in rooms.items()]
    return most_urgent_first(_CLAIM_AFTER(connection, _POSITIONS(marked), now=now))


@Prepared.function("SELECT /* tasks.newest */ last_value - (NOT is_called)::int FROM orchestrator.tasks_seq_seq")
def newest(connection: Connection) -> int:
    """Return the sequence number of the newest task, including uncommitted inserts."""
