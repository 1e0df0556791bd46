"""A limit for each statement of a client, also where Postgres hangs and nothing on the network says so.

A server that was stopped, or that waits for its disk, acknowledges what it is sent and never answers. The driver waits
for it without an end. So a thread looks now and then whether a statement has taken too long, and closes the connection
under it, which the driver sees as a broken connection. Where the call that it is part of ends sooner
(`time_limits.py`), so does the statement. If nobody waits for the call any more, Postgres cancels the statement.
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
_CANCELLED = 5.0
"""Seconds that Postgres has to take note of a cancel."""
_LOOKS = 10
"""How often the thread looks within the time after which a statement is late."""


class NoAnswer(Exception):
    """Postgres has not answered in time."""


class Deadlines:
    """Watches the statements of one process, and logs those that take longer than `late` seconds, again and again."""

    def __init__(self, seconds: float, *, late: float | None = None) -> None:
        self.seconds = seconds
        self._late = seconds if late is None else min(late, seconds)
        self._look_every = self._late / _LOOKS
        self.on_late: Callable[[float], None] = lambda _: None
        """Called, in a thread of its own, with the seconds for which a late statement has waited."""
        self._tokens = itertools.count(1)
        self._open: dict[int, tuple[float, float, Any, TimeLimit | None]] = {}
        """When statements began, when they are given up, on which connection of the driver's, and for which call."""
        self._cancelling: dict[int, threading.Event] = {}
        """Statements to cancel in Postgres; set once it knows."""
        self._cutting = threading.Lock()
        self._starting = threading.RLock()
        self._is_watching = False
        self._is_closed = False
        self._next_look = math.inf
        self._look_now = threading.Event()

    def begin(self, connection: Any) -> int:
        """Watch a driver's connection from now on; return what ends this."""
        token, now, limit = next(self._tokens), time.monotonic(), time_limits.current()
        give_up_at = now + self.seconds
        if limit is not None:
            limit.on_end = self._look_now.set
            if limit.give_up_at is not None and limit.give_up_at < give_up_at:
                give_up_at = limit.give_up_at
        self._open[token] = (now, give_up_at, connection, limit)
        if not self._is_watching:
            self._watch()
        if give_up_at < self._next_look:
            self._look_now.set()
        return token

    def end(self, token: int) -> bool:
        """Say whether the statement has ended in time; if not, its connection is closed."""
        is_open = self._open.pop(token, None) is not None
        if self._cancelling and (told := self._cancelling.pop(token, None)) is not None and not told.wait(_CANCELLED):
            return False  # the next statement on this connection must not be cancelled instead
        if is_open:
            return True
        with self._cutting:  # the thread may be about to close it
            return False

    def missed(self, sql: str) -> exc.OperationalError:
        """Return the error of a statement that has not ended in time."""
        limit = "the timeout of the call" if time_limits.is_over() else f"{self.seconds:g} s (setting database_timeout)"
        reason = NoAnswer(f"no answer within {limit}")
        return exc.OperationalError(sql, None, reason, connection_invalidated=True)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._look_now.set()

    def _watch(self) -> None:
        with self._starting:
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._run, name="orchestrator-deadlines", daemon=True).start()

    def _run(self) -> None:
        """Look until there has been nothing to watch for as long as a statement may take."""
        busy_at = time.monotonic()
        while not self._is_closed:
            now, self._next_look = time.monotonic(), math.inf  # statements that begin during a look have it look again
            busy_at = now if self._open else busy_at
            if now - busy_at > self._late + self._look_every:
                break
            next_look = now + self._look_every
            for token, (began, give_up_at, connection, limit) in list(self._open.items()):
                waited = now - began
                if limit is not None and limit.is_ended:
                    self._cancel(token, connection)
                if waited >= self._late:
                    self.on_late(waited)
                if now >= give_up_at:
                    self._cut(token)
                else:
                    next_look = min(next_look, give_up_at)
            self._next_look = next_look
            self._look_now.wait(max(0.0, next_look - now))
            self._look_now.clear()
        self._is_watching = False
        if self._open and not self._is_closed:
            self._watch()  # a statement began while this thread was on its way out

    def _cancel(self, token: int, connection: Any) -> None:
        """Have Postgres cancel a statement; its limit goes on for the case that Postgres does not answer."""
        if token in self._cancelling:
            return
        told = self._cancelling[token] = threading.Event()

        def cancel() -> None:
            if token in self._open:
                with contextlib.suppress(Exception):
                    connection.cancel()
            told.set()
            if token not in self._open:
                self._cancelling.pop(token, None)  # it has ended meanwhile

        threading.Thread(target=cancel, name="orchestrator-cancel", daemon=True).start()

    def _cut(self, token: int) -> None:
        with self._cutting:
            found = self._open.pop(token, None)
            if found is None:
                return  # it has ended after all
            # Whatever is wrong with the connection, it will not do.
            with contextlib.suppress(Exception), socket.socket(fileno=os.dup(found[2].fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)


def use_deadlines(engine: Engine, deadlines: Deadlines) -> None:
    """Limit every statement on the connections of an engine."""
    engine.update_execution_options(**{_OPTION: deadlines})
    event.listen(engine, "before_cursor_execute", _before)
    event.listen(engine, "after_cursor_execute", _after)


def deadlines_of(connection: Connection | Engine) -> Deadlines | None:
    """Return what limits the statements on a connection, or on all those of an engine."""
    found: Deadlines | None = connection.get_execution_options().get(_OPTION)
    return found


def missed(connection: Connection | None, sql: str) -> exc.OperationalError | None:
    """Return the error of the statement that has just failed on a connection, if it was cut off."""
    deadlines = None if connection is None else deadlines_of(connection)
    if connection is None or deadlines is None or connection.closed or connection.invalidated:
        return None
    token = connection.info.pop(_TOKEN, None)
    return None if token is None or deadlines.end(token) else deadlines.missed(sql)


class limited:  # noqa: N801  # used as a function is
    """Limits what is done on a connection without SQLAlchemy's cursors."""

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
        """Do not count the time in which Postgres waits for us."""
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
