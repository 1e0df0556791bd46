"""Tasks of every kind, and the steps of a DAG."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any

from orchestrator import Retry, TaskContext
from tests.chaos.real.project.base import Unlucky, app, spend, token, write, written_down

RETRIES = 6


@app.task
def work(context: TaskContext, seconds: float = 0.0) -> str:
    with written_down(context):
        spend(seconds)
    return token(context)


@app.task
def work_for(context: TaskContext, key: str, seconds: float = 0.0) -> str:
    """A task that the visitor enqueues with an idempotency key."""
    del key
    with written_down(context):
        spend(seconds)
    return token(context)


@app.task
async def work_async(context: TaskContext, seconds: float = 0.0) -> str:
    with written_down(context):
        await asyncio.sleep(seconds)
    return token(context)


@app.task(isolation="process")
def work_isolated(context: TaskContext, seconds: float = 0.0) -> str:
    with written_down(context):
        spend(seconds)
    return token(context)


@app.task(retries=Retry(max=RETRIES, backoff="constant", base=0.2))
def work_unluckily(context: TaskContext, seconds: float = 0.0) -> str:
    """Fail in about half of the attempts, depending on the task id and the attempt only."""
    with written_down(context):
        spend(seconds)
        if _digest(context)[0] % 2:
            raise Unlucky(f"attempt {context.attempt}")
    return token(context)


@app.task
def work_and_exit(context: TaskContext) -> str:
    """Exit the process in about half of the attempts, also with exit codes that the worker itself uses."""
    with written_down(context):
        if _digest(context)[0] % 2:
            _exit(context)
    return token(context)


@app.task
def exit_always(context: TaskContext) -> None:
    """Exit the process in every attempt, until the task fails."""
    with written_down(context):
        _exit(context)


def _exit(context: TaskContext) -> None:
    write("exit", os.getpid(), time.monotonic())
    digest = _digest(context)
    os._exit(digest[1] % 8 if digest[2] % 2 else digest[1])


def _digest(context: TaskContext) -> bytes:
    return hashlib.blake2b(f"{context.task_id} {context.attempt}".encode()).digest()


@app.task
def work_beside_a_fork(context: TaskContext) -> str:
    """Fork; the child process returns a result that must never be stored."""
    child = os.fork()
    if child == 0:
        return "of a copy of the worker"
    with written_down(context):
        os.waitpid(child, 0)
    return token(context)


@app.task
async def work_and_stop_the_loop(context: TaskContext) -> str:
    with written_down(context):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
    return token(context)


@app.task
def enqueue_children(context: TaskContext, count: int, on_success: bool) -> str:
    """Enqueue child tasks. Children that exist only if this task succeeds are not recorded as committed."""
    with written_down(context):
        for _ in range(count):
            child = work.options(on_success=on_success).enqueue()
            if not on_success:
                write("child", child.id)
    return token(context)


@app.task
def discover(context: TaskContext, count: int) -> dict[str, Any]:
    with written_down(context):
        pass
    return {"token": token(context), "items": list(range(count))}


@app.task
def gather(context: TaskContext, each: list[str], count: int) -> dict[str, Any]:
    """The last step of a DAG; it must receive every item's result."""
    with written_down(context):
        if len(set(each)) != count or None in each:
            raise AssertionError(f"{count} results expected, found {len(set(each))}")
    return {"token": token(context)}
