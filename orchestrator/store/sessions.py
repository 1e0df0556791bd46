"""Dashboard sessions: a session is found by the hash of its ticket, and has the permissions of its API key."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from orchestrator.domain.access import Key, Ticket
from orchestrator.store.keys import COLUMNS, key_of
from orchestrator.store.sql import Row, Statement

_ADD = Statement[None]("""
INSERT /* sessions.add */ INTO orchestrator.sessions (hash, key_id, expires_at)
VALUES (%(hash)s, %(key)s, now() + %(seconds)s::double precision * interval '1 second')
""")
_FIND = Statement[Row](f"""
SELECT /* sessions.find */ {COLUMNS} FROM orchestrator.api_keys
 WHERE id = (SELECT key_id FROM orchestrator.sessions WHERE hash = %(hash)s AND expires_at > now())
""")
_END = Statement[None]("DELETE /* sessions.end */ FROM orchestrator.sessions WHERE hash = %(hash)s")


def add(connection: Connection, ticket: Ticket, key: str, seconds: float) -> None:
    """Store a session for a key id, valid for `seconds`."""
    _ADD(connection, hash=ticket.hash, key=key, seconds=seconds)


def find(connection: Connection, ticket: Ticket) -> tuple[Key, datetime] | None:
    """Return the key of a session and the current time in Postgres; None if the session is not valid."""
    found = _FIND.first(connection, hash=ticket.hash)
    return None if found is None else key_of(found)


def end(connection: Connection, ticket: Ticket) -> bool:
    """End a session. Return whether it existed."""
    return bool(_END.count(connection, hash=ticket.hash))
