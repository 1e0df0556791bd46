"""An application whose tasks ignore timeouts and cancellation."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

import holding
from project import log

from orchestrator import Orchestrator, Retry, SoftTimeout, TaskTimeout, WorkflowContext

app = Orchestrator()
leak: list[bytes] = []


pid = app.task(name="stubborn.pid")(holding.pid)
held = app.task(name="stubborn.held")(holding.held)
held_async = app.task(name="stubborn.held_async")(holding.held_async)


@app.task
def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


@app.task
def swallows(started: str, go: str) -> None:
    """Catch every exception and go on until the file `go` exists."""
    log(started, str(os.getpid()))
    while not Path(go).exists():
        try:
            while not Path(go).exists():
                time.sleep(0.005)
        except BaseException:  # noqa: BLE001
            continue


@app.task
def waits_for_a_writer(started: str, pipe: str) -> None:
    """Block in one system call, in which no exception arrives, until a process writes to the pipe."""
    log(started, str(os.getpid()))
    os.close(os.open(pipe, os.O_RDONLY))


@app.task
async def swallows_async(started: str, go: str) -> None:
    log(started, str(os.getpid()))
    while not Path(go).exists():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue


@app.task
def keeps_the_interpreter(started: str) -> None:
    """Run C code that never releases the GIL, so that no other thread runs."""
    log(started, str(os.getpid()))
    re.match(r"(a+)+$", "a" * 60 + "b")


@app.task(soft_timeout=0.3, timeout=20)
def cleans_up() -> str:
    try:
        while True:
            time.sleep(0.005)
    except SoftTimeout:
        return "cleaned up"


@app.task(soft_timeout=0.3, timeout=20)
async def cleans_up_async() -> str:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
    except SoftTimeout:
        await asyncio.sleep(0.01)  # not cancelled: it may await
        return "cleaned up"
    return "never"


@app.task(soft_timeout=0.3)
def goes_on() -> None:
    while True:
        time.sleep(0.005)


@app.task(soft_timeout=0.3)
async def goes_on_async() -> None:
    await asyncio.sleep(60)


@app.task(timeout=0.3, isolation="process", retries=Retry(max=3, base=0.01, give_up_on=(TaskTimeout,)))
def hopeless() -> None:
    time.sleep(60)


@app.task
def leaks(size: int) -> int:
    leak.append(b"x" * size)
    return os.getpid()


@app.workflow
async def keeps_all(ctx: WorkflowContext) -> None:
    """Run C code that never releases the GIL, in a workflow's code."""
    re.match(r"(a+)+$", "a" * 60 + "b")


@app.workflow
async def asks(ctx: WorkflowContext) -> int:
    await pid.schedule()
    return await pid.schedule()
