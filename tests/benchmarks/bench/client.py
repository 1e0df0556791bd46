"""The client process: enqueues and measures, in the contestant's own environment.

It reads one JSON request per line from standard input, and writes one response line. All timing happens here with one
clock, so that the harness adds no cost. Uses only the standard library and the contestant's module.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from statistics import median
from typing import Any, cast

from tests.benchmarks.peers.queue import Queue, effects, expect

DEADLINE = 600.0
"""Seconds after which a pass has failed."""


class Client:
    """The requests of the harness: each method is a request, and its return value the response."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def prepare(self) -> dict[str, str]:
        """Get ready to enqueue; return the versions.

        Imported objects are excluded from garbage collection: a full collection takes 40 to 60 ms, and would stop
        the client at an arbitrary moment of a pass.
        """
        self._queue.prepare()
        gc.collect()
        gc.freeze()
        return {package: importlib.metadata.version(package) for package in self._queue.packages}

    def wait_until_ready(self) -> None:
        """Wait until all processes except the workers are ready."""
        _poll(self._queue.ready)

    def enqueue_bulk(self, count: int) -> float:
        """Return the duration of a bulk enqueue in seconds."""
        return _timed(lambda: self._queue.enqueue_bulk(count))

    def enqueue_singly(self, count: int) -> float:
        """Return the duration of single enqueues in seconds."""
        return _timed(lambda: self._queue.enqueue_singly(count))

    def run_steps(self, runs: int, steps: int) -> float:
        """Return the duration of `runs` concurrent code workflows with `steps` steps each, in seconds."""
        return _timed(lambda: cast(Any, self._queue).run_steps(steps, runs))

    def compose(self, kind: str, count: int, times: int, patience: float) -> float | None:
        """Return the median duration in seconds of a composition of so many tasks, without the first, which warms up.

        Slow compositions run less often: none starts after `patience` seconds in total. Return None if the queue has
        no such composition.
        """
        run = getattr(self._queue, f"run_{kind}", None)
        if run is None:
            return None
        before, taken = effects(), list[float]()
        while len(taken) <= times and sum(taken) < patience:
            taken.append(_timed(lambda: run(count)))
        expect(f"executions of the tasks of a {kind}", effects() - before, len(taken) * count)
        return median(taken[1:] or taken)

    def drain(self, total: int) -> tuple[int, float]:
        """Watch workers start and clear a backlog; return the tasks and seconds from the first visible end to the last.

        The start of the processes is thus excluded, for all contestants alike.
        """
        first = _poll(self._queue.ended)
        began = time.perf_counter()
        self._queue.wait_for_last()
        _poll(lambda: self._queue.ended() >= total)
        elapsed = time.perf_counter() - began
        self.check(total)
        return total - first, elapsed

    def run_through(self, count: int, total: int) -> float:
        """Enqueue in bulk while workers run; return the seconds from the start of the call to the last end."""
        began = time.perf_counter()
        self._queue.enqueue_bulk(count)
        self._queue.wait_for_last()
        _poll(lambda: self._queue.ended() >= total)
        elapsed = time.perf_counter() - began
        self.check(total)
        return elapsed

    def idle_latencies(self, count: int, patience: float = DEADLINE) -> list[float]:
        """Return the seconds from enqueue to result of single tasks on an idle system.

        After five warm-up tasks, measure `count` tasks, or as many as fit into the time, but at least 20.
        """
        for _ in range(5):
            self._queue.round_trip()
        latencies: list[float] = []
        deadline = time.perf_counter() + patience
        while len(latencies) < count and (len(latencies) < 20 or time.perf_counter() < deadline):
            time.sleep(random.uniform(0.002, 0.006))  # never in phase with periodic work
            latencies.append(_timed(self._queue.round_trip))
        return latencies

    def load_latencies(self, rate: float, seconds: float) -> list[float]:
        """Return the seconds from each task's due time to its result, at a steady rate."""
        return self._queue.latencies_at(rate, seconds)

    def check(self, total: int) -> None:
        """Check that each of `total` tasks ran once and succeeded."""
        self._queue.check(total)
        expect("executions", effects(), total)


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _poll(function: Callable[[], int]) -> int:
    """Poll until the result is not 0; sleep ten times as long as a poll took, at least 10 ms."""
    deadline = time.perf_counter() + DEADLINE
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        if response := function():
            return response
        time.sleep(max(0.01, 10 * (time.perf_counter() - began)))
    raise TimeoutError(f"nothing came of it in {DEADLINE:g} s")


def main(module: str) -> None:
    """Handle requests until standard input closes."""
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not appear among the responses
    client = Client(importlib.import_module(module).queue)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            response = {"value": getattr(client, name)(*arguments)}
        except Exception:  # noqa: BLE001
            response = {"error": traceback.format_exc()}
        print(json.dumps(response), file=responses, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
