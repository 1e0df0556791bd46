"""Sessions begun and ended, in Postgres, so that every server knows them and a restart ends none."""

from __future__ import annotations

import secrets

from orchestrator.api.context import Api
from orchestrator.domain.access import Ticket
from orchestrator.sdk.acting import Actor
from orchestrator.store import audit, sessions


def begin(api: Api, key: str, actor: Actor, before: Ticket | None) -> Ticket:
    """Begin a session of who has shown a key, by its id, in place of the one that the browser had before."""
    ticket = Ticket(secrets.token_urlsafe(32))
    with api.backend.connections.writing("the session was begun", transaction=True) as connection:
        if before is not None:
            sessions.end(connection, before)
        sessions.add(connection, ticket, key, api.settings.session_lifetime)
        audit.add(connection, who=actor.who, origin=actor.origin, act="log in", kind="key", target=key, detail={})
    return ticket


def end(api: Api, ticket: Ticket) -> None:
    """End a session, if it has not ended yet."""
    with api.backend.connections.writing("the session was ended") as connection:
        sessions.end(connection, ticket)
