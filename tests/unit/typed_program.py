"""A user's program, as type checkers see it: every line that ends in `wrong` must be refused, and no other."""

from __future__ import annotations

from datetime import timedelta

from orchestrator import Orchestrator, Retry, TaskContext, WorkflowContext

app = Orchestrator(routes={"mail.*": "mail"})


@app.task
def plain(path: str, width: int = 100) -> str:
    return f"{path} at {width}"


@app.task(retries=Retry(max=3), timeout=timedelta(seconds=30), queue="images", priority=5, name="shop.resize")
def resize(ctx: TaskContext, path: str) -> str:
    return path


@app.task(on_success=plain, isolation="process", concurrency=2, rate="10/s", unique_key=lambda path, **_: path)
async def fetch(path: str) -> bytes:
    return path.encode()


@app.workflow(timeout=60, queue="orders", version=2)
async def order(ctx: WorkflowContext, number: int) -> str:
    return await plain.options(queue="mail").schedule("a")


@app.schedule(cron="0 3 * * *", timezone="Europe/Berlin", overlap="skip")
@app.task
def nightly() -> None: ...


text: str = resize.options(delay=1, priority=2, retries=[1, 5]).enqueue("a.png").result()
data: bytes = fetch.options(eta=None, expires=timedelta(minutes=1)).enqueue("a").result()
answer: str = order.options(timeout=5, detached=True, name="child", on_cancel="wait").start(1).result()


app.task(retires=3)  # wrong
app.task(retries="often")  # wrong
app.task(timeout="30s")  # wrong
app.task(isolation="fork")  # wrong
app.workflow(timeot=60)  # wrong
app.workflow(detached="yes")  # wrong
plain.options(priorty=1)  # wrong
plain.options(queue=5)  # wrong
order.options(quue="orders")  # wrong
order.options(on_cancel="shrug")  # wrong
app.schedule(corn="0 3 * * *")  # wrong
app.schedule(cron="0 3 * * *", overlap="sometimes")  # wrong
app.schedules.set("nightly", evry=5)  # wrong
plain.options(delay=1).enqueue(7)  # wrong
