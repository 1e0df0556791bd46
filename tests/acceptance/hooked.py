"""An application with middleware that records its calls, in a file that callers name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from orchestrator import (
    AttemptEnd,
    EnqueueCall,
    Middleware,
    Orchestrator,
    Retry,
    TaskContext,
    TurnContext,
    WorkflowContext,
)
from orchestrator.executors import Process

tenant: ContextVar[str] = ContextVar("tenant")
notes: ContextVar[str] = ContextVar("notes")


def note(*words: Any) -> None:
    with Path(notes.get()).open("a") as file:
        file.write(json.dumps([*words, tenant.get(None)]) + "\n")


class Noting(Middleware):
    def enqueue(self, call: EnqueueCall) -> None:
        note("enqueue", call.name)

    def execute(self, ctx: TaskContext) -> Iterator[None]:
        note("before", ctx.task_name, "after a loss" if ctx.is_after_loss else ctx.failures)
        try:
            yield
        except BaseException as error:
            note("raised", ctx.task_name, type(error).__name__)
            raise
        note("after", ctx.task_name)

    def turn(self, ctx: TurnContext) -> Iterator[None]:
        yield
        note("turn", ctx.workflow, ctx.is_replay)

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        file = Path(json.loads(ctx.headers["context.notes"]))
        with file.open("a") as lines:
            lines.write(json.dumps(["ended", ctx.task_name, end.outcome, end.error and end.error.kind]) + "\n")


app = Orchestrator(context=[tenant, notes], middleware=[Noting()])


@app.task
def in_thread() -> str:
    return f"{tenant.get()} {threading.current_thread() is threading.main_thread()}"


@app.task
async def on_loop() -> str:
    await asyncio.sleep(0)
    return tenant.get()


@app.task(isolation="process")
def apart() -> str:
    in_thread.enqueue()
    return tenant.get()


@app.task(retries=Retry(max=1, base=0.01))
def fails() -> None:
    raise ValueError


@app.task
def sleeps() -> None:
    note("began")
    while True:
        time.sleep(0.01)


@app.task
async def sleeps_on_loop() -> None:
    note("began")
    await asyncio.sleep(60)


@app.task(isolation="process")
def dies(ctx: TaskContext) -> None:
    if not ctx.is_after_loss:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task
def takes_its_worker_along(ctx: TaskContext) -> None:
    if not ctx.is_after_loss:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(retries=Retry(max=1, base=0.01), executor=Process(command=["/bin/sh", "-c", "exit 1"]))
def runs_elsewhere() -> None: ...


@app.task(executor="http", executor_options={"service": "echo", "url": "http://127.0.0.1:1"})
def asks_elsewhere(word: str) -> str: ...


@app.workflow(queue="turns")
async def waits(ctx: WorkflowContext) -> list[str]:
    before = tenant.get()
    first = await on_loop.schedule()
    await ctx.promise("go")
    return [before, first, tenant.get(), await on_loop.schedule()]
