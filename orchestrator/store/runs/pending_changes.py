"""Pending changes: changes of runs that the tick of the change could not apply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.ids import tree_of
from orchestrator.domain.runs import RunChanges
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row

_FIRST = bytes(16)


class RoundRobin:
    """Returns rows of a table in turn, a few of each run tree at a time, and remembers where it stopped."""

    def __init__(self, name: str, table: str, where: str, columns: str, *, run: str = "id") -> None:
        last = "(left(tree.first::text, 13) || '-ffff-ffff-ffffffffffff')::uuid"
        self._find = Prepared[Row](f"""
WITH /* {name} */ RECURSIVE tree (first, number) AS (
    (SELECT {run}, 1 FROM orchestrator.{table} WHERE {where} AND {run} > %(after)s::uuid ORDER BY {run} LIMIT 1)
     UNION ALL
    SELECT next.run, tree.number + 1 FROM tree
     CROSS JOIN LATERAL (
           SELECT {run} AS run FROM orchestrator.{table}
            WHERE {where} AND {run} > {last} ORDER BY {run} LIMIT 1) AS next
     WHERE tree.number < %(limit)s
), share AS (
    SELECT ceil(%(limit)s::float8 / greatest(count(*), 1))::int AS most FROM tree
)
SELECT tree.first AS tree, part.* FROM tree CROSS JOIN share
 CROSS JOIN LATERAL (
       SELECT {columns} FROM orchestrator.{table} AS w
        WHERE {where} AND {run} >= tree.first AND {run} <= {last} ORDER BY w.{run}, w.id LIMIT share.most) AS part
""")
        self._after = _FIRST

    def __call__(self, connection: Connection, limit: int) -> list[Row]:
        """Return the next rows, about as many from each tree: the first row of every tree before the second of any."""
        rows = self._find(connection, after=self._after, limit=limit)
        if not rows and self._after != _FIRST:
            rows = self._find(connection, after=_FIRST, limit=limit)
        trees: dict[bytes, list[Row]] = {}
        for row in rows:
            trees.setdefault(row.tree, []).append(row)
        is_last = len(trees) < limit
        self._after = _FIRST if is_last else tree_of(max(trees)).ljust(16, b"\xff")
        turns = max(map(len, trees.values()), default=0)
        return [tree[turn] for turn in range(turns) for tree in trees.values() if turn < len(tree)]


_encode = msgspec.msgpack.encode
decode_changes = msgspec.msgpack.Decoder(RunChanges).decode

_WAITING = Prepared[bytes]("""
SELECT /* untold.waiting */ id FROM (
       SELECT id FROM orchestrator.runs WHERE stuck IS NOT NULL AND ended_at IS NULL AND NOT code
        ORDER BY id LIMIT %(limit)s) AS stuck
 UNION ALL
SELECT run_id FROM (SELECT run_id FROM orchestrator.untold ORDER BY run_id LIMIT %(limit)s) AS late
""")


def waiting(connection: Connection, limit: int) -> set[bytes] | None:
    """Return the runs that receive no changes now: they are stuck or queued. None if more than `limit`."""
    rows = _WAITING(connection, limit=limit + 1)
    return None if len(rows) > limit else set(rows)


@Prepared.function("""
SELECT /* untold.waiting_among */ w.id FROM unnest(%(runs)s::uuid[]) AS w(id)
 WHERE (SELECT true FROM orchestrator.untold WHERE run_id = w.id LIMIT 1)
    OR (SELECT stuck IS NOT NULL AND ended_at IS NULL AND NOT code FROM orchestrator.runs WHERE id = w.id LIMIT 1)
""")
def waiting_among(connection: Connection, runs: Iterable[bytes]) -> set[bytes]:
    """Return the runs among these that currently receive no changes."""


_NEW = Batch("n", "run_id uuid, body bytea, place int")
_ADD = Prepared[None](f"""
INSERT /* untold.add */ INTO orchestrator.untold (run_id, held, body)
SELECT n.run_id, %(held)s::boolean OR coalesce(
       (SELECT stuck IS NOT NULL FROM orchestrator.runs WHERE id = n.run_id), true), n.body
  FROM {_NEW} ORDER BY n.place
