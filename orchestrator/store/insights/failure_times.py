"""How failures are spread over time, by task and error."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from orchestrator.store.insights.failures import MOST_LOOKED_AT, MOST_WALKED, walked
from orchestrator.store.sql import Row, Statement

_IN_TIME = "ended_at >= to_timestamp(%(begin)s) AND ended_at < to_timestamp(%(end)s)"
_SPREAD = Statement[Row](f"""
WITH /* insights.failure_times.spread */ looked_at AS MATERIALIZED (
    {walked(_IN_TIME, "name, queue, status, error, ended_at")}
)
SELECT name, queue, coalesce(error->>'kind', '') AS kind,
       width_bucket(extract(epoch FROM ended_at), %(begin)s, %(end)s, %(parts)s) AS part, count(*) AS tasks
  FROM looked_at WHERE status = 'failed'
 GROUP BY 1, 2, 3, 4
""")
GroupKey = tuple[str, str, str]
"""The name of a task, its queue, and the kind of an error."""


def spread_of_failures(
    connection: Connection, begin: datetime, end: datetime, parts: int, within: str = ""
) -> dict[GroupKey, list[int]]:
    """Return how many tasks have failed in each of so many equal parts of a time, by task, queue and error.

    Of very many, the last ones: those of which the groups are made, too.
    """
    found: dict[GroupKey, list[int]] = {}
    given = {
        "begin": begin.timestamp(),
        "end": end.timestamp(),
        "parts": parts,
        "within": within,
        "most": MOST_LOOKED_AT,
        "walked": MOST_WALKED if within else MOST_LOOKED_AT,
    }
    for row in _SPREAD(connection, given):
        counts = found.setdefault((row.name, row.queue, row.kind), [0] * parts)
        counts[min(max(row.part, 1), parts) - 1] += row.tasks
    return found
