"""An application whose tasks share limits across shards. Each task logs its start and end outside the system."""

import time

from project import log

from orchestrator import Orchestrator, Rate, TaskContext, WorkflowContext

app = Orchestrator()


def _work(path: str) -> None:
    log(path, f"+ {time.time()}")
    time.sleep(0.05)
    log(path, f"- {time.time()}")


@app.task(total_concurrency=2)
def narrow(path: str, number: int) -> int:
    _work(path)
    return number


@app.task(queue="limited")
def queued(path: str) -> None:
    _work(path)


@app.task(total_rate=Rate(5, per=1, burst=1))
def slow(path: str) -> None:
    log(path, f"+ {time.time()}")


@app.task
def spread(kind: str, path: str, count: int) -> None:
    """Enqueue tasks, which stay in the shard of this task."""
    for number in range(count):
        if kind == "narrow":
            narrow.enqueue(path, number)
        else:
            slow.enqueue(path)


@app.task
def count(ctx: TaskContext, path: str, name: str) -> str:
    log(path, name)
    return name


@app.workflow
async def twice(ctx: WorkflowContext, path: str, name: str) -> list[str]:
    return [await count.schedule(path, f"{name}.{number}") for number in range(2)]


@app.workflow
async def listens(ctx: WorkflowContext) -> str:
    return await ctx.signals("word", type=str).get()


@app.workflow
async def passes_on(ctx: WorkflowContext, runs: list[str]) -> None:
    for run in runs:
        await app.workflow_run(run).asignal("word", "passed on")


@app.task
def says(ctx: TaskContext) -> str:
    ctx.log("said")
    ctx.progress(0.5, "half")
    return "said"


@app.task
def fails() -> None:
    raise LookupError("nothing there")


@app.workflow
async def answers(ctx: WorkflowContext) -> str:
    """Handle queries and updates until the promise `done` is resolved."""
    ctx.set("word", "none")

    @ctx.query
    def word() -> str:
        return str(ctx.get("word"))

    @ctx.update
    def say(said: str) -> str:
        ctx.set("word", said)
        return said

    return str(await ctx.promise("done"))


@app.task
def fails_or_not(fails: bool) -> None:
    if fails:
        raise ValueError("it was told to")
