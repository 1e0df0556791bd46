"""Waiting for ends over HTTP: all waiters of a process share a few long polls.

Each poll asks for thousands of ids. A waiter that comes while a poll is under way is part of the next one. Only a poll
that is alone is long, so after a moment all ids are in as few polls as hold them.
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
from orchestrator.sdk.calls.waits import MOST_AT_ONCE, PATH, End, Ends, Waiting
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
Heard = Ended | OrchestratorError | None
"""An end, why there can be none, or that there is none yet."""


class _Waiter(NamedTuple):
    """A waiter, and its deadline."""

    wake: Callable[[Heard], None]
    deadline: float


_MOST_POLLS = 8
_LONG, _SHORT = 5.0, 1.0
"""Seconds of a poll that is alone, and of one that is not."""
_GATHER = 0.005
"""Seconds in which new waiters are gathered while another poll is under way."""
_LINGER = 10.0
"""Seconds for which a thread stays that has nothing to ask."""
_LONGEST_PAUSE = 2.0
_FOREVER = 1e9


class Waits:
    """All waiters of this process."""

    def __init__(self, asking: Asking, obstacles: Callable[[bytes], list[str]]) -> None:
        """`obstacles` says what keeps something from its end."""
        self._polls = PerProcess(lambda: _Polls(asking, ObstacleLog(obstacles)))

    def close(self) -> None:
        polls = self._polls.take()
        if polls is not None:
            polls.close()

    def wait(self, kind: Kind, identifier: bytes, limit: TimeLimit) -> Steps[Ended | None]:
        """Wait for one end; None if it does not come in time."""
        for item in self.each(kind, [identifier], limit):
            if not isinstance(item, Pause):
                return item
            yield item
        return None

    def each(self, kind: Kind, identifiers: Sequence[bytes], limit: TimeLimit) -> Stream[Ended]:
        """Yield ends as they come, those that have come already first; stop when the time is up."""
        deadline = time.monotonic() + _FOREVER if limit.deadline is None else limit.deadline
        first_answer = deadline if limit.give_up_at is None else limit.give_up_at
        pause = Pause()
        heard: deque[Heard] = deque()

        def wake(tick: Heard) -> None:
            heard.append(tick)
            pause.ring()

        left, waiter, has_looked = dict.fromkeys(identifiers), _Waiter(wake, deadline), False
        polls = self._polls()
        polls.listen(((kind, identifier) for identifier in left), waiter)
        try:
            while left:
                while heard:
                    tick, has_looked = heard.popleft(), True
                    if isinstance(tick, OrchestratorError):
                        raise tick
                    if tick is not None and tick.id in left:
                        del left[tick.id]
                        yield tick
                if polls is not self._polls():
                    polls = self._polls()
                    polls.listen(((kind, identifier) for identifier in left), waiter)
                pause.seconds = (deadline if has_looked else first_answer) - time.monotonic()
                if not left or pause.seconds <= 0:
                    return
                yield pause
        finally:
            polls.forget(((kind, identifier) for identifier in left), waiter)


class _Polls:
    """The polls of one process, each in a thread."""

    def __init__(self, asking: Asking, obstacles: ObstacleLog) -> None:
        self._asking = asking
        self._obstacles = obstacles
        self._changed = threading.Condition()
        self._waiting: dict[Key, list[_Waiter]] = {}
        self._unasked: dict[Key, None] = {}
        """Those that no poll asks for."""
        self._asked: set[Key] = set()
        self._threads = 0
        self._polling = 0
        self._is_closed = False
        self._under_way: set[Connection] = set()
        self._outage = Outage(log, "The API", "those who wait for results go on waiting")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in list(self._under_way):
                hang_up(connection)
            waiters = {waiter for waiting in self._waiting.values() for waiter in waiting}
        for waiter in waiters:
            waiter.wake(None)  # and go on with later waits

    def listen(self, keys: Iterable[Key], waiter: _Waiter) -> None:
        """Wake a waiter from now on when one of these ends."""
        with self._changed:
            for key in keys:
                self._waiting.setdefault(key, []).append(waiter)
                if key not in self._asked:
                    self._unasked[key] = None
            if self._threads == self._polling and self._threads < _MOST_POLLS:
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
                    self._unasked.pop(key, None)

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
                pause = min(2 * pause, _LONGEST_PAUSE)
            except OrchestratorError as error:
                self._fail(keys, error)
            else:
                self._outage.worked()
                pause = 0.05
                self._done(keys, ends)
                if not ends and time.monotonic() - began >= _LONG:
                    self._look(keys[0][1])

    def _look(self, identifier: bytes) -> None:
        """Say what is in the way of one that has not come for a while."""
        with contextlib.suppress(OrchestratorError):
            self._obstacles.check(identifier)

    def _next(self) -> list[Key]:
        """Return what to ask for next; nothing if this thread is not needed any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._unasked or self._is_closed, _LINGER)
            if self._polling and self._unasked:
                self._changed.wait(_GATHER)
            if self._is_closed or not self._unasked:
                self._threads -= 1
                return []
            # A run of code and its turn task have one id: the kind of an answer distinguishes them.
            keys = list({key[1]: key for key in islice(self._unasked, MOST_AT_ONCE)}.values())
            for key in keys:
                del self._unasked[key]
            self._asked.update(keys)
            self._polling += 1
            return keys

    def _poll(self, keys: Sequence[Key]) -> list[End]:
        with self._changed:
            until = min(
                (waiter.deadline for key in keys for waiter in self._waiting.get(key, ())), default=time.monotonic()
            )
            longest = _LONG if self._polling == 1 and not self._unasked else _SHORT
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
        """Wake waiters whose end has come; the others are asked for again."""
        ended = {end.id: Ended(end.id, end.state, end.result, end.error) for end in ends}
        calls: dict[tuple[_Waiter, bytes], Ended | None] = {}
        with self._changed:
            self._polling -= 1
            for key in keys:
                self._asked.discard(key)
                end = ended.get(key[1])
                if end is not None:
                    calls |= {(waiter, end.id): end for waiter in self._waiting.pop(key, ())}
                elif key in self._waiting:
                    self._unasked[key] = None
                    calls |= {(waiter, b""): None for waiter in self._waiting[key]}
        for (waiter, _), end in calls.items():
            waiter.wake(end)

    def _fail(self, keys: Sequence[Key], error: OrchestratorError) -> None:
        waiters: set[_Waiter] = set()
        with self._changed:
            self._polling -= 1
            for key in keys:
                self._asked.discard(key)
                waiters.update(self._waiting.pop(key, ()))
        for waiter in waiters:
            waiter.wake(error)


