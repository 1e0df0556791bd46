"""A caller's timeout bounds the call, even if Postgres, Redis or the API hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import psutil
import pytest

from orchestrator import (
    Handle,
    Orchestrator,
    ResultTimeout,
    Unavailable,
    Uncertain,
    WorkflowContext,
    as_completed,
    gather,
)
from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from orchestrator.time_limits import TimeLimit

pytestmark = pytest.mark.own_connections

TIMEOUT = 0.3
KEPT = 9.5
"""Seconds by which a call with that timeout must end: 2, or more on a busy machine. Formerly it took 10 to 42."""
MANY = 40
"""Number of calls: more than there are threads for coroutines, or connections to Postgres."""


@contextmanager
def stopped(server: int) -> Iterator[None]:
    """Suspend a server and all its processes during the block."""
    os.kill(server, signal.SIGSTOP)  # first, so that it starts no other processes
    processes = [server, *(child.pid for child in psutil.Process(server).children(recursive=True))]
    try:
        for process in processes[1:]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


class Waiting:
    """Every kind of call that waits with a timeout; none of them can succeed."""

    def __init__(self, app: Orchestrator) -> None:
        self.task = app.task(name="job")(lambda: None)

        @app.workflow(name="talk")
        async def talk(ctx: WorkflowContext) -> None:
            @ctx.update
            def change() -> None: ...

            await ctx.promise("end")

        self.handle: Handle[None] = self.task.enqueue()
        self.run = app.start_many(self.task, [()])
        self.talk = talk.start()
        self.queue = app.queue("default")

    @property
    def calls(self) -> dict[str, Callable[[], object]]:
        return {
            "result": partial(self.handle.result, TIMEOUT),
            "result again": partial(self.handle.result, TIMEOUT),
            "aresult": lambda: asyncio.run(self.handle.aresult(TIMEOUT)),
            "gather": partial(gather, [self.handle, self.handle], TIMEOUT),
            "as_completed": lambda: list(as_completed([self.handle], TIMEOUT)),
            "wait_ended": partial(self.run.wait_ended, TIMEOUT),
            "result of code": partial(self.talk.result, TIMEOUT),
            "query": partial(self.talk.query, "state", timeout=TIMEOUT),
            "update": partial(self.talk.update, "change", timeout=TIMEOUT),
            "drain": partial(self.queue.drain, TIMEOUT),
        }


def errors_of(calls: Mapping[str, Callable[[], object]]) -> dict[str, Exception]:
    """Make calls concurrently; check that each ends in time, and return their errors."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = {name: threads.submit(_timed, call) for name, call in calls.items()}
        ended = {name: future.result() for name, future in futures.items()}
    late = {name: round(took, 1) for name, (took, _) in ended.items() if took > KEPT}
    assert not late, {name: str(error) for name, (_, error) in ended.items()}
    return {name: error for name, (_, error) in ended.items()}


def _timed(call: Callable[[], object]) -> tuple[float, Exception]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001  # the error is the result
        return time.monotonic() - began, error
    raise AssertionError("there is nothing that could have ended")


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Orchestrator]:
    with Orchestrator(database_url=database_url, redis_url=redis_url) as app:
        yield app


def test_calls_time_out_while_postgres_hangs(services: EmbeddedServices, database_url: str, app: Orchestrator) -> None:
    waiting = Waiting(app)
    with pytest.raises(ResultTimeout):
        waiting.handle.result(0)  # opens connections to both servers
    with stopped(services.postgres.pid):
        many = {f"result {number}": waiting.calls["result"] for number in range(MANY)}
        errors = errors_of(waiting.calls | many | {"aresult of many": partial(_all_results, waiting.handle)})
    for name in ("result", "result again", "aresult", "wait_ended", "result of code", *many):
        assert "Postgres did not answer in time" in str(errors[name]), name
    for name in ("gather", "as_completed", "aresult of many"):
        assert isinstance(errors[name], ResultTimeout), (name, errors[name])
    for name in ("query", "update", "drain"):
        assert isinstance(errors[name], Unavailable | Uncertain), name
    assert waiting.handle.status() == "pending"
    engine = database.engine_for(database_url)
    with engine.connect() as connection:
        count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        assert connection.exec_driver_sql(count).scalar_one() <= 2 * 25
    engine.dispose()


def _all_results(handle: Handle[None]) -> None:
    async def main() -> None:
        ends = await asyncio.gather(*(handle.aresult(TIMEOUT) for _ in range(MANY)), return_exceptions=True)
        assert {type(end) for end in ends} == {ResultTimeout}
        raise ResultTimeout("all of them")

    asyncio.run(main())


def test_calls_time_out_while_redis_hangs_before_any_subscription(
    services: EmbeddedServices, app: Orchestrator
) -> None:
    waiting = Waiting(app)
    with stopped(services.redis.pid):
        errors = errors_of(waiting.calls)
    assert {type(error) for error in errors.values()} == {ResultTimeout}, errors
    assert "No scheduler leads" in str(errors["result"])


def test_calls_time_out_while_the_api_hangs() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,  # accepts connections and never answers
        Orchestrator(api_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as app,
    ):
        handle = app.handle("01930000-0000-7000-8000-000000000001")
        talk = app.workflow_run("01930000-0000-7000-8000-000000000001")
        errors = errors_of(
            {
                "result": partial(handle.result, TIMEOUT),
                "gather": partial(gather, [handle], TIMEOUT),
                "result of code": partial(talk.result, TIMEOUT),
                "query": partial(talk.query, "state", timeout=TIMEOUT),
                "update": partial(talk.update, "change", timeout=TIMEOUT),
                "drain": partial(app.queue("default").drain, TIMEOUT),
            }
        )
    for name in ("result", "result of code"):
        assert "The API cannot be reached" in str(errors[name]), name
    assert isinstance(errors["gather"], ResultTimeout)
    for name in ("query", "update", "drain"):
        assert isinstance(errors[name], Uncertain), name


def test_a_signal_handler_can_write_during_a_timed_out_read(app: Orchestrator) -> None:
    task = app.task(name="job")(lambda: None)
    limit = TimeLimit(0, since=time.monotonic() - 60)
    with limit, pytest.raises(Unavailable, match="the time limit of the call has passed"):
        task.enqueue().status()
    with limit:
        handles = [task.enqueue(), task.options(unique_key="a").enqueue(), *app.enqueue_many(task, [()])]
    assert [handle.status() for handle in handles] == ["pending"] * 3
