"""Failures, grouped by task and error: as many of the last ones as can be looked at while somebody waits."""

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

MOST_LOOKED_AT = 5_000
"""Tasks that did not succeed, the last ones, of which groups are made."""
MOST_WALKED = 50_000
"""Tasks that did not succeed, the last ones of all queues, among which those of some queues are looked for."""


GroupKey = tuple[str, str, str]
"""The name of a task, its queue, and the id of a group: the kind of an error and a digest of its message."""


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
        """Return `snoozed`, `acknowledged`, or nothing: also if one has failed since the acknowledgement."""
        if self.act == "snooze":
            return "snoozed" if self.until is not None and self.until > now else ""
        return "acknowledged" if self.act == "acknowledge" and last_at <= self.at else ""


class FailureGroup(NamedTuple):
    """Failed tasks of one name and queue with one kind of error, whose messages differ in numbers, ids and quoted
    values only."""

    name: str
    queue: str
    kind: str
    example: str
    """The message of the last of them."""
    tasks: int
    first_at: datetime
    """When the first of them failed so for the first time, also if it was retried since."""
    last_at: datetime
    workers: list[str]
    """Some of the workers on which they failed."""
    all_workers: int
    id: str
    """What names it beside task and queue, such as `ValueError#1f3a09`."""
    task: UUID
    """The last of them."""
    first_release: str | None = None
    """The release of the application in which the first of those failed that were looked at, if it has one."""
    releases: Sequence[str] = ()
    """Releases in which they failed, the last ones first."""
    runs: Sequence[UUID] = ()
    """Some of the runs that they are of, the last ones first."""
    handled: Handled | None = None
    """What was decided about it, where that was looked up."""

    @property
    def key(self) -> GroupKey:
        """What it is a group by."""
        return self.name, self.queue, self.id


_LONGEST_LINE = 300


def error_line(row: Row) -> str:
    """Return the kind and the first line of an error, for a list."""
    first, *_ = reveal_text(row.message or "").strip().splitlines() or [""]
    return f"{row.kind}: {first[:_LONGEST_LINE]}"


class Failures(NamedTuple):
    """What has failed lately."""

    groups: list[FailureGroup]
    """The largest first."""
    looked_at: int | None
    """Among how many of those that ended last they were looked for, where there are more; None where all were."""


def walked(begin: str, columns: str) -> str:
    """Return the part of a statement that finds the last ones of some queues since then, among a bounded number."""
    return f"""SELECT {columns} FROM (
           SELECT {columns} FROM orchestrator.ended_tasks
            WHERE status <> 'success' AND {begin} ORDER BY ended_at DESC LIMIT %(walked)s) AS walked
     WHERE starts_with(queue, %(within)s::text) ORDER BY ended_at DESC LIMIT %(most)s"""


_SINCE = "ended_at >= %(since)s::timestamptz AND ended_at < coalesce(%(until)s::timestamptz, 'infinity')"
_MOST_RELEASES = 5
_MOST_RUNS = 20
_MOST_ATTEMPTS = 20


def _attempts_like_the_end(task: str, order: str) -> str:
    """Return a query of attempts before the last one that failed as the task did in the end; of many, the first ones
    in this order."""
    tried = f"SELECT * FROM orchestrator.attempts WHERE task_id = {task}.id ORDER BY {order} LIMIT {_MOST_ATTEMPTS}"
    return f"""SELECT tried.attempt AS number, ended_at, worker, error ? '{REOPENED}' AS reopened
      FROM ({tried}) AS tried
     WHERE {task}.attempt > 1 AND outcome = 'failed' AND {group_of("tried")} = {group_of(task)}"""


# They stand far apart in the table, so that each costs a page of it: what decides is how many are looked at.
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
           (array_agg(DISTINCT run_id ORDER BY run_id DESC) FILTER (WHERE run_id IS NOT NULL))[:{_MOST_RUNS}] AS runs
      FROM named GROUP BY name, queue, id
), by_worker AS (
    SELECT name, queue, id, (array_agg(DISTINCT w))[:3] AS workers, count(DISTINCT w) AS all_workers
      FROM named CROSS JOIN LATERAL (VALUES (worker), (first_worker)) AS each(w) WHERE w IS NOT NULL
     GROUP BY name, queue, id
), by_release AS (
    SELECT name, queue, id, (array_agg(release ORDER BY last_at DESC))[:{_MOST_RELEASES}] AS releases
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
    most: int = MOST_LOOKED_AT,
    until: datetime | None = None,
) -> Failures:
    """Return what has failed since then, of queues whose names begin so; of very many, the last ones."""
    walked = MOST_WALKED if within else most
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
        if row.name is not None  # there is no group: this is the only row
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
    """Return groups of which something had failed by then, or later in another release; None if no task had ended.

    Of very many, it looks at the last ones.
    """
    if not _HAS_ENDED_BEFORE.one(connection, at=at):
        return None
    walked = MOST_WALKED if within else MOST_LOOKED_AT
    rows = _FAILED_BEFORE(connection, at=at, within=within, most=MOST_LOOKED_AT, walked=walked, release=release)
    return {(name, queue, kind) for name, queue, kind in rows}


# -- over time


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
    """Return how often tasks that are failed now have failed in each of so many equal parts of a time, by task, queue
    and error: when they ended, and when they had ended before somebody retried them.

    Of very many tasks, the last ones: those of which the groups are made, too.
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
        counts[min(max(row.part, 1), parts) - 1] += row.failures
    return found


# -- what people have said of a group, which the audit log keeps


HANDLED = "failures"
"""The kind of these lines."""
_LONGEST_TARGET = 200
_HANDLED = Statement[Handled](f"""
SELECT /* insights.failures.handled */ DISTINCT ON (target) target, act, who, at,
       (detail->>'until')::timestamptz AS until
  FROM orchestrator.audit WHERE target = ANY(%(targets)s::text[]) AND kind = '{HANDLED}'
 ORDER BY target, id DESC
""")


def target_of(group: GroupKey) -> str:
    """Return what stands for a group in the audit log; a long one is cut, and told apart by a hash."""
    name, queue, kind = group
    text = f"{name} {kind or 'failed'} in {queue}".replace("\0", "")
    if len(text) <= _LONGEST_TARGET:
        return text
    return f"{text[:_LONGEST_TARGET]}… {blake2b(text.encode(), digest_size=6).hexdigest()}"


def handled_groups(connection: Connection, groups: Iterable[GroupKey]) -> dict[GroupKey, Handled]:
    """Return what was last decided about each of these groups, where the audit log still has it."""
    targets = {target_of(group): group for group in groups}
    rows = _HANDLED(connection, targets=[*targets]) if targets else ()
    return {targets[row.target]: row for row in rows}


def list_failures(connection: Connection, since: datetime, until: datetime | None = None, within: str = "") -> Failures:
    """Return what has failed since then, of queues whose names begin so, with what was decided about each group."""
    found = latest_failures(connection, since, within, until=until)
    handled = handled_groups(connection, [group.key for group in found.groups])
    return found._replace(groups=[group._replace(handled=handled.get(group.key)) for group in found.groups])


_ERRORS = Statement[Row]("""
SELECT /* insights.tasks.errors */ id, error->>'kind' AS kind, error->>'message' AS message
  FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[]) AND error IS NOT NULL
""")


def errors_of_tasks(connection: Connection, tasks: Sequence[UUID]) -> dict[UUID, str]:
    """Return how those of these tasks failed that did, in a line of a list."""
    rows = _ERRORS(connection, ids=[task.bytes for task in tasks]) if tasks else ()
    return {row.id: error_line(row) for row in rows}
