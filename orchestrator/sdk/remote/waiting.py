"""Waits for ends over HTTP: all waiters of a process share a few long polls.

A poll covers thousands of ids. Ids of a waiter that comes during a poll are part of the next poll. Only a single poll
is long, so that after a moment as few polls as possible cover all ids.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from orchestrator.domain.ids import to_text
from orchestrator.errors import ConfigurationError, OrchestratorError, Unavailable, Uncertain
from orchestrator.sdk.calls.waits import MAX_AT_ONCE, PATH, End, Ends, Waiting
from orchestrator.sdk.remote.asking import Asking
from orchestrator.sdk.remote.http import Broken, Connection, Http, Unreached, hang_up
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.sdk.waiting.steps import ObstacleLog, Pause, Steps, Stream
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended

log = get_logger("client")

Kind = Literal["tasks", "runs", "code"]
Key = tuple[Kind, bytes]
Message = Ended | OrchestratorError | None
"""A message to a waiter: an end, an error, or None if there is no end yet."""


class _Waiter(NamedTuple):
    """A caller that waits for ends until a deadline."""

    wake: Callable[[Message], None]
    deadline: float


_MAX_POLLS = 8
_LONG, _SHORT = 5.0, 1.0
"""Seconds of a single poll, and of one of several polls."""
_GATHER = 0.005
"""Seconds in which new waiters are collected while another poll is running."""
_LINGER = 10.0
"""Seconds after which an idle thread ends."""
_MAX_PAUSE = 2.0
_FOREVER = 1e9


class Waits:
    """The waits of this process."""

    def __init__(self, asking: Asking, obstacles: Callable[[bytes], list[str]]) -> None:
        """Create the waits; `obstacles` describes the obstacles of a task or run."""
        self._polls = PerProcess(lambda: _Polls(asking, ObstacleLog(obstacles)))

    def close(self) -> None:
        polls = self._polls.take()
        if polls is not None:
            polls.close()

    def wait(self, kind: Kind, identifier: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait for the end of a task or run, and return it; None on timeout."""
        for item in self.each(kind, [identifier], limit):
            if not isinstance(item, Pause):
                return item
            yield item
        return None

    def each(self, kind: Kind, identifiers: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        """Yield the ends of tasks or runs as they happen, past ends first. Stop on timeout."""
        deadline = time.monotonic() + _FOREVER if limit.deadline is None else limit.deadline
        first_answer = deadline if limit.give_up_at is None else limit.give_up_at
        pause = Pause()
        messages: deque[Message] = deque()

        def wake(message: Message) -> None:
            messages.append(message)
            pause.ring()

        pending, waiter, has_answer = dict.fromkeys(identifiers), _Waiter(wake, deadline), False
        polls = self._polls()
        polls.listen(((kind, identifier) for identifier in pending), waiter)
        try:
            while pending:
                while messages:
                    message, has_answer = messages.popleft(), True
                    if isinstance(message, OrchestratorError):
                        raise message
                    if message is not None and message.id in pending:
                        del pending[message.id]
                        yield message
                if polls is not self._polls():
                    polls = self._polls()
                    polls.listen(((kind, identifier) for identifier in pending), waiter)
                pause.seconds = (deadline if has_answer else first_answer) - time.monotonic()
                if not pending or pause.seconds <= 0:
                    return
                yield pause
        finally:
            polls.forget(((kind, identifier) for identifier in pending), waiter)


class _Polls:
    """The long polls of one process, each in a thread."""

    def __init__(self, asking: Asking, obstacles: ObstacleLog) -> None:
        self._asking = asking
        self._obstacles = obstacles
        self._changed = threading.Condition()
        self._waiting: dict[Key, list[_Waiter]] = {}
        self._queued: dict[Key, None] = {}
        """Ids that are in no running poll."""
        self._polled: set[Key] = set()
        self._threads = 0
        self._polling = 0
        self._is_closed = False
        self._under_way: set[Connection] = set()
        self._outage = Outage(log, "The API", "callers that wait for results keep waiting")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in list(self._under_way):
                hang_up(connection)
            waiters = {waiter for waiting in self._waiting.values() for waiter in waiting}
        for waiter in waiters:
            waiter.wake(None)  # the waiters continue with a new `_Polls`

    def listen(self, keys: Iterable[Key], waiter: _Waiter) -> None:
        """Register a waiter for the ends of tasks and runs."""
        with self._changed:
            for key in keys:
                self._waiting.setdefault(key, []).append(waiter)
                if key not in self._polled:
                    self._queued[key] = None
            if self._threads == self._polling and self._threads < _MAX_POLLS:
                self._threads += 1
                threading.Thread(target=self._run, name="orchestrator-waiting", daemon=True).start()
            else:
                self._changed.notify()

    def forget(self, keys: Iterable[Key], waiter: _Waiter) -> None:
        with self._changed:
            for key in keys:
                waiting = self._waiting.get(key, [])
                if waiter in waiting:
                    waiting.remove(waiter)
                if not waiting:
                    self._waiting.pop(key, None)
                    self._queued.pop(key, None)

    def _run(self) -> None:
        pause = 0.05
        while keys := self._next():
            began = time.monotonic()
            try:
                ends = self._poll(keys)
            except (Unavailable, Uncertain) as error:
                if self._is_closed:
                    self._done(keys, ())
                    continue
                self._outage.failed(first_line(error))
                self._done(keys, ())
                time.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE)
            except OrchestratorError as error:
                self._fail(keys, error)
            else:
                self._outage.worked()
                pause = 0.05
                self._done(keys, ends)
                if not ends and time.monotonic() - began >= _LONG:
                    self._check_obstacles(keys[0][1])

    def _check_obstacles(self, identifier: bytes) -> None:
        """Log the obstacles of a task or run that has not ended for a while."""
        with contextlib.suppress(OrchestratorError):
            self._obstacles.check(identifier)

    def _next(self) -> list[Key]:
        """Return the ids of the next poll; none if this thread is no longer needed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._is_closed, _LINGER)
            if self._polling and self._queued:
                self._changed.wait(_GATHER)
            if self._is_closed or not self._queued:
                self._threads -= 1
                return []
            # A run of code and its turn task have the same id, so a poll contains only one of them.
            keys = list({key[1]: key for key in islice(self._queued, MAX_AT_ONCE)}.values())
            for key in keys:
                del self._queued[key]
            self._polled.update(keys)
            self._polling += 1
            return keys

    def _poll(self, keys: Sequence[Key]) -> list[End]:
        with self._changed:
            until = min(
                (waiter.deadline for key in keys for waiter in self._waiting.get(key, ())), default=time.monotonic()
            )
            longest = _LONG if self._polling == 1 and not self._queued else _SHORT
        seconds = min(longest, max(0.0, until - time.monotonic()))
        ids: dict[Kind, list[bytes]] = {"tasks": [], "runs": [], "code": []}
        for kind, identifier in keys:
            ids[kind].append(identifier)
        body = msgspec.json.encode(Waiting(**ids, timeout=seconds))
        try:
            reply = self._asking.http.post(PATH, body, seconds + self._asking.http.timeout, self._under_way)
        except (Unreached, Broken) as error:
            raise self._asking.away(error) from error
        problem = self._asking.problem(reply)
        if problem is not None:
            raise problem
        answer: Ends = self._asking.answer(Ends, reply)
        return answer.ended

    def _done(self, keys: Sequence[Key], ends: Iterable[End]) -> None:
        """Wake the waiters of the ends, and queue all other ids for the next poll."""
        ended = {end.id: Ended(end.id, end.state, end.result, end.error) for end in ends}
        calls: dict[tuple[_Waiter, bytes], Ended | None] = {}
        with self._changed:
            self._polling -= 1
            for key in keys:
                self._polled.discard(key)
                end = ended.get(key[1])
                if end is not None:
                    calls |= {(waiter, end.id): end for waiter in self._waiting.pop(key, ())}
                elif key in self._waiting:
                    self._queued[key] = None
                    calls |= {(waiter, b""): None for waiter in self._waiting[key]}
        for (waiter, _), end in calls.items():
            waiter.wake(end)

    def _fail(self, keys: Sequence[Key], error: OrchestratorError) -> None:
        waiters: set[_Waiter] = set()
        with self._changed:
            self._polling -= 1
            for key in keys:
                self._polled.discard(key)
                waiters.update(self._waiting.pop(key, ()))
        for waiter in waiters:
            waiter.wake(error)


_POLL_INTERVAL = 0.5
"""Seconds until the next poll without an event stream."""
_GRACE = 2.0
"""Seconds by which a periodic keep-alive of the stream may be late."""


class RemoteRunListener:
    """Listens for changes of one run, for one thread. It is an optimization: callers poll as well."""

    def __init__(self, http: Http, run: bytes) -> None:
        self._http = http
        self._path = f"/api/v1/runs/{to_text(run)}/events"
        self._connection: Connection | None = None
        self._answer: HTTPResponse | None = None

    def wait(self, seconds: float) -> None:
        """Wait until the run may have changed since the last call, for about `seconds`. Then read the run again.

        The first call only subscribes and returns: the run may have changed before.
        """
        try:
            if self._answer is None:
                self._connection, self._answer = self._http.listen(self._path, seconds + _GRACE)
                if self._answer.status != HTTPStatus.OK:
                    self._pause(seconds)
                return
            if not self._read_event(self._answer):
                self.close()
        except (Unreached, ConfigurationError, OSError, HTTPException):
            self._pause(seconds)

    @staticmethod
    def _read_event(answer: HTTPResponse) -> bool:
        """Read up to the end of an event or keep-alive. Return False at the end of the stream."""
        while line := answer.readline():
            if line == b"\n":
                return True
        return False

    def _pause(self, seconds: float) -> None:
        self.close()
        time.sleep(min(_POLL_INTERVAL, seconds))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._answer = None
