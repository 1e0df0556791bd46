"""Outages of ten minutes, shortened to seconds: running tasks continue, and no task runs again without need."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator import Unavailable, Uncertain
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.embedded import EmbeddedPostgres, EmbeddedRedis
from orchestrator.embedded.server import find_redis
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.transport.codec import MAX_BUNDLE, encode
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader.streams import LeaderStreams
from orchestrator.transport.worker import WorkerStreams
from tests.acceptance.conftest import fresh_stack, project
from tests.chaos import breakable
from tests.chaos.breakable import OUTAGE, SETTINGS, each_ran_once, is_calm, lines, said, trouble
from tests.chaos.cutting import Cutting
from tests.stores import backend_of
from tests.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_redis() is None, reason="no Redis to stop")]


@pytest.fixture
def directory() -> Iterator[Path]:
    with breakable.folder() as path:
        yield path


@pytest.fixture
def redis(directory: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(directory)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[tuple[EmbeddedPostgres, str]]:
    with breakable.folder() as path, breakable.postgres(path) as running:
        yield running


class Waiter:
    """Waits in a thread for a result or its error."""

    def __init__(self, handle: Handle[Any]) -> None:
        self.outcomes: list[object] = []
        self._handle = handle
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self.outcomes.append(self._handle.result(60))
        except Exception as error:  # noqa: BLE001  # the test asserts the outcome
            self.outcomes.append(error)

    def result(self) -> object:
        self._thread.join(60)
        return self.outcomes[0]


def hold(directory: Path, name: str) -> Handle[int]:
    """Start a task that runs until the test lets it end."""
    handle = project.held.enqueue(str(directory / name), str(directory / f"{name}-go"))
    eventually(lambda: lines(directory / name), f"{name} runs")
    return handle


@pytest.mark.parametrize("keeps_its_data", [True, False])
def test_tasks_survive_a_long_redis_outage_and_run_once(
    database_url: str, redis: EmbeddedRedis, directory: Path, keeps_its_data: bool
) -> None:
    with fresh_stack(database_url, redis.url, directory, **SETTINGS) as stack:
        schedulers = [stack.scheduler(), stack.scheduler()]
        stack.worker()
        ends_meanwhile, goes_on = hold(directory, "first"), hold(directory, "second")
        waiters = [Waiter(ends_meanwhile), Waiter(goes_on)]
        redis.kill()
        (directory / "first-go").touch()
        began = time.monotonic()
        for number in range(20):
            project.logged.enqueue(str(directory / "log"), number)
        assert time.monotonic() - began < 10
        late = Waiter(project.add.enqueue(1, 2))
        assert "redis away" in trouble(stack)
        breakable.pass_time(OUTAGE)
        redis.start(persistence=keeps_its_data)
        assert [waiter.result() for waiter in waiters[:1]] == [int(lines(directory / "first")[0])]
        assert late.result() == 3
        each_ran_once(stack, directory / "log", 20)
        (directory / "second-go").touch()
        assert waiters[1].result() == int(lines(directory / "second")[0])
        assert [len(lines(directory / name)) for name in ("first", "second")] == [1, 1], "their worker lived"
        eventually(lambda: all(said(process, "can be used again") for process in stack.processes[2:]), "it is over")
        assert is_calm(stack, 3)
        assert sum(scheduler.logged("scheduler.leading term=") for scheduler in schedulers) == 1, "nobody stepped down"
        assert "redis away" not in trouble(stack)


def test_tasks_survive_a_long_postgres_outage_and_run_once(
    own_postgres: tuple[EmbeddedPostgres, str], redis_url: str, directory: Path
) -> None:
    server, url = own_postgres
    with fresh_stack(url, redis_url, directory, **SETTINGS) as stack:
        schedulers = [stack.scheduler(), stack.scheduler()]
        stack.worker()
        ends_meanwhile, goes_on = hold(directory, "first"), hold(directory, "second")
        waiters = [Waiter(ends_meanwhile), Waiter(goes_on)]
        run = project.app.start_many(project.logged, [(str(directory / "log"), number) for number in range(1_000)])
        eventually(lambda: run.progress().counters.success > 100, "some have ended")
        server.stop("immediate")
        (directory / "first-go").touch()
        with pytest.raises(Unavailable, match="Check that it runs and can be reached"):
            project.logged.enqueue(str(directory / "log"), 5_000)
        done = breakable.command(stack, "enqueue", "project.noop")
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert "Postgres cannot be used" in done.stderr
        breakable.pass_time(OUTAGE)
        server.start()
        assert waiters[0].result() == int(lines(directory / "first")[0])
        each_ran_once(stack, directory / "log", 1_000)
        assert run.wait_ended(60) == "success"
        (directory / "second-go").touch()
        assert waiters[1].result() == int(lines(directory / "second")[0])
        assert [len(lines(directory / name)) for name in ("first", "second")] == [1, 1]
        eventually(lambda: all(said(scheduler, "can be used again") for scheduler in schedulers), "it is over")
        assert is_calm(stack, 1)
        assert stack.scalar("SELECT count(*) FROM orchestrator.leases WHERE expires_at > now()") == 1


def test_repeated_enqueues_do_not_wait_for_a_hanging_redis(
    database_url: str, redis: EmbeddedRedis, directory: Path
) -> None:
    with fresh_stack(database_url, redis.url, directory) as stack:
        project.noop.enqueue()
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for _ in range(50):
                project.noop.enqueue()
            took = time.monotonic() - began
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        assert took < 15, "one of them waits, not all"
        assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 51


def test_a_result_awaited_during_a_redis_outage_arrives_afterwards(
    database_url: str, redis: EmbeddedRedis, directory: Path
) -> None:
    with fresh_stack(database_url, redis.url, directory, **SETTINGS) as stack:
        stack.scheduler()
        stack.worker()
        handle = hold(directory, "task")
        redis.kill()
        announcements = backend_of(project.app).waiting.announcements
        heard = threading.Event()
        announcements.listen(handle._id, lambda _: heard.set())
        redis.start()
        eventually(lambda: all(event.is_set() for event in announcements._subscribed.values()), "it is subscribed")
        heard.clear()
        (directory / "task-go").touch()
        assert heard.wait(60)


def test_the_leader_notices_a_redis_that_restarted_empty(
    database_url: str, redis: EmbeddedRedis, directory: Path
) -> None:
    with fresh_stack(database_url, redis.url, directory) as stack:
        scheduler = stack.scheduler()
        stack.worker()
        assert project.add.enqueue(1, 1).result(60) == 2
        redis.kill()
        redis.start(persistence=False)
        began = time.monotonic()
        eventually(lambda: scheduler.logged("generation=1-2-"), "a new generation")
        print(f"noticed after {time.monotonic() - began:.2f} s")
        assert project.add.enqueue(2, 2).result(60) == 4


def test_tasks_run_once_when_commit_responses_are_lost(database_url: str, redis_url: str, directory: Path) -> None:
    socket = directory / "socket"
    socket.mkdir()
    with Cutting(database_url, socket) as cutting, fresh_stack(database_url, redis_url, directory, **SETTINGS) as stack:
        stack.environment["ORCHESTRATOR_DATABASE_URL"] = cutting.url
        scheduler = stack.scheduler()
        stack.worker()
        run = project.app.start_many(project.logged, [(str(directory / "log"), number) for number in range(1_000)])
        for threshold in (50, 300, 600, 900):
            eventually(partial(lambda limit: run.progress().counters.success >= limit, threshold), f"{threshold} tasks")
            cutting.arm(b"COMMIT")
            eventually(lambda: not cutting.is_armed, "it is cut")
        each_ran_once(stack, directory / "log", 1_000)
        assert run.wait_ended(60) == "success"
        assert cutting.cuts == 4
        assert scheduler.logged("Postgres cannot be used")


def test_an_enqueue_with_a_lost_response_raises_uncertain(database_url: str, redis_url: str, directory: Path) -> None:
    socket = directory / "socket"
    socket.mkdir()
    with (
        Cutting(database_url, socket) as cutting,
        fresh_stack(cutting.url, redis_url, directory, **SETTINGS) as stack,
    ):
        project.noop.enqueue()
        cutting.arm(b"*/ INTO orchestrator.tasks")
        with pytest.raises(Uncertain, match=r"not known whether task [0-9a-f-]{36} was stored") as caught:
            project.noop.enqueue()
        identifier = str(caught.value).partition("whether task ")[2][:36]
        assert stack.scalar("SELECT count(*) FROM orchestrator.tasks WHERE id = :id", id=identifier) == 1


def test_a_worker_stops_taking_tasks_when_no_leader_applies_its_reports(
    database_url: str, redis: EmbeddedRedis, directory: Path
) -> None:
    with fresh_stack(database_url, redis.url, directory, **SETTINGS) as stack:
        scheduler = stack.scheduler()
        worker = stack.worker()
        assert project.add.enqueue(1, 1).result(60) == 2
        scheduler.kill()
        task = project.noop._new((), {})
        leader = LeaderStreams(connect(redis.url), Keys())
        generation = WorkerStreams(connect(redis.url), Keys()).generation()
        assert generation is not None
        term, leader.terms._name = cast("bytes", stack.redis.get(Keys().term)).decode().split()
        messages = [
            encode([Dispatch(os.urandom(16), 1, task.name, task.payload, "default") for _ in range(MAX_BUNDLE - 1)])
            for _ in range(1_100)
        ]  # 20,900 tasks for a table of 20,000 attempts, whose capacity is no multiple of a message's size
        leader.publish(generation, int(term), {"default": messages})
        eventually(lambda: worker.logged("worker.reports_full"), "it is full", 60)
        remaining = stack.redis.xlen(Keys().queue(generation, "default"))
        assert remaining > 0
        assert said(worker, "died") == 0
        stack.scheduler()
        assert project.add.enqueue(2, 2).result(60) == 4
        assert said(worker, "died") == said(worker, "Traceback") == 0


def test_a_worker_drained_during_a_redis_outage_delivers_its_last_reports(
    database_url: str, redis: EmbeddedRedis, directory: Path
) -> None:
    with fresh_stack(database_url, redis.url, directory, **SETTINGS) as stack:
        stack.scheduler()
        worker = stack.worker()
        handle = hold(directory, "task")
        redis.kill()
        (directory / "task-go").touch()
        worker.signal(signal.SIGTERM)
        breakable.pass_time(6.0)  # longer than the minimum time for last reports
        redis.start()
        assert worker.wait(40) == 0
        stack.worker()
        assert handle.result(60) == int(lines(directory / "task")[0])
        assert len(lines(directory / "task")) == 1
