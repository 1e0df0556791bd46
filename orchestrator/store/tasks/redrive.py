"""Trying failed tasks again by the thousand: those of a queue, a name, an error, a release, a run or a time."""

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


class FailedFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which failed tasks are meant; whatever is None does not matter."""

    queue: str | None = None
    name: str | None = None
    error: str | None = None
    """Part of the error's type or message, in any case."""
    since: datetime | None = None
    until: datetime | None = None
    kind: str | None = None
    """The error's type, and nothing else; or the id of a group, which other releases take for a type without tasks."""
    release: str | None = None
    """Whose last attempt a worker of this release of the application had."""
    run: UUID | None = None


def group_of(task: str) -> str:
    """Return an expression of the group of a failed task: `KIND#digest` of its message without what differs from task
    to task, such as numbers, ids and quoted values."""
    message = f"coalesce({task}.error->>'message', '')"
    return rf"""(coalesce({task}.error->>'kind', '') || '#' || left(md5(CASE
           WHEN starts_with({message}, 'sealed:') THEN '' ELSE regexp_replace(regexp_replace(
                left(split_part({message}, E'\n', 1), 300), $$(?<![[:alnum:]])'[^']*'|"[^"]*"$$, '"', 'g'),
                '[0-9a-fA-F-]{{8,}}|[0-9]+', '#', 'g') END), 6))"""


def is_kind(kind: str, task: str = "e") -> str:
    """Return a condition: a task failed with a kind of error, or is of a group."""
    return f"(coalesce({task}.error->>'kind', '') = {kind} OR (strpos({kind}, '#') > 0 AND {group_of(task)} = {kind}))"


_NARROWED = "# "
"""Before the type in a request with a release or a run: a leader of the previous release, which knows neither, takes it
for a type without tasks, and so does not open those of other releases and runs."""


def _is_of_release(release: str) -> str:
    """Return a condition: a worker of a release had the last attempt of task `e`."""
    return f"e.worker IN (SELECT w.worker FROM orchestrator.worker_releases AS w WHERE w.release = {release})"


MOST_LOOKED_AT = 5_000
"""Tasks that ended without success at which a page looks, to count those that would be tried again."""

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
        "kind": wanted.kind and (wanted.kind.removeprefix(_NARROWED) or None),
        "run": wanted.run and wanted.run.hex,
    }


class Group(NamedTuple):
    """Failed tasks of one name with one kind of error."""

    name: str
    queue: str
    kind: str
    example: str
    """The message of the last of them."""
    tasks: int


# An example is looked up for each group: to sort all messages by time takes longer than everything else.
_IN_TIME = """e.ended_at >= coalesce(%(since)s::timestamptz, '-infinity')
       AND e.ended_at <= coalesce(%(until)s::timestamptz, 'infinity')"""
_LATEST = f"""SELECT * FROM orchestrator.ended_tasks e WHERE status <> 'success' AND {_IN_TIME}
              ORDER BY ended_at DESC"""


def _preview(name: str, source: str) -> Statement[Group]:
    """Return the statement that groups those of some ended tasks that would be tried again."""
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
    """Return what would be tried again, the largest groups first; of those that share a unique key, one.

    It is of queues whose names begin with `within`.
    """
    groups = _PREVIEW(connection, _parameters(wanted), within=within)
    return [group._replace(example=reveal_text(group.example)) for group in groups]


def preview_latest(
    connection: Connection, wanted: FailedFilter, within: str = "", most: int = MOST_LOOKED_AT
) -> tuple[list[Group], bool]:
    """Return the same of so many tasks that ended last without success, and whether there are others before them."""
    groups = _PREVIEW_LATEST(connection, _parameters(wanted), within=within, most=most)
    has_more = bool(_HAS_MORE.first(connection, _parameters(wanted), most=most))
    return [group._replace(example=reveal_text(group.example)) for group in groups], has_more


def ask(connection: Connection, wanted: FailedFilter) -> None:
    """Ask the leader to open the failed tasks again that match now."""
    # A leader of the release before knows no kind, and must not take all.
    if wanted.kind and "#" not in wanted.kind and wanted.error is None:
        wanted = msgspec.structs.replace(wanted, error=wanted.kind)
    if wanted.release or wanted.run:
        wanted = msgspec.structs.replace(wanted, kind=f"{_NARROWED}{wanted.kind or ''}")
    inbox.add(connection, RequestKind.REDRIVE, bytes(16), msgspec.json.encode(wanted).decode())


_ASKED_KIND = f"nullif(regexp_replace(r.body->>'kind', '^{_NARROWED}', ''), '')"
IS_ASKED_FOR = f"""
       (e.status = 'failed' AND e.queue = coalesce(r.body->>'queue', e.queue)
        AND e.name = coalesce(r.body->>'name', e.name)
        AND (r.body->>'error' IS NULL
             OR strpos(lower((e.error->>'kind') || ': ' || (e.error->>'message')), lower(r.body->>'error')) > 0)
        AND ({_ASKED_KIND} IS NULL OR {is_kind(_ASKED_KIND)})
        AND (r.body->>'release' IS NULL OR {_is_of_release("r.body->>'release'")})
        AND (r.body->>'run' IS NULL OR e.run_id = (r.body->>'run')::uuid)
        AND e.ended_at >= coalesce((r.body->>'since')::timestamptz, '-infinity')
        AND e.ended_at <= least(r.created_at, (r.body->>'until')::timestamptz)
        AND (r.body->'after' IS NULL
             OR (e.ended_at, e.id) > ((r.body->'after'->>0)::timestamptz, (r.body->'after'->>1)::uuid)))
"""
"""Whether request `r`, which is not done yet, is to open the ended task `e` again."""

_SLICE = Prepared[Row](f"""
SELECT /* redrive.slice */ e.id, e.ended_at::text AS ended_at, {_MATCHES} AS is_wanted
  FROM (SELECT * FROM orchestrator.ended_tasks
         WHERE status <> 'success' AND (ended_at, id) > (%(after)s::timestamptz, %(after_id)s::uuid)
           AND ended_at <= %(until)s::timestamptz
         ORDER BY ended_at, id LIMIT %(limit)s) AS e
 ORDER BY e.ended_at, e.id
""")
EndCursor = tuple[str, str]
"""How far a walk along what did not succeed has come: the time of an end, and the id of the task."""


class Slice(NamedTuple):
    """A part of what did not succeed."""

    tasks: list[bytes]
    """Those that match."""
    last: EndCursor | None
    """Where the next slice goes on; None if there is no other."""


def beginning(wanted: FailedFilter) -> EndCursor:
    """Return where a walk begins."""
    return ("-infinity" if wanted.since is None else wanted.since.isoformat(), "00" * 16)


def matching(
    connection: Connection, wanted: FailedFilter, before: datetime, after: EndCursor | None, limit: int
) -> Slice:
    """Look at so many tasks that did not succeed, in the order of their ends, up to a time; return those that match.

    What does not match is walked past once, however much of it there is.
    """
    until = before if wanted.until is None else min(before, wanted.until)
    at, task = after or beginning(wanted)
    rows = _SLICE(connection, _parameters(wanted), {"until": until}, after=at, after_id=task, limit=limit)
    tasks = [row.id for row in rows if row.is_wanted]
    return Slice(tasks, (rows[-1].ended_at, to_text(rows[-1].id)) if len(rows) == limit else None)
