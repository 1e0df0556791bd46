"""A user's program for type checkers: lines that end in `wrong` must be rejected, all others accepted."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from orchestrator import (
    Orchestrator,
    OrchestratorError,
    Retry,
    TaskContext,
    WorkflowContext,
    agather,
    as_completed,
    chain,
    chord,
    group,
)

app = Orchestrator(routes={"mail.*": "mail"})
one = uuid4()


@app.task
def plain(path: str, width: int = 100) -> str:
    return f"{path} at {width}"


@app.task(retries=Retry(max=3), timeout=timedelta(seconds=30), queue="images", priority=5, name="shop.resize")
def resize(ctx: TaskContext, path: str) -> str:
    copied: str = ctx.enqueue(plain, path, width=3).result()
    ctx.enqueue(plain, 7)  # wrong
    number: int = ctx.enqueue(plain, path).result()  # wrong
    return f"{copied} {number}"


@app.task
async def resize_later(ctx: TaskContext, path: str) -> str:
    handle = await ctx.aenqueue(plain, path, width=3)
    await ctx.aenqueue(plain, path, hight=3)  # wrong
    number: int = await handle.aresult()  # wrong
    return f"{await handle.aresult()} {number}"


@app.task(on_success=plain, isolation="process", concurrency=2, rate="10/s", unique_key=lambda path, **_: path)
async def fetch(path: str) -> bytes:
    return path.encode()


@app.workflow(timeout=60, queue="orders", version=2)
async def order(ctx: WorkflowContext, number: int) -> str:
    late: str = await ctx.schedule(plain, "a")
    wrong: int = await ctx.schedule(plain, "a")  # wrong
    return f"{late} {wrong} {await plain.options(queue='mail').schedule('a')}"


@app.schedule(cron="0 3 * * *", timezone="Europe/Berlin", overlap="skip")
@app.task
def nightly() -> None: ...


text: str = resize.options(delay=1, priority=2, retries=[1, 5]).enqueue("a.png").result()
data: bytes = fetch.options(eta=None, expires=timedelta(minutes=1)).enqueue("a").result()
keyed: str = plain.options(unique_key=7, concurrency_key=one).enqueue("a").result()
once: str = plain.options(idempotency_key=one, concurrency_key=lambda path, **_: len(path)).enqueue("a").result()
answer: str = order.options(timeout=5, detached=True, name="child", on_cancel="wait").start(1).result()


async def on_a_loop() -> None:
    async with app:
        handle = await plain.aenqueue("a", width=3)
        text: str = await handle.aresult(timeout=3)
        late: str = await (await order.starting(id="o").astart(1)).aresult()
        many: list[str] = await agather(await app.aenqueue_many(plain, [("a",)]))
        mixed: list[str | OrchestratorError] = await agather([handle], return_exceptions=True)
        run = await app.astart_many(resize, ["a"], name="all")
        state: str = await run.await_ended(5)
        state = run.status() + await run.astatus()
        some: list[str | OrchestratorError] = await run.aresults(5, return_exceptions=True)
        some += run.results(return_exceptions=True)
        some += [one async for one in run.aiter_results(return_exceptions=True)]
        all_of_it: list[str] = await run.aresults() + run.results(timeout=3)
        each: list[str] = [one async for one in run.aiter_results()]
        ended: list[str] = [one.result() async for one in as_completed([handle])]
        left: int = await app.queue("mail").aopen()
        print(text, late, many, mixed, state, some, all_of_it, each, ended, left)
        await plain.aenqueue(7)  # wrong
        await plain.adelay("a", hight=3)  # wrong
        await handle.aresult(timeot=3)  # wrong
        number: int = await handle.aresult()  # wrong
        number = await run.await_ended("now")  # wrong
        all_of_it = run.results(return_exceptions=True)  # wrong
        await app.queue("mail").alimit(concurency=1)  # wrong
        await order.astart("one")  # wrong
        print(number)


composed: bytes = chain(plain.s("a", width=3), resize.s(), fetch.s()).start(name="all", tags=["a"]).result(timeout=3)
piped: bytes = (plain.s("a") | plain.s(width=4) | fetch.si("a")).start().result()
listed: list[str] = group(plain.s("a"), plain.s("b")).start().result()
mapped: list[bytes] = fetch.map(["a", "b"]).start().result()
called: str = chord(group(plain.s(path) for path in "ab"), plain.s(width=3)).start().result()
folded: bytes = chord(plain.starmap([("a", 3)]), fetch.s()).start().result()


async def composed_on_a_loop() -> None:
    text: str = await (await chain(fetch.s("a"), plain.s()).astart()).aresult()
    number: int = await (await chain(fetch.s("a"), plain.s()).astart()).aresult()  # wrong
    print(text, number)


plain.s("a", hight=3)  # wrong
plain.si()  # wrong
plain.s("a", "b")  # wrong
chain(plain.s("a"), plain)  # wrong
group(plain.s("a"), "b")  # wrong
number: int = (plain.s("a") | plain.s()).start().result()  # wrong
with app as entered:
    same: Orchestrator = entered
app.task(retires=3)  # wrong
app.task(retries="often")  # wrong
app.task(timeout="30s")  # wrong
app.task(isolation="fork")  # wrong
app.task(unique_key=1.5)  # wrong
app.task(concurrency_key=[one])  # wrong
app.task(idempotency_key=lambda path: path)  # wrong
app.task(rate=10)  # wrong
app.task(weight="heavy")  # wrong
app.task(unique_for="pendig")  # wrong
plain.options(on_duplicate="shrug")  # wrong
plain.enqueue("a", delay=60)  # wrong
Orchestrator("shop")  # wrong
Retry(backoff="exponental")  # wrong
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
