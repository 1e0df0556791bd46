"""A limit for each statement of a client, also where Postgres hangs and nothing on the network says so.

A server that was stopped, or that waits for its disk, acknowledges what it is sent and never answers. The driver waits
for it without an end, and cannot be told otherwise. So a thread looks now and then whether a statement has taken too
long, and closes the connection under it, which the driver takes for what it is: a connection that broke.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, Engine, event, exc

_OPTION = "orchestrator_deadlines"
_TOKEN = "orchestrator_deadline"
_LOOKS = 10
"""How often the thread looks within the time after which a statement is late."""


class NoAnswer(Exception):
    """Postgres has not answered in time."""


class Deadlines:
    """Watches the statements of one process. Whoever takes longer than `late` seconds is told of, again and again."""

    def __init__(self, seconds: float, *, late: float | None = None) -> None:
        self.seconds = seconds
        self._late = seconds if late is None else min(late, seconds)
        self._look_every = self._late / _LOOKS
        self.on_late: Callable[[float], None] = lambda _: None
        """Called, in a thread of its own, with the seconds for which a late statement has waited."""
        self._tokens = itertools.count(1)
        self._open: dict[int, tuple[float, Any]] = {}
        self._cutting = threading.Lock()
        self._starting = threading.RLock()
        self._is_watching = False
        self._closed = threading.Event()

    def begin(self, connection: Any) -> int:
        """Watch a driver's connection from now on; return what ends this."""
        token = next(self._tokens)
        self._open[token] = (time.monotonic(), connection)
        if not self._is_watching:
            self._watch()
        return token

    def end(self, token: int) -> bool:
        """Say whether the statement has ended in time; if not, its connection is closed."""
        if self._open.pop(token, None) is not None:
            return True
        with self._cutting:  # the thread may be about to close it
            return False

    def missed(self, sql: str) -> exc.OperationalError:
        """Return the error of a statement that has not ended in time."""
        reason = NoAnswer(f"no answer within {self.seconds:g} s (setting database_timeout)")
        return exc.OperationalError(sql, None, reason, connection_invalidated=True)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _watch(self) -> None:
        with self._starting:
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._run, name="orchestrator-deadlines", daemon=True).start()

    def _run(self) -> None:
        """Look until there has been nothing to watch for as long as a statement may take."""
        idle = 0
        while idle <= _LOOKS and not self._closed.wait(self._look_every):
            idle = 0 if self._open else idle + 1
            now = time.monotonic()
            for token, (began, _) in list(self._open.items()):
                if now - began >= self._late:
                    self.on_late(now - began)
                if now - began >= self.seconds:
                    self._cut(token)
        self._is_watching = False
        if self._open and not self._closed.is_set():
            self._watch()  # somebody began while this thread was on its way out

    def _cut(self, token: int) -> None:
        with self._cutting:
            found = self._open.pop(token, None)
            if found is None:
                return  # it has ended after all
            # Whatever is wrong with the connection, it will not do.
            with contextlib.suppress(Exception), socket.socket(fileno=os.dup(found[1].fileno())) as line:
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


def limited(connection: Connection, sql: str) -> AbstractContextManager[None]:
    """Limit what is done on a connection without SQLAlchemy's cursors."""
    deadlines = deadlines_of(connection)
    return _UNLIMITED if deadlines is None else _limited(connection, sql, deadlines)


_UNLIMITED = nullcontext()


@contextmanager
def _limited(connection: Connection, sql: str, deadlines: Deadlines) -> Iterator[None]:
    token = deadlines.begin(connection.connection.dbapi_connection)
    try:
        yield
    except Exception as error:
        if not deadlines.end(token):
            connection.invalidate(error)
            raise deadlines.missed(sql) from error
        raise
    finally:
        deadlines.end(token)


def _before(connection: Connection, *_: object) -> None:
    deadlines = deadlines_of(connection)
    if deadlines is not None:
        connection.info[_TOKEN] = deadlines.begin(connection.connection.dbapi_connection)


def _after(connection: Connection, *_: object) -> None:
    deadlines, token = deadlines_of(connection), connection.info.pop(_TOKEN, None)
    if deadlines is not None and token is not None:
        deadlines.end(token)
