"""Unique keys, which only one task may have at a time.

A client takes a key in the statement that inserts the task, and never locks a key that another task has, so the leader,
which frees keys, waits for no client. The leader takes keys only for tasks that running tasks enqueue, and for retried
tasks (`revival.py`); if an open transaction may be taking the same key, the leader tries again later instead of
waiting. The leader locks no key of another shard's task either, so leaders do not wait for each other.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.plain import is_same
from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.domain.tasks.task import KeyHolder, NewTask, UniqueKey, caller_key, differing_options
from orchestrator.errors import Duplicate, OrchestratorError
from orchestrator.sealing import CALL, Sealed, open_data
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks.enqueue import copy_tasks, insert_task
from orchestrator.store.tasks.transitions import Moved, among, arrivals

_MAX_ROUNDS = 100
"""Attempts to take a key that is freed and taken again between two statements."""

LOCK_OF = "hashtextextended('orchestrator.' || {key}, 0)"
"""The advisory lock of a key. The schema is part of the name, so other namespaces have other locks."""

_LOCK_OF_MANY = "hashtextextended('orchestrator.', 1)"
"""The lock that replaces key locks in a transaction with very many keys: Postgres has room for a few thousand locks."""

TRY_LOCK = f"(pg_try_advisory_xact_lock_shared({_LOCK_OF_MANY}) AND pg_try_advisory_xact_lock({LOCK_OF}))"
"""Whether no other transaction is about to take the key. A transaction that takes many keys waits for this lock, so the
transaction that tries must be short."""

_MAX_LOCKS = 100
_CHUNK = 1_000
"""Tasks whose keys one statement takes."""

_HOLDER = Statement[tuple[str, str, bool]]("""
SELECT /* keys.holder */ task_id::text, scope, coalesce(until <= now(), false)
  FROM orchestrator.unique_keys WHERE key = %(key)s
""")
_FREE_EXPIRED = Statement[None](
    "DELETE /* keys.free_expired */ FROM orchestrator.unique_keys WHERE key = %(key)s AND until <= now()"
)
_REPLACE = Statement[UUID](f"""
WITH /* keys.replace */ changed AS (
    UPDATE orchestrator.tasks
       SET payload = %(payload)s, wake_at = now() + %(delay)s::double precision * interval '1 second'
     WHERE id = %(id)s::uuid AND status = 'pending'
    RETURNING id, lane, wake_at
), arrived AS ({arrivals("changed WHERE lane IS NOT NULL AND wake_at IS NULL")})
SELECT id FROM changed
""")
_WAIT_FOR_KEY = Statement[None](
    f"SELECT /* keys.wait_for_key */ pg_advisory_xact_lock({LOCK_OF.format(key='%(key)s::text')})"
)
_WAIT_FOR_KEYS = Statement[None](f"""
SELECT /* keys.wait_for_keys */ pg_advisory_xact_lock({LOCK_OF.format(key="key")})
  FROM unnest(%(keys)s::text[]) AS wanted(key)
""")
_WAIT_FOR_MANY = Statement[None](f"SELECT /* keys.wait_for_many */ pg_advisory_xact_lock({_LOCK_OF_MANY})")
_TRY_KEY = Statement[bool](
    f"SELECT /* keys.try_key */ pg_try_advisory_xact_lock({LOCK_OF.format(key='%(key)s::text')})"
)
_CALL = Statement[Row]("""
SELECT /* keys.call */ name, payload, queue, priority, options::text AS options, lane
  FROM orchestrator.tasks WHERE id = %(id)s::uuid
 UNION ALL
SELECT name, payload, queue, priority, options::text, lane FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid
""")


_QUEUE = Statement[str]("""
SELECT /* keys.queue */ queue FROM orchestrator.tasks WHERE id = %(id)s::uuid
 UNION ALL
