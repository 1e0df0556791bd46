"""Log lines of tasks, stored as the chunks that workers send for each attempt.

The table is only appended to, and trimmed at its old end. No statement about tasks reads or writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.batches import Batch, Blob
from orchestrator.store.sql import Statement

LAST = 2**63 - 1
"""Larger than any chunk id."""


class NewChunk(NamedTuple):
    """Log lines of one attempt."""

    task_id: bytes
    attempt: int
    part: int
    run_id: bytes | None
    step: str
    lines: Blob


class Chunk(NamedTuple):
    """Stored log lines; the ids are in order of storage."""

    id: int
    task_id: UUID
    attempt: int
    step: str
    lines: bytes


_NEW = Batch("n", NewChunk)
_INSERT = Statement[None](f"""
INSERT /* logs.insert */ {_NEW.into("task_logs")}
    ON CONFLICT DO NOTHING
""")


def insert(connection: Connection, chunks: Iterable[NewChunk]) -> int:
    """Store chunks that are not stored yet; return their number."""
    return _INSERT.count(connection, _NEW(chunks))


_COLUMNS = "id, task_id, attempt, step, lines"
# A task has few chunks, which its id finds. `id + 0` keeps the planner from scanning the index of ids.
_EARLIER = """task_id = %(target)s::uuid AND id + 0 < %(before)s::bigint
   AND (%(attempt)s::int IS NULL OR attempt = %(attempt)s::int)"""
_EARLIER_OF_RUN = "run_id = %(target)s::uuid AND id < %(before)s::bigint"
_LAST_OF_TASK = Statement[Chunk](f"""
SELECT /* logs.last_of_task */ {_COLUMNS} FROM orchestrator.task_logs WHERE {_EARLIER}
 ORDER BY id + 0 DESC LIMIT %(limit)s
""")
_LAST_OF_RUN = Statement[Chunk](f"""
SELECT /* logs.last_of_run */ {_COLUMNS} FROM orchestrator.task_logs WHERE {_EARLIER_OF_RUN}
 ORDER BY id DESC LIMIT %(limit)s
""")
# The first bytes of a chunk hold the number of its lines; the rest is not read.
_HEADS = Statement[bytes](f"""
SELECT /* logs.heads */ substring(lines FOR 5) FROM orchestrator.task_logs WHERE {_EARLIER} LIMIT 10000
""")
_HEADS_OF_RUN = Statement[bytes](f"""
SELECT /* logs.heads_of_run */ substring(lines FOR 5) FROM orchestrator.task_logs WHERE {_EARLIER_OF_RUN} LIMIT 10000
""")
_AFTER = Batch("w", "task_id uuid, after bigint")
_OF_TASKS = Statement[Chunk](f"""
SELECT /* logs.of_tasks */ said.id, said.task_id, said.attempt, said.step, said.lines
  FROM {_AFTER} CROSS JOIN LATERAL (
       SELECT {_COLUMNS} FROM orchestrator.task_logs l WHERE l.task_id = w.task_id AND l.id + 0 >= w.after
        ORDER BY id + 0 LIMIT %(limit)s) AS said
 ORDER BY said.id
""")


@Statement.function(f"""
SELECT /* logs.of_task */ {_COLUMNS} FROM orchestrator.task_logs
 WHERE task_id = %(task)s::uuid AND id + 0 >= %(after)s::bigint
   AND (%(attempt)s::int IS NULL OR attempt = %(attempt)s::int)
 ORDER BY id + 0 LIMIT %(limit)s
""")
def of_task(connection: Connection, task: bytes, after: int, limit: int, attempt: int | None = None) -> list[Chunk]:
    """Return chunks of a task from the id `after` on, oldest first."""


def last_of_task(
    connection: Connection, task: bytes, limit: int, attempt: int | None = None, before: int = LAST
) -> list[Chunk]:
    """Return the last chunks of a task before a chunk id, oldest first."""
    return _LAST_OF_TASK(connection, target=task, limit=limit, attempt=attempt, before=before)[::-1]


def last_of_run(connection: Connection, run: bytes, limit: int, before: int = LAST) -> list[Chunk]:
    """Return the last chunks of all tasks of a run before a chunk id, oldest first."""
    return _LAST_OF_RUN(connection, target=run, limit=limit, before=before)[::-1]


def count_lines(
    connection: Connection, target: bytes, attempt: int | None = None, before: int = LAST, *, is_run: bool = False
) -> int:
    """Return the number of log lines of a task or run before a chunk id."""
    if is_run:
        heads = _HEADS_OF_RUN(connection, target=target, before=before)
    else:
        heads = _HEADS(connection, target=target, attempt=attempt, before=before)
    return sum(_length(bytes(head)) for head in heads)


def _length(head: bytes) -> int:
    """Return the length of a list from its MessagePack header; 0 for anything else."""
    wide = {0xDC: 2, 0xDD: 4}.get(head[0] if head else 0)
    if wide is not None:
        return int.from_bytes(head[1 : 1 + wide])
    return head[0] & 0x0F if head and head[0] & 0xF0 == 0x90 else 0


@Statement.function(f"""
SELECT /* logs.of_run */ {_COLUMNS} FROM orchestrator.task_logs
 WHERE run_id = %(run)s::uuid AND id >= %(after)s::bigint ORDER BY id LIMIT %(limit)s
""")
def of_run(connection: Connection, run: bytes, after: int, limit: int) -> list[Chunk]:
    """Return chunks of all tasks of a run from the id `after` on, oldest first."""


def of_tasks(connection: Connection, after: Mapping[bytes, int], limit: int) -> list[Chunk]:
    """Return chunks of many tasks, oldest first; `after` has the first chunk id for each task."""
    return _OF_TASKS(connection, _AFTER(after.items()), limit=limit)


_PRUNE = Statement[None]("""
DELETE /* logs.prune */ FROM orchestrator.task_logs WHERE id = ANY (ARRAY(
       SELECT id FROM (SELECT id, stored_at FROM orchestrator.task_logs ORDER BY id LIMIT %(limit)s) AS oldest
        WHERE stored_at < now() - %(seconds)s::double precision * interval '1 second'))
""")


def prune(connection: Connection, seconds: float, limit: int) -> int:
    """Delete chunks stored more than `seconds` ago, oldest first; return their number."""
    return _PRUNE.count(connection, seconds=seconds, limit=limit)
