"""Load on Postgres from outside: connections that run out, and transactions that hold back vacuum."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.store.namespaces import root_of
from orchestrator.store.shards import ours
from orchestrator.store.sql import Statement


@dataclass(frozen=True, kw_only=True)
class Connections:
    """How many connections the server has, of all its databases and programs."""

    used: int
    """Open now."""
    limit: int
    """How many an ordinary role may open."""


_CONNECTIONS = Statement[Connections]("""
SELECT /* insights.connections */
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::int AS used,
       (SELECT sum(CASE name WHEN 'max_connections' THEN setting::int ELSE -setting::int END) FROM pg_settings
         WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections'))::int AS limit
""")


def connections(connection: Connection) -> Connections:
    """Return how many connections are open, and how many there can be."""
    return _CONNECTIONS.one(connection)


@dataclass(frozen=True, kw_only=True)
class LongTransaction:
    """A transaction that has been open for long. No row that has died since it began can be cleaned away."""

    pid: int | None
    """The server process; None for a prepared transaction, which belongs to none."""
    age: float
    """Seconds since it began."""
    application: str
    """The application name, or the prepared transaction's id."""
    role: str
    """Its user."""
    state: str
    """Its state: `active`, `idle in transaction`, `prepared`."""
    query: str
    """Its last statement, cut short."""


# Only what has a snapshot or an id of its own holds anything back; vacuum itself does not.
@Statement.function("""
SELECT /* insights.long_transactions */ pid,
       extract(epoch FROM clock_timestamp() - xact_start)::double precision AS age,
       coalesce(application_name, '') AS application, coalesce(usename, '') AS role, coalesce(state, '') AS state,
       left(regexp_replace(coalesce(query, ''), '\\s+', ' ', 'g'), 200) AS query
  FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
   AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND query NOT ILIKE 'vacuum%%'
   AND xact_start < clock_timestamp() - %(seconds)s::double precision * interval '1 second'
 UNION ALL
SELECT NULL, extract(epoch FROM clock_timestamp() - prepared)::double precision, gid, owner::text, 'prepared', ''
  FROM pg_prepared_xacts
 WHERE database = current_database()
   AND prepared < clock_timestamp() - %(seconds)s::double precision * interval '1 second'
 ORDER BY age DESC LIMIT 5
""")
def long_transactions(connection: Connection, seconds: float) -> list[LongTransaction]:
    """Return the oldest transactions of this database that have been open for so many seconds."""


_LOCK_HOLDERS = Statement[tuple[int, str, str]](rf"""
SELECT /* insights.lock_holders */ DISTINCT a.pid, a.application_name,
       left(regexp_replace(a.query, '\s+', ' ', 'g'), 200)
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid JOIN pg_class c ON c.oid = l.relation
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.datname = current_database() AND {ours("n.nspname")} AND l.granted AND l.mode = 'AccessExclusiveLock'
 ORDER BY a.pid LIMIT 5
""")


def lock_holders(connection: Connection) -> list[tuple[int, str, str]]:
    """Return the process that keeps others from reading our tables: process, application and last statement."""
    return _LOCK_HOLDERS(connection, root=root_of(connection))


_DEAD_ROWS = Statement[int](f"""
SELECT /* insights.dead_rows */ coalesce(sum(n_dead_tup), 0)::bigint
  FROM pg_stat_user_tables WHERE relname = 'tasks' AND {ours("schemaname")}
""")


def dead_rows(connection: Connection) -> int:
    """Return about how many dead rows the table of open tasks carries along."""
    return _DEAD_ROWS.one(connection, root=root_of(connection))
