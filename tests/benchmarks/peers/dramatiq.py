"""Dramatiq with Redis as broker and result backend, with only the required middleware."""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import GroupCallbacks, Pipelines, Retries
from dramatiq.rate_limits.backends import RedisBackend as Counters
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from redis import Redis

from tests.benchmarks.peers.queue import Queue, effect, expect, redis_url, settle

BROKER, RESULTS, COUNTERS = 3, 4, 7

results = RedisBackend(client=Redis.from_url(redis_url(RESULTS), socket_timeout=None))  # used with blocking calls
counters = Counters(client=Redis.from_url(redis_url(COUNTERS)))
middleware = [Pipelines(), GroupCallbacks(counters), Retries(), Results(backend=results)]
broker = RedisBroker(url=redis_url(BROKER), middleware=middleware)
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def noop() -> int:
    return effect()


@dramatiq.actor(store_results=True)
def collect() -> int:
    """End a chord; Dramatiq passes no results to it."""
    return 1


class DramatiqQueue(Queue):
    packages = ("dramatiq", "redis", "hiredis")

    def prepare(self) -> None:
        self._broker = Redis.from_url(redis_url(BROKER))
        self._results = Redis.from_url(redis_url(RESULTS))

    def send(self) -> Any:
        return noop.send()

    def wait(self, handle: Any) -> None:
        handle.get_result(backend=results, block=True, timeout=300_000)

    def ended(self) -> int:
        return int(self._results.dbsize())  # one key per result, and no other keys

    def check(self, total: int) -> None:
        settle("tasks left in the queue", lambda: self._broker.hlen("dramatiq:default.msgs"), 0)
        expect("dead letters", self._broker.zcard("dramatiq:default.XQ"), 0)
        expect("results", self.ended(), total)

    def run_chain(self, count: int) -> None:
        messages = [noop.message_with_options(pipe_ignore=True) for _ in range(count)]
        found = dramatiq.pipeline(messages).run().get_result(block=True, timeout=300_000)
        expect("result", found, 1)

    def run_chord(self, count: int) -> None:
        group, callback = dramatiq.group([noop.message() for _ in range(count)]), collect.message()
        group.add_completion_callback(callback)
        group.run()
        expect("result", callback.get_result(backend=results, block=True, timeout=300_000), 1)


queue = DramatiqQueue()
