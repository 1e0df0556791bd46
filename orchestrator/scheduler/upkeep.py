"""Rounds of upkeep: in a thread and on a connection of their own, beside the ticks of the leader.

A round is made of small steps, at rest for nine tenths of the time, and ends where this process no longer leads.
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
"""How often as long as a step took there is rest after it."""
_SHORTEST_REST = 0.01
"""In seconds."""
SLICE = 1_000
"""Rows that a step forgets."""


class Rounds:
    """Makes a round of `steps` whenever this process leads, and the last round is `every` seconds ago.

    A step yields how long to rest at least. Where a round is given up in the middle, `start_over` is called.
    """

    def __init__(
        self,
        what: str,
        engine: Engine,
        leading: threading.Event,
        steps: Callable[[Connection], Iterator[float]],
        *,
        every: float,
        rest: Callable[[], float] = lambda: REST,
        start_over: Callable[[], None] = lambda: None,
    ) -> None:
        """`rest` says how often as long as a step took there is rest after it."""
        self._what = what
        self._engine = engine  # in autocommit mode
        self._leading = leading
        self._steps = steps
        self._every = every
        self._rest = rest
        self._start_over = start_over

    def start(self) -> None:
        """Begin to wait for leadership."""
        threading.Thread(target=self._run, name=self._what, daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._leading.wait()
            try:
                with self._engine.connect() as connection:
                    self._make_round(connection, pause)
            except (exc.SQLAlchemyError, Unavailable) as error:
                log.warning("upkeep.postponed work=%r error=%s", self._what, first_line(error))
                self._start_over()
            pause.wait(self._every)

    def _make_round(self, connection: Connection, pause: threading.Event) -> None:
        began = time.monotonic()
        for seconds in self._steps(connection):
            pause.wait(seconds or max(_SHORTEST_REST, self._rest() * (time.monotonic() - began)))
            if not self._leading.is_set():
                self._start_over()
                return
            began = time.monotonic()


# -- collect stored payloads that no row names, where the leader has a payload store.
#
# It works in small rounds, like retention. It only deletes what no row names, so a deposed leader that continues for a
# while does no harm.

_COLLECT_EVERY = 3_600.0
"""Seconds from the end of one round to the next."""
_SETTLED = 60.0
"""Seconds after which a transaction that was open has ended, or the server has ended it."""


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
            Rounds("collecting payloads", self._engine, self._leading, self.steps, every=_COLLECT_EVERY).start()

    def steps(self, connection: Connection) -> Iterator[float]:
        """Collect once; yields after every step how long to rest at least."""
        store = store_of(self._settings)
        if store is None:
            return
        if self._settings.shards == 1 and shards.are_there(connection) and len(shards.list_shards(connection)) > 1:
            log.warning("payload.not_collected: the database has several shards, and setting shards is 1")
            return
        while payloads.prune(connection, SLICE) > 0:
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


# -- store what tasks said: from one stream in Redis into a table that nothing else reads.
#
# The leader does this in a thread and on a connection of its own, beside its ticks, in batches. Lines stay in the
# stream until they are stored. If the process dies in between, they are stored once more, and the table keeps each
# chunk once; so nothing happens either if a deposed leader goes on for a while.

_MOST = 100
"""Entries that are stored at once, each of some 64 kB at most."""
_WAIT = 1.0
"""Seconds that a look waits for the first line."""
_PAUSE = 0.1
"""Seconds between two batches: short enough to follow a log, long enough to spare Postgres."""
_PUT_OFF = 1.0


class LogKeeping:
    """Stores lines, while this process leads."""

    def __init__(
        self, engine: Engine, redis: Redis, keys: Keys, leading: threading.Event, shared: Redis | None = None
    ) -> None:
        """`shared` has the keys of all shards, if that is another server."""
        self._engine = engine  # in autocommit mode
        self._redis = redis  # nobody else waits on it
        self._shared = shared or redis
        self._keys = keys
        self._leading = leading

    def start(self) -> None:
        """Begin to wait for leadership."""
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        is_put_off = False
        while True:
            self._leading.wait()
            try:
                stored = self.store(_WAIT)
                is_put_off = False
            except (exc.SQLAlchemyError, *journal.LOSSES) as error:
                if not is_put_off:
                    log.warning("upkeep.postponed work=%r error=%s", "task logs", first_line(error))
                is_put_off = True
                pause.wait(_PUT_OFF)
                continue
            if stored:
                pause.wait(_PAUSE)

    def store(self, wait: float = 0.0) -> int:
        """Store what waits, up to one batch of it; wait so many seconds for the first. Return how many chunks."""
        waiting = journal.waiting_lines(self._redis, self._keys, _MOST, wait)
        if not waiting.entries:
            return 0
        self._insert(waiting)
        journal.drop_lines(self._redis, self._keys, waiting, self._shared)
        return len(waiting.chunks)

    def _insert(self, waiting: Waiting) -> None:
        if not waiting.chunks:
            return
        new = [
            NewChunk(one.task, one.attempt, one.part, one.run, one.step.replace("\0", ""), one.lines)
            for one in waiting.chunks
        ]
        with self._engine.connect() as connection:
            logs.insert(connection, new)


# -- keep the table of open tasks clean while it is busy.
#
# Every task leaves dead entries at the front of the index that claims read. Autovacuum looks once a minute by default;
# at ten thousand tasks a second the claims would by then read half a million of them. So the leader asks for a vacuum
# of this one small table by the number of tasks that ended, and never for more than a tenth of the time.
#
# Postgres plans by statistics that autovacuum takes once a minute at best. Where a statement of the leader took too
# long, and where a table has ten times the rows of its statistics or a tenth, new ones are taken. `tasks` fills and
# empties all day, so they come from a small sample: one of the default size costs as much as 2,500 tasks.

VACUUM = "VACUUM (TRUNCATE false, PARALLEL 0) orchestrator.tasks"
SAMPLE = "SET LOCAL default_statistics_target = 10"
"""A tenth of Postgres's default, and so of its cost: 3,000 rows. Autovacuum takes more of a busy table."""
_AFTER = 20_000
"""Tasks that ended since the last vacuum."""
_LOOKS_EVERY = 5.0
"""Seconds between two looks at statistics."""
_AT_LEAST = 1.0
"""Seconds between two of them."""


