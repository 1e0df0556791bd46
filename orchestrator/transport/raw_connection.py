"""A raw connection to Redis: one connection that one thread has to itself.

The driver's client finds a connection for each command, wraps it for retries and metrics, and parses what it guesses;
that takes twice as long as Redis does. Where it matters, commands go out and answers come in by the connection itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from hiredis import pack_command
from redis import Redis
from redis.exceptions import ConnectionError, NoScriptError, ResponseError

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


def connect_to_life(connection: Any, server: str) -> None:
    """Connect, unless that is done; refuse a server whose streams were begun in another life, as the key tells.

    It has restarted, or was a replica until now. Then it may have lost entries, and gives their ids to others: whoever
    compares ids would take the one for the other. So nobody reads or writes there until a leader has begun anew.
    """
    if connection._sock is None:
        connection.connect()
        check_life(connection, server)


def check_life(connection: Any, server: str) -> None:
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
                connect_to_life(self._connection, self._server)
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
                check_life(self._connection, self._server)
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()


def field(entry: Entry, name: bytes) -> bytes:
    """Return a field of an entry; empty if it has none."""
    fields = entry[1] or []
    names = fields[::2]
    return fields[2 * names.index(name) + 1] if name in names else b""