SELECT queue FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid
""")


def insert_unique(connection: Connection, task: NewTask, unique: UniqueKey, within: str = "") -> bytes:
    """Insert a task, or apply its duplicate policy if another task has its key; return the id of the key's holder.

    The holder is neither changed nor disclosed unless its queue's name begins with `within`.
    """
    key = caller_key(task.name, unique.key)
    for _ in range(_MAX_ROUNDS):
        if insert_task(connection, task):
            return task.id
        row = _HOLDER.first(connection, key=unique.key)
        if row is None:
            continue  # the key was freed since the insert
        holder, scope, is_over = row
        if is_over:
            _FREE_EXPIRED(connection, key=unique.key)
        elif within and not (_QUEUE.first(connection, id=holder) or "").startswith(within):
            raise Duplicate(f"A task of a different queue has the key {key!r}; this task was not enqueued.", "")
        elif unique.on_duplicate == "raise":
            raise Duplicate(f"Task {holder} already has the key {key!r}; this task was not enqueued.", holder)
        elif unique.on_duplicate == "replace":
            if _replace(connection, holder, task):
                return UUID(holder).bytes
            if scope != "pending":
                raise Duplicate(
                    f"Task {holder} has the key {key!r} and is no longer waiting, so its arguments cannot be replaced; "
                    f"nothing was enqueued. With unique_for='pending' the key is free as soon as its task starts.",
                    holder,
                )
            # The holder was pending when its key was read, and was claimed since then, which frees the key.
        elif unique.same_call and (difference := _difference(connection, holder, task, unique)):
            raise Duplicate.other_call(key, holder, difference)
        else:
            return UUID(holder).bytes
    raise OrchestratorError(f"The key {key!r} could not be acquired: other tasks keep taking and releasing it.")


def holder(connection: Connection, key: str) -> bytes | None:
    """Return the task that has a key."""
    row = _HOLDER.first(connection, key=key)
    return None if row is None else UUID(row[0]).bytes


def _replace(connection: Connection, holder: str, task: NewTask) -> bool:
    delay = task.delay if task.delay > 0 else None
    return _REPLACE.first(connection, id=holder, payload=task.payload, delay=delay) is not None


def _difference(connection: Connection, holder: str, task: NewTask, unique: UniqueKey) -> str:
    """Return how a task differs from the key's holder, for a message; empty if the holder is no longer stored."""
    holder_call = _CALL.first(connection, id=holder)
    if holder_call is None:
        return ""
    parts = [] if holder_call.name == task.name else [f"the name {holder_call.name!r}, here {task.name!r}"]
    if not same_payload(bytes(holder_call.payload), task.payload):
        parts.append("other arguments")
    if unique.same_options:
        parts += differing_options(task, holder_call.queue, holder_call.priority, holder_call.options, holder_call.lane)
    return ", ".join(parts)


def check_batch(connection: Connection, tasks: Sequence[NewTask], created: Mapping[bytes, bytes], beyond: str) -> None:
    """Raise `Duplicate` if a batch's key was used for other tasks: fewer tasks, or more.

    `created` has the holder of each key; `beyond` is the key that one more task would have.
    """
    new = [created[task.id] == task.id for task in tasks]
    if any(new) != all(new) or (new and not any(new) and _HOLDER.first(connection, key=beyond)):
        key = caller_key("", beyond).rpartition("/")[0]
        raise Duplicate(
            f"Other tasks were enqueued under the key {key!r}; none of these was. A repeated call must have the same "
            f"tasks, and a different call needs its own key."
        )


def same_payload(left: bytes, right: bytes) -> bool:
    """Return whether two payloads have the same arguments, whatever the order of mapping keys."""
    try:
        left, right = open_data(left, CALL), open_data(right, CALL)
    except Sealed:
        return True  # without the data key a client cannot compare, and trusts the idempotency key
    return left == right or is_same(msgspec.msgpack.decode(left), msgspec.msgpack.decode(right))


_WANTED = Batch("w", "key text, task_id uuid, scope text, period double precision")
_TAKE_FREE = Statement[UUID](f"""
INSERT /* keys.take_free */ INTO orchestrator.unique_keys (key, task_id, scope, until)
SELECT key, task_id, scope, now() + period * interval '1 second' FROM {_WANTED}
    ON CONFLICT (key) DO NOTHING
RETURNING task_id
""")


