"""A Postgres that takes what it is sent and never answers: calls end, and the rest of the program goes on."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

_LIMIT = 0.5


@pytest.fixture
def line(database_url: str) -> Iterator[Cutting]:
    # Not in pytest's own folder: the path of a socket has a hundred bytes at most.
    with tempfile.TemporaryDirectory() as folder, Cutting(database_url, Path(folder)) as line:
        yield line
        line.go_on()


@pytest.fixture
def app(line: Cutting, redis_url: str) -> Iterator[Orchestrator]:
    app = Orchestrator(database_url=line.url, redis_url=redis_url, database_timeout=_LIMIT)
    yield app
    app.close()


def test_every_call_ends(app: Orchestrator, line: Cutting) -> None:
    task = app.task(name="job")(lambda: None)
    many = app.enqueue_many(task, [()])  # and so there are connections, with and without transactions
    handle = task.enqueue()
    line.hang()
    begun = time.monotonic()
    with pytest.raises(
        Uncertain, match=rf"whether task .* was stored: no answer within {_LIMIT} s .*orchestrator status"
    ):
        task.enqueue()
    with pytest.raises(Uncertain, match=r"all of them or none: no answer within"):
        app.enqueue_many(task, [()])
    with pytest.raises(Unavailable, match="timeout expired"):  # a new connection
        task.enqueue()
    assert time.monotonic() - begun < 15
    line.go_on()
    assert handle.status() == many[0].status() == "pending"
    task.enqueue()
    line.hang()
    with pytest.raises(Unavailable, match="no answer within"):
        handle.status()


def test_a_key_and_a_request_end_too(app: Orchestrator, line: Cutting) -> None:
    task = app.task(name="job")(lambda: None)
    handle = task.enqueue()
    line.hang()
    with pytest.raises(Uncertain, match="no answer within"):
        task.options(unique_key="a").enqueue()
    line.go_on()
    handle.cancel()


def test_a_commit_that_is_not_answered_is_uncertain(app: Orchestrator, line: Cutting) -> None:
    task = app.task(name="job")(lambda number: number)
    writing = backend_of(app).connections.writing("run 7 was stored", transaction=True)
    with pytest.raises(Uncertain, match=r"run 7 was stored: no answer within"), writing as connection:
        connection.exec_driver_sql("SELECT 1")
        line.hang()
    line.go_on()
    assert app.start_many(task, [1]).progress().counters.total == 1


def test_a_statement_just_within_the_limit_is_left_alone(app: Orchestrator) -> None:
    for _ in range(5):
        with backend_of(app).connections.reading() as connection:
            connection.exec_driver_sql(f"SELECT pg_sleep({_LIMIT * 0.5})")
            connection.exec_driver_sql(f"SELECT pg_sleep({_LIMIT * 0.5})")
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1


def test_async_calls_leave_the_threads_of_the_event_loop_alone(app: Orchestrator, line: Cutting) -> None:
    task = app.task(name="job")(lambda: None)
    handle = task.enqueue()

    async def main() -> None:
        line.hang()
        stuck: list[asyncio.Task[Any]] = [asyncio.create_task(task.aenqueue()) for _ in range(40)]
        stuck += [asyncio.create_task(handle.aresult(1)) for _ in range(40)]
        await asyncio.sleep(0)
        began = time.monotonic()
        await asyncio.gather(*(asyncio.to_thread(time.monotonic) for _ in range(10)))
        assert time.monotonic() - began < _LIMIT
        line.go_on()
        for one in stuck:
            with suppress(Exception):
                await one

    asyncio.run(main())
    assert asyncio.run(task.aenqueue()).status() == "pending"


def test_a_leader_says_that_it_gets_no_answer_and_when_it_is_back(
    line: Cutting, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    settings = Settings(database_url=line.url, redis_url=redis_url, lease=1.0)
    with _leading(settings, late=1.0, most=60.0):
        eventually(lambda: "leading, term" in caplog.text, "it leads")
        words = "Postgres cannot be used; nothing moves, and reports wait: it has not answered for 1."
        for number in (1, 2):  # each time
            line.hang()
            eventually(partial(lambda count: caplog.text.count(words) == count, number), "it says so")
            line.go_on()
            eventually(
                partial(lambda count: caplog.text.count("Postgres can be used again") == count, number), "it is over"
            )


def test_a_leader_gives_up_who_does_not_answer_for_long(
    line: Cutting, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    settings = Settings(database_url=line.url, redis_url=redis_url, lease=1.0)
    with _leading(settings, late=1.0, most=2.0) as scheduler:
        eventually(lambda: "leading, term" in caplog.text, "it leads")
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
