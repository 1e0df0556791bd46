"""Tasks in memory: recorded, run at once, or run by a simulated clock."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from orchestrator import (
    AttemptEnd,
    Depends,
    Duplicate,
    EnqueueCall,
    InvalidTask,
    Middleware,
    Orchestrator,
    OrchestratorError,
    Retry,
    RetryLater,
    RunFailed,
    Settings,
    TaskContext,
    TaskFailed,
    TaskFailure,
    Workflow,
    WorkflowContext,
    WrongState,
    chain,
    chord,
    gather,
    group,
)
from orchestrator.domain.dag.definition import Param
from orchestrator.executors import Process
from orchestrator.testing import TaskTest, eager, recording


class Size(msgspec.Struct):
    width: int
    height: int


class Shop:
    """An application, and the log of its tasks."""

    def __init__(self) -> None:
        self.app = app = Orchestrator(Settings())
        self.log: list[Any] = []

        @app.task(name="resize", queue="images")
        def resize(path: str, size: Size | None = None, at: datetime | None = None) -> str:
            self.log.append(("resize", path, size))
            return f"{path} {size.width if size else 'whole'}"

        @app.task(name="note")
        def note(what: Any) -> None:
            self.log.append(what)

        @app.task(name="fail", retries=Retry(max=2, backoff="constant", base=60, jitter=0))
        def fail(ctx: TaskContext, times: int = 9) -> int:
            self.log.append(("fail", ctx.attempt))
            if ctx.attempt <= times:
                raise ValueError(f"no {ctx.attempt}")
            return ctx.attempt

        @app.task(name="later")
        async def later(ctx: TaskContext) -> int:
            ctx.progress(0.5, "half")
            ctx.log("said")
            if ctx.attempt < 3:
                ctx.heartbeat(ctx.attempt)
                raise RetryLater(30)
            return int(ctx.details)

        @app.task(name="parent")
        def parent(ctx: TaskContext, fails: bool = False) -> str:
            note.enqueue("enqueued")
            note.options(on_success=True).enqueue("only on success")
            app.start_many(note, ["many 1", "many 2"])
            self.log.append("parent")
            if fails:
                raise ValueError("no")
            return "done"

        self.resize, self.note, self.fail, self.later, self.parent = resize, note, fail, later, parent


@pytest.fixture
def shop() -> Shop:
    return Shop()


# -- recording


def test_recording_keeps_enqueued_tasks_and_runs_none(shop: Shop) -> None:
    with recording(shop.app) as recorded:
        shop.resize.enqueue("a.png", size=Size(3, 4))
        shop.resize.options(delay=timedelta(minutes=1), priority=5).enqueue("b.png")
        shop.app.enqueue_many(shop.note, [("x",), {"what": "y"}])
        shop.app.start_many(shop.note, ["z"], name="notes")
        asyncio.run(shop.note.aenqueue("w"))
    assert shop.log == []
    found = recorded.assert_enqueued(shop.resize, path="a.png", size=Size(3, 4), queue="images")
    assert (found.arguments, found.state) == ({"path": "a.png", "size": Size(3, 4), "at": None}, "pending")
    recorded.assert_enqueued("resize", path="b.png", delay=60, priority=5)
    recorded.assert_enqueued(shop.resize, delay=timedelta(seconds=60))
    assert [one.arguments["what"] for one in recorded.enqueued(shop.note)] == ["x", "y", "z", "w"]
    assert [run.name for run in recorded.started()] == ["notes"]
    assert recorded.enqueued(shop.later) == []


def test_a_failed_assertion_lists_the_enqueued_tasks(shop: Shop) -> None:
    with recording(shop.app) as recorded:
        with pytest.raises(AssertionError, match=r"^Task 'note' was not enqueued\. Nothing was enqueued\.$"):
            recorded.assert_enqueued(shop.note)
        shop.resize.options(delay=60).enqueue("a.png")
        with pytest.raises(AssertionError) as failed:
            recorded.assert_enqueued(shop.resize, path="b.png", queue="images")
        with pytest.raises(InvalidTask, match=r"no argument or option 'pth'.* Did you mean 'path'"):
            recorded.assert_enqueued(shop.resize, pth="a.png")
    assert str(failed.value) == (
        "Task 'resize' was not enqueued with path='b.png', queue='images'. Enqueued:\n"
        "  resize(path='a.png', size=None, at=None) queue='images' delay=60.0 pending"
    )


def test_calls_are_checked_while_recording(shop: Shop) -> None:
    with recording(shop.app) as recorded:
        with pytest.raises(InvalidTask, match="missing a required argument"):
            shop.resize.enqueue()  # type: ignore[call-arg]
        with pytest.raises(InvalidTask, match="argument 'path': expected str"):
            shop.resize.enqueue(7)  # type: ignore[arg-type]
    assert recorded.enqueued() == []


def test_starts_of_workflows_are_recorded(shop: Shop) -> None:
    @shop.app.workflow(name="order")
    async def order(ctx: WorkflowContext, number: int, size: Size) -> None: ...

    @shop.app.task(name="starter")
    def starter() -> None:
        order.starting(id="o-2").start(2, Size(5, 6))
        shop.app.workflows["nightly"].start(day="today")

    with recording(shop.app) as recorded:
        handle = order.starting(id="o-1").start(1, size=Size(3, 4))
        shop.app.workflows["nightly"].start(day="monday")
        shop.app.flows["flow"].start(val=2)
        starter.enqueue()
        recorded.drain()
        with pytest.raises(OrchestratorError, match="code.wait is not available in memory.*WorkflowTest"):
            handle.result(1)
    first, second = recorded.started(order)
    assert (first.id, first.params, first.key) == (handle.id, {"number": 1, "size": Size(3, 4)}, "o-1")
    assert (second.params, second.key) == ({"number": 2, "size": Size(5, 6)}, "o-2")
    assert [run.params for run in recorded.started("nightly")] == [{"day": "monday"}, {"day": "today"}]
    assert [run.params for run in recorded.started("flow")] == [{"val": 2}]


def test_the_application_is_restored_after_recording(shop: Shop) -> None:
    before = shop.app._client._backend
    with recording(shop.app):
        shop.app.close()
        shop.note.enqueue("still in memory")
        with eager(shop.app) as inner:
            shop.note.enqueue("in the inner one")
        assert len(inner.enqueued()) == 1
        shop.note.enqueue("in the outer one")
    assert (shop.app._client._backend, shop.log) == (before, ["in the inner one"])
    with pytest.raises(Exception, match="redis_url is not set"):
        shop.note.enqueue("no database")


# -- eager


def test_an_eager_task_runs_at_once_and_returns_its_result(shop: Shop) -> None:
    with eager(shop.app):
        assert shop.resize.enqueue("a.png", Size(3, 4)).result() == "a.png 3"
        assert shop.log == [("resize", "a.png", Size(3, 4))]
        assert gather(shop.app.enqueue_many(shop.resize, [("b",), ("c",)])) == ["b whole", "c whole"]
        run = shop.app.start_many(shop.resize, ["d", "e"])
        assert (run.results(), run.status(), run.progress().counters.success) == (["d whole", "e whole"], "success", 2)


def test_a_failure_is_retried_and_then_raised_by_result(shop: Shop) -> None:
    with eager(shop.app) as test:
        start = test.now
        assert shop.fail.enqueue(2).result() == 3
        assert test.now - start == timedelta(seconds=120)
        handle = shop.fail.enqueue()
        with pytest.raises(TaskFailed, match="ValueError: no 3"):
            handle.result()
        assert (handle.status(), test.enqueued(shop.fail)[1].failures) == ("failed", 3)


def test_a_task_that_raises_retry_later_keeps_its_details(shop: Shop) -> None:
    with eager(shop.app) as test:
        handle = shop.later.enqueue()
        assert handle.result() == 2
        progress = handle.progress()
        assert progress is not None
        assert (progress.fraction, [line.text for line in handle.logs()]) == (0.5, ["said"] * 3)
        assert test.enqueued(shop.later)[0].attempt == 3


@pytest.mark.parametrize("fails", [False, True])
def test_tasks_enqueued_by_a_task_run_after_their_parent(shop: Shop, fails: bool) -> None:
    with eager(shop.app) as test:
        shop.parent.enqueue(fails)
    expected = ["parent", "enqueued", "many 1", "many 2"] + ["only on success"] * (not fails)
    assert shop.log == expected  # after the parent, which could not wait for them
    assert all(one.new.parent == test.enqueued(shop.parent)[0].new.id for one in test.enqueued(shop.note))


def test_callbacks_run_after_a_success_and_a_failure(shop: Shop) -> None:
    @shop.app.task(name="failed")
    def failed(failure: TaskFailure) -> None:
        shop.log.append((failure.task, failure.kind, failure.message))

    with eager(shop.app):
        shop.resize.options(on_success=shop.note, on_failure=failed).enqueue("a")
        shop.fail.options(retries=0, on_success=shop.note, on_failure=failed).enqueue()
    assert shop.log == [("resize", "a", None), "a whole", ("fail", 1), ("fail", "ValueError", "no 1")]


def test_eager_tasks_run_on_an_event_loop(shop: Shop) -> None:
    async def main() -> tuple[int, str, int]:
        return (
            await (await shop.later.aenqueue()).aresult(),
            await (await shop.resize.aenqueue("a")).aresult(),
            threading.get_ident(),
        )

    with eager(shop.app):
        assert asyncio.run(main()) == (2, "a whole", threading.get_ident())


@pytest.mark.slow
def test_a_task_that_enqueues_itself_endlessly_is_stopped(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.testing.memory_tasks._MAX_ATTEMPTS", 100)

    @shop.app.task(name="again")
    def again() -> None:
        again.options(delay=60).enqueue()

    with eager(shop.app), pytest.raises(OrchestratorError, match=r"101 attempts .*again\(\).* enqueue itself\?"):
        again.enqueue()
    with recording(shop.app) as test:
        again.enqueue()
        assert len(test.skip(hours=4)) == 241
    with eager(shop.app):
        assert shop.app.start_many(shop.note, range(500)).status() == "success"

    @shop.app.task(name="split")
    def split(count: int) -> None:
        shop.app.enqueue_many(shop.note, [(number,) for number in range(count)])

    @shop.app.task(name="twice")
    def twice() -> None:
        twice.enqueue()
        twice.enqueue()

    with recording(shop.app) as test:
        split.enqueue(5_000)
        assert len(test.drain()) == 5_001
        twice.enqueue()
        with pytest.raises(OrchestratorError, match=r"10,001 attempts .*twice\(\)"):
            test.drain()


def test_a_task_of_an_executor_does_not_run(shop: Shop) -> None:
    @shop.app.task(name="tar", executor=Process(command=["tar"]))
    def tar(path: str) -> None: ...

    with eager(shop.app), pytest.raises(TaskFailed, match="executor 'process'.*orchestrator_app"):
        tar.enqueue("a").result()


# -- keys


def test_a_unique_key_is_held_for_its_period(shop: Shop) -> None:
    key: Any = {"unique_key": "k"}
    with recording(shop.app) as test:
        first = shop.note.options(**key).enqueue(1)
        assert shop.note.options(**key).enqueue(2) == first
        with pytest.raises(Duplicate, match=f"Task {first.id} already has the key 'k'"):
            shop.note.options(on_duplicate="raise", **key).enqueue(3)
        assert shop.note.options(on_duplicate="replace", delay=60, **key).enqueue(4) == first
        assert test.drain() == []
        assert [one.arguments for one in test.skip(60)] == [{"what": 4}]
        assert shop.note.options(unique_for=60, **key).enqueue(5) != first
        test.skip(59)
        assert len(test.enqueued(shop.note, unique_key="k")) == 2
        shop.note.options(unique_for=60, **key).enqueue(6)
        test.skip(1)
        shop.note.options(unique_for=60, **key).enqueue(7)
        test.drain()
    assert shop.log == [4, 5, 7]


def test_a_bulk_enqueue_creates_all_tasks_or_none(shop: Shop) -> None:
    keyed = shop.app.task(name="keyed", unique_key=lambda what: what, on_duplicate="raise")(
        lambda what: shop.log.append(what)
    )
    with recording(shop.app) as test:
        keyed.enqueue(2)
        with pytest.raises(Duplicate):
            shop.app.enqueue_many(keyed, [(1,), (2,), (3,)])
        assert [one.arguments["what"] for one in test.enqueued()] == [2]
        keyed.enqueue(1)
        test.drain()
    assert shop.log == [2, 1]


def test_an_idempotency_key_rejects_other_arguments(shop: Shop) -> None:
    once = shop.note.options(idempotency_key="k")
    with eager(shop.app):
        assert once.enqueue(1) == once.enqueue(1)
        with pytest.raises(Duplicate, match="with other arguments"):
            once.enqueue(2)
    assert shop.log == [1]


# -- time


def test_skipping_time_runs_due_tasks(shop: Shop) -> None:
    start = datetime(2026, 3, 1, 12, tzinfo=UTC)
    with TaskTest(shop.app, start=start) as test:
        shop.note.options(delay=60).enqueue("in a minute")
        shop.note.options(eta=start + timedelta(hours=1)).enqueue("at one")
        shop.note.options(priority=1).enqueue("first")
        shop.note.enqueue("now")
        shop.note.options(delay=120, expires=60).enqueue("never")
        handle = shop.note.options(delay=60).enqueue("cancelled")
        assert [one.arguments["what"] for one in test.drain()] == ["first", "now"]
        handle.cancel()
        with pytest.raises(OrchestratorError, match=r"'note' .* has not run, .*call drain\(\), or skip\(…\)"):
            test._app.handle(test.enqueued()[0].id).result()
        assert [one.arguments["what"] for one in test.skip(minutes=2)] == ["in a minute"]
        assert test.now == start + timedelta(minutes=2)
        shop.note.options(eta=start + timedelta(minutes=30)).enqueue("at half past")
        assert [one.arguments["what"] for one in test.skip(hours=1)] == ["at half past", "at one"]
        assert [one.state for one in test.enqueued(shop.note, what="never")] == ["failed"]
        with pytest.raises(WrongState, match="it is in state 'success'"):
            test._app.handle(test.enqueued()[0].id).cancel()


def test_a_failed_task_can_be_retried_manually(shop: Shop) -> None:
    with recording(shop.app) as test:
        handle = shop.fail.options(retries=0).enqueue(1)
        test.drain()
        assert handle.status() == "failed"
        handle.retry()
        test.drain()
        assert handle.result() == 2


def test_a_rate_limit_spreads_due_tasks(shop: Shop) -> None:
    each = shop.note.options(rate="1/m", concurrency_key="a")
    with recording(shop.app) as test:
        shop.app.enqueue_many(each, [(number,) for number in range(3)])
        assert len(test.drain()) == 1
        assert len(test.skip(61)) == 1
        assert len(test.skip(61)) == 1
    with eager(shop.app) as test:
        start = test.now
        shop.app.enqueue_many(each, [(number,) for number in range(3)])
        assert timedelta(minutes=2) <= test.now - start < timedelta(minutes=2, seconds=1)


def test_schedules_declared_in_code_fire(shop: Shop) -> None:
    @shop.app.schedule(cron="0 3 * * *", timezone="Europe/Berlin", params={"what": "${run.fire_time}"})
    @shop.app.task(name="nightly")
    def nightly(what: str) -> None:
        shop.log.append(what)

    @shop.app.schedule(every="12h")
    @shop.app.workflow(name="report")
    async def report(ctx: WorkflowContext) -> None: ...

    with TaskTest(shop.app, start=datetime(2026, 3, 1, 12, tzinfo=UTC)) as test:
        assert test.drain() == []
        assert len(test.skip(days=2)) == 2
        assert len(test.started(report)) == 4
    assert shop.log == ["2026-03-02T02:00:00+00:00", "2026-03-03T02:00:00+00:00"]


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("skip", "1 2 3 4 1"),
        ("cancel_previous", "1 2 1 2 1 2 1"),
        ("allow", "1 2 1 3 2 4 1 3 2 4 1"),
        ("queue", "1 2 3 4 1 2"),
    ],
)
def test_a_schedule_follows_its_overlap_policy(shop: Shop, overlap: Any, expected: str) -> None:
    attempts: list[str] = []

    @shop.app.schedule(every="3s", overlap=overlap)
    @shop.app.task(name="slow")
    def slow(ctx: TaskContext) -> None:
        attempts.append(str(ctx.attempt))
        if ctx.attempt < 4:
            raise RetryLater(2)

    with TaskTest(shop.app, start=datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)) as test:
        test.skip(11)
    assert " ".join(attempts) == expected


def test_invalid_times_are_rejected(shop: Shop) -> None:
    with pytest.raises(InvalidTask, match="start: expected a datetime with a time zone"):
        TaskTest(shop.app, start=datetime(2026, 1, 1))
    with recording(shop.app) as test:
        for seconds in (-1, math.nan, math.inf):
            with pytest.raises(InvalidTask, match=r"skip\(…\): expected seconds, 0 or more"):
                test.skip(seconds)


def test_enqueue_in_requires_a_transaction(shop: Shop) -> None:
    nothing: Any = None
    anything: Any = object()
    with recording(shop.app) as test:
        with pytest.raises(InvalidTask, match="enqueue_in: expected a connection"):
            shop.note.enqueue_in(nothing, "a")
        with pytest.raises(InvalidTask, match="cannot be combined with enqueue_in"):
            shop.note.options(unique_key="k", on_duplicate="replace").enqueue_in(anything, "a")
        assert test.enqueued() == []


# -- compositions and workflows of steps


class Pages:
    def __init__(self) -> None:
        self.app = app = Orchestrator(Settings())

        @app.task(name="fetch")
        def fetch(url: str) -> str:
            return f"text of {url}"

        @app.task(name="count", retries=1)
        def count(ctx: TaskContext, text: str, letter: str) -> int:
            if letter == "!" or ctx.attempt == 1:
                raise ValueError(f"no {letter}")
            return text.count(letter)

        @app.task(name="total")
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        self.fetch, self.count, self.total = fetch, count, total


def test_compositions_run_at_once() -> None:
    pages = Pages()
    fetch, count, total = pages.fetch, pages.count, pages.total
    with eager(pages.app) as test:
        assert chain(fetch.s("example.com"), count.s("e")).start().result() == 3
        assert group(fetch.s("a.org"), fetch.s("b.org")).start().results() == ["text of a.org", "text of b.org"]
        assert chord([count.s("banana", "a"), count.s("apple", "p")], total.s()).start().result() == 5
        assert (fetch.s("example.com") | group(count.s("e"), count.s("t")) | total.s()).start().result() == 5
        run = group(fetch.s(url) | count.s("o") for url in ("a.org", "b.org")).start()
        assert (run.results(), run.status()) == ([2, 2], "success")
        assert fetch.map(["a.org", "b.org"]).start().results() == ["text of a.org", "text of b.org"]
        assert test.enqueued(count)[0].attempt == 2


def test_a_failed_composition_names_the_failed_step() -> None:
    pages = Pages()
    with eager(pages.app):
        run = (pages.fetch.s("a.org") | pages.count.s("!") | pages.total.s()).start()
        with pytest.raises(RunFailed, match=r"step 2 of 3, count: ValueError: no !\. Not run: total\."):
            run.result()
        nested = group(pages.fetch.s(url) | pages.count.s("!") for url in ("a.org", "b.org")).start()
        with pytest.raises(RunFailed, match="step 2 of 2, count: ValueError: no !"):
            nested.result()


def test_a_composition_is_recorded_and_runs_step_by_step() -> None:
    pages = Pages()
    with recording(pages.app) as test:
        run = chain(pages.fetch.s("a.org"), pages.count.s("o")).start(name="letters")
        assert [one.name for one in test.started()] == ["letters"]
        test.assert_enqueued(pages.fetch, url="a.org")
        assert [one.name for one in test.drain()] == ["fetch", "count"]  # count fails, and is retried after a second
        assert (run.status(), test.enqueued(pages.count)[0].state) == ("running", "pending")
        test.skip(2)
        assert run.result() == 2
        again = chain(pages.fetch.s("a.org"), pages.count.s("o")).start()
        again.cancel()
        assert (test.drain(), again.status()) == ([], "cancelled")


def test_a_task_starts_a_composition_and_an_applied_workflow() -> None:
    pages = Pages()
    flow = Workflow("nightly", params={"urls": Param(default=["a.org"])})
    fetched = flow.task("fetch", pages.fetch, foreach=flow.params.urls, input={"url": flow.item})
    flow.task("size", "size", depends_on=[fetched], input={"texts": fetched})

    @pages.app.task(name="size")
    def size(texts: list[str]) -> int:
        return sum(map(len, texts))

    @pages.app.task(name="starter")
    def starter() -> None:
        chain(pages.fetch.s("a.org"), pages.count.s("o")).start()
        pages.app.workflows["nightly"].start(urls=["b.org", "c.org"])

    with eager(pages.app) as test:
        pages.app.workflows.apply(flow)
        starter.enqueue()
        assert pages.app.workflows["nightly"].start().outputs()["size"] == len("text of a.org")
        assert [one.result for one in test.enqueued(size)] == [2 * len("text of a.org"), len("text of a.org")]
        assert [one.result for one in test.enqueued(pages.count)] == [2]


def test_results_of_compositions_may_contain_errors() -> None:
    app = Orchestrator(Settings())
    note = app.task(name="note")(lambda what: what)
    fail = app.task(name="fail")(lambda what: 1 / what)
    with eager(app):
        for part in (
            group(fail.s(0), fail.s(1)),
            group(fail.s(0), note.s(1)),
            group(note.s(n) | fail.s() for n in range(2)),
            group(fail.s(0) | note.s(), note.s(1)),
            note.s(0) | group(fail.s(), note.si(1)),
            fail.map([0, 1]),
        ):
            error, value = part.start().results(return_exceptions=True)
            assert value == 1
            assert isinstance(error, OrchestratorError)
            assert "ZeroDivisionError" in str(error)


# -- middleware and dependencies


class Watching(Middleware):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def enqueue(self, call: EnqueueCall) -> None:
        call.headers.setdefault("tenant", "acme")

    def execute(self, ctx: TaskContext) -> Iterator[None]:
        self.seen.append(("begins", ctx.task_name, ctx.headers))
        yield

    def ended(self, ctx: TaskContext, end: AttemptEnd) -> None:
        self.seen.append((end.outcome, ctx.task_name))


def test_middleware_runs_and_headers_reach_callbacks() -> None:
    seen: list[Any] = []
    app = Orchestrator(Settings(), middleware=[Watching(seen)])
    note = app.task(name="note")(lambda what: what)
    first = app.task(name="first", on_success=note)(lambda: 1)
    failing = app.task(name="failing")(lambda: 1 / 0)
    headers = {"tenant": "acme"}
    with eager(app):
        first.enqueue()
        assert seen == [
            *(("begins", "first", headers), ("success", "first")),
            *(("begins", "note", headers), ("success", "note")),
        ]
        seen.clear()
        chain(first.s(), note.s()).start()
        assert {one[2]["tenant"] for one in seen if one[0] == "begins"} == {"acme"}
        seen.clear()
        chain(note.s(1), note.s()).start()
        assert [one[1] for one in seen] == ["note"] * 4  # the names of the tasks, not of the steps
        seen.clear()
        failing.options(headers={"tenant": "globex"}).enqueue()
        assert seen == [("begins", "failing", {"tenant": "globex"}), ("failure", "failing")]


def test_a_lifespan_lasts_from_the_first_task_to_the_end() -> None:
    seen: list[str] = []
    app = Orchestrator(Settings())

    @app.lifespan
    def life() -> Iterator[None]:
        seen.append("starts")
        yield
        seen.append("ends")

    def session() -> Iterator[str]:
        seen.append("opens")
        yield "session"
        seen.append("closes")

    @app.task(name="job")
    def job(number: int, db: str = Depends(session)) -> str:
        seen.append(db)
        return f"{db} {number}"

    with recording(app) as test:
        handle = job.enqueue(1)
        assert seen == []
        test.drain()
        assert (handle.result(), seen) == ("session 1", ["starts", "opens", "session", "closes"])
        with app.override(session, "fake"):
            job.enqueue(2)
            test.drain()
    assert seen[4:] == ["fake", "ends"]


def test_an_async_resource_is_opened_once_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "django.db", raising=False)  # with Django, each task has an event loop of its own
    seen: list[str] = []
    app = Orchestrator(Settings())

    @app.resource(scope="process")
    async def pool() -> AsyncIterator[str]:
        seen.append("opens")
        yield "pool"
        await asyncio.sleep(0)
        seen.append("closes")

    @app.task(name="fetch")
    async def fetch(db: str = Depends(pool)) -> None:
        seen.append(db)

    def twice() -> None:
        with eager(app):
            fetch.enqueue().result()
            fetch.enqueue().result()
        assert seen == ["opens", "pool", "pool", "closes"]
        seen.clear()

    async def on_a_loop() -> None:
        twice()

    twice()
    asyncio.run(on_a_loop())
