"""The client process: enqueues and measures, in the contestant's own environment.

It reads one JSON request a line from standard input, and answers with one line. Everything is timed in here, with one
clock, so that what the harness does costs nothing. Only the standard library, and the contestant's module.
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
    """What the harness can ask for; each method is a request, and what it returns is the answer."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def prepare(self) -> dict[str, str]:
        """Get ready to enqueue; return the versions.

        What was imported is no concern of the collector any more: one look at all of it takes 40 to 60 ms, in which the
        client stands still, and comes at some moment of the passes that the results kept so far decide.
        """
        self._queue.prepare()
        gc.collect()
        gc.freeze()
        return {package: importlib.metadata.version(package) for package in self._queue.packages}

    def wait_until_ready(self) -> None:
        """Wait for everything but the workers."""
        _poll(self._queue.ready)

    def enqueue_bulk(self, count: int) -> float:
        """Return the seconds that a bulk enqueue took."""
        return _timed(lambda: self._queue.enqueue_bulk(count))

    def enqueue_singly(self, count: int) -> float:
        """Return the seconds that enqueueing one by one took."""
        return _timed(lambda: self._queue.enqueue_singly(count))

    def run_steps(self, runs: int, steps: int) -> float:
        """Return the seconds that workflows as code took, so many at once, with so many steps each."""
        return _timed(lambda: cast(Any, self._queue).run_steps(steps, runs))

    def compose(self, kind: str, count: int, times: int, patience: float) -> float | None:
        """Return the seconds of a composition of so many tasks, the median of all but the first, which warms up.

        Slow ones run less often: no more begin once they took so many seconds together. Return None if the queue has no
        such composition.
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
        """Watch workers come up and clear a backlog: return tasks and seconds from the first visible end to the last.

        So the start of the processes is left out, for all contestants alike.
        """
        first = _poll(self._queue.ended)
        began = time.perf_counter()
        self._queue.wait_for_last()
        _poll(lambda: self._queue.ended() >= total)
        elapsed = time.perf_counter() - began
        self.check(total)
        return total - first, elapsed

    def run_through(self, count: int, total: int) -> float:
        """Enqueue in bulk while workers run: return the seconds from the start of that call to the last end."""
        began = time.perf_counter()
        self._queue.enqueue_bulk(count)
        self._queue.wait_for_last()
        _poll(lambda: self._queue.ended() >= total)
        elapsed = time.perf_counter() - began
        self.check(total)
        return elapsed

    def idle_latencies(self, count: int, patience: float = DEADLINE) -> list[float]:
        """Return the seconds from enqueue to result of tasks that have the system for themselves.

        After five that warm up, these are so many, or as many as fit into the time, but not fewer than 20.
        """
        for _ in range(5):
            self._queue.round_trip()
        latencies: list[float] = []
        deadline = time.perf_counter() + patience
        while len(latencies) < count and (len(latencies) < 20 or time.perf_counter() < deadline):
            time.sleep(random.uniform(0.002, 0.006))  # never in step with anything that ticks
            latencies.append(_timed(self._queue.round_trip))
        return latencies

    def load_latencies(self, rate: float, seconds: float) -> list[float]:
        """Return the seconds from when each task was due to its result, at a steady rate."""
        return self._queue.latencies_at(rate, seconds)

    def check(self, total: int) -> None:
        """Check that each of `total` tasks ended once with success, and ran once."""
        self._queue.check(total)
        expect("executions", effects(), total)


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _poll(function: Callable[[], int]) -> int:
    """Ask until the answer is not 0; rest ten times as long as the asking took, or 10 ms."""
    deadline = time.perf_counter() + DEADLINE
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        if answer := function():
            return answer
        time.sleep(max(0.01, 10 * (time.perf_counter() - began)))
    raise TimeoutError(f"nothing came of it in {DEADLINE:g} s")


def main(module: str) -> None:
    """Answer requests until standard input closes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not land among the answers
    client = Client(importlib.import_module(module).queue)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(client, name)(*arguments)}
        except Exception:  # noqa: BLE001
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
