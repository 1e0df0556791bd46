"""Tasks that Celery's producers enqueue and our workers run."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator import Orchestrator, Retry, TaskContext

app = Orchestrator()


@app.task(name="shop.note")
def note(what: str, seconds: float = 0.0) -> str:
    """Record that our worker runs the task, before anything else."""
    with (Path(os.environ["BRIDGED"]) / "journal").open("a") as journal:
        journal.write(f"ours {what}\n")
    time.sleep(seconds)
    return what


@app.task(name="shop.add")
def add(one: int, other: int) -> int:
    return one + other


@app.task(name="shop.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="shop.once", unique_key="once", on_duplicate="raise")
def once() -> None:
    """A task with a unique key."""


@app.task(name="shop.year")
def year(when: datetime) -> datetime:
    return when.replace(year=2000)


@app.task(name="shop.fail", retries=Retry(max=3, base=0.01))
def fail(ctx: TaskContext) -> None:
    raise ZeroDivisionError(f"attempt {ctx.attempt}")


@app.task(name="shop.on_error")
def on_error(request: dict[str, Any], exc: str, tb: str) -> None:
    note.function(f"{request['id']} {request['task']} {exc}")
