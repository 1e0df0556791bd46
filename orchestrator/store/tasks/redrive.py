"""Retries failed tasks in bulk: those of a queue, a name, an error, a release, a run or a time range."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.ids import to_text
from orchestrator.sealing import reveal_text
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks.revival import KEEPS_KEY, REVIVABLE


class FailedFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Conditions on failed tasks. A condition that is None matches every task."""

    queue: str | None = None
    name: str | None = None
    error: str | None = None
    """A part of the error's type or message; case is ignored."""
    since: datetime | None = None
    until: datetime | None = None
    kind: str | None = None
    """The error's exact type, or the id of a group. Older releases take a group id for a type without tasks."""
    release: str | None = None
    """The application release of the worker that had the last attempt."""
    run: UUID | None = None


def group_of(task: str) -> str:
    """Return an SQL expression of a failed task's group: `KIND#digest`, where the digest is of the message without
    numbers, ids and quoted values."""
    message = f"coalesce({task}.error->>'message', '')"
    return rf"""(coalesce({task}.error->>'kind', '') || '#' || left(md5(CASE
           WHEN starts_with({message}, 'sealed:') THEN '' ELSE regexp_replace(regexp_replace(
                left(split_part({message}, E'\n', 1), 300), $$(?<![[:alnum:]])'[^']*'|"[^"]*"$$, '"', 'g'),
                '[0-9a-fA-F-]{{8,}}|[0-9]+', '#', 'g') END), 6))"""


def is_kind(kind: str, task: str = "e") -> str:
    """Return an SQL condition: a task failed with this type of error, or belongs to this group."""
    return f"(coalesce({task}.error->>'kind', '') = {kind} OR (strpos({kind}, '#') > 0 AND {group_of(task)} = {kind}))"


_NARROWED_PREFIX = "# "
"""The prefix of the type in a request with a release or a run. A leader of the previous release, which knows neither
condition, finds no task of that type instead of retrying tasks of other releases and runs."""


def _is_of_release(release: str) -> str:
    """Return an SQL condition: a worker of this release had the last attempt of task `e`."""
    return f"e.worker IN (SELECT w.worker FROM orchestrator.worker_releases AS w WHERE w.release = {release})"


MAX_SCANNED = 5_000
"""Tasks that a page scans, among those that ended without success, to count the ones that would be retried."""

_MATCHES = f"""
       e.status = 'failed' AND (%(queue)s::text IS NULL OR e.queue = %(queue)s::text)
   AND (%(name)s::text IS NULL OR e.name = %(name)s::text)
   AND (%(error)s::text IS NULL
        OR strpos(lower((e.error->>'kind') || ': ' || (e.error->>'message')), lower(%(error)s::text)) > 0)
   AND (%(kind)s::text IS NULL OR {is_kind("%(kind)s::text")})
   AND (%(release)s::text IS NULL OR {_is_of_release("%(release)s::text")})
   AND (%(run)s::uuid IS NULL OR e.run_id = %(run)s::uuid)
   AND {REVIVABLE}
"""


def _parameters(wanted: FailedFilter) -> dict[str, object]:
    return msgspec.structs.asdict(wanted) | {
        "kind": wanted.kind and (wanted.kind.removeprefix(_NARROWED_PREFIX) or None),
        "run": wanted.run and wanted.run.hex,
    }


class Group(NamedTuple):
    """Failed tasks of one name with one type of error."""

    name: str
    queue: str
    kind: str
    example: str
    """The message of the latest failure."""
    tasks: int


# An example is looked up for each group: sorting all messages by time takes longer than everything else.
_IN_TIME = """e.ended_at >= coalesce(%(since)s::timestamptz, '-infinity')
       AND e.ended_at <= coalesce(%(until)s::timestamptz, 'infinity')"""
_LATEST = f"""SELECT * FROM orchestrator.ended_tasks e WHERE status <> 'success' AND {_IN_TIME}
              ORDER BY ended_at DESC"""


def _preview(name: str, source: str) -> Statement[Group]:
    """Return the statement that groups the retriable tasks among some ended tasks."""
    return Statement[Group](f"""
WITH /* {name} */ matching AS (
    SELECT e.name, e.queue, coalesce(e.error->>'kind', '') AS kind, e.ended_at,
           CASE WHEN {KEEPS_KEY} IS NOT NULL THEN e.unique_key END AS key
      FROM {source} AS e
     WHERE {_MATCHES} AND {_IN_TIME}
       AND (%(within)s::text = '' OR starts_with(e.queue, %(within)s::text))
), groups AS MATERIALIZED (
    SELECT name, queue, kind, max(ended_at) AS last, count(*) FILTER (WHERE key IS NULL) + count(DISTINCT key) AS tasks
      FROM matching GROUP BY name, queue, kind
)
SELECT name, queue, kind, coalesce((
       SELECT error->>'message' FROM orchestrator.ended_tasks e
        WHERE e.status <> 'success' AND e.ended_at = groups.last AND e.status = 'failed' AND e.name = groups.name
          AND e.queue = groups.queue AND coalesce(e.error->>'kind', '') = groups.kind LIMIT 1), '') AS example, tasks
  FROM groups ORDER BY tasks DESC, name, queue, kind
""")


