"""Where a signal has arrived that was to start a run if there is none."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection


class Sent(NamedTuple):
    """A signal to the run that had a chosen id."""

    run: bytes
    """That run, which was open."""
    otherwise: bytes
    """The run that begins with the signal if that one ends before it arrives, and no other has the id by then."""
    wish: int
    """What stands in the inbox until the leader has decided."""


_REACHED = """
SELECT EXISTS (SELECT FROM orchestrator.inbox WHERE id = %(wish)s),
       EXISTS (SELECT FROM orchestrator.runs WHERE id = %(otherwise)s::uuid),
       (SELECT result FROM orchestrator.answers WHERE id = %(otherwise)s::uuid)
"""


def reached(connection: Connection, sent: Sent) -> bytes | None:
    """Return the run that a signal has reached, or None while it is on its way.

    If that is neither of the two, the leader leaves word of it for an hour.
    """
    parameters = {"wish": sent.wish, "otherwise": sent.otherwise.hex()}
    on_its_way, begun, other = connection.exec_driver_sql(_REACHED, parameters).one()
    if on_its_way:
        return None
    if begun:
        return sent.otherwise
    return sent.run if other is None else bytes(other)
