"""A Postgres that accepts input and never answers: calls time out, and the rest of the program goes on."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Orchestrator, Settings, Unavailable, Uncertain
from orchestrator.scheduler.loop import Scheduler
from orchestrator.store import database
from orchestrator.store.deadlines import Deadlines
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader.streams import LeaderStreams
from tests.chaos.cutting import Cutting
from tests.stores import backend_of
from tests.waiting import eventually

pytestmark = pytest.mark.own_connections

_LIMIT = 0.5
_PATIENCE = 4.0
"""Timeout in seconds while Postgres answers, on a busy machine."""


@pytest.fixture
def line(database_url: str) -> Iterator[Cutting]:
    # Not in pytest's own folder: the path of a socket has a hundred bytes at most.
    with tempfile.TemporaryDirectory() as folder, Cutting(database_url, Path(folder)) as line:
        yield line
        line.go_on()


@pytest.fixture
def app(line: Cutting, redis_url: str) -> Iterator[Orchestrator]:
    app = Orchestrator(database_url=line.url, redis_url=redis_url, database_timeout=_PATIENCE)
    yield app
    app.close()


@contextmanager
def hanging(app: Orchestrator, line: Cutting) -> Iterator[None]:
    """Make Postgres hang during the block, with a short timeout."""
    deadlines = backend_of(app).connections._links().deadlines
    line.hang()
    deadlines.seconds = deadlines._late = _LIMIT
    try:
        yield
    finally:
        deadlines.seconds = deadlines._late = _PATIENCE
        line.go_on()


def test_every_call_ends_when_postgres_hangs(app: Orchestrator, line: Cutting) -> None:
    task = app.task(name="job")(lambda: None)
    many = app.enqueue_many(task, [()])  # opens connections, with and without transactions
    handle = task.enqueue()
    with hanging(app, line):
        with pytest.raises(
            Uncertain, match=rf"whether task .* was stored: no answer within {_LIMIT} s .*orchestrator status"
        ):
            task.enqueue()
        with pytest.raises(Unavailable, match=r"no answer within"):  # nothing was committed
            app.enqueue_many(task, [()])
        with pytest.raises(Unavailable, match="timeout expired"):  # a new connection
            task.enqueue()
    assert handle.status() == many[0].status() == "pending"
    task.enqueue()
    with hanging(app, line), pytest.raises(Unavailable, match="no answer within"):
        handle.status()


def test_an_enqueue_with_a_unique_key_times_out(app: Orchestrator, line: Cutting) -> None:
    task = app.task(name="job")(lambda: None)
    handle = task.options(unique_key="b").enqueue()  # opens the connection that the next call uses
    with hanging(app, line), pytest.raises(Uncertain, match="no answer within"):
        task.options(unique_key="a").enqueue()
    handle.cancel()


def test_an_unanswered_commit_is_uncertain(app: Orchestrator, line: Cutting) -> None:
    task = app.task(name="job")(lambda number: number)
    writing = backend_of(app).connections.writing("run 7 was stored", transaction=True)
    uncertain = pytest.raises(Uncertain, match=r"run 7 was stored: no answer within")
    with ExitStack() as stack, uncertain, writing as connection:
        connection.exec_driver_sql("SELECT 1")
        stack.enter_context(hanging(app, line))
    assert app.start_many(task, [1]).progress().counters.total == 1


def test_statements_within_the_timeout_succeed(line: Cutting, redis_url: str) -> None:
    app = Orchestrator(database_url=line.url, redis_url=redis_url, database_timeout=2.5)
    with app, backend_of(app).connections.reading() as connection:
        for _ in range(6):  # together they exceed the timeout of one statement
            connection.exec_driver_sql("SELECT pg_sleep(0.45)")
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1


def test_async_calls_do_not_exhaust_the_event_loops_threads(line: Cutting, redis_url: str) -> None:
    app = Orchestrator(database_url=line.url, redis_url=redis_url, database_timeout=600)
    task = app.task(name="job")(lambda: None)
    handle = task.enqueue()

    async def main() -> None:
        line.hang()
        stuck: list[asyncio.Task[Any]] = [asyncio.create_task(task.aenqueue()) for _ in range(40)]
        stuck += [asyncio.create_task(handle.aresult(1)) for _ in range(40)]
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*(asyncio.to_thread(time.monotonic) for _ in range(10))), 60)
        line.go_on()
        for one in stuck:
            with suppress(Exception):
                await one

    asyncio.run(main())
    assert asyncio.run(task.aenqueue()).status() == "pending"
    app.close()


def test_a_leader_logs_a_hanging_postgres_and_its_recovery(
    line: Cutting, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    settings = Settings(database_url=line.url, redis_url=redis_url, lease=1.0)
    with _leading(settings, late=1.0, most=60.0):
        eventually(lambda: "scheduler.leading term=" in caplog.text, "it leads")
        away = "Postgres cannot be used; no task starts, and reports wait: it has not answered for "
        for _ in range(2):  # logged each time
            for change, words in ((line.hang, away), (line.go_on, "Postgres can be used again")):
                before = caplog.text.count(words)
                change()
                eventually(partial(lambda said, count: caplog.text.count(said) > count, words, before), words)


def test_a_leader_steps_down_when_postgres_hangs_for_long(
    line: Cutting, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    settings = Settings(database_url=line.url, redis_url=redis_url, lease=1.0)
    with _leading(settings, late=1.0, most=2.0) as scheduler:
        eventually(lambda: "scheduler.leading term=" in caplog.text, "it leads")
        line.hang()
        eventually(lambda: not scheduler.leading.is_set(), "it does not wait for ever")
        line.go_on()
        eventually(scheduler.leading.is_set, "it leads again")


@contextmanager
def _leading(settings: Settings, *, late: float, most: float) -> Iterator[Scheduler]:
    deadlines = Deadlines(most, late=late)
    engine = database.engine_for(settings.require_database(), deadlines=deadlines)
    redis = connect(settings.require_redis())
    streams = LeaderStreams(redis, Keys())
    scheduler = Scheduler(engine, streams, settings)
    deadlines.on_late = scheduler.misses_postgres
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()
        thread.join()
        engine.dispose()
        streams.close()
        redis.close()
