"""Asking the leader for something that may come too late, and Postgres why something does not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection

from orchestrator import time_limits
from orchestrator.domain.ids import to_text
from orchestrator.errors import Unavailable, WrongState
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.waiting.per_process import signal_safe
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind

GOING_ON = "It goes on"
"""Said where nothing is known to be in the way."""


def check_state(kind: RequestKind, target: bytes, state: str, *, allowed: bool) -> None:
    """Say that the state of its target rules a request out, where it does."""
    if not allowed:
        verb, what = kind.split(" ")
        raise WrongState(f"Cannot {verb} {what} {to_text(target)}: it is in state {state!r}.")


def ask(connections: Connections, kind: RequestKind, target: bytes, state: str, *, allowed: bool) -> None:
    """Put a request into the inbox, or say that the state of its target rules it out."""
    check_state(kind, target, state, allowed=allowed)
    with connections.changing(f"the request to {kind} {to_text(target)} was stored") as connection:
        inbox.add(connection, kind, target)
        act, _, thing = kind.partition(" ")
        connections.record(connection, act, thing, to_text(target))
        connections.retries += kind == RequestKind.RETRY_RUN


def obstacles(connections: Connections, target: bytes) -> list[str]:
    """Return what keeps a task or a run from going on, in words."""
    began = time.monotonic()
    find = signal_safe(_obstacle_finder)
    with time_limits.extended(time.monotonic() - began), connections.reading() as connection:
        return find(connection, target)


def _obstacle_finder() -> Callable[[Connection, bytes], list[str]]:
    from orchestrator.store.insights import find_obstacles  # loads all read queries, which an enqueue does not need

    return find_obstacles


def overdue(connections: Connections, target: bytes) -> str:
    """Say why a task or a run has not ended in time."""
    try:
        return " ".join(obstacles(connections, target)).removesuffix(".") or GOING_ON
    except Unavailable:
        return cannot_be_asked()


def cannot_be_asked() -> str:
    """Say that it is not known what keeps something from its end."""
    return f"Postgres {'has not said in time' if time_limits.is_over() else 'cannot be asked'} how it is"
