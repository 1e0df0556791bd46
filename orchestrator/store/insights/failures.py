"""Failures grouped by task and error, among the last tasks that can be scanned while somebody waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.sealing import reveal_text
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tasks.redrive import group_of
from orchestrator.store.tasks.row import REOPENED

MAX_SCANNED = 5_000
"""Unsuccessful tasks that are grouped: the last ones."""
MAX_WALKED = 50_000
"""Unsuccessful tasks of all queues among which those of some queues are looked for: the last ones."""


GroupKey = tuple[str, str, str]
"""A task name, a queue, and a group id: the type of the error and a digest of its message."""


class Handled(NamedTuple):
    """The last decision about a group."""

    target: str
    act: str
    """acknowledge, snooze or reopen."""
    who: str
    at: datetime
    until: datetime | None
    """The end of a snooze."""

    def state(self, now: datetime, last_at: datetime) -> str:
        """Return `snoozed`, `acknowledged`, or an empty text; a failure after the acknowledgement ends it."""
        if self.act == "snooze":
            return "snoozed" if self.until is not None and self.until > now else ""
        return "acknowledged" if self.act == "acknowledge" and last_at <= self.at else ""


class FailureGroup(NamedTuple):
    """Failed tasks of one name and queue with one type of error, whose messages differ only in numbers, ids and quoted
    values."""

    name: str
    queue: str
    kind: str
    example: str
    """The message of the latest failure."""
    tasks: int
    first_at: datetime
    """When the first of these tasks first failed this way, even if it was retried later."""
    last_at: datetime
    workers: list[str]
    """Some of the workers on which the tasks failed."""
    all_workers: int
    id: str
    """The id of the group within task and queue, such as `ValueError#1f3a09`."""
    task: UUID
    """The task that failed last."""
    first_release: str | None = None
    """The application release of the earliest failure among the scanned tasks, if it has one."""
    releases: Sequence[str] = ()
    """Releases in which the tasks failed, latest first."""
    runs: Sequence[UUID] = ()
    """Some of the runs of the tasks, latest first."""
    handled: Handled | None = None
    """The last decision about the group, if it was looked up."""

    @property
    def key(self) -> GroupKey:
        """The key of the group."""
        return self.name, self.queue, self.id


_MAX_LINE = 300


def error_line(row: Row) -> str:
    """Return the type and the first line of an error, for a list."""
    first, *_ = reveal_text(row.message or "").strip().splitlines() or [""]
    return f"{row.kind}: {first[:_MAX_LINE]}"


class Failures(NamedTuple):
    """Recent failures."""

    groups: list[FailureGroup]
    """Largest first."""
    looked_at: int | None
    """The number of ended tasks that were scanned; None if that was all of them."""


def walked(begin: str, columns: str) -> str:
    """Return SQL that selects the last unsuccessful tasks of some queues, scanning a bounded number."""
    return f"""SELECT {columns} FROM (
           SELECT {columns} FROM orchestrator.ended_tasks
            WHERE status <> 'success' AND {begin} ORDER BY ended_at DESC LIMIT %(walked)s) AS walked
     WHERE starts_with(queue, %(within)s::text) ORDER BY ended_at DESC LIMIT %(most)s"""


_SINCE = "ended_at >= %(since)s::timestamptz AND ended_at < coalesce(%(until)s::timestamptz, 'infinity')"
_MAX_RELEASES = 5
_MAX_RUNS = 20
_MAX_ATTEMPTS = 20


def _attempts_like_the_end(task: str, order: str) -> str:
    """Return a query of earlier attempts that failed like the final one; of many, the first ones in this order."""
    tried = f"SELECT * FROM orchestrator.attempts WHERE task_id = {task}.id ORDER BY {order} LIMIT {_MAX_ATTEMPTS}"
    return f"""SELECT tried.attempt AS number, ended_at, worker, error ? '{REOPENED}' AS reopened
      FROM ({tried}) AS tried
     WHERE {task}.attempt > 1 AND outcome = 'failed' AND {group_of("tried")} = {group_of(task)}"""


# The rows are spread over the table, each costing one page read, so the number of scanned rows determines the time.
_LATEST = Statement[Row](f"""
WITH /* insights.failures.latest */ looked_at AS MATERIALIZED (
    {walked(_SINCE, "id, name, queue, status, error, ended_at, worker, attempt, run_id")}
), named AS MATERIALIZED (
    SELECT name, queue, {group_of("looked_at")} AS id, coalesce(error->>'kind', '') AS kind,
           coalesce(error->>'message', '') AS message, looked_at.id AS task, looked_at.ended_at, run_id,
           looked_at.worker, coalesce(before.ended_at, looked_at.ended_at) AS first_at, r.release,
           coalesce(before.worker, looked_at.worker) AS first_worker, f.release AS first_release
      FROM looked_at
      LEFT JOIN LATERAL ({_attempts_like_the_end("looked_at", "attempt")} ORDER BY number LIMIT 1) AS before ON true
      LEFT JOIN orchestrator.worker_releases r ON r.worker = looked_at.worker
      LEFT JOIN orchestrator.worker_releases f ON f.worker = coalesce(before.worker, looked_at.worker)
     WHERE status = 'failed'
), groups AS (
    SELECT name, queue, id, min(kind) AS kind, (array_agg(message ORDER BY ended_at DESC))[1] AS example,
           (array_agg(task ORDER BY ended_at DESC))[1] AS task,
           count(*) AS tasks, min(first_at) AS first_at, max(ended_at) AS last_at,
           (array_agg(first_release ORDER BY first_at))[1] AS first_release,
           (array_agg(DISTINCT run_id ORDER BY run_id DESC) FILTER (WHERE run_id IS NOT NULL))[:{_MAX_RUNS}] AS runs
      FROM named GROUP BY name, queue, id
), by_worker AS (
    SELECT name, queue, id, (array_agg(DISTINCT w))[:3] AS workers, count(DISTINCT w) AS all_workers
      FROM named CROSS JOIN LATERAL (VALUES (worker), (first_worker)) AS each(w) WHERE w IS NOT NULL
     GROUP BY name, queue, id
), by_release AS (
    SELECT name, queue, id, (array_agg(release ORDER BY last_at DESC))[:{_MAX_RELEASES}] AS releases
      FROM (SELECT name, queue, id, release, max(ended_at) AS last_at
              FROM named WHERE release IS NOT NULL GROUP BY name, queue, id, release) AS each
     GROUP BY name, queue, id
)
SELECT counted.looked_at, found.* FROM (SELECT count(*) AS looked_at FROM looked_at) AS counted
  LEFT JOIN (SELECT * FROM groups LEFT JOIN by_release USING (name, queue, id)
               LEFT JOIN by_worker USING (name, queue, id)) AS found ON true
 ORDER BY tasks DESC, name, queue, id
