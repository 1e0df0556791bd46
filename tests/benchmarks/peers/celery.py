"""Celery with Redis as broker and result backend, tuned for short tasks as its manual advises.

It acknowledges a task before running it, the default and the fastest mode: a worker that dies loses its tasks.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, chain, chord
from redis import Redis

from tests.benchmarks.peers import queue as base
from tests.benchmarks.peers.queue import Queue, effect, expect, redis_url

BROKER, RESULTS = 1, 2


def _url(number: int) -> str:
    return redis_url(number).replace("unix://", "redis+socket://").replace("?db=", "?virtual_host=")


app = Celery("bench", broker=_url(BROKER), backend=_url(RESULTS))
app.conf.update(
    worker_prefetch_multiplier=128,
    worker_disable_rate_limits=True,
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
    task_send_sent_event=False,
    task_track_started=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")
def noop() -> int:
    return effect()


@app.task(name="collect")
def collect(results: list[int]) -> int:
    return len(results)


@app.task(name="fibonacci")
def fibonacci(number: int) -> int:
    return base.fibonacci(number)


class CeleryQueue(Queue):
    packages = ("celery", "kombu", "redis", "hiredis")

    def prepare(self) -> None:
        self._broker = Redis.from_url(redis_url(BROKER))
        self._results = Redis.from_url(redis_url(RESULTS))
        self._kept: list[Any] = []

    def send(self) -> Any:
        return noop.delay()

    def wait(self, handle: Any) -> None:
        handle.get(timeout=60)

    def enqueue_bulk(self, count: int) -> None:
        # Kept until `check`, which is not timed: dropping a result costs a round trip to unsubscribe.
        with app.producer_or_acquire() as producer:
            self._kept = [noop.apply_async(producer=producer) for _ in range(count)]

    def enqueue_singly(self, count: int) -> None:
        self._kept = [noop.delay() for _ in range(count)]

    def wait_for_last(self) -> None:
        """Do nothing: polling `ended` is cheap, and avoids reading each result's message."""

    def ended(self) -> int:
        return int(self._results.dbsize())  # one key per result, and no other keys

    def check(self, total: int) -> None:
        if self._kept:
            self._kept[-1].get(timeout=10)  # reads all result messages, so that they do not pile up in Redis
        self._kept.clear()
        expect("tasks left in the queue", self._broker.llen("celery"), 0)
        expect("results", self.ended(), total)
        succeeded = sum('"SUCCESS"' in str(value) for value in self._results.mget(self._results.keys()))
        expect("results that say success", succeeded, total)

    def run_chain(self, count: int) -> None:
        expect("result", chain(*[noop.si()] * count)().get(timeout=300), 1)

    def run_chord(self, count: int) -> None:
        expect("result", chord([noop.si()] * count)(collect.s()).get(timeout=300), count)

    def run_fibonacci(self, count: int) -> None:
        expect("result", chain(*[fibonacci.si(10)] * count)().get(timeout=300), 55)


queue = CeleryQueue()
