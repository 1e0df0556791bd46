"""A raw connection to Redis: one connection that one thread has to itself.

The driver's client finds a connection for each command, wraps it for retries and metrics, and parses what it guesses;
that takes twice as long as Redis does. Where it matters, commands go out and answers come in by the connection itself.
"""

from __future__ import annotations

import hashlib
import re
import select
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hiredis import pack_command
from redis import Redis
from redis.exceptions import ConnectionError, NoScriptError, ResponseError, TimeoutError

Argument = str | bytes | int | float

Entry = tuple[bytes, list[bytes] | None]
"""Id and fields of an entry of a stream, name and value by turns; None if it was deleted."""


def open_connection(redis: Redis) -> Any:
    """Return a connection like those of a client's pool, which the pool need not count; it connects on first use."""
    pool = redis.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


def packed(words: tuple[Argument, ...]) -> list[bytes]:
    """Return a command as it is sent. The driver would look at each word first, which takes it three times as long."""
    return [pack_command(words)]  # type: ignore[arg-type]  # its stub says that there is one word


_LIFE = re.compile(rb"^run_id:(\w+)", re.MULTILINE)


def connect_to_server(connection: Any, server: str) -> None:
    """Connect, once; refuse a server whose streams were begun before it restarted, by the key `server`.

    It has restarted, or was a replica until now. Then it may have lost entries, and may assign their ids again, so ids
    could be mistaken. So nobody reads or writes there until a leader has begun a new generation.
    """
    if connection._sock is None:
        connection.connect()
        check_restart(connection, server)


def check_restart(connection: Any, server: str) -> None:
    """Refuse the server of an open connection if its streams were begun in another life; then disconnect."""
    try:
        connection.send_packed_command([*packed(("GET", server)), *packed(("INFO", "server"))])
        began_on, about = connection.read_response(), connection.read_response()
        life = _LIFE.search(about)
        if began_on is not None and (life is None or began_on != life[1]):
            raise ConnectionError("it has restarted or is another server, and no leader has begun on it yet")
    except BaseException:
        connection.disconnect()
        raise


class Script:
    """A Lua script, which Redis knows by its hash once it has run it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.hash = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RawConnection:
    """Sends one command at a time. What went wrong half-way is not repeated, and the next command connects anew.

    With the key `server`, only to a server whose streams were begun in the life that it is in.
    """

    def __init__(self, redis: Redis, server: str | None = None) -> None:
        self._connection: Any = open_connection(redis)
        self._server = server

    def call(self, *words: Argument) -> Any:
        """Send a command; return its answer as it came."""
        try:
            if self._server is not None:
                connect_to_server(self._connection, self._server)
            self._connection.send_packed_command(packed(words))
            return self._connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            self._connection.disconnect()  # an answer may be on its way that would be taken for the next one's
            raise

    def run(self, script: Script, keys: Sequence[Argument], arguments: Sequence[Argument]) -> Any:
        """Run a script; return its answer."""
        try:
            return self.call("EVALSHA", script.hash, len(keys), *keys, *arguments)
        except NoScriptError:
            if self._server is not None:  # a proxy may keep a connection while another server takes over behind it
                check_restart(self._connection, self._server)
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()


def field(entry: Entry, name: bytes) -> bytes:
    """Return a field of an entry; empty if it has none."""
    fields = entry[1] or []
    names = fields[::2]
    return fields[2 * names.index(name) + 1] if name in names else b""


Found = list[tuple[bytes, list[Entry]]]
"""By stream, what has come."""


class Answer(NamedTuple):
    """Something has come."""

    found: Found
    is_fresh: bool
    """Whether the caller that sent the request also got the answer."""


_LONGEST = 5.0
"""Seconds that Redis is asked to wait; then one learns whether it is still there."""
_ANSWER_TIMEOUT = 5.0
"""Seconds beyond that after which its answer is not awaited any more."""


class Listening:
    """A blocking read that stays open: what comes after these positions of these streams?

    Redis ends a blocking read when its own timer comes round, ten times a second: a wait of 5 ms takes up to 100. So a
    read stays open on a connection of its own, and its answer is waited for here for as long as there is time. An
    answer that comes later wakes the next wait. Then it may be old, and there may be more by now: it only says that
    there is something to read.

    It is sent only to a server that has not restarted since its streams were begun, by the key `server`.
    """

    def __init__(self, redis: Redis, server: str) -> None:
        self._connection: Any = open_connection(redis)
        self._server = server
        self._streams: tuple[str, ...] | None = None
        """The streams of the open read; None while none is open."""
        self._until = 0.0
        """When Redis answers at the latest."""
        self._poll = select.poll()
        self._polled: Any = None
        """The socket that it looks at."""

    def wait(self, streams: Sequence[str], after: Sequence[str], count: int, seconds: float) -> Answer | None:
        """Return what has come, or None if nothing has in so many seconds."""
        is_fresh = False
        try:
            if self._streams not in (None, tuple(streams)):
                self.close()
            if self._streams is None:
                milliseconds = int(_LONGEST * 1000)
                words: tuple[Argument, ...] = (
                    "XREAD",
                    "COUNT",
                    count,
                    "BLOCK",
                    milliseconds,
                    "STREAMS",
                    *streams,
                    *after,
                )
                connect_to_server(self._connection, self._server)
                self._connection.send_packed_command(packed(words))
                self._streams = tuple(streams)
                self._until = time.monotonic() + _LONGEST
                is_fresh = True
            if not self._has_come(seconds):
                if time.monotonic() > self._until + _ANSWER_TIMEOUT:
                    raise TimeoutError("Redis does not answer a question that it was to answer by now")
                return None
            self._streams = None
            return Answer(self._connection.read_response() or [], is_fresh)
        except ResponseError:
            raise
        except BaseException:
            self.close()
            raise

    def _has_come(self, seconds: float) -> bool:
        """Wait for so long; say whether there is an answer, or the connection has ended.

        The driver's own way makes three system calls and two objects for it, and takes twenty times as long.
        """
        line = self._connection._sock
        if line is not self._polled:
            self._poll = select.poll()
            self._poll.register(line, select.POLLIN)
            self._polled = line
        return bool(self._poll.poll(1000 * seconds))

    def close(self) -> None:
        """Close the connection, and with it the question; the next one connects anew."""
        self._streams = None
        self._connection.disconnect()
