"""Huey with Redis storage. Results are announced in a list, so that clients need not poll (`notify_result`)."""

from __future__ import annotations

from typing import Any

from huey import RedisHuey
from huey.api import chord
from redis import ConnectionPool

from tests.benchmarks.peers.queue import Queue, effect, expect, redis_url, settle

pool = ConnectionPool.from_url(redis_url(1), socket_timeout=None)  # used with blocking calls
huey = RedisHuey("bench", connection_pool=pool, notify_result=True)


@huey.task()
def noop() -> int:
    return effect()


@huey.task()
def after(previous: int) -> int:
    del previous
    return effect()


@huey.task()
def collect(results: list[int]) -> int:
    return len(results)


class HueyQueue(Queue):
    packages = ("huey", "redis", "hiredis")

    def send(self) -> Any:
        return noop()

    def wait(self, handle: Any) -> None:
        handle.get(blocking=True, timeout=300, preserve=True)

    def ended(self) -> int:
        return int(huey.result_count())

    def check(self, total: int) -> None:
        super().check(total)
        settle("tasks left in the queue", huey.pending_count, 0)

    def run_chain(self, count: int) -> None:
        chain = noop.s()
        for _ in range(count - 1):
            chain = chain.then(after)
        expect("result", list(huey.enqueue(chain))[-1].get(blocking=True, timeout=300), 1)

    def run_chord(self, count: int) -> None:
        handle = huey.enqueue(chord([noop.s() for _ in range(count)], collect.s()))
        expect("result", handle.get(blocking=True, timeout=300), count)


queue = HueyQueue()
