"""The calls of one subject, and how a call is made of a single query: `open_tasks = reading(queues.open_tasks)`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import Connection

from orchestrator.errors import NotFound
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.backend.waiting import EndWaiters
from orchestrator.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")


class Shared(NamedTuple):
    """The shared parts of all subjects of a backend."""

    settings: Settings
    connections: Connections
    waiting: EndWaiters


class Part:
    """The calls of one subject."""

    def __init__(self, shared: Shared, reading: Callable[[], AbstractContextManager[Connection]] | None = None) -> None:
        """`reading` opens the connections on which queries run, if that is not for the backend to do."""
        self._settings = shared.settings
        self._connections = shared.connections
        self._waiting = shared.waiting
        self._vault = shared.connections.keys.vault
        self._payloads = shared.connections.payloads
        self._limit = shared.settings.max_payload
        """The most bytes that one value may have here."""
        self._reading = reading or shared.connections.reading


def reading(find: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate[Part, P], T]:
    """Return the call that runs a query, on a connection of its own."""

    @wraps(find)
    def call(self: Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._reading() as connection:
            return find(connection, *args, **kwargs)

    return call


def reading_one(
    find: Callable[Concatenate[Connection, P], T | None], missing: Callable[P, NotFound]
) -> Callable[Concatenate[Part, P], T]:
    """Return the call that runs a query, and raises what `missing` returns where it finds nothing."""

    @wraps(find)
    def call(self: Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._reading() as connection:
            found = find(connection, *args, **kwargs)
        if found is None:
            raise missing(*args, **kwargs)
        return found

    return call
