"""Rows of open tasks that other transactions have locked. The leader skips them instead of waiting.

A worker's transaction locks the row of its task until it has committed, which may take long: a standby that must
confirm, a slow disk, a worker of an earlier release whose COMMIT checks deferred constraints. People lock rows, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection

from orchestrator.store.sql import Prepared, Row, Statement

_LOCK = Prepared[bytes]("""
SELECT /* tasks.lock */ asked.id FROM unnest(%(ids)s::uuid[]) AS asked(id)
  LEFT JOIN LATERAL (
       SELECT id FROM orchestrator.tasks WHERE id = asked.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS mine ON true
 WHERE mine.id IS NULL AND (SELECT true FROM orchestrator.tasks WHERE id = asked.id LIMIT 1)
""")


def lock(connection: Connection, ids: Collection[bytes]) -> set[bytes]:
    """Lock the rows of open tasks, so that later statements do not wait. Return the tasks that others have locked."""
    return set(_LOCK(connection, ids=list(ids))) if ids else set()


_HOLDER = Statement[Row]("""
SELECT /* tasks.lock_holder */ a.pid, a.application_name AS application, a.usename AS role, a.state,
       left(regexp_replace(a.query, '\\s+', ' ', 'g'), 200) AS query
  FROM orchestrator.tasks t
  JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = t.xmax
  JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE t.id = ANY(%(ids)s::uuid[]) LIMIT 1
""")


def holder(connection: Connection, ids: Sequence[bytes]) -> str:
    """Describe a session that has locked one of these tasks, for the log."""
    row = _HOLDER.first(connection, ids=ids)
    if row is None:
        return "unknown"
    return f"pid {row.pid} application={row.application!r} role={row.role} state={row.state!r} query={row.query!r}"
