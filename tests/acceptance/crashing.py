"""Tasks that kill, fork or block their worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import holding
from project import log, wait_for

from orchestrator import Orchestrator, TaskContext

app = Orchestrator()


pid = app.task(name="crashing.pid")(holding.pid)
held = app.task(name="crashing.held")(holding.held)
held_async = app.task(name="crashing.held_async")(holding.held_async)


@app.task
async def pid_async() -> int:
    return os.getpid()


@app.task
def exits(path: str, code: int) -> None:
    """Exit the process without cleanup."""
    log(path, str(os.getpid()))
    os._exit(code)


@app.task
def crashes_where_others_are(path: str, after: str, count: int) -> str:
    """Kill the process when `count` other tasks have begun, unless the task runs alone."""
    log(path, str(os.getpid()))
    deadline = time.monotonic() + 30
    while len(Path(after).read_text().split()) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@app.task
def becomes_another_program(path: str) -> None:
    log(path, str(os.getpid()))
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])


# -- forks


@app.task
def forks(path: str, how: str) -> int:
    """Fork; the child ends as `how` says, and the parent returns the child's exit code."""
    child = os.fork()
    if child == 0:
        log(path, str(os.getpid()))
        if how == "exits":
            sys.exit(7)
        if how == "raises":
            raise ValueError("in the child")
        return 0
    return _exit_code(child)


@app.task
async def forks_async(path: str, how: str) -> int:
    child = os.fork()
    if child == 0:
        log(path, str(os.getpid()))
        if how == "awaits":
            await asyncio.sleep(0.01)
        if how == "exits":
            sys.exit(7)
        return 0
    return await asyncio.to_thread(_exit_code, child)


@app.task
async def forks_in_a_thread(path: str) -> int:
    return await asyncio.to_thread(forks.function, path, "returns")


@app.task
def forks_and_enqueues(path: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            pid.enqueue()
        except Exception as error:  # noqa: BLE001
            log(path, type(error).__name__)
        return 0
    return _exit_code(child)


@app.task
def terminates_a_fork() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    os.kill(child, signal.SIGTERM)
    return _exit_code(child)


def _exit_code(child: int) -> int:
    """Wait up to 30 seconds for a child process; return its exit code."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 999


# -- the event loop


@app.task
async def stops_the_loop() -> int:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return os.getpid()


@app.task
async def closes_the_loop(path: str) -> None:
    """Break the event loop: close its selector."""
    log(path, str(os.getpid()))
    asyncio.get_running_loop()._selector.close()  # type: ignore[attr-defined]
    await asyncio.sleep(60)


@app.task
async def cancels_everything() -> int:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()
    return os.getpid()


@app.task
async def leaves_a_bomb() -> int:
    """Start a coroutine that raises SystemExit in the event loop."""

    async def bomb() -> None:
        sys.exit(3)

    asyncio.get_running_loop().create_task(bomb())
    return os.getpid()


@app.task
async def blocks(started: str, go: str) -> int:
    log(started, str(os.getpid()))
    wait_for(go)
    return os.getpid()


# -- tasks that a timeout ends


@app.task(timeout=0.3)
def returns_all_the_same(how: str) -> str:
    try:
        time.sleep(0.01)
        while True:
            time.sleep(0.005)
    except OSError as late:
        if how == "raises":
            raise ValueError("something else") from late
        return "did it"


@app.task(timeout=0.3)
async def returns_all_the_same_async() -> str:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return "did it"


@app.task
def chatters(ctx: TaskContext, lines: int) -> int:
    for number in range(lines):
        ctx.log(f"{number} " + "x" * 500)
    return os.getpid()
