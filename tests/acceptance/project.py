"""The application of the acceptance tests: a user's module that real workers import.

Tasks write to log files outside the system, so that tests can count how often a task ran.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator import (
    Duplicate,
    Orchestrator,
    PromiseRejected,
    Rate,
    TaskContext,
    WorkflowContext,
    chord,
    group,
    unguarded,
)
from orchestrator.executors import Process

app = Orchestrator()


def wait_for(path: str) -> None:
    """Wait inside a task until the test creates a file."""
    while not Path(path).exists():
        time.sleep(0.005)


def log(path: str, line: str) -> None:
    """Append one line atomically."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@dataclass
class Point:
    x: int
    y: int


@app.task
def noop() -> None:
    pass


@app.task
def work(**given: Any) -> Any:
    """Run by an executor that the test chooses."""
    raise NotImplementedError


@app.task(executor=Process(command=["/usr/bin/wc", "-c"]))
def weigh(text: str, unit: str = "bytes") -> int: ...


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def total(numbers: list[int], path: str, name: str) -> int:
    """A callback that logs its name."""
    time.sleep(0.01)
    log(path, name)
    return sum(numbers)


@app.task
def compose(ctx: TaskContext, path: str, *, on_success: bool) -> str:
    """Start a chord from inside a task, then kill the process in the first attempt."""
    header = group(add.s(1, number) for number in range(5))
    run = chord(header, total.s(path, "inside")).start(on_success=on_success)
    if ctx.attempt == 1:
        os._exit(1)
    return run.id


@app.task(rate=Rate(10, per=1, burst=1))
def ten_a_second() -> None:
    pass


@app.task(rate=Rate(100, per=1, burst=1))
def hundred_a_second() -> None:
    pass


@app.task
async def add_async(a: int, b: int) -> int:
    await asyncio.sleep(0.001)
    return a + b


@app.task
def move(point: Point, by: int = 1) -> Point:
    return Point(point.x + by, point.y + by)


@app.task
def who(ctx: TaskContext, label: str) -> list[str]:
    return [label, str(ctx.task_id), ctx.task_name, str(ctx.attempt)]


@app.task
def resized(path: str, width: int = 100) -> str:
    return f"{path} at {width}px"


@app.task
def says(ctx: TaskContext, text: str) -> None:
    ctx.log(text)


@app.task
def rambles(lines: int) -> None:
    for number in range(lines):
        print(f"line {number:05} \x1b[1;38;5;208mof many\x1b[0m" + (" an ERROR" if number == 7 else ""))


@app.task
def recites(ctx: TaskContext, go: str, verses: int) -> None:
    ctx.progress(0.5)
    for number in range(verses):
        print(f"verse {number}")
    while not Path(go).exists():
        time.sleep(0.05)
    print("the end")


@app.task
def narrates(ctx: TaskContext, go: str) -> None:
    ctx.log("begins")
    ctx.progress(0.5, "half of it")
    wait_for(go)
    ctx.log("is done")


@app.task
def logged(path: str, number: int) -> int:
    log(path, str(number))
    return number


@app.task
def timed(path: str, seconds: float = 0.0) -> None:
    """Log the start time, on a clock that all processes of this machine share."""
    log(path, repr(time.monotonic()))
    time.sleep(seconds)


@app.task
def in_one_transaction(ctx: TaskContext, a: int, b: int) -> str:
    """Complete in one transaction with a query and a new task."""
    with ctx.transaction() as connection:
        found: str = connection.exec_driver_sql("SELECT 'orchestrator.tasks'").scalar_one()
        child = add.enqueue(a, b)
        ctx.complete(f"{found} {child.id}")
    return ""


@app.task
def completes_with_nothing(ctx: TaskContext) -> int:
    """Open a transaction without `ctx.complete`."""
    with ctx.transaction():
        pass
    return 3


@app.task
def attempt_of(number: int, ctx: TaskContext | None = None) -> int:
    """Return the attempt, which only the context of a worker has."""
    return number + (ctx.attempt if ctx is not None else 100)


@app.task
def held(started: str, go: str) -> int:
    """Log the process id, then wait for the file `go`."""
    log(started, str(os.getpid()))
    wait_for(go)
    return os.getpid()


@app.task(retries=3)
def flaky(path: str, failures: int) -> int:
    log(path, "try")
    tries = len(Path(path).read_text().splitlines())
    if tries <= failures:
        raise ValueError(f"failure {tries}")
    return tries


@app.task
def broken(text: str) -> None:
    raise LookupError(text)


@app.task
def unserialisable() -> object:
    return object()


@app.task(timeout=0.3)
def too_long() -> None:
    while True:
        time.sleep(0.005)


@app.task(timeout=0.3)
async def too_long_async() -> None:
    await asyncio.sleep(60)


@app.task(timeout=0.3, isolation="process")
def too_long_isolated() -> None:
    time.sleep(60)


@app.task(isolation="process")
def isolated(number: int) -> list[int]:
    return [number, os.getpid()]


@app.task
def kills_its_process(path: str) -> None:
    log(path, str(os.getpid()))
    os.kill(os.getpid(), 9)


@app.task
def parent(path: str, count: int) -> list[str]:
    return [logged.enqueue(path, number).id for number in range(count)]


@app.task
def parent_when(started: str, go: str, path: str, count: int) -> list[str]:
    Path(started).touch()
    wait_for(go)
    return [logged.enqueue(path, number).id for number in range(count)]


