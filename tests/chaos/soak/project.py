"""The application of a soak test: tasks of every kind, whose failures differ clearly from those of the system."""

from __future__ import annotations

import time

from orchestrator import Orchestrator, Retry, TaskContext

app = Orchestrator()


@app.task
def plain(number: int) -> int:
    return number


@app.task
def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@app.task
def later(number: int) -> int:
    return number


@app.task(retries=Retry(max=3, base=0.2))
def flaky(ctx: TaskContext, number: int) -> int:
    """Fail at the first attempt only; with losses included, the retries never run out."""
    if ctx.attempt == 1:
        raise ValueError(f"the first try of {number}")
    return number


@app.task
def parts(count: int) -> dict[str, list[int]]:
    return {"items": list(range(count))}


@app.task
def part(item: int) -> int:
    return item * item


@app.task
def whole(squares: list[int]) -> int:
    return sum(squares)


DAG = f"""
name: soak
tasks:
  parts: {{task: {parts.name}, input: {{count: 4}}}}
  part: {{task: {part.name}, depends_on: [parts], foreach: parts.items}}
  whole: {{task: {whole.name}, depends_on: [part], input: {{squares: "${{part}}"}}}}
"""
TASKS_OF_A_RUN = 6
