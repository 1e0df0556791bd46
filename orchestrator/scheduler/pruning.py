"""Forgets what ended long ago, as the settings and the queues say, and runs that somebody has deleted.

The leader does this in rounds beside its ticks, a thousand rows at a time. It only ever deletes what has ended, and
each statement stands for itself, so that nothing happens if a deposed leader forgets another slice.

Each kind of row has its turn, however much there is of another. While more ends than is forgotten, the rests get
shorter.
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
from orchestrator.store.retention import BEGINNING, FIRST, Kind, Slice, Walk

_SLICES = 100
"""Slices of one kind of row in a turn."""
_EVERY = 10.0
"""Seconds from the end of one round to the next."""
_LATE = 60.0
"""Seconds that rows may stay longer than they are kept before their pruning hurries."""
_LEAST_REST = 1.0

K = TypeVar("K")


class Pruner:
    """Walks along what has ended, and remembers how far it came."""

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
        """A turn has ended before its rows did."""
        self.rest = REST
        """How often as long as a slice took there is rest after it."""

    def start(self) -> None:
        """Begin to wait for leadership."""
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
        """Walk from the beginning next time: something may have been left half done."""
        self._tasks.clear()
        self._runs.clear()
        self._deleted = FIRST

    def slices(self, connection: Connection) -> Iterator[int]:
        """Forget all that is old enough; yields after every slice how many rows it had."""
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
        self._tasks = {walk: self._tasks.get(walk, BEGINNING) for walk in walks}
        for walk in walks:
            next_tasks = partial(retention.next_tasks, connection, walk)
            yield from self._walk(self._tasks, walk, next_tasks, partial(self._forget_tasks, connection, walk))

    def _turn(self, forget: Callable[[], int]) -> Iterator[int]:
        for _ in range(self._slices):
            if (forgotten := forget()) == 0:
                return
            yield forgotten
        self._hurry()  # such rows are all too old already

    def _forget_deleted(self, connection: Connection) -> Iterator[int]:
        for _ in range(self._slices):
            runs = retention.next_deleted(connection, self._deleted, self._size)
            if not runs:
                self._deleted = FIRST  # some of them may not have ended yet
                return
            yield from retention.forget_deleted(connection, runs, self._size)
            self._deleted = runs[-1]
        self._hurry()

    def _hurry(self) -> None:
        self._more = True
        self.rest = max(_LEAST_REST, self.rest / 2)

    def _walk(
        self,
        reached: dict[K, datetime],
        key: K,
        next_slice: Callable[[datetime, int], Slice | None],
        forget: Callable[[datetime, datetime], Iterator[int]],
    ) -> Iterator[int]:
        late: list[float] = []
        while len(late) < self._slices:
            after = reached.get(key, BEGINNING)
            found = next_slice(after, self._size)
            if found is None:
                return
            yield from forget(after, found.upto)
            reached[key] = found.upto
            if not found.full:
                return
            late.append(found.late)
        self._more = True
        self.rest = rest_after(self.rest, late[0], late[-1])

    def _forget_runs(self, connection: Connection, kind: Kind, after: datetime, upto: datetime) -> Iterator[int]:
        gone = retention.forget_runs(connection, kind, after, upto)
        yield len(gone)
        yield from retention.forget_rest(connection, gone, self._size)

    def _forget_tasks(self, connection: Connection, walk: Walk, after: datetime, upto: datetime) -> Iterator[int]:
        left = retention.left_runs(connection, walk, after, upto)
        yield from retention.forget_rest(connection, left, self._size)
        yield retention.forget_tasks(connection, walk, after, upto)


def rest_after(rest: float, late_before: float, late: float) -> float:
    """Return how to rest in the next turn: less, if rows become too old faster than they are forgotten."""
    if late > _LATE and late >= late_before:
        return max(_LEAST_REST, rest / 2)
    return min(REST, rest + 1)
