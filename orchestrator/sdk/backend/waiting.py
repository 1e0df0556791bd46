"""Waits for the ends of tasks and runs: subscribe, query Postgres, and poll in case an announcement was lost.

A wait holds no connection to Postgres. It continues while Postgres or Redis is unavailable; without Redis, an end is
found by the next poll. All queries of a wait obey the time limit of the call.
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

_POLL_INTERVAL = 5.0
"""Seconds between two polls of Postgres without an announcement."""

_NEW_FOR = 2
"""Age in milliseconds from which a task or run may have ended before its waiter has subscribed."""

_FIRST_POLL_AFTER = 0.025
"""Seconds before the first poll for a new task or run; most ends are announced by then. An earlier poll would take CPU
time from the claim of tasks, which hurts most under load."""

_MAX_IDS = 5_000
"""Ids in one query."""

T = TypeVar("T")
FindEnd = Callable[[], "Ended | None"]
"""Queries Postgres for the end of a task or run."""
FindEnds = Callable[[Sequence[bytes]], Sequence[Ended]]
"""Queries Postgres for the ends of several tasks or runs."""


class EndWaiters:
    """The waits of this process."""

    def __init__(self, settings: Settings, obstacles: Callable[[bytes], list[str]]) -> None:
        """Create the waits; `obstacles` describes the obstacles of a task or run."""
        self._obstacles = ObstacleLog(obstacles)
        self._announcements = PerProcess(lambda: Announcements(connect(settings.require_redis()), Keys.of(settings)))
        self._postgres = Outage(log, "Postgres", "callers that wait for results keep waiting")

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
        """Wait until the end of a task or run is announced or found, and return it; None on timeout.

        Return None, too, if the end of the run `beside` is announced first.
        """
        pause = Pause()
        announced: list[Ended | None] = []
        run_ends: list[Ended | None] = []

        def wake(ended: Ended | None) -> None:
            announced.append(ended)
            pause.ring()

        def give_up(ended: Ended | None) -> None:
            run_ends.append(ended)
            pause.ring()

        try:
            with limit:
                self.announcements.listen(identifier, wake)
                if beside is not None:
                    self.announcements.listen(beside, give_up)
                is_new = _is_new(identifier, limit)
                end = None if is_new else self._try(find_end)
            while end is None:
                pause.seconds, is_new = _FIRST_POLL_AFTER if is_new else _until_next_poll(limit), False
                if pause.seconds <= 0:
                    return None
                yield pause
                end = _complete(announced)
                if end is None:
                    with limit:
                        end = self._try(find_end)
                        if end is None and pause.seconds == _POLL_INTERVAL and not announced:
                            self._obstacles.check(identifier)
                    if run_ends:
                        break
            return end
        finally:
            self.announcements.forget(identifier, wake)
            if beside is not None:
                self.announcements.forget(beside, give_up)

    def each(self, identifiers: Sequence[bytes], find_ends: FindEnds, limit: TimeLimit) -> Stream[Ended]:
        """Yield the ends of tasks or runs as they happen, past ends first. Stop on timeout."""
        pause = Pause()
        announced: deque[Ended | None] = deque()

        def wake(ended: Ended | None) -> None:
            announced.append(ended)
            pause.ring()

        pending = dict.fromkeys(identifiers)
        try:
            with limit:
                self.announcements.listen_all(pending, wake)
            announced.append(None)  # earlier ends are not announced again
            while pending:
                with limit:
                    ends = self._ends(pending, announced, find_ends)
                for ended in ends:
                    del pending[ended.id]
                    self.announcements.forget(ended.id, wake)
                    yield ended
                pause.seconds = _until_next_poll(limit)
                if not pending or pause.seconds <= 0:
                    return
                yield pause
                if not announced:
                    announced.append(None)
                    with limit:
                        self._obstacles.check(next(iter(pending)))
        finally:
            for identifier in pending:
                self.announcements.forget(identifier, wake)

    def _ends(self, pending: Mapping[bytes, None], announced: deque[Ended | None], find_ends: FindEnds) -> list[Ended]:
        """Return the ends that were announced, completed by Postgres where an announcement is incomplete."""
        ends: dict[bytes, Ended] = {}
        incomplete: dict[bytes, None] = {}
        while announced:
            ended = announced.popleft()
            if ended is None:
                incomplete.update(pending)
            elif _is_complete(ended):
                ends[ended.id] = _opened(ended)
            else:
                incomplete[ended.id] = None
        ask = [identifier for identifier in incomplete if identifier in pending and identifier not in ends]
        for start in range(0, len(ask), _MAX_IDS):
            queried = self._try(partial(find_ends, ask[start : start + _MAX_IDS]))
            if queried is None:
                break  # the next poll queries all of them
            ends.update((ended.id, ended) for ended in queried)
        return [ended for identifier, ended in ends.items() if identifier in pending]

    def _try(self, find_end: Callable[[], T]) -> T | None:
        """Query Postgres. Return None while Postgres is unavailable, so that the wait continues."""
        if time_limits.is_over():
            return None
        try:
            result = find_end()
        except Unavailable as error:
            self._postgres.failed(first_line(error))
            return None
        self._postgres.worked()
        return result


def _until_next_poll(limit: TimeLimit) -> float:
    remaining = limit.remaining
    return _POLL_INTERVAL if remaining is None else min(_POLL_INTERVAL, remaining)


def _is_new(identifier: bytes, limit: TimeLimit) -> bool:
    """Return whether a task or run is too new to have ended, by the time in its id, and there is time to poll later."""
    age = time.time_ns() // 1_000_000 - int.from_bytes(identifier[:6], "big")
    return 0 <= age < _NEW_FOR and _until_next_poll(limit) > _FIRST_POLL_AFTER


def _complete(announced: list[Ended | None]) -> Ended | None:
    """Return the first complete announcement, for which Postgres need not be queried; None if there is none."""
    for ended in announced:
        if ended is not None and _is_complete(ended):
            return _opened(ended)
    announced.clear()
    return None


def _is_complete(ended: Ended) -> bool:
    """Return whether an announcement can be trusted as it is. Anyone may publish; Postgres has the authoritative end.

    Only an announced success is enough: after any other end the task may have been retried meanwhile.
    """
    if ended.state != TaskState.SUCCESS or ended.result is None:
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