class Janitor:
    """Vacuums in a thread and on a connection of its own, which commits by itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ended = 0
        self._suspect: set[str] = set()
        """Tables whose statistics may be wrong."""
        self._due = threading.Event()
        self._due.set()  # whatever an earlier leader left behind

    def start(self) -> None:
        """Begin to wait for work."""
        threading.Thread(target=self._run, name="janitor", daemon=True).start()

    def note(self, ended: int) -> None:
        self._ended += ended
        if self._ended >= _AFTER:
            self._due.set()

    def analyse(self, statement: str) -> None:
        """Take new statistics of the tables of a statement, which took too long."""
        self._suspect = self._suspect | tables_of(statement)
        self._due.set()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            is_due = self._due.wait(_LOOKS_EVERY)
            self._due.clear()
            self._ended, suspect, self._suspect = 0, self._suspect, set()
            began = time.monotonic()
            try:
                with self._engine.connect() as connection:
                    for table in sorted(suspect.union(throughput.misleading(connection))):
                        log.debug("upkeep.analyzing table=%s", table)
                        connection.exec_driver_sql(f"{SAMPLE}; ANALYZE orchestrator.{table}")  # one transaction
                    if is_due:
                        connection.exec_driver_sql(VACUUM)
            except exc.SQLAlchemyError as error:
                log.debug("upkeep.postponed work=vacuum error=%s", error)
            pause.wait(max(_AT_LEAST, 9 * (time.monotonic() - began)))
