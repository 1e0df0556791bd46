"""A small application. Run it with `./scripts/quickstart`, or with `orchestrator dev --app tour:app` in this folder."""

from __future__ import annotations

import asyncio
import random

from orchestrator import Orchestrator

app = Orchestrator()


@app.task
def count_primes(start: int, stop: int) -> int:
    """Plain Python in a worker thread."""
    return sum(all(number % divisor for divisor in range(2, int(number**0.5) + 1)) for number in range(start, stop))


@app.task
async def greet(name: str) -> str:
    """Async tasks share one event loop per worker process."""
    await asyncio.sleep(0.1)
    return f"Hello, {name}!"


@app.task(retries=5, timeout=10)
def flaky(chance: float) -> str:
    """Fail now and then; the scheduler retries with a growing delay."""
    if random.random() < chance:
        raise ConnectionError("the network is moody today")
    return "got through"
