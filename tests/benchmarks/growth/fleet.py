"""Many workers in one process: each sends heartbeats, reads its queues as a consumer, and reports success at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from orchestrator.domain.tasks.outcomes import Flush
from orchestrator.domain.tasks.task import Succeeded
from orchestrator.transport.codec import Heartbeat, decode_dispatches, encode, names_digest
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import GROUP, Keys, private_queue
from orchestrator.transport.worker import WorkerStreams
from tests.benchmarks.peers.orchestrator_app import noop
from tests.benchmarks.peers.queue import effect

_TTL = 60.0
_NO_TIMEOUTS: Any = {"socket_timeout": None, "socket_connect_timeout": None}
_BATCH = 100
"""Heartbeats per message, as of a parent with many processes."""


class Fleet:
    """Simulated workers by name, with the queues of each."""

    def __init__(self, workers: dict[str, Sequence[str]]) -> None:
        self._workers = workers
        self._keys = Keys()
        self._redis = connect(os.environ["ORCHESTRATOR_REDIS_URL"])
        self._streams = WorkerStreams(self._redis, self._keys)
        self._generation = ""

    async def run(self) -> None:
        """Send heartbeats and consume forever."""
        while not self._generation:
            self._generation = self._streams.generation() or ""
            await asyncio.sleep(0.05)
        pipeline = self._redis.pipeline(transaction=False)
        all_queues = {queue for queues in self._workers.values() for queue in queues} | {
            *map(private_queue, self._workers)
        }
        for queue in all_queues:
            pipeline.xgroup_create(self._keys.queue(self._generation, queue), GROUP, id="0", mkstream=True)
        pipeline.execute(raise_on_error=False)
        await asyncio.gather(self._beat(), *(self._consume(*worker) for worker in self._workers.items()))

    async def _beat(self) -> None:
        """Send every heartbeat once a second, spread over the second like those of independent workers."""
        started, number, names = time.time(), 0, list(workers_know())
        groups = [list(self._workers)[first : first + _BATCH] for first in range(0, len(self._workers), _BATCH)]
        while True:
            number += 1
            for group in groups:
                beats = [
                    Heartbeat(
                        worker,
                        "host",
                        1,
                        list(self._workers[worker]),
                        10,
                        names_digest(names),
                        self._generation,
                        started,
                        number=number,
                    )
                    for worker in group
                ]
                self._streams.beat(beats, names, _TTL)
                await asyncio.sleep(1.0 / len(groups))

    async def _consume(self, worker: str, queues: Sequence[str]) -> None:
        redis: Any = Redis.from_url(os.environ["ORCHESTRATOR_REDIS_URL"], single_connection_client=True, **_NO_TIMEOUTS)
        prefix = self._keys.queue(self._generation, "")
        streams = {prefix + queue: ">" for queue in (*queues, private_queue(worker))}
        while True:
            found = await redis.xreadgroup(GROUP, worker, streams, count=10, block=60_000)
            for stream, entries in found or ():
                tasks = [task for _, fields in entries for task in decode_dispatches(fields[b"d"])]
                reports = [Succeeded(task.id, task.attempt, 0.001, b"\x01") for task in tasks]
                done = {stream.decode().removeprefix(prefix): [entry.decode() for entry, _ in entries]}
                self._streams.flush(self._generation, encode(Flush(worker, list(reports))), done)
                for _ in tasks:
                    effect()


def workers_know() -> Sequence[str]:
    """Return the names of the tasks that all workers know."""
    return (noop.name,)


def served(workers: int, queues: int) -> dict[str, Sequence[str]]:
    """Distribute queues among workers; with more workers than queues, several workers serve one queue."""
    names = queue_names(queues)
    each = -(-queues // workers)
    return {
        f"host-{number}": names[number * each : (number + 1) * each] if queues >= workers else [names[number % queues]]
        for number in range(workers)
    }


def queue_names(queues: int) -> list[str]:
    return ["default"] if queues == 1 else [f"queue-{number}" for number in range(queues)]


if __name__ == "__main__":
    asyncio.run(Fleet(served(int(sys.argv[1]), int(sys.argv[2]))).run())