""")


def add(connection: Connection, changes_by_run: Iterable[tuple[bytes, RunChanges]], *, is_over: bool = False) -> None:
    """Store changes until their runs can receive them: stuck runs once they are freed, other runs in the next tick.

    With `is_over`, the runs have ended and receive the changes once they are retried.
    """
    rows = [(run, _encode(changes), position) for position, (run, changes) in enumerate(changes_by_run)]
    if rows:
        _ADD(connection, _NEW(rows), held=is_over)


@Prepared.function("""
UPDATE /* untold.release */ orchestrator.untold u SET held = false
 WHERE u.run_id = ANY (%(runs)s::uuid[]) AND u.held
   AND (SELECT stuck IS NULL FROM orchestrator.runs WHERE id = u.run_id)
""")
def release(connection: Connection, runs: Sequence[bytes]) -> None:
    """Release the changes of runs that were retried."""


class WaitingChange(NamedTuple):
    """A change in the queue."""

    id: int
    run: bytes
    size: int


class PendingChangesQueue:
    """The queue of changes to apply; changes of one run are in order."""

    def __init__(self) -> None:
        self._find = RoundRobin(
            "untold.line", "untold", "NOT held", "id, run_id, octet_length(body) AS size", run="run_id"
        )

    def __call__(self, connection: Connection, limit: int) -> list[WaitingChange]:
        """Return the first changes of the queue, up to `limit`."""
        return [WaitingChange(row.id, row.run_id, row.size) for row in self._find(connection, limit)]


_READ = Prepared[Row]("""
SELECT /* untold.read */ id, run_id, body FROM orchestrator.untold WHERE id = ANY (%(ids)s::bigint[]) ORDER BY id
""")


class Waited(NamedTuple):
    """The first pending changes of one run, or all of them."""

    run: bytes
    ids: list[int]
    changes: list[RunChanges]


def read(connection: Connection, ids: Sequence[int]) -> list[Waited]:
    """Return these changes, by run."""
    by_run: dict[bytes, Waited] = {}
    for row in _READ(connection, ids=ids):
        pending = by_run.setdefault(row.run_id, Waited(row.run_id, [], []))
        pending.ids.append(row.id)
        pending.changes.append(decode_changes(row.body))
    return list(by_run.values())


# A WITH query does not see its own deletions, so the second condition excludes the deleted ids.
@Prepared.function("""
WITH /* untold.remove */ gone AS (DELETE FROM orchestrator.untold WHERE id = ANY (%(ids)s::bigint[]) RETURNING run_id)
SELECT DISTINCT run_id FROM gone
 WHERE (SELECT true FROM orchestrator.untold u
         WHERE u.run_id = gone.run_id AND u.id <> ALL (%(ids)s::bigint[]) LIMIT 1)
""")
def remove(connection: Connection, ids: Sequence[int]) -> set[bytes]:
    """Delete these changes; return the runs that have further changes."""


_TAKE_OF = Prepared[tuple[bytes, bytes]]("""
WITH /* untold.take_of */ gone AS (
    DELETE FROM orchestrator.untold WHERE run_id = ANY (%(runs)s::uuid[]) RETURNING id, run_id, body
), freed AS (
    UPDATE orchestrator.runs SET stuck = NULL WHERE id = ANY (%(runs)s::uuid[])
)
SELECT run_id, body FROM gone ORDER BY id
""")


def take_of(connection: Connection, runs: Sequence[bytes]) -> dict[bytes, list[RunChanges]]:
    """Delete and return all pending changes of these runs, and mark the runs as no longer stuck."""
    by_run: dict[bytes, list[RunChanges]] = {}
    for run, body in _TAKE_OF(connection, runs=runs):
        by_run.setdefault(run, []).append(decode_changes(body))
    return by_run
