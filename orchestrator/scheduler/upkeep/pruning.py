"""Forget what ended long ago, as the settings and the queues say, and runs that somebody has deleted.

The leader does this in rounds beside its ticks, a thousand rows at a time. It only ever deletes what has ended, and
each statement stands for itself, so that nothing happens if a deposed leader forgets another slice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import Connection, Engine

from orchestrator.scheduler.upkeep.rounds import Rounds
from orchestrator.settings import Settings
from orchestrator.store import audit, logs, retention
from orchestrator.store.retention import BEGINNING, Kind, Walk

_SLICE = 1_000
_EVERY = 10.0
"""Seconds from the end of one round to the next."""


class Pruner:
    """Walks along what has ended, and remembers how far it came."""

    def __init__(self, engine: Engine, settings: Settings, leading: threading.Event, *, size: int = _SLICE) -> None:
        self._engine = engine  # in autocommit mode
        self._settings = settings
        self._leading = leading
        self._size = size
        self._tasks: dict[Walk, datetime] = {}
        self._runs: dict[Kind, datetime] = {}

    def start(self) -> None:
        """Begin to wait for leadership."""
        Rounds("pruning", self._engine, self._leading, self._steps, every=_EVERY, start_over=self._start_over).start()

    def _steps(self, connection: Connection) -> Iterator[float]:
        return (0.0 for _ in self.slices(connection))

    def _start_over(self) -> None:
        """Walk from the beginning next time: something may have been left half done."""
        self._tasks.clear()
        self._runs.clear()

    def slices(self, connection: Connection) -> Iterator[int]:
        """Forget all that is old enough; yields after every slice how many rows it had."""
        retention.prepare(connection)
        for table in retention.EXPIRING:
            while (forgotten := retention.forget_expired(connection, table, self._size)) > 0:
                yield forgotten
        yield from retention.forget_deleted(connection, self._size)
        settings = self._settings
        if settings.retention_audit > 0:
            while (forgotten := audit.prune(connection, settings.retention_audit, self._size)) > 0:
                yield forgotten
        if settings.retention_logs > 0:
            while (forgotten := logs.prune(connection, settings.retention_logs, self._size)) > 0:
                yield forgotten
        kinds: tuple[tuple[Kind, float], ...] = (
            ("success", settings.retention_success),
            ("failed", settings.retention_failed),
        )
        for kind, seconds in kinds:
            if seconds > 0:
                yield from self._forget_runs(connection, kind, seconds)
        walks = retention.walks(connection, settings.retention_success, settings.retention_failed)
        self._tasks = {walk: self._tasks.get(walk, BEGINNING) for walk in walks}
        for walk in walks:
            yield from self._forget_tasks(connection, walk)

    def _forget_runs(self, connection: Connection, kind: Kind, seconds: float) -> Iterator[int]:
        more = True
        while more:
            after = self._runs.get(kind, BEGINNING)
            found = retention.next_runs(connection, seconds, after, self._size)
            if found is None:
                return
            gone = retention.forget_runs(connection, kind, after, found.upto)
            yield len(gone)
            yield from retention.forget_rest(connection, gone, self._size)
            self._runs[kind] = found.upto
            more = found.full

    def _forget_tasks(self, connection: Connection, walk: Walk) -> Iterator[int]:
        more = True
        while more:
            after = self._tasks[walk]
            found = retention.next_tasks(connection, walk, after, self._size)
            if found is None:
                return
            left = retention.left_runs(connection, walk, after, found.upto)
            yield from retention.forget_rest(connection, left, self._size)
            yield retention.forget_tasks(connection, walk, after, found.upto)
            self._tasks[walk] = found.upto
            more = found.full