def insert_many_unique(connection: Connection, tasks: Sequence[NewTask], within: str = "") -> dict[bytes, bytes]:
    """Insert tasks with keys, in a transaction that may be long; return the holder of each task's key.

    Keys are taken in sorted order, so two such calls cannot deadlock.
    """
    owners: dict[bytes, bytes] = {}
    keyed = sorted(((task.unique.key, task, task.unique) for task in tasks if task.unique), key=itemgetter(0))
    if len(keyed) > _MAX_LOCKS:
        _WAIT_FOR_MANY(connection)
    elif keyed:
        _WAIT_FOR_KEYS(connection, keys=[key for key, _, _ in keyed])
    for start in range(0, len(keyed), _CHUNK):
        chunk = keyed[start : start + _CHUNK]
        rows = _WANTED((key, task.id, unique.scope, unique.period) for key, task, unique in chunk)
        taken = {row.bytes for row in _TAKE_FREE(connection, rows)}
        copy_tasks(connection, [task for _, task, _ in chunk if task.id in taken])
        for _, task, unique in chunk:
            try:
                owners[task.id] = task.id if task.id in taken else insert_unique(connection, task, unique, within)
            except Duplicate as error:
                if error.task_id and UUID(error.task_id).bytes in owners:
                    key = caller_key(task.name, unique.key)
                    raise Duplicate(f"Two of these tasks have the key {key!r}; none of them was enqueued.") from error
                raise
    return owners


def try_key(connection: Connection, unique: UniqueKey) -> bool:
    """Like `wait_for_key`, but without waiting. Return False if another transaction may be about to take the key."""
    return _TRY_KEY.one(connection, key=unique.key)


def wait_for_key(connection: Connection, unique: UniqueKey) -> None:
    """Lock a key before taking it in a transaction that may be long, so that the leader does not block on it."""
    _WAIT_FOR_KEY(connection, key=unique.key)


# -- for the leader


def taking(asked: str, until: str) -> str:
    """Return CTEs that take the keys in `asked`: `key, task_id, scope, is_mine` and the columns that `until` needs.

    They neither lock nor await a key of another task, as `ON CONFLICT DO UPDATE` would until the tick ends.
    """
    return f"""
wanted AS MATERIALIZED (
    SELECT asked.*, found.place FROM ({asked}) AS asked
      LEFT JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.unique_keys WHERE key = asked.key LIMIT 1) AS found ON true
), renewed AS (
    UPDATE orchestrator.unique_keys held SET task_id = wanted.task_id, scope = wanted.scope, until = {until}
      FROM wanted
     WHERE held.ctid = wanted.place AND is_mine AND (held.until <= now() OR held.task_id = wanted.task_id)
    RETURNING held.key
), added AS (
    INSERT INTO orchestrator.unique_keys (key, task_id, scope, until)
    SELECT key, task_id, scope, {until} FROM wanted WHERE is_mine AND place IS NULL
        ON CONFLICT (key) DO NOTHING
    RETURNING key
), taken AS (
    SELECT key FROM renewed UNION ALL SELECT key FROM added
)"""


_ASKED = f"""
    SELECT key, task_id, scope, period, {TRY_LOCK.format(key="key")} AS is_mine
      FROM {_WANTED}"""
_TAKE = Prepared[Row](f"""
WITH /* keys.take */ {taking(_ASKED, "now() + wanted.period * interval '1 second'")}
SELECT wanted.key, wanted.is_mine, EXISTS (SELECT FROM taken WHERE taken.key = wanted.key) AS is_taken FROM wanted
""")


def take(connection: Connection, tasks: Sequence[NewTask]) -> tuple[set[bytes], set[bytes]]:
    """Take the keys of tasks, all different; return the ids of tasks that got their key, and of tasks to try again."""
    unique = [(task.id, task.unique) for task in tasks if task.unique is not None]
    rows = _TAKE(connection, _WANTED((key.key, task, key.scope, key.period) for task, key in unique))
    row_of = {row.key: row for row in rows}
    taken = {task for task, key in unique if row_of[key.key].is_taken}
    contested = {task for task, key in unique if not row_of[key.key].is_mine}
    return taken, contested


_HOLDERS = Prepared[Row]("""
SELECT /* keys.holders */ held.key, held.task_id, coalesce(
       (SELECT payload FROM orchestrator.tasks t WHERE t.id = held.task_id LIMIT 1),
       (SELECT payload FROM orchestrator.ended_tasks e WHERE e.id = held.task_id LIMIT 1)) AS payload
  FROM orchestrator.unique_keys AS held WHERE held.key = ANY(%(keys)s::text[])
""")


def holders(connection: Connection, tasks: Sequence[NewTask]) -> dict[bytes, KeyHolder]:
    keyed = [(task, task.unique) for task in tasks if task.unique is not None]
    rows = _HOLDERS(connection, keys=[unique.key for _, unique in keyed])
    row_of = {row.key: row for row in rows}
    result: dict[bytes, KeyHolder] = {}
    for task, unique in keyed:
        if holder := row_of.get(unique.key):
            payload = holder.payload
            is_other = unique.same_call and payload is not None and not same_payload(payload, task.payload)
            result[task.id] = KeyHolder(holder.task_id, is_other)
    return result