""")
_HAS_MORE = Statement[bool](f"""
SELECT /* insights.failures.has_more */ true FROM orchestrator.ended_tasks
 WHERE status <> 'success' AND {_SINCE} ORDER BY ended_at DESC OFFSET %(walked)s LIMIT 1
""")


def latest_failures(
    connection: Connection,
    since: datetime,
    within: str = "",
    most: int = MAX_SCANNED,
    until: datetime | None = None,
) -> Failures:
    """Return the failures of a period, of queues whose names begin with `within`; of very many, the last ones."""
    walked = MAX_WALKED if within else most
    rows = _LATEST(connection, since=since, until=until, within=within, most=most, walked=walked)
    groups = [
        FailureGroup(
            row.name,
            row.queue,
            row.kind,
            reveal_text(row.example),
            row.tasks,
            row.first_at,
            row.last_at,
            row.workers or [],
            row.all_workers or 0,
            row.id,
            row.task,
            row.first_release,
            row.releases or (),
            row.runs or (),
        )
        for row in rows
        if row.name is not None  # a row without a name means that there is no group
    ]
    if rows[0].looked_at >= most:
        return Failures(groups, most)
    is_cut = bool(within) and bool(_HAS_MORE.first(connection, since=since, until=until, walked=walked))
    return Failures(groups, walked if is_cut else None)


_BEFORE = "ended_at < %(at)s::timestamptz"
# A task that was retried by hand has its earlier failure among its attempts.
_FAILED_BEFORE = Statement[GroupKey](f"""
WITH /* insights.failures.before */ earlier AS MATERIALIZED (
    {walked(_BEFORE, "name, queue, status, error, ended_at")}
), later AS MATERIALIZED (
    {walked("ended_at >= %(at)s::timestamptz", "id, name, queue, status, error, ended_at, worker")}
)
SELECT name, queue, {group_of("earlier")} AS kind FROM earlier WHERE status = 'failed'
 UNION
SELECT later.name, queue, {group_of("attempts")} FROM later
  JOIN orchestrator.attempts ON task_id = later.id AND outcome = 'failed' AND attempts.{_BEFORE}
 UNION
SELECT name, queue, {group_of("later")} FROM later
  JOIN orchestrator.worker_releases USING (worker) WHERE status = 'failed' AND release <> %(release)s::text
