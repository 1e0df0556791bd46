"""Keys that only one task may have at a time.

A client takes a key with the same statement that creates the task, and never locks a key that another task has, so the
leader, which frees keys, waits for nobody. The leader takes keys only for tasks that running tasks enqueue, and for
ended tasks that are opened again (`revival.py`); if a transaction that has not ended yet may be taking the same key, it
asks again later instead of waiting. It locks no key that a task of another shard has, either, so leaders of several
shards do not wait for each other.
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
from orchestrator.domain.tasks.task import KeyHolder, NewTask, UniqueKey, differing_options, given_key
from orchestrator.errors import Duplicate, OrchestratorError
from orchestrator.sealing import CALL, Sealed, open_data
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks.enqueue import copy_tasks, insert_task
from orchestrator.store.tasks.transitions import Moved, among, arrivals

_ROUNDS = 100
"""How often a key may slip away between two statements before something must be wrong."""

LOCK_OF = "hashtextextended('orchestrator.' || {key}, 0)"
"""The lock of a key. It names the schema, so that the same key in another namespace is another lock."""

_LOCK_OF_MANY = "hashtextextended('orchestrator.', 1)"
"""The lock of a transaction that takes very many keys, in the place of theirs: Postgres has room for few thousands."""

TRY_LOCK = f"(pg_try_advisory_xact_lock_shared({_LOCK_OF_MANY}) AND pg_try_advisory_xact_lock({LOCK_OF}))"
"""Whether nobody else is about to take a key. Who asks ends soon: a transaction that takes many keys waits for it."""

_MANY = 100
_CHUNK = 1_000
"""Tasks whose keys are taken by one statement."""

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
    """Create a task, or do what its policy says if another has its key; return the id of the task that has it.

    The other one is left alone, and stays unknown, unless the name of its queue begins with `within`.
    """
    key = given_key(task.name, unique.key)
    for _ in range(_ROUNDS):
        if insert_task(connection, task):
            return task.id
        row = _HOLDER.first(connection, key=unique.key)
        if row is None:
            continue  # the task that had it has just let it go
        holder, scope, is_over = row
        if is_over:
            _FREE_EXPIRED(connection, key=unique.key)
        elif within and not (_QUEUE.first(connection, id=holder) or "").startswith(within):
            raise Duplicate(f"A task of another queue has the key {key!r}; this one was not enqueued.", "")
        elif unique.on_duplicate == "raise":
            raise Duplicate(f"Task {holder} already has the key {key!r}; this one was not enqueued.", holder)
        elif unique.on_duplicate == "replace":
            if _replace(connection, holder, task):
                return UUID(holder).bytes
            if scope != "pending":
                raise Duplicate(
                    f"Task {holder} has the key {key!r} and waits no more, so its arguments cannot be replaced; "
                    f"nothing was enqueued. With unique_for='pending' its key is free from the moment it starts.",
                    holder,
                )
            # It waited when its key was read and has been claimed since, which frees the key.
        elif unique.same_call and (difference := _difference(connection, holder, task, unique)):
            raise Duplicate.other_call(key, holder, difference)
        else:
            return UUID(holder).bytes
    raise OrchestratorError(f"The key {key!r} could not be had: other tasks take it and let it go all the time.")


def holder(connection: Connection, key: str) -> bytes | None:
    """Return the task that has a key."""
    row = _HOLDER.first(connection, key=key)
    return None if row is None else UUID(row[0]).bytes


def _replace(connection: Connection, holder: str, task: NewTask) -> bool:
    delay = task.delay if task.delay > 0 else None
    return _REPLACE.first(connection, id=holder, payload=task.payload, delay=delay) is not None


def _difference(connection: Connection, holder: str, task: NewTask, unique: UniqueKey) -> str:
    """Say in what a task differs from another that should be the same; empty if that is no longer stored."""
    found = _CALL.first(connection, id=holder)
    if found is None:
        return ""
    parts = [] if found.name == task.name else [f"the name {found.name!r}, here {task.name!r}"]
    if not same_payload(bytes(found.payload), task.payload):
        parts.append("other arguments")
    if unique.same_options:
        parts += differing_options(task, found.queue, found.priority, found.options, found.lane)
    return ", ".join(parts)


def check_batch(connection: Connection, tasks: Sequence[NewTask], created: Mapping[bytes, bytes], beyond: str) -> None:
    """Refuse tasks under a key that was used for other tasks: fewer, or as many and some more.

    `created` has the holder of each key, and `beyond` is the key that one more task would have.
    """
    new = [created[task.id] == task.id for task in tasks]
    if any(new) != all(new) or (new and not any(new) and _HOLDER.first(connection, key=beyond)):
        key = given_key("", beyond).rpartition("/")[0]
        raise Duplicate(
            f"Other tasks were enqueued under the key {key!r}; none of these was. A repeated call has the same tasks, "
            f"and another one needs a key of its own."
        )


def same_payload(one: bytes, other: bytes) -> bool:
    """Say whether two payloads hold the same arguments, in whatever order their mappings were written."""
    try:
        one, other = open_data(one, CALL), open_data(other, CALL)
    except Sealed:
        return True  # a client without the data key cannot compare, and trusts the idempotency key
    return one == other or is_same(msgspec.msgpack.decode(one), msgspec.msgpack.decode(other))


_WANTED = Batch("w", "key text, task_id uuid, scope text, period double precision")
_TAKE_FREE = Statement[UUID](f"""
INSERT /* keys.take_free */ INTO orchestrator.unique_keys (key, task_id, scope, until)
SELECT key, task_id, scope, now() + period * interval '1 second' FROM {_WANTED}
    ON CONFLICT (key) DO NOTHING
