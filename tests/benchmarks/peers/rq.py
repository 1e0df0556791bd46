"""RQ with its SimpleWorker, which runs tasks in its own process; the default forks per task, six times slower."""

from __future__ import annotations

from typing import Any

from redis import Redis
from rq import Queue as RqQueue
from rq import SimpleWorker

from tests.benchmarks.peers.queue import Queue, effect, expect, redis_url

connection = Redis.from_url(redis_url(1), socket_timeout=None)  # used with blocking calls
tasks = RqQueue(connection=connection)


def noop() -> int:
    return effect()


def collect() -> int:
    """End a chord; RQ passes no results to it."""
    return 1


class RqPeer(Queue):
    packages = ("rq", "redis", "hiredis")

    def send(self) -> Any:
        return tasks.enqueue(noop)

    def wait(self, handle: Any) -> None:
        expect("result", handle.latest_result(timeout=300).return_value, 1)

    def enqueue_bulk(self, count: int) -> None:
        self.last = tasks.enqueue_many([RqQueue.prepare_data(noop)] * count)[-1]

    def ended(self) -> int:
        return int(tasks.finished_job_registry.get_job_count(cleanup=False))

    def run_chain(self, count: int) -> None:
        job = None
        for _ in range(count):
            job = tasks.enqueue(noop, depends_on=job)
        self.wait(job)

    def run_chord(self, count: int) -> None:
        jobs = tasks.enqueue_many([RqQueue.prepare_data(noop)] * count)
        self.wait(tasks.enqueue(collect, depends_on=jobs))


queue = RqPeer()

if __name__ == "__main__":
    SimpleWorker([tasks], connection=connection, log_job_description=False).work(logging_level="WARNING")
