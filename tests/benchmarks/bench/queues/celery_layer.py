"""Ours by Celery's API: the same servers and processes, called by `delay`, `get`, `chain`, `group` and `chord`."""

from __future__ import annotations

from typing import Any, NamedTuple

from orchestrator.compat.celery import Celery, chain, chord, group
from tests.benchmarks.bench.queues.base import expect
from tests.benchmarks.bench.queues.orchestrator import OrchestratorQueue

app = Celery("bench")


@app.task
def noop() -> int:
    """Do nothing."""
    return 1


@app.task
def collect(results: list[int]) -> int:
    """Count what the tasks of a chord have returned."""
    return len(results)


class Waiting(NamedTuple):
    """A result that is waited for as the harness does."""

    found: Any

    def result(self, timeout: float) -> Any:
        """Wait for the result."""
        return self.found.get(timeout)


class LayerQueue(OrchestratorQueue):
    """A program of Celery has no bulk enqueue of its own: it calls `delay` for each task."""

    _last: Any

    def enqueue_bulk(self, count: int) -> None:
        for _ in range(count):
            self._last = noop.delay()

    enqueue_singly = enqueue_bulk

    def run_chain(self, count: int) -> None:
        expect("result", chain([noop.si()] * count).delay().get(300), 1)

    def run_group(self, count: int) -> None:
        expect("results", group([noop.si()] * count).delay().get(300), [1] * count)

    def run_chord(self, count: int) -> None:
        expect("result", chord([noop.si()] * count, collect.s()).delay().get(300), count)

    def wait_for_last(self) -> None:
        self._last.get(300)

    def round_trip(self) -> None:
        noop.delay().get(60)

    def send(self) -> Any:
        """Enqueue one task."""
        return Waiting(noop.delay())


queue = LayerQueue()