@app.task
def parent_until(started: str, go: str, enqueued: str, end: str, path: str, count: int) -> list[str]:
    Path(started).touch()
    wait_for(go)
    ids = [logged.enqueue(path, number).id for number in range(count)]
    Path(enqueued).touch()
    wait_for(end)
    return ids


@app.task
async def parent_async(path: str, count: int) -> list[str]:
    return [(await logged.aenqueue(path, number)).id for number in range(count)]


@app.task(isolation="process")
def parent_isolated(path: str, count: int) -> list[str]:
    return [logged.enqueue(path, number).id for number in range(count)]


def _same_key(key: str) -> list[str]:
    first = add.options(unique_key=key, delay=3600).enqueue(1, 1)
    many = app.enqueue_many(add.options(unique_key=key), [(2, 2), (2, 2)])
    return [first.id, *(handle.id for handle in many)]


@app.task
def parent_with_keys(key: str) -> list[str]:
    return _same_key(key)


@app.task(isolation="process")
def parent_with_keys_isolated(key: str) -> list[str]:
    return _same_key(key)


@app.task
def parent_with_keys_in_transaction(ctx: TaskContext, key: str) -> list[str]:
    with ctx.transaction():
        return ctx.complete(_same_key(key))


@app.task
def parent_with_another_call(key: str) -> list[str]:
    once = add.options(idempotency_key=key)
    found = [once.enqueue(1, 1).id, once.enqueue(a=1, b=1).id]
    try:
        once.enqueue(1, 2)
    except Duplicate as duplicate:
        found.append(duplicate.task_id)
    return found


@app.task(retries=1)
def parent_on_success(path: str, tries: str) -> str:
    """Fail the first attempt, whose child task must never exist."""
    log(tries, "try")
    child = logged.options(on_success=True).enqueue(path, len(Path(tries).read_text().splitlines()))
    if len(Path(tries).read_text().splitlines()) == 1:
        raise RuntimeError("the first try fails")
    return child.id


@app.task
def waits_for_another() -> int:
    return add.enqueue(1, 2).result(5)


# -- workflows as code


@app.workflow
async def both(ctx: WorkflowContext, first: int, second: int) -> list[int]:
    return list(await asyncio.gather(add.schedule(first, 1), add.schedule(second, 1)))


@app.workflow
async def steps(ctx: WorkflowContext, count: int) -> int:
    total = 0
    for _ in range(count):
        total = await add.schedule(total, 1)
    return total


@app.workflow
async def parallel(ctx: WorkflowContext, path: str, go: str, width: int) -> list[int]:
    """Run a parallel section that ends when the test creates a file, and a second one."""
    numbers = await asyncio.gather(*(logged_when.schedule(path, go, number) for number in range(width)))
    return list(await asyncio.gather(*(logged.schedule(path, width + number) for number in numbers)))


@app.task
def logged_when(path: str, go: str, number: int) -> int:
    wait_for(go)
    log(path, str(number))
    return number


@app.workflow
async def approval(ctx: WorkflowContext, patience: float) -> str:
    @ctx.query
    def describe() -> str:
        return f"waits for {patience:g} s"

    try:
        return str(await asyncio.wait_for(ctx.promise("approval"), patience))
    except TimeoutError:
        return "too late"
    except PromiseRejected as error:
        return f"rejected: {error}"


@dataclass
class Ruling:
    """A decision about an order."""

    ok: bool
    amount: float
    level: Literal["low", "high"] = "low"
    note: str | None = None


@app.workflow
async def ruling(ctx: WorkflowContext) -> list[Any]:
    found = await ctx.promise("ruling", type=Ruling)
    return [found.ok, found.amount, found.level, found.note]


@app.workflow
async def basket(ctx: WorkflowContext) -> list[str]:
    """Collect the items of signals until the item is `pay`."""
    items: list[str] = []

    @ctx.update
    def rename(number: int, name: str) -> str:
        old, items[number] = items[number], name
        return old

    @ctx.query("items")
    def all_items() -> list[str]:
        return items

    async for item in ctx.signals("add", type=str):
        if item == "pay":
            return items
        items.append(item)
    return items


@app.workflow
async def restless(ctx: WorkflowContext, number: int = 0) -> None:
    """Continue as new forever."""

    @ctx.update
    def count() -> int:
        return number

    await ctx.sleep(0.05)
    ctx.continue_as_new(number + 1)


@app.workflow
async def leaves(ctx: WorkflowContext, seconds: float) -> None:
    """End while a child workflow still runs."""
    restless.schedule()
    await ctx.sleep(seconds)


@app.workflow
async def tidy(ctx: WorkflowContext, path: str) -> None:
    """Wait forever; when cancelled, run a cleanup task."""
    child = approval.schedule(3600.0)
    try:
        await asyncio.gather(child, logged_when.options(queue="nobody").schedule(path, path, 1))
    finally:
        await logged.schedule(path, 7)


@app.task
def heavy(number: int) -> str:
    return str(number % 10) * 990_000


@app.workflow
async def collect(ctx: WorkflowContext, count: int, path: str) -> int:
    """Kill the worker process once, when there is much to replay; then wait for a promise."""
    parts = await asyncio.gather(*(heavy.schedule(number) for number in range(count)))
    with unguarded():
        if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), 9)
    await ctx.promise("enough")
    return sum(map(len, parts))
