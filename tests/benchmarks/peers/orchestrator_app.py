"""The tasks of Orchestrator. Workers import this module instead of the client's, which needs a database."""

from __future__ import annotations

from orchestrator import Orchestrator, WorkflowContext
from tests.benchmarks.peers import queue as base
from tests.benchmarks.peers.queue import effect

app = Orchestrator()


@app.task
def noop() -> int:
    return effect()


@app.task
def collect(results: list[int]) -> int:
    return len(results)


@app.task(concurrency=1_000, concurrency_key=lambda key: key)
def keyed(key: int) -> int:
    del key
    return effect()


@app.workflow
async def sequence(ctx: WorkflowContext, steps: int) -> int:
    del ctx
    return sum([await noop.schedule() for _ in range(steps)])


@app.task
def fibonacci(number: int) -> int:
    return base.fibonacci(number)


@app.workflow
async def fibonaccis(ctx: WorkflowContext, count: int) -> int:
    del ctx
    return [await fibonacci.schedule(10) for _ in range(count)][-1]