RETURNING task_id
""")


def insert_many_unique(connection: Connection, tasks: Sequence[NewTask], within: str = "") -> dict[bytes, bytes]:
    """Create tasks with keys in a transaction that may last; return which task has the key of each.

    It goes in the order of their keys: two such calls that share some cannot then wait for each other.
    """
    found: dict[bytes, bytes] = {}
    wanted = sorted(((task.unique.key, task, task.unique) for task in tasks if task.unique), key=itemgetter(0))
    if len(wanted) > _MANY:
        _WAIT_FOR_MANY(connection)
    elif wanted:
        _WAIT_FOR_KEYS(connection, keys=[key for key, _, _ in wanted])
    for start in range(0, len(wanted), _CHUNK):
        chunk = wanted[start : start + _CHUNK]
        rows = _WANTED((key, task.id, unique.scope, unique.period) for key, task, unique in chunk)
        taken = {row.bytes for row in _TAKE_FREE(connection, rows)}
        copy_tasks(connection, [task for _, task, _ in chunk if task.id in taken])
        for _, task, unique in chunk:
            try:
                found[task.id] = task.id if task.id in taken else insert_unique(connection, task, unique, within)
            except Duplicate as error:
                if error.task_id and UUID(error.task_id).bytes in found:
                    key = given_key(task.name, unique.key)
                    raise Duplicate(f"Two of these tasks have the key {key!r}; none of them was enqueued.") from error
                raise
    return found


def try_key(connection: Connection, unique: UniqueKey) -> bool:
    """Do the same as `wait_for_key` without waiting; say whether no other transaction is about to take it."""
    return _TRY_KEY.one(connection, key=unique.key)


def wait_for_key(connection: Connection, unique: UniqueKey) -> None:
    """Before taking a key in a transaction that may last: keep the leader from running into it."""
    _WAIT_FOR_KEY(connection, key=unique.key)


# -- the leader


def taking(asked: str, until: str) -> str:
    """Return the steps that take the keys that are asked for: `key, task_id, scope, is_mine` and what `until` needs.

    They lock and wait for none that another task has, as `ON CONFLICT DO UPDATE` would until the tick ends.
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
    """Take the keys of tasks, no two alike; return the ids of those that have theirs, and of those to ask again for."""
    unique = [(task.id, task.unique) for task in tasks if task.unique is not None]
    rows = _TAKE(connection, _WANTED((key.key, task, key.scope, key.period) for task, key in unique))
    found = {row.key: row for row in rows}
    taken = {task for task, key in unique if found[key.key].is_taken}
    contested = {task for task, key in unique if not found[key.key].is_mine}
    return taken, contested


