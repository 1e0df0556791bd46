"""Tables without rows, for the next test."""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.store.tables import metadata

TABLES = [table.name for table in metadata.sorted_tables]
"""All that a release has."""


def empty(connection: Connection, *only: str) -> None:
    """Delete all rows, in one statement.

    To truncate a table makes a file for each index. So that is done with large ones, and with those of which Postgres
    has statistics: it would plan for a table that is empty for ever.
    """
    names = only or TABLES
    connection.exec_driver_sql(f"""DO $$
DECLARE large text := (SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
    WHERE relnamespace = 'orchestrator'::regnamespace AND relname IN ({", ".join(f"'{name}'" for name in names)})
      AND relkind = 'r' AND (pg_relation_size(oid) > 250000 OR reltuples >= 0));
BEGIN
    IF large IS NOT NULL THEN EXECUTE 'TRUNCATE ' || large; END IF;
    {"".join(f"DELETE FROM orchestrator.{name}; " for name in names)}
END $$""")
