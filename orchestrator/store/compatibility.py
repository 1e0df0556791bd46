"""Decides which releases may use a schema that is newer than they are, by a marker that migrations write.

A release knows the migrations up to its own. After a rollback, or during a rolling deploy, it meets the schema of the
next release. Usually that release has only added to the schema, and older releases continue to work. A migration that
breaks older releases, such as one that drops a column, names the oldest revision whose release still works: `oldest =
"0041"` beside its `revision`. The marker is the newest of these. It is a comment on Alembic's table, because a comment
is transactional and needs no migration.

Migrations after `FIRST` can also be undone, until something uses what they added (`refuse_loss`).
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Connection, exc, text

from orchestrator.errors import SchemaError
from orchestrator.settings import DEFAULT_NAMESPACE
from orchestrator.store.tables.columns import SCHEMA

OLDEST_POSTGRES = 13
"""The oldest supported version of the server."""
FIRST = "0033"
"""The newest revision whose release does not read the marker, and the oldest one that can be upgraded."""
_MARK = "Releases that know revision {} or a later one may use this schema."


def refuse_old_server(connection: Connection) -> None:
    """Raise an error for an old server. SQLAlchemy knows the version from the first connection."""
    version = connection.dialect.server_version_info or (OLDEST_POSTGRES,)
    if version < (OLDEST_POSTGRES,):
        raise SchemaError(f"Postgres {'.'.join(map(str, version))} is too old: use {OLDEST_POSTGRES} or newer.")


def refuse_early(revision: str) -> None:
    """Raise an error for a revision whose migrations no longer exist."""
    if "" < revision < FIRST:
        raise SchemaError(
            f"The database is at revision {revision}, which no release uses, and cannot be upgraded: expected {FIRST} "
            f"or later. Upgrade it with the commit that added revision {FIRST} first, or create a new database."
        )


def lacks_tables(error: exc.ProgrammingError, namespace: str) -> bool:
    """Return whether a statement failed because a namespace or one of its tables is missing."""
    message, root = str(error.orig), namespace.partition("/")[0]
    return f"{root}." in message or f'schema "{root}' in message or f'"{root}/' in message


def no_tables(namespace: str) -> str:
    """Return a message that the tables are missing, and what to do."""
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
    """Return whether the views over all shards exist; a connection to all shards reads them."""
    return connection.execute(text(f"SELECT to_regclass('{SCHEMA}.tasks')")).scalar() is not None


def is_pooled(connection: Connection) -> bool:
    """Return whether a pooler is in between: it gives clients another process id than the server's."""
    driver: Any = connection.connection.driver_connection
    pid: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return bool(driver.info.backend_pid != pid)


def oldest_supported(connection: Connection) -> str | None:
    """Return the oldest revision that a release must know to use this schema; None if there is no marker."""
    found = connection.execute(
        text(f"SELECT obj_description(to_regclass('{SCHEMA}.alembic_version'), 'pg_class')")
    ).scalar()
    match = re.fullmatch(_MARK.format(r"(\w+)"), found or "")
    return match[1] if match else None


def write_oldest_revision(connection: Connection, oldest: str) -> None:
    """Write the oldest revision that the schema supports."""
    connection.execute(text(f"COMMENT ON TABLE {SCHEMA}.alembic_version IS '{_MARK.format(oldest)}'"))


def refuse_loss(connection: Connection, revision: str, table: str, condition: str) -> None:
    """Raise an error that stops a downgrade if rows of `table` fulfil `condition`: they use what the migration added.

    The table stays locked until the transaction ends, so that no such row appears in between.
    """
    connection.execute(text(f"LOCK TABLE {SCHEMA}.{table} IN ACCESS EXCLUSIVE MODE"))
    count = connection.execute(text(f"SELECT count(*) FROM {SCHEMA}.{table} WHERE {condition}")).scalar()
    if count:
        raise SchemaError(
            f"Revision {revision} cannot be undone without loss: {table} has rows with {condition} ({count}). "
            f"The database stays at revision {revision}."
        )
