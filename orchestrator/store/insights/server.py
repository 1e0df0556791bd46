"""What the Postgres server is, its clock, its position in the write-ahead log, and where a role's own tables go."""

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
    """A server, as a role sees it."""

    version: str
    """As people write it, e.g. 17.2."""
    number: int
    """The same for comparisons, e.g. 170002."""
    read_only: bool
    """It is a standby, or takes no writes for another reason."""
    unsafe: Sequence[str]
    """Settings of durability that are off: a crash of the machine may lose commits."""
    role: str
    """The role of this connection."""
    owns: bool
    """The role has the rights of our tables' owner."""
    forbidden: Sequence[str]
    """Tables of ours that the role may not read and write."""


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
    """Return what the server is, and what the role may do there."""
    return _SERVER.one(connection)


@Statement.function("SELECT /* insights.clock */ extract(epoch FROM clock_timestamp())::double precision")
def clock(connection: Connection) -> float:
    """Return the time of the server, in seconds since 1970."""


# A message in the write-ahead log: durable like a row, and in no table.
_COMMIT = Statement[str]("SELECT /* insights.commit */ pg_logical_emit_message(true, 'doctor', '')::text")


def commit(connection: Connection) -> None:
    """Commit a transaction that changes no table; the connection commits by itself."""
    _COMMIT.one(connection)


@Statement.function("SELECT /* insights.position */ (pg_current_wal_flush_lsn() - '0/0')::bigint")
def position(connection: Connection) -> int:
    """Return how far a primary has flushed its log: a standby that has replayed this has all commits."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """How far a standby is."""

    position: int | None
    """None if the server is no standby."""
    age: float
    """Seconds since the last commit that it has replayed."""


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
    """Say that a role creates its own tables among ours where it names no schema, and what to do."""
    engine = engine_for(url, name="orchestrator db upgrade")
    try:
        with engine.connect() as connection:
            role, schema = _DEFAULT_SCHEMA.one(connection)
    finally:
        engine.dispose()
    if schema != namespace:
        return None
    return (
        f"what the role {role} creates without naming a schema, your own tables too, goes into the schema "
        f"{schema}, among ours: its search_path leads there first, as that of a role does which is named like the "
        f'schema. Tell it otherwise: ALTER ROLE "{role}" SET search_path = public'
    )


# -- load on Postgres from outside: connections that run out, and transactions that hold back vacuum


@dataclass(frozen=True, kw_only=True)
class Connections:
    """How many connections the server has, of all its databases and programs."""

    used: int
    """Open now."""
    limit: int
    """How many an ordinary role may open."""


@Statement.function("""
SELECT /* insights.connections */
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::int AS used,
       (SELECT sum(CASE name WHEN 'max_connections' THEN setting::int ELSE -setting::int END) FROM pg_settings
         WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections'))::int AS limit
""")
def connections(connection: Connection) -> Connections:
    """Return how many connections are open, and how many there can be."""


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