_PAUSE = 0.5
"""Seconds until the next look where there is no stream."""
_LATE = 2.0
"""Seconds by which what is said every few seconds may be late."""


class RemoteRunListener:
    """Hears of one run; for one thread. Only speed depends on it."""

    def __init__(self, http: Http, run: bytes) -> None:
        self._http = http
        self._path = f"/api/v1/runs/{to_text(run)}/events"
        self._connection: Connection | None = None
        self._answer: HTTPResponse | None = None

    def wait(self, seconds: float) -> None:
        """Wait until the run may have changed since this was called last, or about so many seconds; then look at it.

        The first time, it begins to listen, and what was looked at before may have changed already.
        """
        try:
            if self._answer is None:
                self._connection, self._answer = self._http.listen(self._path, seconds + _LATE)
                if self._answer.status != HTTPStatus.OK:
                    self._pause(seconds)
                return
            if not self._heard(self._answer):
                self.close()
        except (Unreached, ConfigurationError, OSError, HTTPException):
            self._pause(seconds)

    @staticmethod
    def _heard(answer: HTTPResponse) -> bool:
        """Read up to the end of an event, or of a sign of life; False where there is nothing more to come."""
        while line := answer.readline():
            if line == b"\n":
                return True
        return False

    def _pause(self, seconds: float) -> None:
        self.close()
        time.sleep(min(_PAUSE, seconds))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._answer = None
