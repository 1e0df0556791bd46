"""Upkeep work of the leader, in threads with connections of their own, beside its ticks.

A round consists of small steps, pauses for nine tenths of the time, and stops when this process no longer leads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from redis import Redis
from sqlalchemy import Connection, Engine, exc

from orchestrator.errors import Unavailable
from orchestrator.payloads.collector import Collector, collect_leftovers
from orchestrator.sdk.values.sealing import store_of
from orchestrator.settings import Settings
from orchestrator.store import logs, payloads, shards, throughput
from orchestrator.store.logs import NewChunk
from orchestrator.store.sql import tables_of
from orchestrator.telemetry import first_line, get_logger
from orchestrator.transport import journal
from orchestrator.transport.journal import Waiting
from orchestrator.transport.keys import Keys

log = get_logger("scheduler")

REST = 9.0
"""How many times the duration of a step the pause after it lasts."""
_MIN_REST = 0.01
"""The shortest pause after a step, in seconds."""
SLICE = 1_000
"""Rows deleted in one step."""


class Rounds:
    """Runs a round of `steps` every `every` seconds while this process leads.

    A step yields the seconds to pause at least. `start_over` is called when a round is abandoned.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        leading: threading.Event,
        steps: Callable[[Connection], Iterator[float]],
        *,
        every: float,
        rest: Callable[[], float] = lambda: REST,
        start_over: Callable[[], None] = lambda: None,
    ) -> None:
        """`rest` returns how many times the duration of a step the pause after it lasts."""
        self._name = name
        self._engine = engine  # in autocommit mode
        self._leading = leading
        self._steps = steps
        self._every = every
        self._rest = rest
        self._start_over = start_over

    def start(self) -> None:
        """Start the thread, which waits for leadership."""
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._leading.wait()
            try:
                with self._engine.connect() as connection:
                    self._make_round(connection, pause)
            except (exc.SQLAlchemyError, Unavailable) as error:
                log.warning("upkeep.postponed work=%r error=%s", self._name, first_line(error))
                self._start_over()
            pause.wait(self._every)

    def _make_round(self, connection: Connection, pause: threading.Event) -> None:
        began = time.monotonic()
        for seconds in self._steps(connection):
            pause.wait(seconds or max(_MIN_REST, self._rest() * (time.monotonic() - began)))
            if not self._leading.is_set():
                self._start_over()
                return
            began = time.monotonic()


# -- delete stored payloads that no row refers to, if the leader has a payload store
#
# This works in small rounds, like retention. It deletes only payloads without references, so a deposed leader that
# continues for a while does no harm.

_COLLECT_EVERY = 3_600.0
"""Seconds from the end of a round to the start of the next."""
_SETTLED = 60.0
"""Seconds after which an open transaction has ended or been ended by the server."""


class PayloadCollection:
    """Deletes payloads without references while this process leads."""

    def __init__(self, engine: Engine, settings: Settings, leading: threading.Event) -> None:
        self._engine = engine  # in autocommit mode
        self._settings = settings
        self._leading = leading
        self._settled = max(_SETTLED, 2 * settings.database_timeout)

    def start(self) -> None:
        """Start the thread, if there is a payload store."""
        if self._settings.payload_store:
            Rounds("collecting payloads", self._engine, self._leading, self.steps, every=_COLLECT_EVERY).start()

    def steps(self, connection: Connection) -> Iterator[float]:
        """Delete unreferenced payloads once. Yield the seconds to pause at least after every step."""
        store = store_of(self._settings)
        if store is None:
            return
        if self._settings.shards == 1 and shards.are_there(connection) and len(shards.list_shards(connection)) > 1:
            log.warning("payload.not_collected: the database has several shards, and setting shards is 1")
            return
        while payloads.prune(connection, SLICE) > 0:
            yield 0.0
        grace = self._settings.payload_grace
        executions = 0
        for number in collect_leftovers(store.store, grace, partial(payloads.open_tasks, connection)):
            executions += number
            yield 0.0
        if executions:
            log.info("execution.deleted executions=%d: they have ended", executions)
        collector = Collector(
            store.store,
            grace,
            partial(payloads.deleted_owners, connection),
            partial(payloads.attempts, connection),
        )
        for _ in collector.find_unreferenced():
            yield 0.0
        if not collector.has_unreferenced:
            return
        yield self._settled
        deleted = 0
        for number in collector.delete():
            deleted += number
            yield 0.0
        log.info("payload.deleted payloads=%d: nothing refers to them", deleted)


# -- move task logs from one Redis stream into a table that nothing else reads
#
# A thread with its own connection does this in batches. Entries stay in the stream until they are stored. If the
# process dies in between, they are stored again, and the table keeps each chunk once; so a deposed leader does no harm
# either.

