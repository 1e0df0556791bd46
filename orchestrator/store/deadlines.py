"""A deadline for each statement of a client, even if Postgres hangs and the network reports no error.

A server that is stopped, or waits for its disk, acknowledges packets and never answers; the driver waits without end.
So a thread polls the open statements and closes the connection of a statement that takes too long, which the driver
reports as a broken connection. A statement ends no later than the call that it belongs to (`time_limits.py`). If nobody
waits for the call any more, the thread makes Postgres cancel the statement.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from sqlalchemy import Connection, Engine, event, exc

from orchestrator import time_limits
from orchestrator.time_limits import TimeLimit

_OPTION = "orchestrator_deadlines"
_TOKEN = "orchestrator_deadline"
_CANCEL_TIMEOUT = 5.0
"""Seconds that Postgres has to acknowledge a cancel request."""
_CHECKS = 10
"""Checks by the thread in the time after which a statement is late."""


class NoAnswer(Exception):
    """Postgres has not answered in time."""


class Deadlines:
    """Watches the statements of one process, and calls `on_late` for statements slower than `late` seconds."""

    def __init__(self, seconds: float, *, late: float | None = None) -> None:
        self.seconds = seconds
        self._late = seconds if late is None else min(late, seconds)
        self._check_interval = self._late / _CHECKS
        self.on_late: Callable[[float], None] = lambda _: None
        """Called in the watching thread with the number of seconds for which a late statement has been running."""
        self._tokens = itertools.count(1)
        self._open: dict[int, tuple[float, float, Any, TimeLimit | None]] = {}
        """By token: when the statement began, its deadline, the driver's connection, and the limit of the call."""
        self._cancels: dict[int, threading.Event] = {}
        """By token, statements that are being cancelled; the event is set when Postgres has taken the request."""
        self._close_lock = threading.Lock()
        self._start_lock = threading.RLock()
        self._is_watching = False
        self._is_closed = False
        self._next_check = math.inf
        self._check_now = threading.Event()

    def begin(self, connection: Any) -> int:
        """Begin to watch a driver's connection; return the token for `end`."""
        token, now, limit = next(self._tokens), time.monotonic(), time_limits.current()
        give_up_at = now + self.seconds
        if limit is not None:
            limit.on_end = self._check_now.set
            if limit.give_up_at is not None and limit.give_up_at < give_up_at:
                give_up_at = limit.give_up_at
        self._open[token] = (now, give_up_at, connection, limit)
        if not self._is_watching:
            self._watch()
        if give_up_at < self._next_check:
            self._check_now.set()
        return token

    def end(self, token: int) -> bool:
        """Return whether the statement ended in time; otherwise its connection is closed."""
        is_open = self._open.pop(token, None) is not None
        if self._cancels and (done := self._cancels.pop(token, None)) is not None and not done.wait(_CANCEL_TIMEOUT):
            return False  # a late cancel request must not hit the next statement on this connection
        if is_open:
            return True
        with self._close_lock:  # wait for the thread if it is closing the connection
            return False

    def missed(self, sql: str) -> exc.OperationalError:
        """Return the error of a statement that was too slow."""
        limit = "the timeout of the call" if time_limits.is_over() else f"{self.seconds:g} s (setting database_timeout)"
        reason = NoAnswer(f"no answer within {limit}")
        return exc.OperationalError(sql, None, reason, connection_invalidated=True)

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed = True
        self._check_now.set()

    def _watch(self) -> None:
        with self._start_lock:
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._run, name="orchestrator-deadlines", daemon=True).start()

    def _run(self) -> None:
        """Check the open statements, until there were none for the time after which a statement is late."""
        busy_at = time.monotonic()
        while not self._is_closed:
            now, self._next_check = time.monotonic(), math.inf  # a statement that begins now triggers a check
            busy_at = now if self._open else busy_at
            if now - busy_at > self._late + self._check_interval:
                break
            next_check = now + self._check_interval
            for token, (began, give_up_at, connection, limit) in list(self._open.items()):
                waited = now - began
                if limit is not None and limit.is_ended:
                    self._cancel(token, connection)
                if waited >= self._late:
                    self.on_late(waited)
                if now >= give_up_at:
                    self._close_connection(token)
                else:
                    next_check = min(next_check, give_up_at)
            self._next_check = next_check
            self._check_now.wait(max(0.0, next_check - now))
            self._check_now.clear()
        self._is_watching = False
        if self._open and not self._is_closed:
            self._watch()  # a statement began while this thread was ending

    def _cancel(self, token: int, connection: Any) -> None:
        """Make Postgres cancel a statement. Its deadline still applies, in case Postgres does not answer."""
        if token in self._cancels:
            return
        done = self._cancels[token] = threading.Event()

        def cancel() -> None:
            if token in self._open:
                with contextlib.suppress(Exception):
                    connection.cancel()
            done.set()
            if token not in self._open:
                self._cancels.pop(token, None)  # the statement has ended meanwhile

        threading.Thread(target=cancel, name="orchestrator-cancel", daemon=True).start()

    def _close_connection(self, token: int) -> None:
        with self._close_lock:
            statement = self._open.pop(token, None)
            if statement is None:
                return  # the statement has ended after all
            # Ignore errors: the connection may be closed or broken already.
            with contextlib.suppress(Exception), socket.socket(fileno=os.dup(statement[2].fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def use_deadlines(engine: Engine, deadlines: Deadlines) -> None:
    """Set a deadline for every statement on the connections of an engine."""
    engine.update_execution_options(**{_OPTION: deadlines})
    event.listen(engine, "before_cursor_execute", _before)
    event.listen(engine, "after_cursor_execute", _after)


def deadlines_of(connection: Connection | Engine) -> Deadlines | None:
    """Return the deadlines of a connection, or of an engine."""
    deadlines: Deadlines | None = connection.get_execution_options().get(_OPTION)
    return deadlines


def missed(connection: Connection | None, sql: str) -> exc.OperationalError | None:
    """Return the error of the statement that has just failed on a connection, if its deadline caused the failure."""
    deadlines = None if connection is None else deadlines_of(connection)
    if connection is None or deadlines is None or connection.closed or connection.invalidated:
        return None
    token = connection.info.pop(_TOKEN, None)
    return None if token is None or deadlines.end(token) else deadlines.missed(sql)


class limited:  # noqa: N801  # used like a function
    """Sets a deadline for operations on a connection that bypass SQLAlchemy's cursors."""

    def __init__(self, connection: Connection, sql: str) -> None:
        self._connection = connection
        self._sql = sql
        self._deadlines = deadlines_of(connection)
        self._token = 0
        self._is_in_time = True

    def __enter__(self) -> Self:
        if self._deadlines is not None:
            self._token = self._deadlines.begin(self._connection.connection.dbapi_connection)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._deadlines is None:
            return
        self._is_in_time &= self._deadlines.end(self._token)
        if isinstance(error, Exception) and not self._is_in_time:
            self._connection.invalidate(error)
            raise self._deadlines.missed(self._sql) from error

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock while Postgres waits for this process."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def _before(connection: Connection, *_: object) -> None:
    deadlines = deadlines_of(connection)
    if deadlines is not None:
        connection.info[_TOKEN] = deadlines.begin(connection.connection.dbapi_connection)


def _after(connection: Connection, *_: object) -> None:
    deadlines, token = deadlines_of(connection), connection.info.pop(_TOKEN, None)
    if deadlines is not None and token is not None:
        deadlines.end(token)
