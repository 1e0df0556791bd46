"""Tasks that use their context: progress, logs, heartbeat details and cancellation."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from project import log, wait_for

from orchestrator import Orchestrator, OrchestratorError, TaskAborted, TaskContext, WorkflowContext

app = Orchestrator()


def talk(ctx: TaskContext, text: str) -> None:
    for step in range(1_000):  # far more updates than the leader stores
        ctx.progress(step / 1_000)
    ctx.progress(0.4, text)
    ctx.log("reading")
    ctx.log("a line is missing", "warning")


@app.task(timeout=60)
def talks(ctx: TaskContext, go: str) -> float:
    talk(ctx, "in a thread")
    wait_for(go)
    return ctx.remaining or 0.0


@app.task(timeout=60)
async def talks_async(ctx: TaskContext, go: str) -> float:
    talk(ctx, "on the loop")
    await asyncio.to_thread(wait_for, go)
    return ctx.remaining or 0.0


@app.task(timeout=60, isolation="process")
def talks_isolated(ctx: TaskContext, go: str) -> float:
    talk(ctx, "in a process")
    wait_for(go)
    return ctx.remaining or 0.0


def count(ctx: TaskContext) -> list[Any]:
    """Count to nine, three numbers per attempt, with heartbeat details."""
    details = ctx.details or {"numbers": []}
    numbers = details["numbers"]
    for number in range(len(numbers), len(numbers) + 3):
        numbers.append([number, ctx.attempt])
        ctx.heartbeat({"numbers": numbers})
    if len(numbers) < 9:
        raise RuntimeError("not yet")
    return list(numbers)


@app.task(retries=3)
def counts(ctx: TaskContext) -> list[Any]:
    return count(ctx)


@app.task(retries=3)
async def counts_async(ctx: TaskContext) -> list[Any]:
    return count(ctx)


@app.task(retries=3, isolation="process")
def counts_isolated(ctx: TaskContext) -> list[Any]:
    return count(ctx)


@app.task
def is_killed_once(ctx: TaskContext, path: str, go: str) -> Any:
    if ctx.details is None:
        log(path, str(os.getpid()))
        ctx.heartbeat("the first attempt was here")
        wait_for(go)
    return ctx.details


@app.task
async def is_cancelled(ctx: TaskContext, path: str) -> None:
    """Poll for cancellation in a thread that cannot be interrupted."""

    def loop() -> None:
        log(path, "started")
        while not ctx.cancelled:
            time.sleep(0.005)
        try:
            ctx.check_cancelled()
        except TaskAborted:
            log(path, "stopped")

    await asyncio.shield(asyncio.to_thread(loop))


@app.task
def nothing(number: int) -> int:
    return number


@app.task
def has_a_thread(ctx: TaskContext) -> list[str]:
    """Enqueue from a thread without the task's context variables."""
    ids: list[str] = []
    thread = threading.Thread(target=lambda: ids.append(ctx.enqueue(nothing, 1).id))
    thread.start()
    thread.join()
    return ids


@app.workflow
async def adds_up(ctx: WorkflowContext, first: int, *, second: int | None = None) -> int:
    return first + (second if second is not None else await ctx.signals("more", type=int).get())


def start_runs(key: str) -> dict[str, Any]:
    """Start runs of every kind from a task; return their ids and the errors of refused starts."""
    steps = app.workflows["inside.steps"]
    first = adds_up.starting(id=key, tags=["mine"]).start(1, second=2)
    refused: list[str] = []
    for start in (
        lambda: app.workflows["inside.nowhere"].start(),
        lambda: steps.start(wrong=1),
        lambda: adds_up.starting(id=key).start(9, second=0),
    ):
        try:
            start()
        except OrchestratorError as error:
            refused.append(f"{type(error).__name__}: {error}")
    return {
        "code": first.id,
        "returned": adds_up.starting(id=key, on_conflict="return").start(9, second=0).id,
        "free": adds_up.start(5, second=0).id,
        "signalled": adds_up.starting(id=f"{key}-signal", signal=("more", 4)).start(3).id,
        "steps": steps.options(key=key, tags=["mine"]).start(number=7).id,
        "same steps": steps.options(key=key).start(number=7).id,
        "many": app.start_many(nothing, range(3)).id,
        "refused": refused,
    }


@app.task
def starts(key: str) -> dict[str, Any]:
    return start_runs(key)


@app.task
def starts_flow(key: str) -> list[str]:
    """Start a flow twice with one key, and an unknown flow; return the runs and the error."""
    flow = app.flows["inside.flow"].options(key=key, tags=["mine"])
    results = [flow.start(number=7).id, flow.start(number=7).id]
    try:
        app.flows["inside.no-flow"].start()
    except OrchestratorError as error:
        results.append(str(error))
    return results


@app.task
async def starts_async(key: str) -> dict[str, Any]:
    return await asyncio.to_thread(start_runs, key)


@app.task(isolation="process")
def starts_isolated(key: str) -> dict[str, Any]:
    return start_runs(key)


@app.task
def starts_in_transaction(ctx: TaskContext, key: str) -> list[str]:
    with ctx.transaction():
        ids = [adds_up.start(1, second=0).id, app.workflows["inside.steps"].start(number=1).id]
        ctx.complete(ids)
    return ids
