"""Orchestrator through its public API; SQL is used only to check the results."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Engine, text

import orchestrator.sdk.backend  # noqa: F401  # imported here so that the first call does not import it during the measurement
from orchestrator import chain, chord
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.store import database
from tests.benchmarks.peers.orchestrator_app import app, collect, fibonaccis, noop, sequence
from tests.benchmarks.peers.queue import Queue, expect


class OrchestratorQueue(Queue):
    """Postgres and Redis, a scheduler, a worker of two processes, all with default settings."""

    packages = ("durable-orchestrator", "redis", "hiredis", "psycopg2-binary", "SQLAlchemy", "msgspec")
    _engine: Engine
    _began: datetime
    """Start of the pass; earlier tasks do not count."""

    def prepare(self) -> None:
        url = app.settings.require_database()
        database.upgrade(url)
        self._engine = database.engine_for(url, autocommit=True, name="benchmark")
        with self._engine.connect() as connection:
            self._began = connection.execute(text("SELECT now()")).scalar_one()

    def ready(self) -> bool:
        return bool(self._number("SELECT count(*) FROM orchestrator.leases WHERE expires_at > now()"))

    def enqueue_bulk(self, count: int) -> None:
        self.last = app.enqueue_many(noop, [()] * count)[-1]

    def run_steps(self, steps: int, runs: int = 1) -> None:
        """Run concurrent code workflows, and check their results."""
        handles = [sequence.start(steps) for _ in range(runs)]
        expect("steps", {handle.result(300) for handle in handles}, {steps})

    def run_chain(self, count: int) -> None:
        expect("result", chain([noop.si()] * count).start().result(300), 1)

    def run_chord(self, count: int) -> None:
        expect("result", chord([noop.si()] * count, collect.s()).start().result(300), count)

    def run_fibonacci(self, count: int) -> None:
        expect("result", fibonaccis.start(count).result(300), 55)

    def ended(self) -> int:
        return self._number("SELECT count(*) FROM orchestrator.ended_tasks WHERE ended_at >= :began")

    def check(self, total: int) -> None:
        expect("open tasks", self._number("SELECT count(*) FROM orchestrator.tasks"), 0)
        with self._engine.connect() as connection:
            grouped = connection.execute(
                text(
                    "SELECT status, result, count(*), count(DISTINCT id) FROM orchestrator.ended_tasks"
                    " WHERE ended_at >= :began GROUP BY status, result"
                ),
                {"began": self._began},
            ).all()
        # Any attempt may succeed: a worker without CPU returns unstarted tasks. `effects` counts the executions.
        found = [(status, bytes(result or b""), rows, ids) for status, result, rows, ids in grouped]
        expect("ended tasks by status and result", found, [("success", b"\x01", total, total)])

    def send(self) -> Handle[int]:
        return noop.enqueue()

    def wait(self, handle: Handle[int]) -> None:
        handle.result(300)

    def _number(self, query: str) -> int:
        with self._engine.connect() as connection:
            parameters = {"began": self._began} if ":began" in query else {}
            return int(connection.execute(text(query), parameters).scalar_one())


queue = OrchestratorQueue()
