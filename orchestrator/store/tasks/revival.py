"""Ended → pending: retries a failed, skipped or cancelled task, which takes its unique key again.

One statement restores the row and the key, so neither is ever visible without the other. As in `unique.py`, the leader
waits for no client: if an open transaction may be taking the same key, the caller must request the retry again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.states import ENDED_TASK_STATES, TaskState, sources_of
from orchestrator.store.sql import Prepared, Statement, columns_of
from orchestrator.store.tasks.row import CARRIED, archive_last_attempt
from orchestrator.store.tasks.transitions import Moved, among, arrivals
from orchestrator.store.tasks.unique import LOCK_OF, TRY_LOCK, taking

KEEPS_KEY = "(e.options->>'unique_for')"
"""The scope of the unique key that an ended task `e` takes on a retry; null without a key of a scope."""

REVIVABLE = """
       (e.run_id IS NULL OR (
            SELECT true FROM orchestrator.runs r
             WHERE r.id = e.run_id AND NOT r.cancelling AND NOT r.code AND NOT r.flow AND (
                   r.status = 'running' OR (r.status = 'failed' AND r.lane IS NULL AND r.parent_step IS NULL))
             LIMIT 1))
       AND (e.unique_key IS NULL OR NOT EXISTS (
            SELECT FROM orchestrator.unique_keys k
             WHERE k.key = e.unique_key AND k.task_id <> e.id AND (k.until IS NULL OR k.until > now())))
"""
"""Whether an ended task `e` can be retried: its run allows it, and no other task has its key. A run that has ended and
needs a concurrency slot, or that belongs to a parent run, is retried as a whole.

A scalar subquery finds the run: with EXISTS the planner may read all runs into a hash table first. Tasks of workflows
as code are excluded, because the code has already received their ends.
"""

ENDED_SOURCES = [state for state in sources_of(TaskState.PENDING) if state in ENDED_TASK_STATES]

_KEYS = f"""
    SELECT DISTINCT ON (key) id AS task_id, key, scope,
           {TRY_LOCK.format(key="key")} AS is_mine
      FROM revived WHERE scope IS NOT NULL ORDER BY key, turn"""
_REVIVE = Prepared[Moved](f"""
WITH /* revival.revive */ revived AS MATERIALIZED (
    SELECT e.place, e.id, e.unique_key AS key, {KEEPS_KEY} AS scope, asked.turn
      FROM unnest(%(ids)s::uuid[], %(attempts)s::int[]) WITH ORDINALITY AS asked(id, attempt, turn)
     CROSS JOIN LATERAL (
           SELECT ctid AS place, id, status, run_id, unique_key, options, attempt FROM orchestrator.ended_tasks
            WHERE id = asked.id LIMIT 1) AS e
     WHERE e.status IN {among(ENDED_SOURCES)} AND coalesce(e.attempt = asked.attempt, true) AND {REVIVABLE}
       AND (e.status <> 'cancelled' OR e.run_id IS NULL OR %(cancelled)s::boolean)
), {taking(_KEYS, "NULL")}, back AS (
    DELETE FROM orchestrator.ended_tasks e USING revived
     WHERE e.ctid = revived.place AND (revived.scope IS NULL OR revived.id IN (
           SELECT task_id FROM wanted WHERE key IN (SELECT key FROM taken)))
    RETURNING e.*
), history AS (
    {archive_last_attempt("back WHERE status IN ('failed', 'cancelled') AND attempt > 0")}
), opened AS (
    INSERT INTO orchestrator.tasks ({CARRIED}, alone, ready_at)
    SELECT {CARRIED}, losses > 0, CASE WHEN trace IS NOT NULL THEN now() END FROM back
), arrived AS (
    {arrivals("back WHERE lane IS NOT NULL")}
)
SELECT {columns_of(Moved, last="lane", state="'pending'", before="status")} FROM back
 UNION ALL
