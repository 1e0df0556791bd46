"""Which releases may use a schema that is newer than they are: a mark in the database, which migrations set.

A release knows the migrations up to its own. After a rollback, or while a deploy replaces processes one by one, it
meets the schema of the next release. As a rule that release has only added to it, and older ones go on working. A
migration after which they cannot (it drops a column that they use, say) names the oldest revision whose release still
can, as `oldest = "0041"` beside its `revision`. The mark is the newest of these. It is a comment on Alembic's table: it
is written in the transaction of the migration, and needs no migration of its own.

Migrations after `FIRST` can be undone, too, while nothing uses what they have brought (`refuse_loss`).
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Connection, exc, text

from orchestrator.errors import SchemaError
from orchestrator.settings import DEFAULT_NAMESPACE
from orchestrator.store.tables.columns import SCHEMA

OLDEST_POSTGRES = 13
"""The oldest version of the server that works."""
FIRST = "0033"
"""The newest revision of the last release that does not read the mark; the oldest that can be upgraded."""
_MARK = "Releases that know revision {} or a later one may use this schema."


def refuse_old_server(connection: Connection) -> None:
    """Refuse a server that lacks what statements need. SQLAlchemy knows the version from the first connection."""
    version = connection.dialect.server_version_info or (OLDEST_POSTGRES,)
    if version < (OLDEST_POSTGRES,):
        raise SchemaError(f"Postgres {'.'.join(map(str, version))} is too old: use {OLDEST_POSTGRES} or newer.")


def refuse_early(revision: str) -> None:
    """Refuse a database of a revision whose migrations are gone."""
    if "" < revision < FIRST:
        raise SchemaError(
            f"The database is at revision {revision}, which no release had, and cannot be upgraded: expected {FIRST} "
            f"or later. Upgrade it with the commit that added revision {FIRST} first, or create a new database."
        )


def lacks_tables(error: exc.ProgrammingError, namespace: str) -> bool:
    """Say whether a statement was refused because a namespace, or a table of it, is missing."""
    said, root = str(error.orig), namespace.partition("/")[0]
    return f"{root}." in said or f'schema "{root}' in said or f'"{root}/' in said


def no_tables(namespace: str) -> str:
    """Say that a database has no tables for us, and what to do."""
    if namespace == DEFAULT_NAMESPACE:
        return "The database has no orchestrator tables yet. Run `orchestrator db upgrade`."
    root, _, shard = namespace.partition("/")
    if shard:
        return f"The database has no shard {shard} of {root!r} yet. Run `orchestrator db upgrade` with setting shards."
    return (
        f"The database has no orchestrator tables in the namespace {namespace!r} yet. Run "
        f"`ORCHESTRATOR_NAMESPACE={namespace} orchestrator db upgrade`."
    )


def has_views(connection: Connection) -> bool:
    """Say whether there are the views of all shards, which a connection of all of them reads."""
    return connection.execute(text(f"SELECT to_regclass('{SCHEMA}.tasks')")).scalar() is not None


def is_pooled(connection: Connection) -> bool:
    """Say whether a pooler is between: it gives its clients another number of the server's process."""
    driver: Any = connection.connection.driver_connection
    pid: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return bool(driver.info.backend_pid != pid)


def oldest_supported(connection: Connection) -> str | None:
    """Return the revision that a release must know at least to use this schema; None where nothing says so."""
    found = connection.execute(
        text(f"SELECT obj_description(to_regclass('{SCHEMA}.alembic_version'), 'pg_class')")
    ).scalar()
    match = re.fullmatch(_MARK.format(r"(\w+)"), found or "")
    return match[1] if match else None


def mark(connection: Connection, oldest: str) -> None:
    """Write down the oldest revision that the schema supports."""
    connection.execute(text(f"COMMENT ON TABLE {SCHEMA}.alembic_version IS '{_MARK.format(oldest)}'"))


def refuse_loss(connection: Connection, revision: str, table: str, condition: str) -> None:
    """Keep a migration from being undone where rows fulfil this condition: they have what it has brought.

    The table stays locked until its transaction ends, so that no such row comes in between.
    """
    connection.execute(text(f"LOCK TABLE {SCHEMA}.{table} IN ACCESS EXCLUSIVE MODE"))
    count = connection.execute(text(f"SELECT count(*) FROM {SCHEMA}.{table} WHERE {condition}")).scalar()
    if count:
        raise SchemaError(
            f"Revision {revision} cannot be undone without loss: {table} has rows with {condition} ({count}). "
            f"The database stays at revision {revision}."
        )
