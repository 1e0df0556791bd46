"""Claims of ready tasks for dispatch, as many as there is room for: pending → dispatched."""

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
    """Return the number of a task's next attempt; above the fence, if it is unknown which numbers were used."""
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
    """The details that an earlier attempt left for this one."""
    seq: int = 0
    worker: str | None = None
    """Of a run's turn task: the worker that has its code in memory."""
    trace: str | None = None
    """The span that it came of."""
    ready: float | None = None
    """If it is traced: since when it may run, in Unix seconds."""
    to: str | None = None
    """The one worker that it is sent to; None where any worker of the queue may take it."""

    @property
    def is_turn_task(self) -> bool:
        """Say whether this is a turn of a workflow's code: a run's turn task has the run's id."""
        return self.run_id == self.id


_CLAIMED = columns_of(
    Claimed,
    "t",
    but=("to",),
    options="t.options::text",
    ready="""CASE WHEN t.trace IS NOT NULL
               THEN extract(epoch FROM coalesce(t.ready_at, t.created_at))::double precision END""",
)


def claiming(name: str, places: str) -> Prepared[Claimed]:
    """Return the statement that claims what stands at the places of an array: pending → dispatched."""
    return Prepared[Claimed](f"""
UPDATE /* {name} */ orchestrator.tasks t
   SET status = 'dispatched', attempt = {_next_attempt("t.attempt")}, dispatched_at = %(now)s::timestamptz
 WHERE t.ctid = ANY ({places})
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
    """Claim the most urgent ready tasks of each queue, as many as it has room for, most urgent first."""
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
    """Return the first queues that have something ready, without keys; each is one step through the index."""


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
    """Create tasks as claimed, unless they exist by now; say whether nothing else is ready in these queues.

    `commit` is called before, to have the statement commit.
    """
    if not channel(connection).take_back(creation.alone):
        return [], False
    if commit is not None:
        commit()
    rows = _CREATE(connection, creation.rows, has_spans=creation.has_spans, queues=list(queues), now=now)
    return [Claimed(*row[:-1]) for row in rows], bool(rows) and rows[0][-1]


def successes_of(creation: Creation, claimed: Iterable[Claimed]) -> list[Moved]:
    """Return tasks of runs that were created as claimed, as they are once they have succeeded."""
    attempts = {task.id: task.attempt for task in claimed}
    return [
        Moved(new.id, "success", new.queue, new.run_id, attempts[new.id], "dispatched", new.name, new.step)
        for new in creation.tasks
        if new.run_id is not None and new.callbacks is None and new.id in attempts
    ]


def most_urgent_first(claimed: Iterable[Claimed]) -> list[Claimed]:
    """Return what was claimed in the order in which it is handed out."""
    return sorted(claimed, key=lambda task: (-task.priority, task.seq))


def by_queue(claimed: Iterable[Claimed]) -> dict[str, list[Claimed]]:
    """Return what was claimed of each queue, in the same order."""
    found: dict[str, list[Claimed]] = {}
    for task in claimed:
        found.setdefault(task.queue, []).append(task)
    return found


class ClaimPosition(NamedTuple):
    """Where a claim has ended: everything more urgent that was ready then has been claimed."""

    priority: int
    seq: int
    emptied: bool
    """Less urgent tasks were not there either, up to this `seq`."""


def _behind(condition: str) -> str:
    return f"""(SELECT ctid, priority, seq FROM orchestrator.tasks
                 WHERE queue = queue.name AND {READY_PLAIN} AND seq > queue.seq AND {condition}
                 ORDER BY priority DESC, seq LIMIT queue.room)"""


# Three probes instead of one: each begins where its part of the index has something new.
_MARKED = Batch("queue", "name text, room int, priority int, seq bigint, emptied boolean")
_CLAIM_BEHIND = claiming(
    "tasks.claim_behind",
    f"""ARRAY(
       SELECT next.ctid
         FROM {_MARKED}
        CROSS JOIN LATERAL (
              SELECT ctid FROM (
                {_behind("priority > queue.priority")} UNION ALL
                {_behind("priority = queue.priority")} UNION ALL
                {_behind("priority < queue.priority AND queue.emptied")}) AS parts
               ORDER BY priority DESC, seq LIMIT queue.room) AS next)""",
)


def claim_behind(
    connection: Connection, rooms: dict[str, int], positions: Mapping[str, ClaimPosition], now: datetime
) -> list[Claimed]:
    """Claim as `claim` does, but only what has come since each queue's mark was set."""
    marked = [(queue, room, *positions[queue]) for queue, room in rooms.items()]
    return most_urgent_first(_CLAIM_BEHIND(connection, _MARKED(marked), now=now))


@Prepared.function("SELECT /* tasks.newest */ last_value - (NOT is_called)::int FROM orchestrator.tasks_seq_seq")
def newest(connection: Connection) -> int:
    """Return the number of the newest task that anyone has begun to insert."""
