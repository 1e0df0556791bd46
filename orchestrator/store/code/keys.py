"""Ids of people's own for runs of workflows as code: one run has such an id at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement

OWN_ID = "right(k.key, -length(workflow) - CASE WHEN strpos(workflow, '/') > 0 THEN 2 ELSE 1 END)"
"""The id that a client has chosen, behind the name of the workflow (`scoped` in `domain/limits/lane_limits.py`)."""

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
    """Let a run have a chosen id, in the transaction that starts it; else return the run that has it, and its state.

    `anew` takes it over from a run that has ended; `in_order` only where no signal is on its way to that one, for which
    the leader will begin another. Others may be taking it at the same moment. So it is locked before its holder is
    looked at, by a statement of its own: one that waits for a lock goes on with what it saw before.
    """
    while True:
        if _CLAIM.first(connection, key=key, run=run) is not None:
            return None
        if _LOCK.first(connection, key=key) is not None:
            break  # else its holder has just released it
    found = _HOLDER.one(connection, key=key, in_order=in_order)
    if not (anew and found.is_over) or found.is_awaited:
        return found.run.bytes, found.status
    _TAKE_OVER(connection, key=key, run=run)
    return None


@Prepared.function(
    "SELECT /* run_keys.holders */ key, run_id FROM orchestrator.run_keys WHERE key = ANY(%(keys)s::text[])"
)
def holders(connection: Connection, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the runs that have chosen ids."""


class KeyedRun(NamedTuple):
    """A run, and the id that a client has chosen for it."""

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
    """Return the runs that have a chosen id, or idempotency key: one a workflow. `workflow/id` is that of one."""
    return _FIND(connection, id=key, length=len(key))


_SUCCESSORS = Batch("p", "old uuid, new uuid")
_PASS_ON = Prepared[bytes](f"""
UPDATE /* run_keys.pass_on */ orchestrator.run_keys k SET run_id = p.new
  FROM {_SUCCESSORS}
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.run_keys WHERE run_id = p.old OFFSET 0) AS found
 WHERE k.ctid = found.place
RETURNING p.new
""")


def pass_on(connection: Connection, successors: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Let the successors of runs have the ids that those were started under; return those that have one now.

    A client may be giving the id of a run that has ended to another one at this moment; then that one keeps it.
    """
    return set(_PASS_ON(connection, _SUCCESSORS(successors)))


# -- signals


class Sent(NamedTuple):
    """A signal to the run that had a chosen id."""

    run: bytes
    """That run, which was open."""
    otherwise: bytes
    """The run that begins with the signal if that one ends before it arrives, and no other has the id by then."""
    request: int
    """The request in the inbox, until the leader has decided."""


_REACHED = Statement[Row]("""
SELECT /* signals.reached */ EXISTS (SELECT FROM orchestrator.inbox WHERE id = %(request)s) AS on_its_way,
       EXISTS (SELECT FROM orchestrator.runs WHERE id = %(otherwise)s::uuid) AS begun,
       (SELECT result FROM orchestrator.answers WHERE id = %(otherwise)s::uuid) AS other
""")


def reached(connection: Connection, sent: Sent) -> bytes | None:
    """Return the run that a signal has reached, or None while it is on its way.

    If that is neither of the two, the leader leaves word of it for an hour.
    """
    row = _REACHED.one(connection, request=sent.request, otherwise=sent.otherwise)
    if row.on_its_way:
        return None
    if row.begun:
        return sent.otherwise
    return sent.run if row.other is None else bytes(row.other)
