"""Collect stored payloads that no row names, where the leader has a payload store.

It works in small rounds, like retention. It only deletes what no row names, so a deposed leader that continues for a
while does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

from sqlalchemy import Connection, Engine

from orchestrator.payloads.collector import Collector, collect_leftovers
from orchestrator.scheduler.upkeep.rounds import Rounds
from orchestrator.sdk.values.sealing import store_of
from orchestrator.settings import Settings
from orchestrator.store import payloads, shards
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_EVERY = 3_600.0
"""Seconds from the end of one round to the next."""
_SETTLED = 60.0
"""Seconds after which a transaction that was open has ended, or the server has ended it."""
_SLICE = 1_000


class PayloadCollection:
    """Collects, while this process leads."""

    def __init__(self, engine: Engine, settings: Settings, leading: threading.Event) -> None:
        self._engine = engine  # in autocommit mode
        self._settings = settings
        self._leading = leading
        self._settled = max(_SETTLED, 2 * settings.database_timeout)

    def start(self) -> None:
        """Begin to wait for leadership, if there is a store."""
        if self._settings.payload_store:
            Rounds("collecting payloads", self._engine, self._leading, self.steps, every=_EVERY).start()

    def steps(self, connection: Connection) -> Iterator[float]:
        """Collect once; yields after every step how long to rest at least."""
        store = store_of(self._settings)
        if store is None:
            return
        if self._settings.shards == 1 and shards.are_there(connection) and len(shards.list_shards(connection)) > 1:
            log.warning("payload.not_collected: the database has several shards, and setting shards is 1")
            return
        while payloads.prune(connection, _SLICE) > 0:
            yield 0.0
        grace = self._settings.payload_grace
        left = 0
        for number in collect_leftovers(store.store, grace, partial(payloads.open_tasks, connection)):
            left += number
            yield 0.0
        if left:
            log.info("execution.deleted executions=%d: they have ended", left)
        collector = Collector(
            store.store,
            grace,
            partial(payloads.gone, connection),
            partial(payloads.attempts, connection),
        )
        for _ in collector.look():
            yield 0.0
        if not collector.has_found:
            return
        yield self._settled
        deleted = 0
        for number in collector.delete():
            deleted += number
            yield 0.0
        log.info("payload.deleted payloads=%d: nothing refers to them any more", deleted)
