"""Tasks that tests run with `orchestrator serve`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import GiveUp, Orchestrator, TaskContext
from orchestrator.executors import Process

app = Orchestrator()


@dataclass
class Point:
    x: int
    y: int = 0


@app.task(name="move")
def move(point: Point, by: int = 1) -> Point:
    return Point(point.x + by, point.y)


@app.task(name="note")
def note(file: str, seconds: float = 0.0) -> str:
    """Append a line to a file for each call."""
    with Path(file).open("a") as lines:
        lines.write("x\n")
    time.sleep(seconds)
    return "noted"


@app.task(name="nap")
async def nap(seconds: float, file: str = "") -> str:
    if file:
        Path(file).write_text("napping")
    await asyncio.sleep(seconds)
    return "woken"


@app.task(name="stubborn", timeout=0.3)
async def stubborn(how: str) -> str:
    """Catch the cancellation at the timeout."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as late:
        if how == "raises":
            raise ValueError("something else") from late
    return "did it"


@app.task(name="fail")
def fail(message: str, final: bool = False) -> None:
    raise GiveUp(message) if final else ValueError(message)


@app.task(name="who")
def who(ctx: TaskContext) -> Any:
    return ctx.task_name


@app.task(name="told")
def told(params: dict[str, Any]) -> Any:
    return params


@app.task(name="odd")
def odd() -> Any:
    return object()


@app.task(name="elsewhere", executor=Process(command=["/usr/bin/wc"]))
def elsewhere(text: str) -> int: ...


@app.task(name="hasty", timeout=0.3)
async def hasty(seconds: float) -> None:
    await asyncio.sleep(seconds)


@app.task(name="shop/größe")
async def size(number: float) -> float:
    return number


@app.task(name="nan")
def nan() -> Any:
    return [{"mean": float("nan"), "most": None}]
