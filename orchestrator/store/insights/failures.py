"""Failures, grouped by task and error: as many of the last ones as can be looked at while somebody waits."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.sealing import reveal_text
from orchestrator.store.sql import Statement
from orchestrator.store.tasks.redrive import Group

MOST_LOOKED_AT = 5_000
"""Tasks that did not succeed, the last ones, of which groups are made."""


class Failures(NamedTuple):
    """What has failed lately."""

    groups: list[Group]
    """The largest first."""
    looked_at: int | None
    """How many were looked at, where there are more; None where all were."""


class _Row(NamedTuple):
    name: str
    queue: str
    kind: str
    example: str
    tasks: int
    looked_at: int


# They stand far apart in the table, so that each costs a page of it: what decides is how many are looked at.
_LATEST = Statement[_Row]("""
WITH /* insights.failures.latest */ looked_at AS MATERIALIZED (
    SELECT name, queue, status, error, ended_at FROM orchestrator.ended_tasks
     WHERE status <> 'success' AND ended_at >= %(since)s::timestamptz ORDER BY ended_at DESC LIMIT %(most)s
), named AS (
    SELECT name, queue, coalesce(error->>'kind', '') AS kind, error->>'message' AS message, ended_at FROM looked_at
     WHERE status = 'failed' AND starts_with(queue, %(within)s::text)
)
SELECT name, queue, kind, coalesce((array_agg(message ORDER BY ended_at DESC))[1], '') AS example,
       count(*) AS tasks, (SELECT count(*) FROM looked_at) AS looked_at
  FROM named GROUP BY name, queue, kind ORDER BY tasks DESC, name, queue, kind
""")


def latest_failures(connection: Connection, since: datetime, within: str = "", most: int = MOST_LOOKED_AT) -> Failures:
    """Return what has failed since then, of queues whose names begin so; of very many, the last ones."""
    rows = _LATEST(connection, since=since, within=within, most=most)
    groups = [Group(row.name, row.queue, row.kind, reveal_text(row.example), row.tasks) for row in rows]
    return Failures(groups, most if rows and rows[0].looked_at >= most else None)
