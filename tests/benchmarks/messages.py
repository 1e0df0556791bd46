"""`python -m tests.benchmarks.messages`: signals to one run, queries without a run in memory, and replay."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator import CodeWorkflow, Orchestrator, WorkflowContext
from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from orchestrator.testing import replay
from tests.acceptance.stack import Stack, using

app = Orchestrator()
REPOSITORY = Path(__file__).parents[2]
SIGNALS, RUNS = 5_000, 30


@app.workflow(name="counting")
async def counting(ctx: WorkflowContext, count: int) -> int:
    """Add up so many signals; a query says how many came."""
    seen: list[int] = []
    ctx.query("count")(lambda: len(seen))
    for _ in range(count):
        seen.append(await ctx.signals("more", type=int).get())
        ctx.set("seen", len(seen))
    return sum(seen)


def _say(what: str, seconds: float) -> None:
    sys.stdout.write(f"{what:60} {seconds:8.3f} s\n")


def _signals(workflow: CodeWorkflow[..., int]) -> None:
    for what in ("one by one", "in one statement"):
        handle = workflow.start(SIGNALS)
        began = time.monotonic()
        if what == "one by one":
            for number in range(SIGNALS):
                handle.signal("more", number)
        else:
            workflow.signal_many("more", [(handle, number) for number in range(SIGNALS)])
        assert handle.result(300) == sum(range(SIGNALS))
        _say(f"{SIGNALS:,} signals to one run, {what}, to its end", time.monotonic() - began)
        recording = handle.history()
        cpu = time.process_time()
        replay(workflow, recording)
        _say(f"replay of {len(recording.events):,} events, CPU", time.process_time() - cpu)


def _queries(stack: Stack, workflow: CodeWorkflow[..., int]) -> None:
    handles = [workflow.start(2) for _ in range(RUNS)]
    for handle in handles:
        assert handle.query("count") == 0
    for worker in stack.processes[1:]:
        worker.stop()
    stack.worker("--app", "tests.benchmarks.messages:app", folder=REPOSITORY)
    for what in ("that no worker has in memory", "that a worker has in memory"):
        took: list[float] = []
        for handle in handles:
            began = time.monotonic()
            handle.query("count")
            took.append(time.monotonic() - began)
        _say(f"a query of a run {what}, p50 of {RUNS}", median(took))


def main() -> None:
    """Measure, and print."""
    sys.stdout.write(f"load {os.getloadavg()[0]:.1f}\n")
    workflow: Any = counting
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with EmbeddedServices(folder / "services") as services:
            database.upgrade(services.database_url)
            stack = Stack(services.database_url, services.redis_url, folder)
            try:
                with using(app, stack):
                    stack.scheduler()
                    stack.worker("--app", "tests.benchmarks.messages:app", folder=REPOSITORY)
                    _queries(stack, workflow)
                    _signals(workflow)
            finally:
                stack.close()


if __name__ == "__main__":
    main()