SELECT task_id, 'contested', NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM wanted WHERE NOT is_mine
""")


class Revived(NamedTuple):
    """The results of retrying tasks."""

    moved: list[Moved]
    contested: set[bytes]
    """Tasks whose key an open transaction may be taking: ask again."""


def revive(
    connection: Connection, ids: Sequence[bytes], *, cancelled: bool = False, attempts: Sequence[int | None] = ()
) -> Revived:
    """Retry failed, skipped and cancelled tasks: failures start from 0, and attempt numbers continue.

    Tasks whose processes died run alone. Cancelled tasks of runs are retried only with `cancelled`. Of several tasks
    with the same key, the first is retried, and the rest stay ended. With `attempts`, one for each id, a task is
    retried only if that was its last attempt.
    """
    rows = _REVIVE(connection, ids=ids, cancelled=cancelled, attempts=list(attempts))
    contested = {row.id for row in rows if row.state == "contested"}
    return Revived([row for row in rows if row.id not in contested], contested)


_NOT_RETRIED = Prepared[tuple[bytes, bytes]](f"""
WITH /* revival.not_retried */ ended AS MATERIALIZED (
    SELECT asked.id, e.key FROM unnest(%(ids)s::uuid[]) AS asked(id)
     CROSS JOIN LATERAL (
           SELECT e.unique_key AS key FROM orchestrator.ended_tasks e
            WHERE e.id = asked.id AND {KEEPS_KEY} IS NOT NULL LIMIT 1) AS e
), held AS MATERIALIZED (
    SELECT ended.id, k.place, k.task_id FROM ended
     CROSS JOIN LATERAL (
           SELECT ctid AS place, task_id FROM orchestrator.unique_keys WHERE key = ended.key LIMIT 1) AS k
), freed AS (
    DELETE FROM orchestrator.unique_keys k USING held WHERE k.ctid = held.place AND held.task_id = held.id
)
SELECT id, task_id FROM held WHERE task_id <> id
""")


def not_retried(connection: Connection, ids: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Free the keys that ended tasks had for a retry; return the tasks whose keys others have, with the others."""
    return _NOT_RETRIED(connection, ids=ids)


_WAIT_FOR_TURN = Statement[None](f"""
SELECT /* revival.wait_for_turn */ pg_advisory_xact_lock({LOCK_OF.format(key="'retry/' || e.unique_key")})
  FROM orchestrator.ended_tasks e WHERE e.id = %(id)s::uuid AND e.unique_key IS NOT NULL
""")
_TRY_KEY = Statement[bool](f"""
SELECT /* revival.try_key */ {TRY_LOCK.format(key="e.unique_key")}
  FROM orchestrator.ended_tasks e WHERE e.id = %(id)s::uuid AND {KEEPS_KEY} IS NOT NULL
""")
_TAKE_KEY = Statement[None](f"""
INSERT /* revival.take_key */ INTO orchestrator.unique_keys (key, task_id, scope, until)
SELECT e.unique_key, e.id, {KEEPS_KEY}, now() + interval '1 hour'
  FROM orchestrator.ended_tasks e WHERE e.id = %(id)s::uuid AND {KEEPS_KEY} IS NOT NULL
    ON CONFLICT (key) DO NOTHING
""")
"""The retry makes the key permanent. If a leader of an earlier release drops the request, the key becomes free."""
_HOLDER = Statement[tuple[str, str]]("""
SELECT /* revival.holder */ k.key, k.task_id::text
  FROM orchestrator.ended_tasks e JOIN orchestrator.unique_keys k ON k.key = e.unique_key
 WHERE e.id = %(id)s::uuid AND k.task_id <> e.id AND (k.until IS NULL OR k.until > now())
 UNION ALL
SELECT e.unique_key, i.target::text FROM orchestrator.ended_tasks e
  JOIN orchestrator.inbox i ON i.kind = 'retry task' AND i.body->>'key' = e.unique_key AND i.target <> e.id
 WHERE e.id = %(id)s::uuid
 LIMIT 1
""")
_ASK = Statement[None](f"""
INSERT /* revival.ask */ INTO orchestrator.inbox (kind, target, body)
SELECT 'retry task', asked.id, nullif(jsonb_strip_nulls(jsonb_build_object(
           'key', CASE WHEN {KEEPS_KEY} IS NOT NULL THEN e.unique_key END, 'attempt', %(attempt)s::int)), '{{}}')
  FROM (SELECT %(id)s::uuid AS id) AS asked LEFT JOIN orchestrator.ended_tasks e ON e.id = asked.id
""")


def request_retry(connection: Connection, task: bytes, attempt: int | None = None) -> tuple[str, str] | None:
    """Ask the leader to retry an ended task, in the caller's transaction; with `attempt`, only if that was the last
    one.

    The task takes its key at once, unless an open transaction may be taking it: then the leader decides. If another
    task has the key, or has a retry request for it, do nothing and return the key and that task's id. Requests for
    tasks with the same key are serialized by a lock, because a request is visible only after its commit.
    """
    _WAIT_FOR_TURN(connection, id=task)
    holder = _HOLDER.first(connection, id=task)
    if holder is None and _TRY_KEY.first(connection, id=task):
        _TAKE_KEY(connection, id=task)
        holder = _HOLDER.first(connection, id=task)  # unless another client was faster
    if holder is None:
        _ASK(connection, id=task, attempt=attempt)
    return holder
