"""The protocol between the client process and each queue. Only the standard library: all contestants import it."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WAITERS = 32
"""Threads that enqueue and wait for results under load."""
AT_ONCE = 100
"""Concurrent calls of an asynchronous client in a bulk enqueue without a bulk API."""


class Queue:
    """A contestant, as its client uses it. Its task calls `effect`.

    Optional methods are `run_chain`, `run_chord`, `run_steps` and `run_fibonacci`: each takes the number of tasks and
    returns when it has checked the result.
    """

    packages: tuple[str, ...]
    """Packages whose versions the report shows; the contestant's own package is first."""
    last: Any
    """The last task of `enqueue_bulk`."""

    def prepare(self) -> None:
        """Create the schema, and open the connections."""

    def ready(self) -> bool:
        """Return whether all processes except the workers are ready."""
        return True

    def send(self) -> Any:
        """Enqueue one task durably; return a handle."""
        raise NotImplementedError

    def wait(self, handle: Any) -> None:
        """Wait for the result of a task."""
        raise NotImplementedError

    def ended(self) -> int:
        """Return how many tasks have a recorded success."""
        raise NotImplementedError

    def check(self, total: int) -> None:
        """Raise an error unless exactly `total` tasks were enqueued, all succeeded once, and none is left."""
        settle("recorded successes", self.ended, total)

    def enqueue_bulk(self, count: int) -> None:
        """Enqueue many tasks by the fastest way of the queue's API."""
        for _ in range(count):
            self.last = self.send()

    def enqueue_singly(self, count: int) -> None:
        for _ in range(count):
            self.send()

    def wait_for_last(self) -> None:
        """Wait for the last task of `enqueue_bulk`, without polling if the queue supports it."""
        self.wait(self.last)

    def round_trip(self) -> None:
        self.wait(self.send())

    def latencies_at(self, rate: float, seconds: float) -> list[float]:
        """Call at a steady rate, regardless of delays; return the seconds from each call's due time to its result."""
        with ThreadPoolExecutor(WAITERS) as threads:
            began = time.perf_counter()
            futures = []
            for number in range(int(rate * seconds)):
                due = began + number / rate
                time.sleep(max(0.0, due - time.perf_counter()))
                futures.append(threads.submit(self._latency, due))
            return [future.result() for future in futures]

    def _latency(self, due: float) -> float:
        self.round_trip()
        return time.perf_counter() - due


class AsyncQueue(Queue):
    """A queue with an asynchronous client, on uvloop."""

    def prepare(self) -> None:
        self._runner = asyncio.Runner(loop_factory=importlib.import_module("uvloop").new_event_loop)
        self.run(self.connect())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    async def connect(self) -> None:
        """Create the schema, and open the connections."""
        raise NotImplementedError

    async def asend(self) -> Any:
        """Enqueue one task; return a handle."""
        raise NotImplementedError

    async def await_end(self, handle: Any) -> None:
        """Wait for the result of a task."""
        raise NotImplementedError

    def enqueue_bulk(self, count: int) -> None:
        async def enqueue() -> None:
            for first in range(0, count, AT_ONCE):
                calls = (self.asend() for _ in range(min(AT_ONCE, count - first)))
                self.last = (await asyncio.gather(*calls))[-1]

        self.run(enqueue())

    def enqueue_singly(self, count: int) -> None:
        async def enqueue() -> None:
            for _ in range(count):
                await self.asend()

        self.run(enqueue())

    def wait(self, handle: Any) -> None:
        self.run(self.await_end(handle))

    async def _call(self) -> None:
        await self.await_end(await self.asend())

    def round_trip(self) -> None:
        self.run(self._call())

    def latencies_at(self, rate: float, seconds: float) -> list[float]:
        async def latency(due: float) -> float:
            await self._call()
            return time.perf_counter() - due

        async def load() -> list[float]:
            began = time.perf_counter()
            calls = []
            for number in range(int(rate * seconds)):
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                calls.append(asyncio.ensure_future(latency(due)))
            return await asyncio.gather(*calls)

        return list(self.run(load()))


_EFFECTS = os.environ.get("BENCH_EFFECTS", os.devnull)
_effects = os.open(_EFFECTS, os.O_APPEND | os.O_CREAT | os.O_WRONLY)


def effect() -> int:
    """Record an execution; return 1, the result of every task."""
    return os.write(_effects, b".")


def effects() -> int:
    """Return the number of executions in all processes."""
    return Path(_EFFECTS).stat().st_size


def fibonacci(number: int) -> int:
    """Compute a Fibonacci number recursively, as in Windmill's published benchmark."""
    effect()
    return _fibonacci(number)


def _fibonacci(number: int) -> int:
    return number if number < 2 else _fibonacci(number - 1) + _fibonacci(number - 2)


def redis_url(database: int) -> str:
    """Return the URL of a numbered Redis database."""
    url = os.environ["BENCH_REDIS_URL"]
    if url.startswith("unix:"):
        return f"{url}?db={database}"
    return f"{url.rpartition('/')[0]}/{database}"


def expect(description: str, found: object, expected: object) -> None:
    """Raise an error unless the values are equal."""
    if found != expected:
        raise AssertionError(f"{description}: expected {expected}, found {found}")


def settle(description: str, ask: Callable[[], object], expected: object, timeout: float = 5.0) -> None:
    """Raise an error unless the values become equal soon: some queues acknowledge a task after storing its result."""
    deadline = time.monotonic() + timeout
    while ask() != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    expect(description, ask(), expected)
