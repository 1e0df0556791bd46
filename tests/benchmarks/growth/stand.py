"""The system under test: a scheduler and a worker as users run them, with their use of resources."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text

from orchestrator.store import database
from tests.benchmarks.bench.programs import Program, Programs, memory, running
from tests.benchmarks.growth.tasks import app, noop
from tests.benchmarks.peers.contestants import OURS
from tests.benchmarks.peers.queue import effects
from tests.benchmarks.processes import _cpu

TIMEOUT = 900.0
"""Seconds after which a point has failed."""
_STATISTICS_DELAY = 1.3
"""Seconds until Postgres's processes have flushed their statistics."""
_COUNTERS = text("""
SELECT blks_hit + blks_read AS pages, tup_returned AS rows, xact_commit AS transactions,
       (SELECT pg_current_wal_insert_lsn() - '0/0')::bigint AS wal
  FROM pg_stat_database WHERE datname = current_database()
""")


class Stand:
    """A database with a leading scheduler. Axes start workers as needed."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        url = os.environ["BENCH_DATABASE_URL"]
        database.upgrade(url)
        self.engine = database.engine_for(url, autocommit=True, name="growth")
        self._programs_by_part: dict[str, Program] = {}
        self._start("leader", *OURS.scheduler)
        self.wait(lambda: self.sql("SELECT count(*) FROM orchestrator.leases WHERE expires_at > now()"))

    def work(self) -> None:
        """Start the worker if it does not run, and let it run some tasks, so that all is loaded and planned."""
        if "worker" in self._programs_by_part:
            return
        module = "tests.benchmarks.growth.tasks:app"
        self._start("worker", "-P", "-m", "orchestrator", "worker", "--app", module, "--processes", "2")
        before = effects()
        app.enqueue_many(noop, [()] * 1_000)
        self.wait(lambda: effects() - before == 1_000)

    def fleet(self, workers: int, queues: int) -> None:
        """Start a process that simulates many workers, which share the queues."""
        if "fleet" in self._programs_by_part:
            self._programs.stop(self._programs_by_part.pop("fleet"))
        self._start("fleet", "-P", "-m", "tests.benchmarks.growth.fleet", str(workers), str(queues))
        alive = "SELECT count(*) FROM orchestrator.workers WHERE state = 'live'"
        self.wait(lambda: self.sql(alive) == workers)

    def _start(self, part: str, *arguments: str) -> None:
        self._programs_by_part[part] = self._programs.start(part, [sys.executable, *arguments])

    def sql(self, statement: str, **parameters: Any) -> Any:
        """Execute a statement; return the first value, or None."""
        with self.engine.connect() as connection:
            result = connection.execute(text(statement), parameters)
            return result.scalar() if result.returns_rows else None

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true; sleep fifty times as long as a check takes."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            checked_at = time.monotonic()
            if condition():
                return
            self._programs.expect_alive()
            if (now := time.monotonic()) > deadline:
                raise TimeoutError(f"nothing came of it in {TIMEOUT:g} s")
            time.sleep(max(0.01, 50 * (now - checked_at)))

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """Yield a dictionary; fill it with the resources used by the block."""
        usage: dict[str, float] = {}
        time.sleep(_STATISTICS_DELAY)
        before = self._used()
        yield usage
        time.sleep(_STATISTICS_DELAY)
        usage |= {name: used - before[name] for name, used in self._used().items()}
        usage["memory"] = memory(self._programs_by_part["leader"])["leader"]

    def _used(self) -> dict[str, float]:
        with self.engine.connect() as connection:
            counters = connection.execute(_COUNTERS).mappings().one()
        servers = {"postgres": int(os.environ["GROWTH_POSTGRES"]), "redis": int(os.environ["GROWTH_REDIS"])}
        pids = servers | {part: program.process.pid for part, program in self._programs_by_part.items()}
        return {**counters, **{part: _cpu(pid) for part, pid in pids.items() if part != "fleet"}}


@contextmanager
def standing() -> Iterator[Stand]:
    """Yield a stand; stop all processes afterwards."""
    with running(Path.cwd() / "stand", os.environ) as programs:
        stand = Stand(programs)
        try:
            yield stand
        finally:
            app.close()
            stand.engine.dispose()