_HOLDERS = Prepared[Row]("""
SELECT /* keys.holders */ held.key, held.task_id, coalesce(
       (SELECT payload FROM orchestrator.tasks t WHERE t.id = held.task_id LIMIT 1),
       (SELECT payload FROM orchestrator.ended_tasks e WHERE e.id = held.task_id LIMIT 1)) AS payload
  FROM orchestrator.unique_keys AS held WHERE held.key = ANY(%(keys)s::text[])
""")


def holders(connection: Connection, tasks: Sequence[NewTask]) -> dict[bytes, KeyHolder]:
    wanted = [(task, task.unique) for task in tasks if task.unique is not None]
    rows = _HOLDERS(connection, keys=[unique.key for _, unique in wanted])
    found = {row.key: row for row in rows}
    answers: dict[bytes, KeyHolder] = {}
    for task, unique in wanted:
        if holder := found.get(unique.key):
            payload = holder.payload
            is_other = unique.same_call and payload is not None and not same_payload(payload, task.payload)
            answers[task.id] = KeyHolder(holder.task_id, is_other)
    return answers


_DEFERRED = Batch("task", "id uuid, data text")
_DEFER = Statement[None](f"""
INSERT /* keys.defer */ INTO orchestrator.inbox (kind, target, body)
SELECT 'enqueue', task.id, jsonb_build_object('task', task.data)
  FROM {_DEFERRED}
""")


def defer(connection: Connection, tasks: Sequence[NewTask]) -> None:
    """Put tasks into the inbox, to be created when their keys can be had."""
    rows = [(task.id, base64.b85encode(msgspec.msgpack.encode(task)).decode()) for task in tasks]
    _DEFER(connection, _DEFERRED(rows))


def deferred(body: Any) -> NewTask:
    """Return a task as `defer` put it into the inbox."""
    return msgspec.msgpack.decode(base64.b85decode(body["task"]), type=NewTask)


@Prepared.function("""
SELECT /* keys.known */ asked.id FROM unnest(%(ids)s::uuid[]) AS asked(id)
 WHERE (SELECT true FROM orchestrator.tasks WHERE id = asked.id LIMIT 1)
    OR (SELECT true FROM orchestrator.ended_tasks WHERE id = asked.id LIMIT 1)
""")
def known(connection: Connection, ids: Sequence[bytes]) -> set[bytes]:
    """Return those of these ids that tasks already have, open or ended."""


_FREED = Batch("freed", "key text, task_id uuid")
_FREE = Prepared[None](f"""
DELETE /* keys.free */ FROM orchestrator.unique_keys k
 USING {_FREED}
 CROSS JOIN LATERAL (SELECT ctid AS tid FROM orchestrator.unique_keys WHERE key = freed.key LIMIT 1) AS found
 WHERE k.ctid = found.tid AND k.task_id = freed.task_id AND k.scope = ANY(%(scopes)s::text[])
""")


def free(connection: Connection, keys: Sequence[tuple[str, bytes]], *, ended: bool) -> None:
    """Free the keys that tasks had until they were claimed or, if they have ended, until now."""
    _FREE(connection, _FREED(keys), scopes=["pending", "running"] if ended else ["pending"])


# -- tasks whose ids stand among the open and among the ended ones.
#
# That should never be. But earlier releases could create a task again that had ended, where a proxy repeated a
# request, and people restore rows by hand. Whatever such a task comes to, a primary key refuses it, and so it runs
# without end.

_REFUSED_BY = ("ended_tasks_pkey", "attempts_pkey", "tasks_pkey")
"""When it ends, when it is to be tried again, and when what has ended is to be opened again."""
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def named_in(error: BaseException) -> bytes | None:
    """Return the task that a primary key has refused, if that is what an error says."""
    about = getattr(getattr(error, "orig", None), "diag", None)
    if about is None or about.constraint_name not in _REFUSED_BY:
        return None
    found = _ID.search(about.message_detail or "")
    return UUID(found[0]).bytes if found else None


# Whether a task has ended is asked by a scalar subquery: EXISTS lets the planner read all that ever ended. Its run has
# counted the recorded end, and its follow-ups exist: neither happens again.
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
    """Remove the open rows of this task, and of those in flight, that have ended; return them as what they ended as."""
