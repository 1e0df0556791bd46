"""PGQueuer on asyncpg and uvloop. It stores no results: the success of a task is a row in its log.

A worker writes its log in batches or every 100 ms, so that a single task takes long.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pgqueuer
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.core.completion import CompletionWatcher
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from tests.benchmarks.peers.queue import AsyncQueue, effect, expect

DSN = os.environ["BENCH_DATABASE_URL"]
BATCH = 1_000
"""The fastest batch size of 10, 50, 100, 250, 500 and 1,000."""


@asynccontextmanager
async def worker() -> AsyncIterator[PgQueuer]:
    connection = await asyncpg.connect(DSN)
    manager = PgQueuer.from_asyncpg_connection(connection)

    @manager.entrypoint("noop")
    async def noop(job: Job) -> None:
        del job
        effect()

    yield manager
    await connection.close()


class PgQueuerQueue(AsyncQueue):
    """Two processes with one connection each."""

    packages = ("pgqueuer", "asyncpg", "uvloop")

    async def connect(self) -> None:
        self._connection = await asyncpg.connect(DSN)
        self._queries = Queries(AsyncpgDriver(self._connection))
        await self._queries.install()
        listening = AsyncpgDriver(await asyncpg.connect(DSN))
        self._watcher = CompletionWatcher(listening, queries=Queries(listening), debounce=timedelta(milliseconds=1))
        await self._watcher.__aenter__()

    async def asend(self) -> Any:
        return (await self._queries.enqueue("noop", None))[0]

    def enqueue_bulk(self, count: int) -> None:
        self.last = self.run(self._queries.enqueue(["noop"] * count, [None] * count, [0] * count))[-1]

    async def await_end(self, handle: Any) -> None:
        expect("status", await asyncio.wait_for(self._watcher.wait_for(handle), 300), "successful")

    def ended(self) -> int:
        return self._number("SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'")

    def check(self, total: int) -> None:
        expect("tasks left in the queue", self._number("SELECT count(*) FROM pgqueuer"), 0)
        expect("successes", self.ended(), total)
        expect(
            "tasks that succeeded",
            self._number("SELECT count(DISTINCT job_id) FROM pgqueuer_log WHERE status = 'successful'"),
            total,
        )

    def _number(self, query: str) -> int:
        return int(self.run(self._connection.fetchval(query)))


queue = PgQueuerQueue()

if __name__ == "__main__":  # a worker; `pgq run` is equivalent, but its version 1.6.0 fails on its own --log-level
    uvloop.run(pgqueuer.run(worker, batch_size=BATCH))
