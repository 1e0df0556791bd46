"""Orchestrator through its Celery API (`delay`, `get`, `chain`, `chord`), with the same servers and processes."""

from __future__ import annotations

from typing import Any

from orchestrator.compat.celery import Celery, chain, chord
from tests.benchmarks.peers.orchestrator import OrchestratorQueue
from tests.benchmarks.peers.queue import Queue, effect, expect

app = Celery("bench")


@app.task
def noop() -> int:
    return effect()


@app.task
def collect(results: list[int]) -> int:
    return len(results)


class LayerQueue(OrchestratorQueue):
    """A Celery program has no bulk enqueue: it calls `delay` for each task."""

    enqueue_bulk = Queue.enqueue_bulk
    run_steps = run_fibonacci = None  # type: ignore[assignment]

    def send(self) -> Any:
        return noop.delay()

    def wait(self, handle: Any) -> None:
        handle.get(300)

    def run_chain(self, count: int) -> None:
        expect("result", chain([noop.si()] * count).delay().get(300), 1)

    def run_chord(self, count: int) -> None:
        expect("result", chord([noop.si()] * count, collect.s()).delay().get(300), count)


queue = LayerQueue()
