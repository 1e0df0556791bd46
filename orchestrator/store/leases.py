"""Leadership: a term number issued by Postgres, and the cursor that only the leader moves.

    standby ── acquire: term + 1 ──▶ leader ── begin: every tick locks the row and checks the term ──▶ …
                 ▲                     │
                 └── lease expired ────┘  or released, or the standby can do what the leader cannot

`begin` locks the row FOR SHARE until the tick's transaction ends, and `acquire` updates it. So a takeover waits for a
running tick, and a tick after a takeover finds another term and does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, exc

from orchestrator.store import postgres_errors
from orchestrator.store.driver import channel, send
from orchestrator.store.namespaces import namespace_of
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks import transitions
from orchestrator.store.tasks.transitions import Moved, Success
from orchestrator.store.tasks.waiting import PENDING_WORK, PendingWorkProbe


@Statement.function("""
INSERT /* leases.acquire */ INTO orchestrator.leases AS held
       (shard, owner, term, expires_at, address, useful_at, useful_term)
VALUES (%(shard)s, %(owner)s::uuid, 1, clock_timestamp() + %(lease)s::double precision * interval '1 second',
        %(address)s, clock_timestamp(), 1)
    ON CONFLICT (shard) DO UPDATE
   SET owner = excluded.owner, term = held.term + 1, address = excluded.address,
       expires_at = clock_timestamp() + %(lease)s::double precision * interval '1 second',
       useful_term = held.term + 1,
       useful_at = CASE WHEN held.owner = excluded.owner AND held.useful_term = held.term
                        THEN held.useful_at ELSE clock_timestamp() END,
       trouble = %(trouble)s
 WHERE held.owner = excluded.owner OR held.expires_at < clock_timestamp()
    OR (held.useful_term = held.term
        AND held.useful_at < clock_timestamp() - %(idle_limit)s::double precision * interval '1 second')
    OR held.expires_at = %(abandoned)s::timestamptz
RETURNING term
""")
def acquire(
    connection: Connection,
    shard: int,
    owner: str,
    lease: float,
    address: str,
    *,
    trouble: str | None = None,
    idle_limit: float | None = None,
    abandoned: datetime | None = None,
) -> int | None:
    """Become leader if the lease is free; return the new term, or None.

    With `idle_limit`, also replace a leader that has done no useful work for so many seconds; with `abandoned`, a
    leader whose lease still expires at that time. Taking the own lease again does not count as useful work.
    """


class LeaseView(NamedTuple):
    """The lease, as a standby sees it."""

    remaining: float = -math.inf
    """Seconds until the lease expires; negative once it is free."""
    is_mine: bool = False
    idle: float | None = None
    """Seconds since the leader last did all of its work; None if the leader does not store that."""
    expires_at: datetime | None = None
    length: float = 0.0
    """Seconds from the last renewal to `expires_at`, at least; negative if a clock step came between the two."""


_LEASE_VIEW = Statement[LeaseView]("""
SELECT /* leases.lease_view */ extract(epoch FROM expires_at - clock_timestamp())::double precision AS remaining,
       owner = %(owner)s::uuid AS is_mine,
       CASE WHEN useful_term = term
            THEN extract(epoch FROM clock_timestamp() - useful_at)::double precision END AS idle,
       expires_at, coalesce(extract(epoch FROM expires_at - useful_at)::double precision, 'Infinity') AS length
  FROM orchestrator.leases WHERE shard = %(shard)s
""")


def lease_view(connection: Connection, shard: int, owner: str) -> LeaseView:
    return _LEASE_VIEW.first(connection, shard=shard, owner=owner) or LeaseView()


_OWN_TERM = "WHERE shard = %(shard)s AND term = %(term)s"
_HOLD = f"SELECT /* leases.{{}} */ {{}} FROM orchestrator.leases {_OWN_TERM} FOR SHARE"
_RENEW = f"""
UPDATE /* leases.{{}} */ orchestrator.leases
   SET expires_at = clock_timestamp() + %(lease)s::double precision * interval '1 second',
       useful_at = CASE WHEN %(trouble)s::text IS NULL THEN clock_timestamp() ELSE useful_at END,
       useful_term = term, trouble = %(trouble)s
{_OWN_TERM} RETURNING {{}}
"""
_BEGIN = {
    (renew, with_pending_work): Prepared[Row](
        (_RENEW if renew else _HOLD).format(
            ("renew" if renew else "hold") + ("_and_look" if with_pending_work else ""),
            f"now() AS now, {PENDING_WORK}" if with_pending_work else "now() AS now",
        )
    )
    for renew in (False, True)
    for with_pending_work in (False, True)
}


def begin(
    connection: Connection,
    shard: int,
    term: int,
    *,
    renew: float | None,
    with_pending_work: bool,
    trouble: str | None = None,
) -> tuple[datetime, PendingWorkProbe | None] | None:
    """Begin a transaction that locks the lease, and renew the lease if `renew` is given, in one round trip.

    `trouble` is the reason why the leader cannot work; a renewal stores it. Return the time and, with
    `with_pending_work`, a probe of the pending work; None if deposed.
    """
    parameters: dict[str, Any] = {"shard": shard, "term": term}
    if renew is not None:
        parameters |= {"lease": renew, "trouble": trouble}
    rows = _BEGIN[renew is not None, with_pending_work].begin(connection, **parameters)
    if not rows:
        return None
    now, *pending_work = rows[0]
    return now, PendingWorkProbe(*pending_work) if with_pending_work else None


_TERM_OVER = "term over"
_HOLD_LATER = Prepared[None](f"""
SELECT /* leases.hold_later */ (CASE count(*) WHEN 0 THEN '{_TERM_OVER}' ELSE '1' END)::int
  FROM (SELECT FROM orchestrator.leases {_OWN_TERM} FOR SHARE) AS held