_MAX_ENTRIES = 100
"""Entries stored in one batch, each up to about 64 kB."""
_BLOCK = 1.0
"""Seconds to block for the first entry."""
_PAUSE = 0.1
"""Seconds between two batches: short enough to follow a log, long enough to spare Postgres."""
_FAILURE_PAUSE = 1.0


class LogKeeping:
    """Stores task logs while this process leads."""

    def __init__(
        self, engine: Engine, redis: Redis, keys: Keys, leading: threading.Event, shared: Redis | None = None
    ) -> None:
        """`shared` is the Redis server with the keys of all shards, if it is a separate one."""
        self._engine = engine  # in autocommit mode
        self._redis = redis  # a connection of its own, because reads block
        self._shared = shared or redis
        self._keys = keys
        self._leading = leading

    def start(self) -> None:
        """Start the thread, which waits for leadership."""
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        is_failing = False
        while True:
            self._leading.wait()
            try:
                stored = self.store(_BLOCK)
                is_failing = False
            except (exc.SQLAlchemyError, *journal.LOSSES) as error:
                if not is_failing:
                    log.warning("upkeep.postponed work=%r error=%s", "task logs", first_line(error))
                is_failing = True
                pause.wait(_FAILURE_PAUSE)
                continue
            if stored:
                pause.wait(_PAUSE)

    def store(self, wait: float = 0.0) -> int:
        """Store one batch of waiting entries, blocking up to `wait` seconds for the first. Return how many chunks."""
        waiting = journal.waiting_lines(self._redis, self._keys, _MAX_ENTRIES, wait)
        if not waiting.entries:
            return 0
        self._insert(waiting)
        journal.drop_lines(self._redis, self._keys, waiting, self._shared)
        return len(waiting.chunks)

    def _insert(self, waiting: Waiting) -> None:
        if not waiting.chunks:
            return
        new = [
            NewChunk(chunk.task, chunk.attempt, chunk.part, chunk.run, chunk.step.replace("\0", ""), chunk.lines)
            for chunk in waiting.chunks
        ]
        with self._engine.connect() as connection:
            logs.insert(connection, new)


# -- vacuum and analyze the table of open tasks while it is busy
#
# Every task leaves dead entries at the front of the index that claims read. Autovacuum looks once a minute by default;
# at ten thousand tasks a second, claims would then read half a million of them. So the leader vacuums this one small
# table after a number of ended tasks, for at most a tenth of the time.
#
# Autovacuum refreshes the planner's statistics once a minute at best. The leader analyzes tables of a statement that
# took too long, and tables with ten times or a tenth of the rows in their statistics. `tasks` fills and empties all
# day, so a small sample serves: one of the default size costs as much as 2,500 tasks.

VACUUM = "VACUUM (TRUNCATE false, PARALLEL 0) orchestrator.tasks"
SAMPLE = "SET LOCAL default_statistics_target = 10"
"""A tenth of Postgres's default, at a tenth of the cost: 3,000 rows. Autovacuum samples more of a busy table."""
_VACUUM_AFTER = 20_000
"""Ended tasks after which the table is vacuumed."""
_STATISTICS_INTERVAL = 5.0
"""Seconds between two checks of statistics."""
_MIN_PAUSE = 1.0
"""Seconds between two rounds, at least."""


class Janitor:
    """Vacuums and analyzes tables in a thread, on an autocommit connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ended = 0
        self._stale_tables: set[str] = set()
        """Tables whose statistics may be wrong."""
        self._due = threading.Event()
        self._due.set()  # an earlier leader may have left dead rows

    def start(self) -> None:
        threading.Thread(target=self._run, name="janitor", daemon=True).start()

    def note(self, ended: int) -> None:
        self._ended += ended
        if self._ended >= _VACUUM_AFTER:
            self._due.set()

    def analyse(self, statement: str) -> None:
        """Analyze the tables of a statement that took too long."""
        self._stale_tables = self._stale_tables | tables_of(statement)
        self._due.set()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            is_due = self._due.wait(_STATISTICS_INTERVAL)
            self._due.clear()
            self._ended, stale_tables, self._stale_tables = 0, self._stale_tables, set()
            began = time.monotonic()
            try:
                with self._engine.connect() as connection:
                    for table in sorted(stale_tables.union(throughput.misleading(connection))):
                        log.debug("upkeep.analyzing table=%s", table)
                        connection.exec_driver_sql(f"{SAMPLE}; ANALYZE orchestrator.{table}")  # one transaction
                    if is_due:
                        connection.exec_driver_sql(VACUUM)
            except exc.SQLAlchemyError as error:
                log.debug("upkeep.postponed work=vacuum error=%s", error)
            pause.wait(max(_MIN_PAUSE, 9 * (time.monotonic() - began)))