""")
_HAS_ENDED_BEFORE = Statement[bool](f"""
SELECT /* insights.failures.has_ended_before */ EXISTS (SELECT FROM orchestrator.ended_tasks WHERE {_BEFORE})
""")


def failed_before(
    connection: Connection, at: datetime, within: str = "", release: str | None = None
) -> set[GroupKey] | None:
    """Return groups with a failure before `at`, or later in another release; None if no task had ended before.

    Of very many tasks, the last ones are scanned.
    """
    if not _HAS_ENDED_BEFORE.one(connection, at=at):
        return None
    walked = MAX_WALKED if within else MAX_SCANNED
    rows = _FAILED_BEFORE(connection, at=at, within=within, most=MAX_SCANNED, walked=walked, release=release)
    return {(name, queue, kind) for name, queue, kind in rows}


# -- failures over time


_IN_TIME = "ended_at >= to_timestamp(%(begin)s) AND ended_at < to_timestamp(%(end)s)"
_SPREAD = Statement[Row](f"""
WITH /* insights.failure_times.spread */ looked_at AS MATERIALIZED (
    {walked(_IN_TIME, "id, name, queue, status, error, ended_at, attempt")}
)
SELECT name, queue, {group_of("looked_at")} AS kind,
       width_bucket(extract(epoch FROM ends.at), %(begin)s, %(end)s, %(parts)s) AS part, count(*) AS failures
  FROM looked_at CROSS JOIN LATERAL (
       SELECT looked_at.ended_at AS at
        UNION ALL
       SELECT ended_at FROM ({_attempts_like_the_end("looked_at", "attempt DESC")}) AS earlier
        WHERE reopened AND ended_at >= to_timestamp(%(begin)s)) AS ends
 WHERE status = 'failed'
 GROUP BY 1, 2, 3, 4
""")


def spread_of_failures(
    connection: Connection, begin: datetime, end: datetime, parts: int, within: str = ""
) -> dict[GroupKey, list[int]]:
    """Return how often tasks that are now failed have failed in each of several equal parts of a period, by group.

    A task counts when it ended, and for earlier ends after which it was retried. Of very many tasks, the last ones are
    scanned: the same ones that are grouped.
    """
    by_group: dict[GroupKey, list[int]] = {}
    values = {
        "begin": begin.timestamp(),
        "end": end.timestamp(),
        "parts": parts,
        "within": within,
        "most": MAX_SCANNED,
        "walked": MAX_WALKED if within else MAX_SCANNED,
    }
    for row in _SPREAD(connection, values):
        counts = by_group.setdefault((row.name, row.queue, row.kind), [0] * parts)
        counts[min(max(row.part, 1), parts) - 1] += row.failures
    return by_group


# -- decisions of people about groups, which are entries of the audit log


HANDLED = "failures"
"""The type of these entries."""
_MAX_TARGET = 200
_HANDLED = Statement[Handled](f"""
SELECT /* insights.failures.handled */ DISTINCT ON (target) target, act, who, at,
       (detail->>'until')::timestamptz AS until
  FROM orchestrator.audit WHERE target = ANY(%(targets)s::text[]) AND kind = '{HANDLED}'
 ORDER BY target, id DESC
""")


def target_of(group: GroupKey) -> str:
    """Return the name of a group in the audit log; a long name is cut, and gets a hash."""
    name, queue, kind = group
    text = f"{name} {kind or 'failed'} in {queue}".replace("\0", "")
    if len(text) <= _MAX_TARGET:
        return text
    return f"{text[:_MAX_TARGET]}… {blake2b(text.encode(), digest_size=6).hexdigest()}"


def handled_groups(connection: Connection, groups: Iterable[GroupKey]) -> dict[GroupKey, Handled]:
    """Return the last decision about each of these groups, if the audit log still has it."""
    targets = {target_of(group): group for group in groups}
    rows = _HANDLED(connection, targets=[*targets]) if targets else ()
    return {targets[row.target]: row for row in rows}


def list_failures(connection: Connection, since: datetime, until: datetime | None = None, within: str = "") -> Failures:
    """Return the failures of a period with the decisions about them, of queues whose names begin with `within`."""
    failures = latest_failures(connection, since, within, until=until)
    handled = handled_groups(connection, [group.key for group in failures.groups])
    return failures._replace(groups=[group._replace(handled=handled.get(group.key)) for group in failures.groups])


_ERRORS = Statement[Row]("""
SELECT /* insights.tasks.errors */ id, error->>'kind' AS kind, error->>'message' AS message
  FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[]) AND error IS NOT NULL
""")


def errors_of_tasks(connection: Connection, tasks: Sequence[UUID]) -> dict[UUID, str]:
    """Return one-line errors of the tasks that failed."""
    rows = _ERRORS(connection, ids=[task.bytes for task in tasks]) if tasks else ()
    return {row.id: error_line(row) for row in rows}
