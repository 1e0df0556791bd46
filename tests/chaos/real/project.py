"""The application under chaos: tasks that write down, outside of the system, when they begin and how they end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator import Orchestrator, Retry, TaskContext
from tests.chaos.real.journal import append

app = Orchestrator()

LOG = "CHAOS_EXECUTION_LOG"
"""The environment variable that says where to write."""
RETRIES = 6
_SLICE = 0.02


class Unlucky(Exception):
    """What a task raises that is meant to fail."""


@contextmanager
def written_down(context: TaskContext) -> Iterator[None]:
    """Write a line when the task begins and one when it ends, whatever ends it."""
    path = os.environ[LOG]
    who = (context.task_id, context.attempt, os.getpgrp(), os.getpid())
    append(path, "begin", *who, time.monotonic())
    outcome = "stopped"
    try:
        yield
        outcome = "success"
    except Unlucky:
        outcome = "failed"
        raise
    finally:
        append(path, "end", *who, time.monotonic(), outcome)


def token(context: TaskContext) -> str:
    """Return what a success leaves in the database, so that it can be told which execution it came from."""
    return f"{context.task_id}/{context.attempt}/{os.getpid()}"


def spend(seconds: float) -> None:
    """Take this long, in slices, so that an order to stop arrives in between."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(_SLICE, left))


@app.task
def work(context: TaskContext, seconds: float = 0.0) -> str:
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
    """Fail in about every second attempt; which ones depends on the task and the attempt alone."""
    with written_down(context):
        spend(seconds)
        if hashlib.blake2b(f"{context.task_id} {context.attempt}".encode()).digest()[0] % 2:
            raise Unlucky(f"attempt {context.attempt}")
    return token(context)


@app.task(concurrency=2, concurrency_key=lambda lane, **_: lane)
def work_in_lane(context: TaskContext, lane: str, seconds: float) -> str:
    append(os.environ[LOG], "limit", context.task_id, f"lane:{lane}", 2)
    with written_down(context):
        spend(seconds)
    return token(context)


@app.task(unique_key=lambda key, **_: key)
def work_once(context: TaskContext, key: str, seconds: float) -> str:
    append(os.environ[LOG], "limit", context.task_id, f"key:{key}", 1)
    with written_down(context):
        spend(seconds)
    return token(context)


@app.task
def enqueue_children(context: TaskContext, count: int, on_success: bool) -> str:
    """Enqueue from inside a task; those that exist only on success are known when it has succeeded."""
    with written_down(context):
        for _ in range(count):
            child = work.options(on_success=on_success).enqueue()
            if not on_success:
                append(os.environ[LOG], "child", child.id)
    return token(context)


@app.task
def discover(context: TaskContext, count: int) -> dict[str, Any]:
    with written_down(context):
        pass
    return {"token": token(context), "items": list(range(count))}


@app.task
def gather(context: TaskContext, each: list[str], count: int) -> dict[str, Any]:
    """End a DAG; every item must have arrived here."""
    with written_down(context):
        if len(set(each)) != count or None in each:
            raise AssertionError(f"{count} results expected, found {len(set(each))}")
    return {"token": token(context)}
