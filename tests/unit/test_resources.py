"""Dependencies of tasks: opened when the task runs, closed when the task has ended."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import pytest

from orchestrator import Depends, InvalidTask, InvalidWorkflow, Orchestrator, TaskContext

if TYPE_CHECKING:
    from collections import OrderedDict as Unresolved

app = Orchestrator()
events: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    events.clear()
    yield
    app.close()


class Engine:
    """A resource that a process opens once."""


@app.resource(scope="process")
def engine() -> Iterator[Engine]:
    events.append("engine opened")
    yield Engine()
    events.append("engine closed")


def session(engine: Engine = Depends(engine)) -> Iterator[tuple[Engine, str]]:
    events.append("session opened")
    try:
        yield engine, "session"
    except Exception as error:
        events.append(f"session rolled back: {error}")
        raise
    finally:
        events.append("session closed")


def audit(session: tuple[Engine, str] = Depends(session)) -> str:
    return f"audit in {session[1]}"


Db = Annotated[tuple[Engine, str], Depends(session)]


@app.task
def place(order: int, *, db: tuple[Engine, str] = Depends(session), log: str = Depends(audit)) -> str:
    events.append(f"place {order} with {log}")
    if order < 0:
        raise ValueError("no such order")
    return db[1]


def test_a_plain_call_opens_and_closes_its_dependencies() -> None:
    assert place(7) == "session"
    assert events == ["engine opened", "session opened", "place 7 with audit in session", "session closed"]
    assert place(8) == "session"
    assert events[4:] == ["session opened", "place 8 with audit in session", "session closed"]
    app.close()
    assert events[-1] == "engine closed"


def test_a_dependency_sees_the_failure_of_the_task() -> None:
    with pytest.raises(ValueError, match="no such order"):
        place(-1)
    assert events[-2:] == ["session rolled back: no such order", "session closed"]


def test_a_dependency_cannot_hide_a_failure() -> None:
    def hiding() -> Iterator[None]:
        try:
            yield
        except ValueError:
            events.append("hidden")

    @app.task(name="hidden")
    def task(nothing: None = Depends(hiding)) -> None:
        raise ValueError("seen")

    with pytest.raises(ValueError, match="seen"):
        task()
    assert events == ["hidden"]


def test_dependencies_are_not_arguments_of_the_call() -> None:
    assert place._signature.names == ["order"]
    with pytest.raises(InvalidTask, match="unexpected keyword argument 'db'"):
        place._signature.check((1,), {"db": 2})
    with pytest.raises(InvalidTask, match="expected int"):
        place._signature.restore(["x"], {})


def test_dependencies_may_stand_anywhere_among_the_parameters() -> None:
    @app.task(name="mixed")
    def mixed(db: Db, ctx: TaskContext, path: str, other: Db, *rest: int, last: Db, width: int = 1) -> list[Any]:
        return [db[1], ctx.task_name, path, other is db, rest, last is db, width]

    assert mixed._signature.names == ["path", "rest", "width"]
    assert mixed("a") == ["session", "mixed", "a", True, (), True, 1]  # type: ignore[call-arg,arg-type]
    assert mixed(path="a", width=2) == ["session", "mixed", "a", True, (), True, 2]  # type: ignore[call-arg]
    assert events.count("session opened") == 2, "one for each call"


def test_a_dependency_may_have_an_unresolvable_annotation() -> None:
    def unknown() -> Any:
        return {"a": 1}

    @app.task(name="unresolved")
    def unresolved(order: int, db: Unresolved[str, int] = Depends(unknown)) -> list[str]:
        return [*db]

    assert unresolved(1) == ["a"]
    with pytest.raises(InvalidTask, match="expected int"):
        unresolved._signature.restore(["x"], {})


def test_a_dependency_can_be_passed_or_overridden() -> None:
    assert place(7, db=(Engine(), "mine"), log="x") == "mine"
    assert events == ["place 7 with x"]
    with app.override(session, (Engine(), "fake")):
        assert place(7) == "fake"
        with app.override(audit, "none"):
            place(8)
    assert events[1:] == ["place 7 with audit in fake", "place 8 with none"]
    assert place(9) == "session"


def test_context_managers_classes_and_functions_can_be_dependencies() -> None:
    @contextmanager
    def managed() -> Iterator[str]:
        yield "managed"
        events.append("managed closed")

    class Client:
        def __enter__(self) -> str:
            return "client"

        def __exit__(self, *_: object) -> None:
            events.append("client closed")

    @app.task(name="kinds")
    def kinds(one: str = Depends(managed), two: str = Depends(Client), three: int = Depends(lambda: 3)) -> list[Any]:
        return [one, two, three]

    assert kinds() == ["managed", "client", 3]
    assert events == ["client closed", "managed closed"]


# -- asynchronous dependencies


@app.resource(scope="process")
async def pool() -> AsyncIterator[str]:
    events.append("pool opened")
    await asyncio.sleep(0)
    try:
        yield "pool"
    finally:
        events.append("pool closed")


@app.resource(scope="process")
async def client(pool: str = Depends(pool)) -> str:
    events.append("client made")
    return f"client of {pool}"


@asynccontextmanager
async def cursor(client: str = Depends(client), engine: Engine = Depends(engine)) -> AsyncIterator[str]:
    yield f"cursor of {client}"
    events.append("cursor closed")


@app.task
async def fetch(number: int, cursor: str = Depends(cursor)) -> str:
    await asyncio.sleep(0)
    return f"{number} by {cursor}"


def test_async_resources_are_opened_once_for_each_loop() -> None:
    async def main() -> list[str]:
        return await asyncio.gather(*(fetch(number) for number in range(3)))  # type: ignore[call-overload]

    assert asyncio.run(main())[2] == "2 by cursor of client of pool"
    expected = ["client made", *["cursor closed"] * 3, "engine opened", "pool closed", "pool opened"]
    assert sorted(events) == sorted(expected)
    events.clear()
    asyncio.run(main())
    assert events.count("pool opened") == 1


def test_async_resources_are_closed_on_their_running_loop() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(fetch(1), loop).result(10)  # type: ignore[arg-type]
    app._resources.close(loop)
    assert events[-2:] == ["pool closed", "engine closed"]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_cancelled_task_closes_its_dependencies() -> None:
    async def held() -> AsyncIterator[str]:
        try:
            yield "held"
        finally:
            await asyncio.sleep(0)
            events.append("held closed")

    @app.task(name="waiting")
    async def waiting(held: str = Depends(held)) -> None:
        events.append(held)
        await asyncio.Event().wait()

    async def main() -> None:
        running = asyncio.ensure_future(waiting())  # type: ignore[call-overload]
        while not events:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert events == ["held", "held closed"]


def test_the_event_loop_continues_while_a_resource_is_opened() -> None:
    own, going_on = Orchestrator(), threading.Event()

    @own.resource(scope="process")
    def model() -> str:
        assert going_on.wait(10), "the loop stands still"
        return "model"

    @own.task(name="predict")
    async def predict(model: str = Depends(model)) -> str:
        return model

    async def main() -> list[str]:
        running = [asyncio.ensure_future(predict()) for _ in range(3)]  # type: ignore[call-overload]
        await asyncio.sleep(0)
        going_on.set()
        return [await one for one in running]

    assert asyncio.run(main()) == ["model"] * 3


def test_a_slowly_opening_resource_delays_no_other_resource() -> None:
    own, opening, done = Orchestrator(), threading.Event(), threading.Event()

    @own.resource(scope="process")
    def slow() -> str:
        opening.set()
        assert done.wait(10), "the other one waits"
        return "slow"

    @own.resource(scope="process")
    def quick() -> str:
        return "quick"

    first = own.task(name="slow")(lambda value=Depends(slow): value)
    second = own.task(name="quick")(lambda value=Depends(quick): value)
    thread = threading.Thread(target=first)
    thread.start()
    assert opening.wait(10)
    assert second() == "quick"
    done.set()
    thread.join()


# -- rejected dependencies


def test_invalid_dependencies_are_rejected() -> None:
    def between(pool: str = Depends(pool)) -> str:
        return pool

    with pytest.raises(InvalidTask, match="blocking depends on pool, which is asynchronous. Make .*blocking an `async"):

        @app.task(name="blocking")
        def blocking(pool: str = Depends(pool)) -> None: ...

    with pytest.raises(InvalidTask, match="between depends on pool, which is asynchronous"):

        @app.task(name="nested")
        async def nested(between: str = Depends(between)) -> None: ...

    with pytest.raises(
        InvalidTask, match=r"'session' only as long as a task. Declare session with @app.resource\(scope"
    ):

        @app.resource(scope="process")
        def cache(session: Any = Depends(session)) -> None: ...

    with pytest.raises(InvalidTask, match="expected 'task' or 'process', found 'app'"):
        app.resource(scope="app")(session)  # type: ignore[call-overload]
    with pytest.raises(InvalidTask, match="expected a function that yields or returns the value, found 7"):
        Depends(7)  # type: ignore[call-overload]
    with pytest.raises(InvalidTask, match="which is asynchronous. Make it a resource"):
        app.lifespan(pool)
    with pytest.raises(InvalidWorkflow, match=r"it cannot depend on resources \(db\). Give them to its tasks"):

        @app.workflow
        async def flow(ctx: Any, db: Any = Depends(session)) -> None: ...

    with pytest.raises(InvalidTask, match="Task name 'place2' is registered twice"):
        app.task(name="place2")(lambda db=Depends(session): [db])
        app.task(name="place2")(lambda db=Depends(session): (db,))


# -- processes


def test_a_failing_close_does_not_skip_other_resources(caplog: pytest.LogCaptureFixture) -> None:
    own = Orchestrator()

    @own.resource(scope="process")
    def first() -> Iterator[int]:
        yield 1
        events.append("first closed")

    @own.resource(scope="process")
    def second(first: int = Depends(first)) -> Iterator[int]:
        yield 2
        raise OSError("cannot close")

    own.task(name="both")(lambda second=Depends(second): second)()
    own._resources.close()
    assert events == ["first closed"]


def test_a_forked_process_opens_its_own_resources() -> None:
    place(1)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        events.clear()
        place(2)
        app.close()
        os.write(write, "\n".join(events).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 10_000).decode().splitlines()
    os.close(read)
    os.close(write)
    assert said[0] == "engine opened"
    assert said[-1] == "engine closed"
    assert "engine closed" not in events


def test_a_lifespan_is_opened_at_the_start() -> None:
    own = Orchestrator()

    @own.lifespan
    def life() -> Iterator[str]:
        events.append("begins")
        yield "alive"
        events.append("ends")

    task = own.task(name="living")(lambda life=Depends(life): life)
    own._resources.start()
    assert events == ["begins"]
    assert task() == "alive"
    own._resources.close()
    assert events == ["begins", "ends"]


# -- overrides


@app.resource(scope="process")
def url() -> str:
    return "real"


@app.resource(scope="process")
def connection(url: str = Depends(url)) -> Iterator[str]:
    events.append(f"{url} opened")
    yield f"connection to {url}"
    events.append(f"{url} closed")


@app.resource(scope="process")
async def channel(url: str = Depends(url)) -> AsyncIterator[str]:
    events.append(f"{url} opened")
    yield f"channel to {url}"
    events.append(f"{url} closed")


@app.task
def ask(db: str = Depends(connection)) -> str:
    return db


@app.task
async def listen(db: str = Depends(channel)) -> str:
    return db


def test_process_resources_follow_an_override() -> None:
    with app.override(url, "first"):
        assert ask() == ask() == "connection to first"
        assert events == ["first opened"]
    assert events == ["first opened", "first closed"]
    assert ask() == "connection to real"
    with app.override(url, "outer"):
        with app.override(url, "inner"):
            assert ask() == "connection to inner"
        with app.override(connection, "fake"):
            assert ask() == "fake"
        assert ask() == "connection to outer"
    assert ask() == "connection to real"
    assert events[2:] == ["real opened", "inner opened", "inner closed", "outer opened", "outer closed"]


def test_async_resources_follow_an_override_and_close_with_their_loop() -> None:
    call: Any = listen

    async def main() -> None:
        with app.override(url, "fake"):
            assert [await call() for _ in range(2)] == ["channel to fake"] * 2
        assert await call() == "channel to real"
        await app._resources.close_on_loop()

    asyncio.run(main())
    assert events == ["fake opened", "real opened", "real closed", "fake closed"]


def test_overlapping_overrides_leave_nothing_behind() -> None:
    first, second = app.override(connection, "first"), app.override(connection, "second")
    with first:
        second.__enter__()
        assert ask() == "second"
    assert ask() == "second"
    second.__exit__(None, None, None)
    assert ask() == "connection to real"


def test_an_override_without_effect_is_rejected() -> None:
    def other() -> str:
        return "other"

    with pytest.raises(InvalidTask, match=r"no task depends on .*other"), app.override(other, "fake"):
        pass
