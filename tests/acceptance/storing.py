"""An application with arguments and results that are too large for a row."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

from orchestrator import Orchestrator, Payload, TaskContext, WorkflowContext

app = Orchestrator()


@app.task
def echo(value: Any) -> Any:
    return value


@app.task
async def echo_async(value: Any) -> Any:
    return value


@app.task
def length(value: Any) -> int:
    return len(value)


@app.task
def numbers(count: int) -> list[dict[str, Any]]:
    return [{"number": number, "text": "x" * 100} for number in range(count)]


@app.task
def number_of(item: dict[str, Any]) -> int:
    return int(item["number"])


@app.task
def write(ctx: TaskContext, megabytes: int) -> None:
    with ctx.open_output() as output:
        for number in range(megabytes):
            output.write(bytes([number % 256]) * 1_000_000)


@app.task
def copy(ctx: TaskContext, write: Payload) -> None:
    with write.open() as source, ctx.open_output() as output:
        while data := source.read(100_000):
            output.write(data)


@app.task
def digest(copy: Payload) -> dict[str, Any]:
    sha256 = hashlib.sha256()
    with copy.open() as source:
        while data := source.read(100_000):
            sha256.update(data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"sha256": sha256.hexdigest(), "size": copy.size, "peak": peak}


def doom(marker: str) -> None:
    """Kill this process at its first report of an outcome, once."""
    if not Path(marker).exists():
        from orchestrator.domain.tasks.task import Started
        from orchestrator.workers.reporting.reporter import Reporter

        report = Reporter.report

        def die(self: Reporter, said: Any, *more: Any, **options: Any) -> None:
            if isinstance(said, Started):
                return report(self, said, *more, **options)
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

        Reporter.report = die  # type: ignore[method-assign, assignment]


@app.task
def die_once(marker: str) -> bytes:
    """Return a large result. The first attempt's process is killed after it has stored the result."""
    doom(marker)
    return b"y" * 500_000


@app.task
def follow(result: bytes) -> int:
    return len(result)


@app.task(on_success=follow)
def followed() -> bytes:
    return b"z" * 500_000


@app.workflow
async def flow(ctx: WorkflowContext, size: int) -> int:
    first = await echo.schedule("a" * size)
    made = await numbers.schedule(size // 100)
    return len(first) + len(made)


@app.workflow
async def porter(ctx: WorkflowContext, text: str) -> str:
    return f"{text}p"


@app.workflow
async def courier(ctx: WorkflowContext, text: str, laps: int) -> str:
    """Pass a large value through every feature of a workflow that stores values."""
    if laps:
        ctx.continue_as_new(f"{text}n", laps - 1)
    told: str = await ctx.signals("told").get()
    noted = await ctx.run("note", lambda: f"{text}o")
    carried = await porter.schedule(noted)
    return await echo.schedule(carried) + told


@app.workflow
async def wrap(ctx: WorkflowContext, other: str, text: str) -> None:
    app.workflow_run(other).signal("told", text)


@app.workflow
async def doomed(ctx: WorkflowContext, marker: str) -> bytes:
    """Return a large result. The first attempt's process is killed after it has stored the result."""
    await ctx.run("doom", lambda: doom(marker))
    return b"y" * 500_000
