"""Delete old ended tasks and runs by the retention settings, and runs that a person deleted.

The leader does this in rounds beside its ticks, a thousand rows at a time. Only ended rows are deleted, and each
statement is independent, so a deposed leader that deletes another slice does no harm.

Each kind of row has its turn, regardless of the backlog of other kinds. Pauses shorten while rows pile up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, Engine

from orchestrator.scheduler.upkeep import REST, SLICE, Rounds
from orchestrator.settings import Settings
from orchestrator.store import audit, logs, retention
from orchestrator.store.retention import FIRST, START, Kind, Slice, Walk

_SLICES = 100
"""Slices of one kind of row in a turn."""
_EVERY = 10.0
"""Seconds from the end of a round to the start of the next."""
_MAX_DELAY = 60.0
"""Seconds beyond their retention after which a backlog of rows shortens the pauses."""
_MIN_REST = 1.0

K = TypeVar("K")


class Pruner:
    """Deletes ended rows in order of age, and remembers its progress."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        leading: threading.Event,
        *,
        size: int = SLICE,
        slices: int = _SLICES,
    ) -> None:
        self._engine = engine  # in autocommit mode
        self._settings = settings
        self._leading = leading
        self._size = size
        self._slices = slices
        self._tasks: dict[Walk, datetime] = {}
        self._runs: dict[Kind, datetime] = {}
        self._deleted = FIRST
        self._more = False
        """A turn ended before all its rows were deleted."""
        self.rest = REST
        """How many times the duration of a slice the pause after it lasts."""

    def start(self) -> None:
        """Start the thread, which waits for leadership."""
        Rounds(
            "pruning",
            self._engine,
            self._leading,
            lambda connection: (0.0 for _ in self.slices(connection)),
            every=_EVERY,
            rest=lambda: self.rest,
            start_over=self._start_over,
        ).start()

    def _start_over(self) -> None:
        """Begin the next round at the oldest rows, in case the last one stopped halfway."""
        self._tasks.clear()
        self._runs.clear()
        self._deleted = FIRST

    def slices(self, connection: Connection) -> Iterator[int]:
        """Delete everything old enough. Yield the number of rows after every slice."""
        retention.prepare(connection)
        self._more = True
        while self._more:
            self._more = False
            yield from self._turns(connection)
        self.rest = min(REST, self.rest + 1)

    def _turns(self, connection: Connection) -> Iterator[int]:
        settings = self._settings
        for table in retention.EXPIRING:
            yield from self._turn(partial(retention.forget_expired, connection, table, self._size))
        yield from self._forget_deleted(connection)
        if settings.retention_audit > 0:
            yield from self._turn(partial(audit.prune, connection, settings.retention_audit, self._size))
        if settings.retention_logs > 0:
            yield from self._turn(partial(logs.prune, connection, settings.retention_logs, self._size))
        kinds: tuple[tuple[Kind, float], ...] = (
            ("success", settings.retention_success),
            ("failed", settings.retention_failed),
        )
        for kind, seconds in kinds:
            if seconds > 0:
                next_runs = partial(retention.next_runs, connection, seconds)
                yield from self._walk(self._runs, kind, next_runs, partial(self._forget_runs, connection, kind))
        walks = retention.walks(connection, settings.retention_success, settings.retention_failed)
        self._tasks = {walk: self._tasks.get(walk, START) for walk in walks}
        for walk in walks:
            next_tasks = partial(retention.next_tasks, connection, walk)
            yield from self._walk(self._tasks, walk, next_tasks, partial(self._forget_tasks, connection, walk))

    def _turn(self, delete: Callable[[], int]) -> Iterator[int]:
        for _ in range(self._slices):
            if (deleted := delete()) == 0:
                return
            yield deleted
        self._hurry()  # these rows are all past their retention

    def _forget_deleted(self, connection: Connection) -> Iterator[int]:
        for _ in range(self._slices):
            runs = retention.next_deleted(connection, self._deleted, self._size)
            if not runs:
                self._deleted = FIRST  # some of these runs may not have ended yet
                return
            yield from retention.forget_deleted(connection, runs, self._size)
            self._deleted = runs[-1]
        self._hurry()

    def _hurry(self) -> None:
        self._more = True
        self.rest = max(_MIN_REST, self.rest / 2)

    def _walk(
        self,
        reached: dict[K, datetime],
        key: K,
        next_slice: Callable[[datetime, int], Slice | None],
        delete: Callable[[datetime, datetime], Iterator[int]],
    ) -> Iterator[int]:
        delays: list[float] = []
        while len(delays) < self._slices:
            after = reached.get(key, START)
            found = next_slice(after, self._size)
            if found is None:
                return
            yield from delete(after, found.upto)
            reached[key] = found.upto
            if not found.full:
                return
            delays.append(found.late)
        self._more = True
        self.rest = rest_after(self.rest, delays[0], delays[-1])

    def _forget_runs(self, connection: Connection, kind: Kind, after: datetime, upto: datetime) -> Iterator[int]:
        gone = retention.forget_runs(connection, kind, after, upto)
        yield len(gone)
        yield from retention.delete_remains(connection, gone, self._size)

    def _forget_tasks(self, connection: Connection, walk: Walk, after: datetime, upto: datetime) -> Iterator[int]:
        runs = retention.orphaned_runs(connection, walk, after, upto)
        yield from retention.delete_remains(connection, runs, self._size)
        yield retention.forget_tasks(connection, walk, after, upto)


def rest_after(rest: float, delay_before: float, delay: float) -> float:
    """Return the pause factor for the next turn: smaller if rows expire faster than they are deleted."""
    if delay > _MAX_DELAY and delay >= delay_before:
        return max(_MIN_REST, rest / 2)
    return min(REST, rest + 1)
