"""Counts of ended tasks, queue latencies and run times, by queue and bucket of ten seconds, kept for two hours.

The leader writes each bucket once, in the first tick after it. Until then, readers count newer ends in `ended_tasks`.
If a leader dies before it has written a bucket, its successor counts those ends there too; their times are lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.store.namespaces import namespace_of
from orchestrator.store.sql import Prepared, Statement

BUCKET = timedelta(seconds=10)
KEPT = timedelta(hours=2)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The counts of one queue in one bucket."""

    bucket: datetime
    """The beginning of the bucket."""
    queue: str
    """`other` for all queues beyond the first hundred."""
    success: int
    failed: int
    cancelled: int
    skipped: int
    dispatched: int
    """Dispatched attempts."""
    retried: int
    """Failed attempts that are retried."""
    lost: int
    """Attempts that were lost with their workers."""
    waits: Sequence[int]
    """A histogram of the queue latency of first attempts: a number for each bound, and one for longer latencies."""
    runs: Sequence[int]
    """A histogram of the run time of attempts."""


class EndCounts(NamedTuple):
    """The number of tasks that ended in one state."""

    state: str
    minute: int
    """The number in the last minute."""
    hour: int


def bucket_of(moment: datetime) -> datetime:
    """Return the beginning of the bucket that contains a time."""
    return datetime.fromtimestamp(moment.timestamp() // BUCKET.total_seconds() * BUCKET.total_seconds(), UTC)


_ADD = Prepared[None]("""
INSERT /* throughput.add */ INTO orchestrator.throughput (bucket, queue, term, success, failed, cancelled, skipped,
       dispatched, retried, lost, waits, runs)
SELECT %(bucket)s::timestamptz, row.queue, %(term)s::bigint, row.success, row.failed, row.cancelled, row.skipped,
       row.dispatched, row.retried, row.lost, row.waits, row.runs
  FROM jsonb_to_recordset(%(rows)s::jsonb) AS row(queue text, success bigint, failed bigint, cancelled bigint,
       skipped bigint, dispatched bigint, retried bigint, lost bigint, waits bigint[], runs bigint[])
ON CONFLICT DO NOTHING
""")


def add(connection: Connection, term: int, bucket: datetime, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert the counts of a bucket, by queue."""
    _ADD(connection, term=term, bucket=bucket, rows=msgspec.json.encode(rows).decode())


class TermSince(NamedTuple):
    """A leader's term, and the first bucket that it wrote."""

    term: int
    at: datetime


@Statement.function("""
SELECT /* throughput.terms */ term, min(bucket) AS at FROM orchestrator.throughput
 WHERE bucket >= %(since)s::timestamptz GROUP BY term ORDER BY term
""")
def terms(connection: Connection, since: datetime) -> list[TermSince]:
    """Return the terms that have written buckets since then, oldest first."""


@Statement.function("""
SELECT /* throughput.list */ bucket, queue, success, failed, cancelled, skipped, dispatched, retried, lost, waits, runs
  FROM orchestrator.throughput
 WHERE bucket >= %(since)s::timestamptz AND (%(queue)s::text IS NULL OR queue = %(queue)s::text)
 ORDER BY bucket, queue, term
""")
def read(connection: Connection, since: datetime, queue: str | None = None) -> list[Throughput]:
    """Return buckets since then, oldest first; of one queue, or of all."""


MAX_BOUNDS = 24
"""The maximum number of entries in `waits` and `runs` that are added up."""


def _sums(column: str) -> str:
    return ", ".join(f"coalesce(sum({column}[{index}]), 0)" for index in range(1, MAX_BOUNDS + 1))


# Ends after the last bucket are not counted in a bucket yet; without buckets, no end is.
_WRITTEN = """written AS (
    SELECT coalesce(max(bucket) + %(size)s::double precision * interval '1 second', '-infinity') AS until
      FROM orchestrator.throughput WHERE bucket <= now()
)"""
_WRITTEN_NUMBERS = (*map(str, ENDED_TASK_STATES), "dispatched", "retried", "lost")
_SUMS = ", ".join(f"sum({name})::bigint AS {name}" for name in _WRITTEN_NUMBERS)
_COUNTED = f"""{_WRITTEN}, counted AS (
    SELECT bucket, queue, {", ".join(_WRITTEN_NUMBERS)}, waits, runs
      FROM orchestrator.throughput WHERE bucket >= %(since)s::timestamptz
     UNION ALL
    SELECT ended_at, queue, {", ".join(f"(status = '{state}')::int" for state in ENDED_TASK_STATES)}, 0, 0, 0,
           '{{}}'::bigint[], '{{}}'::bigint[]
      FROM orchestrator.ended_tasks
     WHERE ended_at >= greatest((SELECT until FROM written), %(since)s::timestamptz)
), chosen AS (
    SELECT * FROM counted
     WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text) AND starts_with(queue, %(within)s::text)
       AND (%(until)s::timestamptz IS NULL OR bucket < %(until)s::timestamptz)
)"""
_MINUTES = Statement[Throughput](f"""
WITH /* throughput.minutes */ {_COUNTED}
SELECT date_trunc('minute', bucket) AS bucket, '' AS queue, {_SUMS},
       ARRAY[{_sums("waits")}]::bigint[] AS waits, ARRAY[{_sums("runs")}]::bigint[] AS runs
  FROM chosen GROUP BY 1 ORDER BY 1
""")
_MINUTES_OF_QUEUES = Statement[Throughput](f"""
WITH /* throughput.minutes_of_queues */ {_COUNTED}
SELECT date_trunc('minute', bucket) AS bucket, queue, {_SUMS},
       '{{}}'::bigint[] AS waits, '{{}}'::bigint[] AS runs
  FROM chosen GROUP BY 1, 2 ORDER BY 1, 2
""")


class LastMinute(NamedTuple):
    """The counts of one queue in the last minute."""

    queue: str
    dispatched: int
    """Dispatched attempts."""
    runs: Sequence[int]
    """A histogram of the run time of attempts."""


# The leader writes a bucket when it is over.
@Statement.function(f"""
SELECT /* throughput.last_minute */ queue, sum(dispatched)::bigint AS dispatched,
       ARRAY[{_sums("runs")}]::bigint[] AS runs
  FROM orchestrator.throughput
 WHERE bucket >= now() - interval '75 seconds' AND bucket < now() - interval '15 seconds' GROUP BY queue
""")
def last_minute(connection: Connection) -> list[LastMinute]:
    """Return the counts of the last six written buckets, by queue."""


def minutes(
    connection: Connection,
    since: datetime,
    queue: str | None = None,
    within: str = "",
    until: datetime | None = None,
) -> list[Throughput]:
    """Return counts since then by minute: of one queue, or the sum over all queues whose names begin with `within`."""
    size = BUCKET.total_seconds()
    return _MINUTES(connection, since=since, queue=queue, within=within, until=until, size=size)


def minutes_of_queues(connection: Connection, since: datetime, within: str = "") -> list[Throughput]:
    """Return counts by queue and minute, without latencies and run times."""
    size = BUCKET.total_seconds()
    return _MINUTES_OF_QUEUES(connection, since=since, queue=None, within=within, until=None, size=size)


def _of_minute(column: str) -> str:
    return f"sum({column}) FILTER (WHERE bucket > now() - interval '1 minute')"


_HOUR_AGO = "date_trunc('minute', now()) - interval '59 minutes'"
"""The beginning of the last hour: sixty minutes, including the current one."""
_ENDED = Statement[EndCounts](f"""
WITH /* throughput.ended */ {_WRITTEN}, summed AS (
    SELECT {", ".join(f"sum({state}) AS {state}, {_of_minute(state)} AS {state}_lately" for state in ENDED_TASK_STATES)}
      FROM orchestrator.throughput WHERE bucket >= {_HOUR_AGO}
), counted AS (
    SELECT state, minute, hour FROM summed
     CROSS JOIN LATERAL (VALUES {", ".join(f"('{state}', {state}_lately, {state})" for state in ENDED_TASK_STATES)})
        AS counts(state, minute, hour)
     UNION ALL
    SELECT status, count(*) FILTER (WHERE ended_at > now() - interval '1 minute'), count(*)
      FROM orchestrator.ended_tasks
     WHERE ended_at >= greatest((SELECT until FROM written), {_HOUR_AGO}) GROUP BY status
)
SELECT state, coalesce(sum(minute), 0)::bigint AS minute, sum(hour)::bigint AS hour
  FROM counted WHERE hour > 0 GROUP BY state
""")


def ended(connection: Connection) -> list[EndCounts]:
    """Return the number of tasks that ended in the last minute and in the last hour, by state."""
    return _ENDED(connection, size=BUCKET.total_seconds())


_UNWRITTEN = Prepared[tuple[str, str, int]](f"""
WITH /* throughput.unwritten */ {_WRITTEN}
SELECT queue, status, count(*) FROM (
    SELECT queue, status FROM orchestrator.ended_tasks
     WHERE ended_at >= greatest((SELECT until FROM written), %(now)s::timestamptz - interval '1 hour')
       AND ended_at < %(now)s::timestamptz
     ORDER BY ended_at DESC LIMIT %(most)s::int) AS lately
 GROUP BY queue, status
""")


def unwritten(connection: Connection, now: datetime, most: int) -> list[tuple[str, str, int]]:
    """Return the number of tasks by queue and state that ended before `now` and are in no bucket: the latest `most`."""
    return _UNWRITTEN(connection, now=now, most=most, size=BUCKET.total_seconds())


# -- table statistics of Postgres's planner

_MISLEADING = Statement[str]("""
SELECT /* statistics.misleading */ c.relname
  FROM pg_stat_all_tables s
  JOIN pg_class c ON c.oid = s.relid
 WHERE s.schemaname = %(schema)s
   AND (s.n_live_tup > 10 * greatest(c.reltuples, 0) + 5000 OR c.reltuples > 10 * s.n_live_tup + 5000)
   AND pg_has_role(c.relowner, 'USAGE')
""")


def misleading(connection: Connection) -> list[str]:
    """Return tables with ten times or a tenth of the rows in their statistics, if the role may run ANALYZE on them."""
    return _MISLEADING(connection, schema=namespace_of(connection))
