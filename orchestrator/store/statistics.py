"""Statistics of our tables, by which Postgres plans."""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.store.namespaces import namespace_of
from orchestrator.store.sql import Statement

_MISLEADING = Statement[str]("""
SELECT /* statistics.misleading */ c.relname
  FROM pg_stat_all_tables s
  JOIN pg_class c ON c.oid = s.relid
 WHERE s.schemaname = %(schema)s
   AND (s.n_live_tup > 10 * greatest(c.reltuples, 0) + 5000 OR c.reltuples > 10 * s.n_live_tup + 5000)
   AND pg_has_role(c.relowner, 'USAGE')
""")


def misleading(connection: Connection) -> list[str]:
    """Return tables with ten times the rows of their statistics, or a tenth, that the role may analyse."""
    return _MISLEADING(connection, schema=namespace_of(connection))
