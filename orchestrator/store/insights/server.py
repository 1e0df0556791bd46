"""The Postgres server: version, clock, position in the write-ahead log, privileges and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.store.database import engine_for
from orchestrator.store.namespaces import root_of
from orchestrator.store.shards import ours
from orchestrator.store.sql import Statement


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, as seen by a role."""

    version: str
    """The version for people, e.g. 17.2."""
    number: int
    """The version for comparisons, e.g. 170002."""
    read_only: bool
    """Whether the server is a standby or refuses writes for another reason."""
    unsafe: Sequence[str]
    """Durability settings that are off: a crash of the machine may lose commits."""
    role: str
    """The role of this connection."""
    owns: bool
    """Whether the role has the rights of the tables' owner."""
    forbidden: Sequence[str]
    """Tables that the role may not read and write."""


_SERVER = Statement[Server]("""
WITH /* insights.server */ ours AS (
    SELECT oid, relname, relowner, relnamespace FROM pg_class
     WHERE relkind IN ('r', 'p') AND relnamespace =
           (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('orchestrator.alembic_version'))
)
SELECT current_setting('server_version') AS version, current_setting('server_version_num')::int AS number,
       current_user::text AS role,
       pg_is_in_recovery() OR current_setting('default_transaction_read_only')::bool AS read_only,
       ARRAY(SELECT name FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')
                AND setting = 'off' ORDER BY name)::text[] AS unsafe,
       NOT EXISTS (SELECT FROM ours WHERE NOT pg_has_role(relowner, 'USAGE')) AS owns,
       ARRAY(SELECT relname FROM ours
              WHERE NOT (has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT')
                         AND has_table_privilege(oid, 'UPDATE') AND has_table_privilege(oid, 'DELETE'))
              ORDER BY relname)::text[] AS forbidden
""")


def server(connection: Connection) -> Server:
    """Return the server's version and settings, and the role's privileges."""
    return _SERVER.one(connection)


@Statement.function("SELECT /* insights.clock */ extract(epoch FROM clock_timestamp())::double precision")
def clock(connection: Connection) -> float:
    """Return the time of the server, in Unix seconds."""


# A message in the write-ahead log: durable like a row, but in no table.
_COMMIT = Statement[str]("SELECT /* insights.commit */ pg_logical_emit_message(true, 'doctor', '')::text")


def commit(connection: Connection) -> None:
    """Commit a transaction that changes no table; the connection must be in autocommit mode."""
    _COMMIT.one(connection)


@Statement.function("SELECT /* insights.position */ (pg_current_wal_flush_lsn() - '0/0')::bigint")
def position(connection: Connection) -> int:
    """Return the position up to which a primary has flushed its log: a standby that has replayed it has all commits."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The progress of a standby."""

    position: int | None
    """None if the server is not a standby."""
    age: float
    """Seconds since the last replayed commit."""


@Statement.function("""
SELECT /* insights.replayed */
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() - '0/0' END::bigint AS position,
       greatest(0, extract(epoch FROM clock_timestamp()
           - coalesce(pg_last_xact_replay_timestamp(), pg_postmaster_start_time())))::double precision AS age
""")
def replayed(connection: Connection) -> Replayed:
    """Return how far a standby has replayed the log of its primary."""


_DEFAULT_SCHEMA = Statement[tuple[str, str | None]](
    "SELECT /* insights.default_schema */ current_user::text, current_schema()::text"
)


def misplaced_tables(url: str, namespace: str) -> str | None:
    """Return a warning and advice if a role's unqualified tables are created in the namespace's schema."""
    engine = engine_for(url, name="orchestrator db upgrade")
    try:
        with engine.connect() as connection:
            role, schema = _DEFAULT_SCHEMA.one(connection)
    finally:
        engine.dispose()
    if schema != namespace:
        return None
    return (
        f"the role {role} has {schema} first in its search_path (the default, as they have the same name), so tables "
        f"that your application creates without a schema would land among ours. To change that: "
        f'ALTER ROLE "{role}" SET search_path = public'
    )


# -- load on Postgres by other programs: exhausted connections, and transactions that hold back vacuum


@dataclass(frozen=True, kw_only=True)
class Connections:
    """The number of connections to the server, of all databases and programs."""

    used: int
    """Open connections."""
    limit: int
    """The number of connections that ordinary roles may open."""


@Statement.function("""
SELECT /* insights.connections */
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::int AS used,
       (SELECT sum(CASE name WHEN 'max_connections' THEN setting::int ELSE -setting::int END) FROM pg_settings
         WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections'))::int AS limit
""")
def connections(connection: Connection) -> Connections:
    """Return the number of open connections, and their limit."""


@dataclass(frozen=True, kw_only=True)
class LongTransaction:
    """A transaction that has been open for long. Vacuum cannot remove rows that died after its start."""

    pid: int | None
    """The server process; None for a prepared transaction, which has no process."""
    age: float
    """Seconds since the transaction began."""
    application: str
    """The application name, or the prepared transaction's id."""
    role: str
    """The user."""
    state: str
    """`active`, `idle in transaction`, `prepared`, …"""
    query: str
    """The last statement, truncated."""


# Only transactions with a snapshot or an id hold vacuum back; vacuum itself does not.
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
    """Return the oldest transactions of this database that have been open for `seconds`."""


_LOCK_HOLDERS = Statement[tuple[int, str, str]](rf"""
SELECT /* insights.lock_holders */ DISTINCT a.pid, a.application_name,
       left(regexp_replace(a.query, '\s+', ' ', 'g'), 200)
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid JOIN pg_class c ON c.oid = l.relation
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE a.datname = current_database() AND {ours("n.nspname")} AND l.granted AND l.mode = 'AccessExclusiveLock'
 ORDER BY a.pid LIMIT 5
""")


def lock_holders(connection: Connection) -> list[tuple[int, str, str]]:
    """Return processes that keep others from reading the tables: process id, application and last statement."""
    return _LOCK_HOLDERS(connection, root=root_of(connection))


_DEAD_ROWS = Statement[int](f"""
SELECT /* insights.dead_rows */ coalesce(sum(n_dead_tup), 0)::bigint
  FROM pg_stat_user_tables WHERE relname = 'tasks' AND {ours("schemaname")}
""")


def dead_rows(connection: Connection) -> int:
    """Return an estimate of the dead rows in the table of open tasks."""
    return _DEAD_ROWS.one(connection, root=root_of(connection))