_DEFERRED = Batch("task", "id uuid, data text")
_DEFER = Statement[None](f"""
INSERT /* keys.defer */ INTO orchestrator.inbox (kind, target, body)
SELECT 'enqueue', task.id, jsonb_build_object('task', task.data)
  FROM {_DEFERRED}
""")


def defer(connection: Connection, tasks: Sequence[NewTask]) -> None:
    """Insert requests into the inbox that create tasks once their keys can be taken."""
    rows = [(task.id, base64.b85encode(msgspec.msgpack.encode(task)).decode()) for task in tasks]
    _DEFER(connection, _DEFERRED(rows))


def deferred(body: Any) -> NewTask:
    """Return the task in a request of `defer`."""
    return msgspec.msgpack.decode(base64.b85decode(body["task"]), type=NewTask)


@Prepared.function("""
SELECT /* keys.known */ asked.id FROM unnest(%(ids)s::uuid[]) AS asked(id)
 WHERE (SELECT true FROM orchestrator.tasks WHERE id = asked.id LIMIT 1)
    OR (SELECT true FROM orchestrator.ended_tasks WHERE id = asked.id LIMIT 1)
""")
def existing(connection: Connection, ids: Sequence[bytes]) -> set[bytes]:
    """Return the ids that belong to existing tasks, open or ended."""


_FREED = Batch("freed", "key text, task_id uuid")
_FREE = Prepared[None](f"""
DELETE /* keys.free */ FROM orchestrator.unique_keys k
 USING {_FREED}
 CROSS JOIN LATERAL (SELECT ctid AS tid FROM orchestrator.unique_keys WHERE key = freed.key LIMIT 1) AS found
 WHERE k.ctid = found.tid AND k.task_id = freed.task_id AND k.scope = ANY(%(scopes)s::text[])
""")


def free(connection: Connection, keys: Sequence[tuple[str, bytes]], *, ended: bool) -> None:
    """Free the keys that tasks held until their claim or, if the tasks have `ended`, until their end."""
    _FREE(connection, _FREED(keys), scopes=["pending", "running"] if ended else ["pending"])


# -- tasks that are both open and ended.
#
# This should never happen. But earlier releases could insert an ended task again when a proxy repeated a request, and
# people restore rows by hand. A primary key then refuses every further change of the task, so it runs without end.

_REFUSED_BY = ("ended_tasks_pkey", "attempts_pkey", "tasks_pkey")
"""The keys that refuse its end, its retry and its reopening."""
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def named_in(error: BaseException) -> bytes | None:
    """Return the task that a primary key has refused, if an error is about that."""
    diagnostics = getattr(getattr(error, "orig", None), "diag", None)
    if diagnostics is None or diagnostics.constraint_name not in _REFUSED_BY:
        return None
    match = _ID.search(diagnostics.message_detail or "")
    return UUID(match[0]).bytes if match else None


# A scalar subquery checks whether a task has ended: with EXISTS the planner may read all ended tasks. The run has
# counted the stored end, and callbacks exist: neither must happen again.
@Prepared.function(f"""
WITH /* duplicates.remove */ gone AS (
    DELETE FROM orchestrator.tasks t WHERE t.ctid = ANY (ARRAY(
           SELECT place FROM (
                  SELECT ctid AS place, id FROM orchestrator.tasks WHERE id = %(task)s::uuid
                   UNION
                  SELECT ctid, id FROM orchestrator.tasks WHERE status IN {among(IN_FLIGHT_STATES)}) AS suspect
            WHERE (SELECT true FROM orchestrator.ended_tasks WHERE id = suspect.id LIMIT 1)
            LIMIT %(limit)s))
    RETURNING t.*
)
SELECT gone.id, (SELECT status FROM orchestrator.ended_tasks e WHERE e.id = gone.id) AS state, gone.queue,
       NULL::uuid AS run_id, gone.attempt, gone.status AS before, gone.name, NULL::text AS step, gone.lane,
       gone.unique_key
  FROM gone
""")
def remove(connection: Connection, task: bytes, limit: int) -> list[Moved]:
    """Delete the open rows of ended tasks: of this task and of tasks in flight. Return the tasks in their end state."""
