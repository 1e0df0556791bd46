"""Ids that clients choose for runs of workflows as code: only one run has such an id at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement

OWN_ID = "right(k.key, -length(workflow) - CASE WHEN strpos(workflow, '/') > 0 THEN 2 ELSE 1 END)"
"""The id that a client chose, without the workflow's name before it (`scoped` in `domain/limits/lane_limits.py`)."""

_CLAIM = Statement[UUID]("""
INSERT /* run_keys.claim */ INTO orchestrator.run_keys (key, run_id) VALUES (%(key)s, %(run)s::uuid)
    ON CONFLICT (key) DO NOTHING
RETURNING run_id
""")
_LOCK = Statement[UUID]("SELECT /* run_keys.lock */ run_id FROM orchestrator.run_keys WHERE key = %(key)s FOR UPDATE")
_HOLDER = Statement[Row]("""
SELECT /* run_keys.holder */ k.run_id AS run, r.status, r.id IS NULL OR r.ended_at IS NOT NULL AS is_over,
       %(in_order)s AND EXISTS (
           SELECT FROM orchestrator.inbox i WHERE i.kind = 'signal' AND i.target = k.run_id) AS is_awaited
  FROM orchestrator.run_keys k LEFT JOIN orchestrator.runs r ON r.id = k.run_id
 WHERE k.key = %(key)s
""")
_TAKE_OVER = Statement[None](
    "UPDATE /* run_keys.take_over */ orchestrator.run_keys SET run_id = %(run)s::uuid WHERE key = %(key)s"
)


def take(
    connection: Connection, key: str, run: bytes, *, anew: bool, in_order: bool = False
) -> tuple[bytes, str] | None:
    """Give a chosen id to a run, in the transaction that starts it; or return the run that has the id, and its state.

    `anew` takes the id from a run that has ended; with `in_order`, only if no signal to that run is pending, because
    the leader would start another run for it. Other clients may take the id at the same time, so it is locked before a
    separate statement reads the holder: a statement that waits for a lock continues with its old snapshot.
    """
    while True:
        if _CLAIM.first(connection, key=key, run=run) is not None:
            return None
        if _LOCK.first(connection, key=key) is not None:
            break  # otherwise the holder has just released the id
    holder = _HOLDER.one(connection, key=key, in_order=in_order)
    if not (anew and holder.is_over) or holder.is_awaited:
        return holder.run.bytes, holder.status
    _TAKE_OVER(connection, key=key, run=run)
    return None


@Prepared.function(
    "SELECT /* run_keys.holders */ key, run_id FROM orchestrator.run_keys WHERE key = ANY(%(keys)s::text[])"
)
def holders(connection: Connection, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the runs with these chosen ids."""


class KeyedRun(NamedTuple):
    """A run and its chosen id."""

    run: UUID
    workflow: str
    key: str


_FIND = Statement[KeyedRun](f"""
SELECT /* run_keys.find */ r.id AS run, r.workflow, {OWN_ID} AS key
  FROM orchestrator.run_keys k JOIN orchestrator.runs r ON r.id = k.run_id
 WHERE k.key = %(id)s OR (right(k.key, %(length)s) = %(id)s AND {OWN_ID} = %(id)s)
 UNION ALL
SELECT id, workflow, key FROM orchestrator.runs WHERE key = %(id)s
""")


def find(connection: Connection, key: str) -> list[KeyedRun]:
    """Return the runs with a chosen id or idempotency key, one for each workflow, or for `workflow/id` one."""
    return _FIND(connection, id=key, length=len(key))


_SUCCESSORS = Batch("p", "old uuid, new uuid")
_PASS_ON = Prepared[bytes](f"""
UPDATE /* run_keys.pass_on */ orchestrator.run_keys k SET run_id = p.new
  FROM {_SUCCESSORS}
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.run_keys WHERE run_id = p.old OFFSET 0) AS found
 WHERE k.ctid = found.place
RETURNING p.new
""")


def pass_to_successors(connection: Connection, successors: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Give the chosen ids of runs to their successors; return the successors that got one.

    A client may at the same moment give the id of an ended run to a new one; then that run keeps the id.
    """
    return set(_PASS_ON(connection, _SUCCESSORS(successors)))


# -- signals


class Sent(NamedTuple):
    """A signal to the run with a chosen id."""

    run: bytes
    """The run that had the id and was open."""
    otherwise: bytes
    """The run that begins with the signal if `run` ends before the signal arrives and no other run has taken the id."""
    request: int
    """The inbox request, which exists until the leader has decided."""


_REACHED = Statement[Row]("""
SELECT /* signals.reached */ EXISTS (SELECT FROM orchestrator.inbox WHERE id = %(request)s) AS on_its_way,
       EXISTS (SELECT FROM orchestrator.runs WHERE id = %(otherwise)s::uuid) AS begun,
       (SELECT result FROM orchestrator.answers WHERE id = %(otherwise)s::uuid) AS other
""")


def reached(connection: Connection, sent: Sent) -> bytes | None:
    """Return the run that received a signal; None while the signal is pending.

    If that is neither `run` nor `otherwise`, the leader keeps the answer for an hour.
    """
    row = _REACHED.one(connection, request=sent.request, otherwise=sent.otherwise)
    if row.on_its_way:
        return None
    if row.begun:
        return sent.otherwise
    return sent.run if row.other is None else bytes(row.other)
