"""Leadership: a term number issued by Postgres, and the cursor that only its holder moves.

    standby ── acquire: term + 1 ──▶ leader ── hold: every tick locks the row and checks the term ──▶ …
                 ▲                     │
                 └── lease expired ────┘  or released

`hold` takes the row FOR SHARE until the tick's transaction ends, and `acquire` updates it, so a takeover waits
for a tick that is under way, and a tick that comes too late finds another term and does nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.store.namespaces import namespace_of
from orchestrator.store.statement import Statement

_ACQUIRE = """
INSERT INTO orchestrator.leases AS held (shard, owner, term, expires_at, address)
VALUES (%(shard)s, %(owner)s::uuid, 1, clock_timestamp() + %(lease)s::double precision * interval '1 second',
        %(address)s)
    ON CONFLICT (shard) DO UPDATE
   SET owner = excluded.owner, term = held.term + 1, address = excluded.address,
       expires_at = clock_timestamp() + %(lease)s::double precision * interval '1 second'
 WHERE held.owner = excluded.owner OR held.expires_at < clock_timestamp()
RETURNING term
"""


def acquire(connection: Connection, shard: int, owner: str, lease: float, address: str) -> int | None:
    """Become leader if nobody else is; return the new term, or None."""
    parameters = {"shard": shard, "owner": owner, "lease": lease, "address": address}
    row = connection.exec_driver_sql(_ACQUIRE, parameters).one_or_none()
    return row[0] if row else None


_REMAINING = """
SELECT extract(epoch FROM expires_at - clock_timestamp())::double precision
  FROM orchestrator.leases WHERE shard = %(shard)s
"""


def remaining(connection: Connection, shard: int) -> float:
    """Return the seconds until the present lease expires, unless it is renewed."""
    row = connection.exec_driver_sql(_REMAINING, {"shard": shard}).one_or_none()
    return row[0] if row else 0.0


_HOLD = Statement("SELECT now() FROM orchestrator.leases WHERE shard = %(shard)s AND term = %(term)s FOR SHARE")

_RENEW = Statement(
    """
UPDATE orchestrator.leases SET expires_at = clock_timestamp() + %(lease)s::double precision * interval '1 second'
 WHERE shard = %(shard)s AND term = %(term)s RETURNING now()
"""
)


def hold(connection: Connection, shard: int, term: int, renew: float | None) -> datetime | None:
    """Lock the lease until the transaction ends, and renew it if asked; return the time, or None if deposed."""
    parameters = {"shard": shard, "term": term}
    result = _HOLD(connection, parameters) if renew is None else _RENEW(connection, parameters | {"lease": renew})
    row = result.one_or_none()
    return row[0] if row else None


RELEASED = "lease"
"""What a notification says when a leader has given its lease up."""

_RELEASE = """
UPDATE orchestrator.leases SET expires_at = clock_timestamp() - interval '1 second'
 WHERE shard = %(shard)s AND term = %(term)s
RETURNING pg_notify(%(channel)s, %(released)s)
"""


def release(connection: Connection, shard: int, term: int) -> None:
    """Give the lease up and, when the transaction commits, wake the standbys: they need not wait for it to expire."""
    said = {"channel": namespace_of(connection), "released": RELEASED}
    connection.exec_driver_sql(_RELEASE, {"shard": shard, "term": term, **said})


class Cursor(NamedTuple):
    """How far the events of a generation have been applied."""

    generation: str
    position: str
    server: str


_CURSOR = "SELECT generation, position, server FROM orchestrator.cursors WHERE shard = %(shard)s"


def read_cursor(connection: Connection, shard: int) -> Cursor | None:
    """Return the cursor, or None before the first leader."""
    row = connection.exec_driver_sql(_CURSOR, {"shard": shard}).one_or_none()
    return Cursor(*row) if row else None


_SAVE_CURSOR = Statement(
    """
INSERT INTO orchestrator.cursors (shard, generation, position, server)
VALUES (%(shard)s, %(generation)s, %(position)s, %(server)s)
    ON CONFLICT (shard) DO UPDATE
   SET generation = excluded.generation, position = excluded.position, server = excluded.server
"""
)


def save_cursor(connection: Connection, shard: int, cursor: Cursor) -> None:
    """Record how far events are applied, in the transaction that applied them."""
    _SAVE_CURSOR(connection, {"shard": shard, **cursor._asdict()})
