"""A read replica: lists and charts are read from a standby of Postgres, which may lag. Nothing that decides reads it.

Positions are places in the write-ahead log. After an action, lists come from the primary until the standby has replayed
as much as was committed then: people see what they have done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeVar

from sqlalchemy import Connection, Engine, exc

from orchestrator.sdk.waiting.per_process import PerProcess, ProcessLock
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.store.deadlines import Deadlines
from orchestrator.store.insights import server
from orchestrator.telemetry import Outage, get_logger
from orchestrator.time_limits import TimeLimit

T = TypeVar("T")
SHOWN = 1.0
"""Seconds of lag from which on people are told."""
lag_of_list: ContextVar[float] = ContextVar("orchestrator_lag", default=0.0)
"""Seconds by which the list of this request is old, if people are told."""
_LOOK_EVERY = 1.0
"""Seconds for which it is known how far the standby is."""
_TRIES, _TRY_AGAIN = 4, 0.05
"""How often, and after how many seconds, a look is repeated. On an idle system the last commit is old; a standby that
does not lag has the next one soon."""
_LONGEST_LOOK = 1.0
"""Seconds, and a second of grace, after which a standby that does not answer is away."""
_AWAY = 5.0
"""Seconds in which a standby that could not be used is left alone."""


class Replica:
    """A standby for lists. `primary` opens a connection for all that must not be old, or while the standby is away."""

    def __init__(self, settings: Settings, primary: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._links = PerProcess(lambda: _links(settings))
        self._primary = primary
        self._outage = Outage(get_logger("replica"), "The read replica", "the primary answers")
        self._replayed = -1
        self._lock = ProcessLock()
        self._needed = 0
        """The position of the last action."""
        self._next_look = self._known_until = 0.0
        self.lag = 0.0
        """Seconds by which lists may be old, when it was last looked at."""

    @property
    def is_behind(self) -> bool:
        """Say whether it lags so far that people are told."""
        return self.lag > SHOWN

    def read(self, find: Callable[[Connection], T]) -> T:
        """Run a query: on the standby, or on the primary if the standby is away or lacks the last action."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _AWAY  # one looks; others go by what is known, for a moment
            self._look()
        if self._replayed >= self._needed and time.monotonic() < self._known_until:
            try:
                with self._links()[0].connect() as connection:
                    found = find(connection)
                lag_of_list.set(self.lag if self.is_behind else 0.0)
                return found
            except exc.SQLAlchemyError as error:  # recovery may also have cancelled it
                if database.is_outage(error):
                    self._give_up(database.explain(error))
        with self._primary() as connection:
            return find(connection)

    def acted(self) -> int:
        """Read from the primary until the standby has all that is committed now; return that position."""
        with self._primary() as connection:
            position = server.position(connection)
        with self._lock:
            self._needed = max(self._needed, position)
        return position

    def has_heard(self, position: int) -> bool:
        """Say whether an action at this position, of another process perhaps, is known."""
        return position <= self._needed

    def close(self) -> None:
        if (links := self._links.take()) is not None:
            links[0].dispose()
            links[1].close()

    def _look(self) -> None:
        with self._primary() as connection:
            committed = server.position(connection)
        try:
            with TimeLimit(_LONGEST_LOOK), self._links()[0].connect() as connection:
                for _ in range(_TRIES):
                    replayed = server.replayed(connection)
                    if replayed.position is None or replayed.position >= committed or replayed.age < SHOWN:
                        break
                    time.sleep(_TRY_AGAIN)
        except exc.SQLAlchemyError as error:
            self._give_up(database.explain(error))
            return
        if replayed.position is None:
            self._give_up("it is a primary. Name a standby in the setting read_database_url.")
            return
        self._outage.worked()
        self._next_look = time.monotonic() + _LOOK_EVERY
        self._known_until = self._next_look + _LOOK_EVERY
        self._replayed = replayed.position
        self.lag = 0.0 if replayed.position >= committed else replayed.age

    def _give_up(self, reason: str) -> None:
        self._outage.failed(reason)
        self._replayed, self.lag = -1, 0.0
        self._next_look = time.monotonic() + _AWAY


def _links(settings: Settings) -> tuple[Engine, Deadlines]:
    deadlines = Deadlines(settings.database_timeout)
    engine = database.engine_for(
        settings.read_database_url,
        autocommit=True,
        name="orchestrator replica",
        namespace=(settings.of_shard("all") if settings.shards > 1 else settings).namespace,
        deadlines=deadlines,
    )
    return engine, deadlines
