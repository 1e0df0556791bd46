"""A read replica: lists and charts come from a standby of Postgres, which may lag. Decisions never read the standby.

Positions are those of the write-ahead log. After an action, lists come from the primary until the standby has replayed
the log up to that commit, so that people see the effects of their actions.
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
from orchestrator.store import database, postgres_errors
from orchestrator.store.deadlines import Deadlines
from orchestrator.store.insights import server
from orchestrator.telemetry import Outage, get_logger
from orchestrator.time_limits import TimeLimit

T = TypeVar("T")
SHOWN = 1.0
"""Seconds of lag above which pages display the lag."""
lag_of_list: ContextVar[float] = ContextVar("orchestrator_lag", default=0.0)
"""Seconds of lag of the list in this request, if the page displays it; else 0."""
_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the standby's position."""
_MAX_TRIES, _TRY_INTERVAL = 4, 0.05
"""The tries of a check, and the seconds between them. On an idle system the last replayed commit is old although the
standby does not lag; then a later try finds the current position."""
_CHECK_TIMEOUT = 1.0
"""Seconds after which a check times out, plus a second of grace."""
_RETRY_AFTER = 5.0
"""Seconds before a standby that failed is used again."""


class Replica:
    """A standby for lists. `primary` opens a connection for reads while the standby lags too far or is unavailable."""

    def __init__(self, settings: Settings, primary: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._links = PerProcess(lambda: _links(settings))
        self._primary = primary
        self._outage = Outage(get_logger("replica"), "The read replica", "the primary answers")
        self._replayed = -1
        self._lock = ProcessLock()
        self._needed = 0
        """The log position of the last action."""
        self._next_check = self._valid_until = 0.0
        self.lag = 0.0
        """Seconds of lag at the last check."""

    @property
    def is_behind(self) -> bool:
        """Whether pages display the lag."""
        return self.lag > SHOWN

    def read(self, find: Callable[[Connection], T]) -> T:
        """Run a query on the standby, or on the primary if the standby is unavailable or lacks the last action."""
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _RETRY_AFTER  # other threads use the last check meanwhile
            self._check()
        if self._replayed >= self._needed and time.monotonic() < self._valid_until:
            try:
                with self._links()[0].connect() as connection:
                    rows = find(connection)
                lag_of_list.set(self.lag if self.is_behind else 0.0)
                return rows
            except exc.SQLAlchemyError as error:  # recovery may also have cancelled it
                if postgres_errors.is_outage(error):
                    self._give_up(postgres_errors.explain(error))
        with self._primary() as connection:
            return find(connection)

    def acted(self) -> int:
        """Read from the primary until the standby has replayed all commits up to now. Return the current position."""
        with self._primary() as connection:
            position = server.position(connection)
        with self._lock:
            self._needed = max(self._needed, position)
        return position

    def has_heard(self, position: int) -> bool:
        """Return whether an action at this position, perhaps of another process, was recorded with `acted`."""
        return position <= self._needed

    def close(self) -> None:
        if (links := self._links.take()) is not None:
            links[0].dispose()
            links[1].close()

    def _check(self) -> None:
        with self._primary() as connection:
            committed = server.position(connection)
        try:
            with TimeLimit(_CHECK_TIMEOUT), self._links()[0].connect() as connection:
                for _ in range(_MAX_TRIES):
                    replayed = server.replayed(connection)
                    if replayed.position is None or replayed.position >= committed or replayed.age < SHOWN:
                        break
                    time.sleep(_TRY_INTERVAL)
        except exc.SQLAlchemyError as error:
            self._give_up(postgres_errors.explain(error))
            return
        if replayed.position is None:
            self._give_up("it is a primary. Name a standby in the setting read_database_url.")
            return
        self._outage.worked()
        self._next_check = time.monotonic() + _CHECK_INTERVAL
        self._valid_until = self._next_check + _CHECK_INTERVAL
        self._replayed = replayed.position
        self.lag = 0.0 if replayed.position >= committed else replayed.age

    def _give_up(self, reason: str) -> None:
        self._outage.failed(reason)
        self._replayed, self.lag = -1, 0.0
        self._next_check = time.monotonic() + _RETRY_AFTER


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
