"""Waiting for ends: subscribe, then look in Postgres, and look again whenever something may have been missed.

A wait holds no connection to Postgres. It goes on while Postgres is away, and while Redis is: then it takes as long as
the next look. All requests of a wait keep to the time of the call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from orchestrator import time_limits
from orchestrator.domain.states import TaskState
from orchestrator.errors import Unavailable
from orchestrator.references import is_reference
from orchestrator.sdk.values.payload import decode_value
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.sdk.waiting.steps import ObstacleLog, Pause, Steps, Stream
from orchestrator.sealing import Sealed, is_sealed, reveal
from orchestrator.settings import Settings
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.client import Announcements
from orchestrator.transport.codec import Ended
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys

log = get_logger("client")

_LOOK_AGAIN = 5.0
"""Seconds after which a waiter looks in Postgres although nothing was announced."""

_NEW = 2
"""Milliseconds after which something may have ended before its waiter has subscribed."""

_FIRST_LOOK = 0.025
"""Seconds after which a waiter looks for something that is new; most of it is announced by then. An earlier look would
take processor time from the claim, and most where much is late already."""

_LOOK_AT_ONCE = 5_000
"""Ids that one look asks for."""

T = TypeVar("T")
FindEnd = Callable[[], "Ended | None"]
"""Looks in Postgres whether something has ended."""
FindEnds = Callable[[Sequence[bytes]], Sequence[Ended]]
"""Looks in Postgres which of these have ended."""


class EndWaiters:
    """All waits of this process."""

    def __init__(self, settings: Settings, obstacles: Callable[[bytes], list[str]]) -> None:
        """`obstacles` says what keeps something from its end."""
        self._obstacles = ObstacleLog(obstacles)
        self._announcements = PerProcess(lambda: Announcements(connect(settings.require_redis()), Keys.of(settings)))
        self._postgres = Outage(log, "Postgres", "those who wait for results go on waiting")

    def close(self) -> None:
        announcements = self._announcements.take()
        if announcements is not None:
            announcements.close()

    @property
    def announcements(self) -> Announcements:
        return self._announcements()

    def wait(
        self, identifier: bytes, find_end: FindEnd, limit: TimeLimit, beside: bytes | None = None
    ) -> Steps[Ended | None]:
        """Wait until `find_end` finds an end, or one is announced; None if there is none by then.

        Nor is there if the end of `beside` is announced first.
        """
        pause = Pause()
        heard: list[Ended | None] = []
        over: list[Ended | None] = []

        def wake(ended: Ended | None) -> None:
            heard.append(ended)
            pause.ring()

        def give_up(ended: Ended | None) -> None:
            over.append(ended)
            pause.ring()

        try:
            with limit:
                self.announcements.listen(identifier, wake)
                if beside is not None:
                    self.announcements.listen(beside, give_up)
                is_new = _is_new(identifier, limit)
                found = None if is_new else self._try(find_end)
            while found is None:
                pause.seconds, is_new = _FIRST_LOOK if is_new else _until_next_look(limit), False
                if pause.seconds <= 0:
                    return None
                yield pause
                found = _complete(heard)
                if found is None:
                    with limit:
                        found = self._try(find_end)
                        if found is None and pause.seconds == _LOOK_AGAIN and not heard:
                            self._obstacles.check(identifier)
                    if over:
                        break
            return found
        finally:
            self.announcements.forget(identifier, wake)
            if beside is not None:
                self.announcements.forget(beside, give_up)

    def each(self, identifiers: Sequence[bytes], find_ends: FindEnds, limit: TimeLimit) -> Stream[Ended]:
        """Yield ends as they come, those that have come already first; stop when the time is up."""
        pause = Pause()
        heard: deque[Ended | None] = deque()

        def wake(ended: Ended | None) -> None:
            heard.append(ended)
            pause.ring()

        left = dict.fromkeys(identifiers)
        try:
            with limit:
                self.announcements.listen_all(left, wake)
            heard.append(None)  # earlier ends are not announced again
            while left:
                with limit:
                    ends = self._ends(left, heard, find_ends)
                for ended in ends:
                    del left[ended.id]
                    self.announcements.forget(ended.id, wake)
                    yield ended
                pause.seconds = _until_next_look(limit)
                if not left or pause.seconds <= 0:
                    return
                yield pause
                if not heard:
                    heard.append(None)
                    with limit:
                        self._obstacles.check(next(iter(left)))
        finally:
            for identifier in left:
                self.announcements.forget(identifier, wake)

    def _ends(self, left: Mapping[bytes, None], heard: deque[Ended | None], find_ends: FindEnds) -> list[Ended]:
        """Return those that have ended, from what was announced or, where that does not say it all, from Postgres."""
        ends: dict[bytes, Ended] = {}
        unclear: dict[bytes, None] = {}
        while heard:
            ended = heard.popleft()
            if ended is None:
                unclear.update(left)
            elif _is_complete(ended):
                ends[ended.id] = _opened(ended)
            else:
                unclear[ended.id] = None
        ask = [identifier for identifier in unclear if identifier in left and identifier not in ends]
        for start in range(0, len(ask), _LOOK_AT_ONCE):
            found = self._try(partial(find_ends, ask[start : start + _LOOK_AT_ONCE]))
            if found is None:
                break  # the next look asks for all of them
            ends.update((ended.id, ended) for ended in found)
        return [ended for identifier, ended in ends.items() if identifier in left]

    def _try(self, find_end: Callable[[], T]) -> T | None:
        """Look; while Postgres is away, nothing has ended that anyone could know of, and the wait goes on."""
        if time_limits.is_over():
            return None
        try:
            found = find_end()
        except Unavailable as error:
            self._postgres.failed(first_line(error))
            return None
        self._postgres.worked()
        return found


def _until_next_look(limit: TimeLimit) -> float:
    left = limit.left
    return _LOOK_AGAIN if left is None else min(_LOOK_AGAIN, left)


def _is_new(identifier: bytes, limit: TimeLimit) -> bool:
    """Say whether this cannot have ended yet, by the time in its id, and there is time to look later."""
    age = time.time_ns() // 1_000_000 - int.from_bytes(identifier[:6], "big")
    return 0 <= age < _NEW and _until_next_look(limit) > _FIRST_LOOK


def _complete(heard: list[Ended | None]) -> Ended | None:
    """Return an announcement that says everything, so that Postgres need not be asked."""
    for ended in heard:
        if ended is not None and _is_complete(ended):
            return _opened(ended)
    heard.clear()
    return None


def _is_complete(ended: Ended) -> bool:
    """Say whether an announcement is all that there is to know; anyone may publish anything, Postgres has the real end.

    What has failed may be open again by the time that one hears of it.
    """
    if ended.state != TaskState.SUCCESS:
        return ended.state == TaskState.CANCELLED
    if ended.result is None:
        return False
    if is_reference(ended.result):
        return True
    try:
        decode_value(ended.result)
    except (msgspec.DecodeError, ValueError, RecursionError, Sealed):
        return False
    return True


def _opened(ended: Ended) -> Ended:
    if ended.result is None or not is_sealed(ended.result):
        return ended
    return msgspec.structs.replace(ended, result=reveal(ended.result))
