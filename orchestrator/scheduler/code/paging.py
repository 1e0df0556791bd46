"""Send histories that are too large for one message in pages, some of them after each commit.

    in the tick's transaction       the turn is claimed, and its events are measured but not read
    after the commit                pages are read from Postgres and written to Redis, one by one, up to a limit
    after the last page             the message is pushed like that of any task
    when the attempt has ended      its pages are removed

The leader has one page in memory at a time, and no tick takes long. Until the message is pushed, the leader itself
holds the attempt. If the leader dies, its successor finds the attempt nowhere, and dispatches it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code.activation import PAGE
from orchestrator.domain.ids import run_log_fields
from orchestrator.scheduler.tick_result import CommitHooks, Paged, TickResult
from orchestrator.store.code import turns
from orchestrator.store.tasks.claims import Claimed
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import encode
from orchestrator.transport.connection import FULL
from orchestrator.transport.pages import Pages

log = get_logger("scheduler")

_MAX_BYTES_PER_TICK = 4_000_000
"""Bytes of pages sent in one tick: other tasks wait meanwhile."""

Reading = Callable[[], AbstractContextManager[Connection]]
Turn = tuple[bytes, int]
"""A run, and the attempt of its turn task."""


@dataclass
class _Unsent:
    """The progress of sending the pages of a turn."""

    paged: Paged
    after: int
    """The number of the last event sent."""
    pages: int = 0


class Paging(CommitHooks):
    """Tracks the turns with pages in Redis, and those still being sent."""

    def __init__(self) -> None:
        self._sizes: dict[Turn, int] = {}
        """The bytes of pages of each turn that are in Redis or will be."""
        self._unsent: dict[Turn, _Unsent] = {}
        """Turns whose messages have not been pushed, in order."""
        self._obsolete: list[Turn] = []
        """Turns whose pages are no longer needed."""

    @property
    def size(self) -> int:
        """Bytes of pages in Redis or about to be sent."""
        return sum(self._sizes.values())

    @property
    def is_busy(self) -> bool:
        """Return whether there are pages to send or to remove."""
        return bool(self._unsent or self._obsolete)

    def has(self, run: bytes, attempt: int) -> bool:
        return (run, attempt) in self._sizes

    @property
    def held(self) -> Collection[tuple[bytes, int]]:
        """Attempts that this leader still holds, although Postgres has them as dispatched."""
        return self._unsent.keys()

    def committed(self, tick: TickResult) -> None:
        for turn in tick.capacity.turns_over:
            if self._sizes.pop(turn, None) is not None:
                self._unsent.pop(turn, None)
                self._obsolete.append(turn)
        for paged in tick.outgoing.paged:
            turn = paged.task.id, paged.task.attempt
            self._sizes[turn] = paged.unshown.size
            self._unsent[turn] = _Unsent(paged, paged.unshown.after)

    def send(self, reading: Reading, pages: Pages, push: Callable[[Sequence[Claimed]], None]) -> None:
        """Send more pages. After a failure of Redis, the next call repeats the page, unless Redis is full."""
        if self._obsolete:
            pages.remove(self._obsolete)
            self._obsolete.clear()
        sent = 0
        while self._unsent and sent < _MAX_BYTES_PER_TICK:
            turn, unsent = next(iter(self._unsent.items()))
            with reading() as connection:
                events = turns.page(connection, unsent.paged.unshown, unsent.after, PAGE)
            if events:
                page = encode(events)
                try:
                    pages.write(*turn, unsent.pages, page)
                except FULL:  # perhaps because of these pages
                    self._give_up(turn)
                    pages.remove([turn])
                    raise
                unsent.pages += 1
                unsent.after = events[-1].number
                sent += len(page)
            else:
                activation = msgspec.structs.replace(unsent.paged.activation, pages=unsent.pages)
                del self._unsent[turn]  # before the push: nobody may push twice, whatever the answer
                push([unsent.paged.task._replace(payload=encode(activation))])

    def _give_up(self, turn: Turn) -> None:
        """Stop sending a turn. The reconciler then dispatches it again, some seconds later."""
        ids = run_log_fields(turn[0])
        log.error(
            "run.history_too_large run=%s bytes=%d: Redis has no room for it",
            *ids.values(),
            self._sizes[turn],
            extra=ids,
        )
        del self._unsent[turn], self._sizes[turn]
