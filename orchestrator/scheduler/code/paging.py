"""Send histories that are too large for one message, in pages, some of them after each commit.

    in the tick's transaction       the turn is claimed, and its events are measured, not read
    after the commit                pages are read from Postgres and written to Redis, one by one, so many in a tick
    after the last page             the message is pushed, like that of any task
    when the attempt has landed     its pages are removed

So the leader has one page in memory at a time, and no tick takes long. Until the message is pushed, this leader holds
the attempt. If the leader dies, its successor finds an attempt that is nowhere, as after any push that did not happen,
and dispatches it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code.activation import PAGE
from orchestrator.domain.ids import about_run
from orchestrator.scheduler.tick_result import CommitHooks, Paged, TickResult
from orchestrator.store.code import turns
from orchestrator.store.tasks.claims import Claimed
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import encode
from orchestrator.transport.connection import FULL
from orchestrator.transport.pages import Pages

log = get_logger("scheduler")

_PER_TICK = 4_000_000
"""Bytes of pages after which a tick sends no more: other tasks wait meanwhile."""

Reading = Callable[[], AbstractContextManager[Connection]]
Turn = tuple[bytes, int]
"""A run and the attempt of its turn task."""


@dataclass
class _Unsent:
    """How far the pages of a turn have been sent."""

    paged: Paged
    after: int
    """The number of the last event that has been sent."""
    pages: int = 0


class Paging(CommitHooks):
    """Knows which turns have pages in Redis, and which are still being sent."""

    def __init__(self) -> None:
        self._sizes: dict[Turn, int] = {}
        """Of turns that have pages in Redis, or will have."""
        self._unsent: dict[Turn, _Unsent] = {}
        """Of those, the ones whose messages have not been pushed, in their order."""
        self._over: list[Turn] = []
        """Turns whose pages are no longer needed."""

    @property
    def size(self) -> int:
        """How many bytes of pages are sent, or about to be."""
        return sum(self._sizes.values())

    @property
    def is_busy(self) -> bool:
        """Say whether there is more to send, or to remove."""
        return bool(self._unsent or self._over)

    def has(self, run: bytes, attempt: int) -> bool:
        return (run, attempt) in self._sizes

    @property
    def held(self) -> Collection[tuple[bytes, int]]:
        """Attempts that have not left this leader yet, although Postgres says that they were dispatched."""
        return self._unsent.keys()

    def committed(self, tick: TickResult) -> None:
        """Send what was claimed, and forget what has landed."""
        for turn in tick.capacity.turns_over:
            if self._sizes.pop(turn, None) is not None:
                self._unsent.pop(turn, None)
                self._over.append(turn)
        for paged in tick.outgoing.paged:
            turn = paged.task.id, paged.task.attempt
            self._sizes[turn] = paged.unshown.size
            self._unsent[turn] = _Unsent(paged, paged.unshown.after)

    def send(self, reading: Reading, pages: Pages, push: Callable[[Sequence[Claimed]], None]) -> None:
        """Send some more pages. Where Redis fails, the next call goes on with the same page, unless Redis is full."""
        if self._over:
            pages.remove(self._over)
            self._over.clear()
        sent = 0
        while self._unsent and sent < _PER_TICK:
            turn, unsent = next(iter(self._unsent.items()))
            with reading() as connection:
                events = turns.page(connection, unsent.paged.unshown, unsent.after, PAGE)
            if events:
                page = encode(events)
                try:
                    pages.write(*turn, unsent.pages, page)
                except FULL:  # perhaps of these very pages
                    self._give_up(turn)
                    pages.remove([turn])
                    raise
                unsent.pages += 1
                unsent.after = events[-1].number
                sent += len(page)
            else:
                activation = msgspec.structs.replace(unsent.paged.activation, pages=unsent.pages)
                del self._unsent[turn]  # before the push: nobody may push twice, whatever the answer was
                push([unsent.paged.task._replace(payload=encode(activation))])

    def _give_up(self, turn: Turn) -> None:
        """Send no more of a turn. The attempt is nowhere then, so it will be made again, in some seconds."""
        whose = about_run(turn[0])
        log.error(
            "run.history_too_large run=%s bytes=%d: Redis has no room for it",
            *whose.values(),
            self._sizes[turn],
            extra=whose,
        )
        del self._unsent[turn], self._sizes[turn]
