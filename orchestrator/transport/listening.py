"""Wait for what is new in streams, with a timer of one's own.

Redis ends a blocking read when its own timer comes round, ten times a second: whoever asks it to wait for 5 ms waits
for up to 100. So a question stays open on a connection of its own, and its answer is waited for here for as long as
there is time. What has not come by then rings for the next who waits. Then the answer may be old, and there may be more
by now: it says that there is something to read, and no more.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import ResponseError, TimeoutError

from orchestrator.transport.raw_connection import Argument, Entry, connect_to_life, open_connection, packed

Found = list[tuple[bytes, list[Entry]]]
"""By stream, what has come."""


class Answer(NamedTuple):
    """Something has come."""

    found: Found
    is_fresh: bool
    """The question was asked by the one who got the answer."""


_LONGEST = 5.0
"""Seconds that Redis is asked to wait; then one learns whether it is still there."""
_ANSWER_TIMEOUT = 5.0
"""Seconds beyond that after which its answer is not awaited any more."""


class Listening:
    """A question that stays open: what comes after these positions of these streams?

    It is asked only of a server whose streams were begun in the life that it is in, as the key `server` tells.
    """

    def __init__(self, redis: Redis, server: str) -> None:
        self._connection: Any = open_connection(redis)
        self._server = server
        self._streams: tuple[str, ...] | None = None
        """What the open question is about; None while none is open."""
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
                connect_to_life(self._connection, self._server)
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
