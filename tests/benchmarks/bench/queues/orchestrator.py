"""Ours, through its public API; SQL only to check what it did."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Engine, text

import orchestrator.sdk.backend  # noqa: F401  # which the first call would load while it is measured
from orchestrator import Orchestrator, WorkflowContext, chain, chord, group
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.store import database
from tests.benchmarks.bench.queues.base import expect

app = Orchestrator()


@app.task
def noop() -> int:
    """Do nothing."""
    return 1


@app.task
def collect(results: list[int]) -> int:
    """Count what the tasks of a chord have returned."""
    return len(results)


@app.task(concurrency=1_000, concurrency_key=lambda key: key)
def keyed(key: int) -> int:
    """Do nothing for somebody."""
    del key
    return 1


@app.workflow
async def sequence(ctx: WorkflowContext, steps: int) -> int:
    """Do nothing, one step after another."""
    del ctx
    return sum([await noop.schedule() for _ in range(steps)])


class OrchestratorQueue:
    """Postgres and Redis, a scheduler, a worker of two processes, all with default settings."""

    packages = ("durable-orchestrator", "redis", "hiredis", "psycopg2-binary", "SQLAlchemy", "msgspec")
    _engine: Engine
    _last: Handle[int]
    _began: datetime
    """What ended before that is none of our business."""

    def prepare(self) -> None:
        url = app.settings.require_database()
        database.upgrade(url)
        self._engine = database.engine_for(url, autocommit=True, name="benchmark")
        with self._engine.connect() as connection:
            self._began = connection.execute(text("SELECT now()")).scalar_one()

    def ready(self) -> bool:
        return bool(self._number("SELECT count(*) FROM orchestrator.leases WHERE expires_at > now()"))

    def enqueue_bulk(self, count: int) -> None:
        self._last = app.enqueue_many(noop, [()] * count)[-1]

    def enqueue_singly(self, count: int) -> None:
        for _ in range(count):
            noop.enqueue()

    def enqueue_keyed(self, count: int, keys: int, *, together: bool) -> None:
        """Enqueue tasks with so many keys (0 for none): by turns, or all of a key together."""
        if keys:
            numbers = range(count)
            found = [(number * keys // count if together else number % keys,) for number in numbers]
            self._last = app.enqueue_many(keyed, found)[-1]
        else:
            self.enqueue_bulk(count)

    def enqueue_later(self, count: int, seconds: float) -> None:
        """Enqueue tasks that are due in a while."""
        app.enqueue_many(noop.options(delay=seconds), [()] * count)

    def purge(self) -> None:
        """Cancel all that waits, and wait until that is done."""
        app.queue("default").purge()
        app.queue("default").drain(600)

    def run_steps(self, runs: int, steps: int) -> None:
        """Run workflows as code at once, and check what they return."""
        handles = [sequence.start(steps) for _ in range(runs)]
        expect("steps", {handle.result(300) for handle in handles}, {steps})

    def run_chain(self, count: int) -> None:
        expect("result", chain([noop.si()] * count).start().result(300), 1)

    def run_group(self, count: int) -> None:
        expect("results", group([noop.si()] * count).start().result(300), [1] * count)

    def run_chord(self, count: int) -> None:
        expect("result", chord([noop.si()] * count, collect.s()).start().result(300), count)

    def wait_for_last(self) -> None:
        self._last.result(300)

    def ended(self) -> int:
        return self._number("SELECT count(*) FROM orchestrator.ended_tasks WHERE ended_at >= :began")

    def span(self) -> float:
        """Return the seconds from the first end to the last, by the clock that stamps them."""
        with self._engine.connect() as connection:
            query = text("SELECT extract(epoch FROM max(ended_at) - min(ended_at)) FROM orchestrator.ended_tasks")
            return float(connection.execute(query).scalar_one())

    def check(self, total: int) -> None:
        expect("open tasks", self._number("SELECT count(*) FROM orchestrator.tasks"), 0)
        with self._engine.connect() as connection:
            grouped = connection.execute(
                text(
                    "SELECT status, attempt, result, count(*), count(DISTINCT id) FROM orchestrator.ended_tasks"
                    " WHERE ended_at >= :began GROUP BY status, attempt, result"
                ),
                {"began": self._began},
            ).all()
        found = [(status, attempt, bytes(result or b""), rows, ids) for status, attempt, result, rows, ids in grouped]
        expect("ended tasks by status, attempt, result", found, [("success", 1, b"\x01", total, total)])

    def round_trip(self) -> None:
        noop.enqueue().result(60)

    def send(self) -> Handle[int]:
        """Enqueue one task."""
        return noop.enqueue()

    def _number(self, query: str) -> int:
        with self._engine.connect() as connection:
            parameters = {"began": self._began} if ":began" in query else {}
            return int(connection.execute(text(query), parameters).scalar_one())


queue = OrchestratorQueue()
