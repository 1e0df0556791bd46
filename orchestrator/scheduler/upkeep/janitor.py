"""Keep the table of open tasks clean while it is busy.

Every task leaves dead entries at the front of the index that claims read. Autovacuum looks once a minute by default; at
ten thousand tasks a second the claims would by then read half a million of them. So the leader asks for a vacuum of
this one small table by the number of tasks that ended, and never for more than a tenth of the time.

Postgres plans by statistics that autovacuum takes once a minute at best. Where a statement of the leader took too long,
and where a table has ten times the rows of its statistics or a tenth, new ones are taken. `tasks` fills and empties all
day, so they come from a small sample: one of the default size costs as much as 2,500 tasks.
"""

from __future__ import annotations

import threading
import time

from sqlalchemy import Engine, exc

from orchestrator.store import throughput
from orchestrator.store.sql import tables_of
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

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
        """Tasks have ended."""
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
                        log.info("upkeep.analyzing table=%s", table)
                        connection.exec_driver_sql(f"{SAMPLE}; ANALYZE orchestrator.{table}")  # one transaction
                    if is_due:
                        connection.exec_driver_sql(VACUUM)
            except exc.SQLAlchemyError as error:
                log.debug("upkeep.postponed work=vacuum error=%s", error)
            pause.wait(max(_AT_LEAST, 9 * (time.monotonic() - began)))
