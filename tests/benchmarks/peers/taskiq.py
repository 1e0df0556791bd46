"""taskiq with Redis Streams as broker and Redis as result backend; it acknowledges a task after storing its result.

Clients poll for results: every millisecond here, every 200 ms by default.
"""

from __future__ import annotations

from typing import Any

from redis import Redis
from taskiq.serializers import ORJSONSerializer
from taskiq_pipelines import Pipeline, PipelineMiddleware
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from tests.benchmarks.peers.queue import AsyncQueue, effect, expect, redis_url, settle

BROKER, RESULTS = 1, 2

results: Any = RedisAsyncResultBackend(redis_url(RESULTS), serializer=ORJSONSerializer())
broker = (
    RedisStreamBroker(redis_url(BROKER), xread_count=100)
    .with_result_backend(results)
    .with_serializer(ORJSONSerializer())
    .with_middlewares(PipelineMiddleware())
)


@broker.task
async def noop() -> int:
    return effect()


class TaskiqQueue(AsyncQueue):
    """Two processes with 100 concurrent tasks each."""

    packages = ("taskiq", "taskiq-redis", "taskiq-pipelines", "redis", "hiredis")

    async def connect(self) -> None:
        self._broker, self._results = Redis.from_url(redis_url(BROKER)), Redis.from_url(redis_url(RESULTS))
        await broker.startup()

    async def asend(self) -> Any:
        return await noop.kiq()

    async def await_end(self, handle: Any) -> None:
        expect("result", (await handle.wait_result(check_interval=0.001, timeout=300)).return_value, 1)

    def ended(self) -> int:
        return int(self._results.dbsize())  # one key per result, and no other keys

    def check(self, total: int) -> None:
        super().check(total)
        settle("tasks not acknowledged", lambda: self._broker.xpending("taskiq", "taskiq")["pending"], 0)

    def run_chain(self, count: int) -> None:
        chain: Any = Pipeline(broker, noop)
        for _ in range(count - 1):
            chain = chain.call_after(noop)

        async def run() -> None:
            await self.await_end(await chain.kiq())

        self.run(run())


queue = TaskiqQueue()