""")
"""Fails if another scheduler leads, because nothing reads its result."""


def begin_later(connection: Connection, shard: int, term: int) -> None:
    """Begin a transaction that locks the lease, in the round trip of its first statement. That fails if deposed."""
    _HOLD_LATER.begin_later(connection, shard=shard, term=term)


def is_term_over(error: BaseException) -> bool:
    """Return whether the first statement of a transaction failed because another scheduler leads."""
    return isinstance(error, exc.DataError) and f'"{_TERM_OVER}"' in str(error.orig)


RELEASED = "lease"
"""The payload of the notification that a leader has released its lease."""

_RELEASE = Statement[None]("""
UPDATE /* leases.release */ orchestrator.leases SET expires_at = clock_timestamp() - interval '1 second'
 WHERE shard = %(shard)s AND term = %(term)s
RETURNING pg_notify(%(channel)s, %(released)s)
""")


def release(connection: Connection, shard: int, term: int) -> None:
    """Release the lease. The commit wakes the standbys, so that they do not wait for the expiry."""
    _RELEASE(connection, shard=shard, term=term, channel=namespace_of(connection), released=RELEASED)


@Statement.function(f"UPDATE /* leases.raise_fence */ orchestrator.leases SET fence = fence + %(by)s {_OWN_TERM}")
def raise_fence(connection: Connection, shard: int, term: int, by: int) -> None:
    """Raise the fence: number attempts from far above those that were dispatched."""


_IDENTITY = Statement[str]("""
SELECT /* leases.identity */ (SELECT system_identifier FROM pg_control_system())::text
       || '-' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
""")


def identity(connection: Connection) -> str:
    """Return the name of the database's timeline; a promoted standby or a point-in-time restore begins a new timeline.

    Empty if the server does not tell. A copy of the server's files has the same name.
    """
    try:
        return _IDENTITY.one(connection)
    except exc.DBAPIError as error:
        if postgres_errors.is_outage(error) and not postgres_errors.is_forbidden(error):
            raise
        return ""


@Statement.function("""
SELECT /* leases.has_claimed */
       EXISTS (SELECT FROM orchestrator.tasks WHERE id = %(task)s::uuid AND attempt >= %(attempt)s)
    OR EXISTS (SELECT FROM orchestrator.ended_tasks WHERE id = %(task)s::uuid AND attempt >= %(attempt)s)
""")
def has_claimed(connection: Connection, task: bytes, attempt: int) -> bool:
    """Return whether a task has reached an attempt."""


class Cursor(NamedTuple):
    """The position up to which the events of a generation are applied."""

    generation: str
    position: str
    server: str


@Statement.function(
    "SELECT /* leases.cursor */ generation, position, server FROM orchestrator.cursors WHERE shard = %(shard)s"
)
def read_cursor(connection: Connection, shard: int) -> Cursor | None:
    """Return the cursor; None before the first leader."""


_SAVE = """
INSERT {name} INTO orchestrator.cursors (shard, generation, position, server)
SELECT %(shard)s::int, %(generation)s::text, %(position)s::text, %(server)s::text {condition}
    ON CONFLICT (shard) DO UPDATE
   SET generation = excluded.generation, position = excluded.position, server = excluded.server
"""
_SAVE_CURSOR = Prepared[None](_SAVE.format(name="/* leases.save_cursor */", condition=""))
_SUCCEED_AND_COMMIT = Prepared[Moved](f"""
WITH /* leases.succeed_and_commit */ {transitions.succeeding(f"AND NOT EXISTS ({transitions.FOLLOWED})")},
saved AS ({_SAVE.format(name="", condition="WHERE EXISTS (SELECT FROM gone)")})
{transitions.SINGLE_SUCCEEDED}
""")


def succeed_and_commit(
    connection: Connection, rows: Sequence[Success], now: datetime, shard: int, cursor: Cursor
) -> list[Moved]:
    """Mark tasks as succeeded, save the cursor and commit: the whole transaction in one round trip.

    Nothing is done if one of the tasks has a run, a limit, a key or callbacks: such a transaction needs more
    statements. The cursor is saved only if a task has ended.
    """
    channel(connection).commit_with_next()
    values = transitions.SUCCESSES(rows)
    return _SUCCEED_AND_COMMIT(connection, values, now=now, shard=shard, **cursor._asdict())


def commit_with_next(connection: Connection, shard: int, cursor: Cursor) -> None:
    """Let the next statement begin and commit its transaction, together with the deferred statements and the cursor."""
    if channel(connection).commit_with_next(others=True):
        _SAVE_CURSOR.defer(connection, shard=shard, **cursor._asdict())


def commit(connection: Connection, shard: int, cursor: Cursor | None) -> None:
    """Commit the transaction of `begin` and the cursor, in one round trip.

    A transaction that is already committed, or that has had no statements, needs no round trip.
    """
    if channel(connection).is_over(is_complete=cursor is None):
        return
    if cursor is None:
        send(connection, "COMMIT")
    else:
        _SAVE_CURSOR.commit(connection, shard=shard, **cursor._asdict())