_PREVIEW = _preview("redrive.preview", "orchestrator.ended_tasks")
_PREVIEW_LATEST = _preview("redrive.preview_latest", f"({_LATEST} LIMIT %(most)s)")
_HAS_MORE = Statement[bool](f"SELECT /* redrive.has_more */ true FROM ({_LATEST}) AS later OFFSET %(most)s LIMIT 1")


def preview(connection: Connection, wanted: FailedFilter, within: str = "") -> list[Group]:
    """Return the tasks that would be retried as groups, largest first; of tasks with the same unique key, one counts.

    Only queues whose names begin with `within` count.
    """
    groups = _PREVIEW(connection, _parameters(wanted), within=within)
    return [group._replace(example=reveal_text(group.example)) for group in groups]


def preview_latest(
    connection: Connection, wanted: FailedFilter, within: str = "", most: int = MAX_SCANNED
) -> tuple[list[Group], bool]:
    """Like `preview` for the `most` tasks that last ended without success. Return also whether earlier ones exist."""
    groups = _PREVIEW_LATEST(connection, _parameters(wanted), within=within, most=most)
    has_more = bool(_HAS_MORE.first(connection, _parameters(wanted), most=most))
    return [group._replace(example=reveal_text(group.example)) for group in groups], has_more


def request_retries(connection: Connection, wanted: FailedFilter) -> None:
    """Ask the leader to retry the failed tasks that match now."""
    # A leader of the previous release ignores `kind`; `error` keeps it from retrying all tasks.
    if wanted.kind and "#" not in wanted.kind and wanted.error is None:
        wanted = msgspec.structs.replace(wanted, error=wanted.kind)
    if wanted.release or wanted.run:
        wanted = msgspec.structs.replace(wanted, kind=f"{_NARROWED_PREFIX}{wanted.kind or ''}")
    inbox.add(connection, RequestKind.REDRIVE, bytes(16), msgspec.json.encode(wanted).decode())


_REQUESTED_KIND = f"nullif(regexp_replace(r.body->>'kind', '^{_NARROWED_PREFIX}', ''), '')"
IS_ASKED_FOR = f"""
       (e.status = 'failed' AND e.queue = coalesce(r.body->>'queue', e.queue)
        AND e.name = coalesce(r.body->>'name', e.name)
        AND (r.body->>'error' IS NULL
             OR strpos(lower((e.error->>'kind') || ': ' || (e.error->>'message')), lower(r.body->>'error')) > 0)
        AND ({_REQUESTED_KIND} IS NULL OR {is_kind(_REQUESTED_KIND)})
        AND (r.body->>'release' IS NULL OR {_is_of_release("r.body->>'release'")})
        AND (r.body->>'run' IS NULL OR e.run_id = (r.body->>'run')::uuid)
        AND e.ended_at >= coalesce((r.body->>'since')::timestamptz, '-infinity')
        AND e.ended_at <= least(r.created_at, (r.body->>'until')::timestamptz)
        AND (r.body->'after' IS NULL
             OR (e.ended_at, e.id) > ((r.body->'after'->>0)::timestamptz, (r.body->'after'->>1)::uuid)))
"""
"""Whether the pending request `r` retries the ended task `e`."""

_SLICE = Prepared[Row](f"""
SELECT /* redrive.slice */ e.id, e.ended_at::text AS ended_at, {_MATCHES} AS is_wanted
  FROM (SELECT * FROM orchestrator.ended_tasks
         WHERE status <> 'success' AND (ended_at, id) > (%(after)s::timestamptz, %(after_id)s::uuid)
           AND ended_at <= %(until)s::timestamptz
         ORDER BY ended_at, id LIMIT %(limit)s) AS e
 ORDER BY e.ended_at, e.id
""")
EndCursor = tuple[str, str]
"""A position among the unsuccessful tasks: the end time and the id of a task."""


class Slice(NamedTuple):
    """A range of the unsuccessful tasks."""

    tasks: list[bytes]
    """The matching tasks."""
    last: EndCursor | None
    """The `after` of the next slice; None if this is the last."""


def beginning(wanted: FailedFilter) -> EndCursor:
    """Return the cursor before the first task that can match."""
    return ("-infinity" if wanted.since is None else wanted.since.isoformat(), "00" * 16)


def matching(
    connection: Connection, wanted: FailedFilter, before: datetime, after: EndCursor | None, limit: int
) -> Slice:
    """Scan `limit` unsuccessful tasks in order of their end, up to `before`; return those that match.

    Each task is scanned once, whether it matches or not.
    """
    until = before if wanted.until is None else min(before, wanted.until)
    at, task = after or beginning(wanted)
    rows = _SLICE(connection, _parameters(wanted), {"until": until}, after=at, after_id=task, limit=limit)
    tasks = [row.id for row in rows if row.is_wanted]
    return Slice(tasks, (rows[-1].ended_at, to_text(rows[-1].id)) if len(rows) == limit else None)
