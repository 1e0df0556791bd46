"""An application whose tasks print, log and fail."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
import time

from orchestrator import Orchestrator, Retry, RetryLater, TaskContext, WorkflowContext

app = Orchestrator()
log = logging.getLogger("bakery")


@app.task
def speaks(word: str) -> None:
    print("printed", word)
    print(f"complained {word}", file=sys.stderr)
    log.info("logged %s", word)
    log.debug("murmured %s", word)
    print("unfinished", word, end="")


@app.task
def closes() -> None:
    """Rewrap and close the standard streams, as some scripts do."""
    io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
    sys.stdout.close()
    sys.stderr.detach()  # type: ignore[union-attr]


@app.task
async def speaks_async(word: str) -> None:
    print(f"printed {word}", end="")
    await asyncio.sleep(0.01)
    print(" in pieces")
    await asyncio.to_thread(log.warning, "logged %s in a thread", word)


@app.task(isolation="process")
def speaks_apart(word: str) -> None:
    print("printed", word)
    log.info("logged %s", word)


@app.task
def says(word: str, ctx: TaskContext) -> None:
    ctx.log(word, "warning")


@app.task
def burns(word: str) -> None:
    raise ValueError(f"{word} is burnt\n00:00:00 ERROR   forged\x1b[2J")


@app.task(isolation="process")
def burns_apart() -> None:
    raise ValueError("burnt apart")


@app.task(retries=Retry(max=1, base=0.3, jitter=0.0))
def burns_twice() -> None:
    raise KeyError("yeast")


@app.task
def postpones(ctx: TaskContext) -> None:
    if ctx.attempt == 1:
        raise RetryLater(0.2, "the oven is cold")


@app.task
def naps(seconds: float) -> None:
    time.sleep(seconds)


@app.task
async def blocks(pipe: str) -> None:
    os.close(os.open(pipe, os.O_RDONLY))  # blocks until the other end is opened


@app.task
def floods(lines: int) -> None:
    for number in range(lines):
        print(f"{number:06} {'x' * 200}")


@app.task
def floods_log(lines: int) -> None:
    for number in range(lines):
        log.warning("%06d %s", number, "x" * 200)


@app.workflow
async def order(ctx: WorkflowContext, word: str) -> None:
    ctx.logger.info("ordered %s", word)
    raise LookupError(f"no {word} left")
