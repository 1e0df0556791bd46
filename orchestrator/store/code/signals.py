"""Where a signal has arrived that was to start a run if there is none."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.store.sql import Row, Statement


class Sent(NamedTuple):
    """A signal to the run that had a chosen id."""

    run: bytes
    """That run, which was open."""
    otherwise: bytes
    """The run that begins with the signal if that one ends before it arrives, and no other has the id by then."""
    request: int
    """What stands in the inbox until the leader has decided."""


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
