"""Procrastinate on psycopg. It stores no results and cannot wait for a task: clients poll its status."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import psycopg
import uvloop
from procrastinate import App, PsycopgConnector

from tests.benchmarks.peers.queue import AsyncQueue, effect, expect

DSN = os.environ["BENCH_DATABASE_URL"]
CONCURRENCY = 5

app = App(connector=PsycopgConnector(conninfo=DSN, min_size=CONCURRENCY, max_size=CONCURRENCY))


@app.task(name="noop")
async def noop() -> int:
    return effect()


class ProcrastinateQueue(AsyncQueue):
    """Two processes with 5 concurrent tasks each."""

    packages = ("procrastinate", "psycopg", "uvloop")

    async def connect(self) -> None:
        await app.open_async()
        await app.schema_manager.apply_schema_async()
        self._connection = psycopg.connect(DSN, autocommit=True)

    async def asend(self) -> Any:
        return await noop.defer_async()

    def enqueue_bulk(self, count: int) -> None:
        self.last = self.run(noop.batch_defer_async(*[{}] * count))[-1]

    async def await_end(self, handle: Any) -> None:
        while (status := (await app.job_manager.get_job_status_async(handle)).value) in ("todo", "doing"):
            await asyncio.sleep(0.001)
        expect("status", status, "succeeded")

    def ended(self) -> int:
        return self._number("SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'")

    def check(self, total: int) -> None:
        super().check(total)
        expect("all tasks", self._number("SELECT count(*) FROM procrastinate_jobs"), total)

    def _number(self, query: str) -> int:
        [(number,)] = self._connection.execute(query).fetchall()
        return int(number)


queue = ProcrastinateQueue()


async def work() -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY, fetch_job_polling_interval=0.1, shutdown_graceful_timeout=1)


if __name__ == "__main__":
    logging.disable(logging.INFO)
    uvloop.run(work())
