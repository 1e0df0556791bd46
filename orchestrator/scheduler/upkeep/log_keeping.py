"""Store what tasks said: from one stream in Redis into a table that nothing else reads.

The leader does this in a thread and on a connection of its own, beside its ticks, in batches. Lines stay in the stream
until they are stored. If the process dies in between, they are stored once more, and the table keeps each chunk once;
so nothing happens either if a deposed leader goes on for a while.
"""

from __future__ import annotations

import threading

from redis import Redis
from sqlalchemy import Engine, exc

from orchestrator.store import logs
from orchestrator.store.logs import NewChunk
from orchestrator.telemetry import first_line, get_logger
from orchestrator.transport import journal
from orchestrator.transport.journal import Waiting
from orchestrator.transport.keys import Keys

log = get_logger("scheduler")

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
