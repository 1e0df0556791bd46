"""arq. Worker and client poll Redis: every 5 ms and every millisecond here, every 500 ms by default."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import run_worker
from redis import Redis

from tests.benchmarks.peers.queue import AsyncQueue, effect, expect, redis_url, settle


async def noop(context: dict[str, Any]) -> int:
    del context
    return effect()


class WorkerSettings:
    """The settings of a worker."""

    functions = [noop]
    redis_settings = RedisSettings.from_dsn(redis_url(1))
    max_jobs = 50
    poll_delay = 0.005
    log_results = False


class ArqQueue(AsyncQueue):
    """Two processes with 50 concurrent tasks each."""

    packages = ("arq", "redis", "hiredis", "uvloop")

    async def connect(self) -> None:
        self._redis = Redis.from_url(redis_url(1))
        self._pool = await create_pool(WorkerSettings.redis_settings)
        self._sent = 0

    async def asend(self) -> Any:
        self._sent += 1
        return await self._pool.enqueue_job("noop")

    async def await_end(self, handle: Any) -> None:
        expect("result", await handle.result(300, poll_delay=0.001), 1)

    def ended(self) -> int:
        return self._sent - int(self._redis.zcard("arq:queue"))  # a task leaves the queue when its result is stored

    def check(self, total: int) -> None:
        super().check(total)
        settle("results", lambda: len(self._redis.keys("arq:result:*")), total)


queue = ArqQueue()

if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run_worker(WorkerSettings)
