"""An application whose tasks and workflows store a secret word in every place where data is stored."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from orchestrator import Orchestrator, PromiseRejected, TaskContext, TaskFailed, TaskFailure, WorkflowContext

app = Orchestrator()


class Odd(Exception):
    """An exception with an attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(f"it is odd: {text}")
        self.known = text


@app.task
def keep(ctx: TaskContext, text: str, more: Any = None) -> dict[str, Any]:
    ctx.log(f"log {text}")
    ctx.progress(0.5, f"progress {text}")
    ctx.heartbeat({"details": text})
    return {"said": text, "list": [text, text]}


@app.task
def said() -> dict[str, str]:
    return {"word": "xyzzy-PLUGH"}


@app.task
def given(one: Any) -> dict[str, Any]:
    return {"one": one}


@app.task
def note(failure: TaskFailure) -> list[Any]:
    return [failure.message, failure.data]


@app.task
def follow(result: dict[str, Any]) -> str:
    return str(result["said"])


@app.task(retries=1, on_failure=note)
def fail(text: str) -> None:
    raise Odd(text)


@app.task
def ended(params: dict[str, Any]) -> Any:
    return params


@app.task
def hold(ctx: TaskContext, started: str, go: str, text: str) -> str:
    ctx.log(text)
    Path(started).touch()
    while not Path(go).exists():
        time.sleep(0.01)
    return text


@app.task
def spawn(text: str) -> str:
    keep.options(unique_key="one", unique_for="running").enqueue(text)
    app.workflows["dag"].start(word=text)
    return flow.start(text).id


@app.task
def in_transaction(ctx: TaskContext, text: str) -> str:
    with ctx.transaction():
        ctx.complete(text)
    return text


@app.workflow
async def child(ctx: WorkflowContext, text: str) -> str:
    return text


@app.workflow
async def flow(ctx: WorkflowContext, text: str, shown: str = "") -> list[Any]:
    @ctx.query
    def word() -> str:
        return text

    @ctx.update
    def tell(more: str) -> str:
        return more + text

    ctx.set("word", text)
    said = await keep.schedule(text)
    try:
        failed = ""
        await fail.schedule(text)
    except TaskFailed as error:
        failed = str(error)
    mail = await ctx.signals("mail", type=str).get()
    try:
        await ctx.promise("broken")
    except PromiseRejected as error:
        failed += str(error)
    promised = await ctx.promise("word")
    return [said["said"], failed, mail, promised, await child.schedule(text)]


@app.workflow
async def breaks(ctx: WorkflowContext, text: str) -> None:
    raise Odd(text)


@app.workflow
async def sticks(ctx: WorkflowContext, text: str) -> None:
    await asyncio.to_thread(print, text)
