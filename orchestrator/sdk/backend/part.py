"""The base class of backend parts, and helpers for their calls: queries, and requests to the leader."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Connection

from orchestrator import time_limits
from orchestrator.domain.ids import to_text
from orchestrator.errors import NotFound, Unavailable, WrongState
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.waiting import EndWaiters
from orchestrator.sdk.waiting.per_process import signal_safe
from orchestrator.settings import Settings
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind

P = ParamSpec("P")
T = TypeVar("T")


class Shared(NamedTuple):
    """The objects that all parts of a backend share."""

    settings: Settings
    connections: Connections
    waiting: EndWaiters


class Part:
    """The calls about one subject."""

    def __init__(self, shared: Shared, reading: Callable[[], AbstractContextManager[Connection]] | None = None) -> None:
        """Create a part. `reading` opens connections for queries, by default those of the backend."""
        self._settings = shared.settings
        self._connections = shared.connections
        self._waiting = shared.waiting
        self._vault = shared.connections.keys.vault
        self._payloads = shared.connections.payloads
        self._limit = shared.settings.max_payload
        """Bytes of one value, at most."""
        self._reading = reading or shared.connections.reading


def reading(find: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate[Part, P], T]:
    """Make a call from a query, which runs on a connection of its own: `open_tasks = reading(queues.open_tasks)`."""

    @wraps(find)
    def call(self: Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._reading() as connection:
            return find(connection, *args, **kwargs)

    return call


def reading_one(
    find: Callable[Concatenate[Connection, P], T | None], missing: Callable[P, NotFound]
) -> Callable[Concatenate[Part, P], T]:
    """Make a call from a query. The call raises the error that `missing` returns if there is no result."""

    @wraps(find)
    def call(self: Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._reading() as connection:
            found = find(connection, *args, **kwargs)
        if found is None:
            raise missing(*args, **kwargs)
        return found

    return call


GOING_ON = "It is in progress"
"""The message for a task or run without a known obstacle."""


def check_state(kind: RequestKind, target: bytes, state: str, *, allowed: bool) -> None:
    """Raise WrongState unless the state of the target allows the request."""
    if not allowed:
        verb, subject = kind.split(" ")
        raise WrongState(f"Cannot {verb} {subject} {to_text(target)}: it is in state {state!r}.")


def ask(connections: Connections, kind: RequestKind, target: bytes, state: str, *, allowed: bool) -> None:
    """Put a request into the inbox. Raise WrongState unless the state of the target allows it."""
    check_state(kind, target, state, allowed=allowed)
    with connections.changing(f"the request to {kind} {to_text(target)} was stored") as connection:
        inbox.add(connection, kind, target)
        act, _, thing = kind.partition(" ")
        connections.record(connection, act, thing, to_text(target))
        connections.retries += kind == RequestKind.RETRY_RUN


def obstacles(connections: Connections, target: bytes) -> list[str]:
    """Describe the obstacles that keep a task or a run from continuing."""
    began = time.monotonic()
    find = signal_safe(_obstacle_finder)
    with time_limits.extended(time.monotonic() - began), connections.reading() as connection:
        return find(connection, target)


def _obstacle_finder() -> Callable[[Connection, bytes], list[str]]:
    from orchestrator.store.insights import find_obstacles  # loads all read queries, which an enqueue does not need

    return find_obstacles


def overdue(connections: Connections, target: bytes) -> str:
    """Describe why a task or a run has not ended in time."""
    try:
        return " ".join(obstacles(connections, target)).removesuffix(".") or GOING_ON
    except Unavailable:
        return cannot_be_asked()


def cannot_be_asked() -> str:
    """Return the message if the obstacles cannot be queried."""
    return f"Postgres {'did not answer in time' if time_limits.is_over() else 'cannot be reached'}"
