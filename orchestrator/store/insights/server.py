"""What the Postgres server is, its clock, its position in the write-ahead log, and where a role's own tables go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.store.database import engine_for
from orchestrator.store.sql import Statement


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, as a role sees it."""

    version: str
    """As people write it, e.g. 17.2."""
    number: int
    """The same for comparisons, e.g. 170002."""
    pid: int
    """The server process of this connection. A pooler tells its clients another one."""
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
       pg_backend_pid() AS pid, current_user::text AS role,
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


_CLOCK = Statement[float]("SELECT /* insights.clock */ extract(epoch FROM clock_timestamp())::double precision")


def clock(connection: Connection) -> float:
    """Return the time of the server, in seconds since 1970."""
    return _CLOCK.one(connection)


# A message in the write-ahead log: durable like a row, and in no table.
_COMMIT = Statement[str]("SELECT /* insights.commit */ pg_logical_emit_message(true, 'doctor', '')::text")


def commit(connection: Connection) -> None:
    """Commit a transaction that changes no table; the connection commits by itself."""
    _COMMIT.one(connection)


_POSITION = Statement[int]("SELECT /* insights.position */ (pg_current_wal_flush_lsn() - '0/0')::bigint")


def position(connection: Connection) -> int:
    """Return how far a primary has flushed its log: a standby that has replayed this has all commits."""
    return _POSITION.one(connection)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """How far a standby is."""

    position: int | None
    """None if the server is no standby."""
    age: float
    """Seconds since the last commit that it has replayed."""


_REPLAYED = Statement[Replayed]("""
SELECT /* insights.replayed */
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() - '0/0' END::bigint AS position,
       greatest(0, extract(epoch FROM clock_timestamp()
           - coalesce(pg_last_xact_replay_timestamp(), pg_postmaster_start_time())))::double precision AS age
""")


def replayed(connection: Connection) -> Replayed:
    """Return how far a standby has replayed the log of its primary."""
    return _REPLAYED.one(connection)


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
