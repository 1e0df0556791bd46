"""Full memory, full disks, no free connections: the system slows down, reports it, keeps all data, and recovers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psycopg2
import pytest
from redis.exceptions import ResponseError
from sqlalchemy import text

from orchestrator import Unavailable
from orchestrator.embedded import EmbeddedRedis
from orchestrator.embedded.server import find_redis
from orchestrator.sdk.app import Orchestrator
from orchestrator.store.database import engine_for
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Stack
from tests.chaos import breakable
from tests.chaos.breakable import OUTAGE, SETTINGS, each_ran_once, is_calm, lines, said, trouble
from tests.stores import backend_of
from tests.waiting import eventually

REDIS = find_redis()
UNPROTECTED = {"enable-protected-configs": "yes"} if REDIS and REDIS.version >= (7,) else {}
"""Redis settings that let a test change the data folder of a running server."""
pytestmark = pytest.mark.skipif(REDIS is None, reason="no Redis to break")


@pytest.fixture
def directory() -> Iterator[Path]:
    with breakable.folder() as path:
        yield path


# -- Redis

Break = Callable[[EmbeddedRedis, Stack, Path, ExitStack], Callable[[], object]]
"""Makes Redis reject writes; returns the function that repairs Redis."""


def out_of_memory(_: EmbeddedRedis, stack: Stack, __: Path, ___: ExitStack) -> Callable[[], object]:
    stack.redis.config_set("maxmemory", "1kb")
    return lambda: stack.redis.config_set("maxmemory", "0")


def failed_save(_: EmbeddedRedis, stack: Stack, directory: Path, __: ExitStack) -> Callable[[], None]:
    folder = directory / "saves"
    folder.mkdir()
    stack.redis.config_set("dir", str(folder))
    folder.rmdir()
    stack.redis.config_set("save", "3600 1000000")
    stack.redis.bgsave()
    eventually(lambda: stack.redis.info("persistence")["rdb_last_bgsave_status"] == "err", "the save fails")

    def repair() -> None:
        folder.mkdir()
        stack.redis.config_set("dir", str(folder))
        stack.redis.bgsave()

    return repair


def full_disk(_: EmbeddedRedis, stack: Stack, directory: Path, mounted: ExitStack) -> Callable[[], None]:
    disk = mounted.enter_context(breakable.small_disk(directory / "disk", 4))
    stack.redis.config_set("dir", str(disk))
    stack.redis.config_set("appendonly", "yes")
    eventually(lambda: not stack.redis.info("persistence")["aof_rewrite_in_progress"], "the log is begun")
    filler = breakable.fill(disk)
    eventually(
        lambda: _write(stack) and stack.redis.info("persistence")["aof_last_write_status"] == "err", "it is full"
    )
    return filler.unlink


def _write(stack: Stack) -> bool:
    try:
        stack.redis.set("something", "x" * 4096)
    except ResponseError as error:
        assert "MISCONF" in str(error)
    return True


@contextmanager
def redis_stack(database_url: str, directory: Path, mounted: ExitStack) -> Iterator[tuple[EmbeddedRedis, Stack]]:
    redis = EmbeddedRedis(directory, settings=UNPROTECTED)
    redis.start(persistence=False)
    try:
        with fresh_stack(database_url, redis.url, directory, **SETTINGS) as stack:
            yield redis, stack
    finally:
        redis.stop()
        mounted.close()


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [(out_of_memory, "redis full"), (failed_save, "redis refuses writes"), (full_disk, "redis refuses writes")],
)
@pytest.mark.long_for("failed_save")  # a full disk gives the same error
def test_a_redis_that_rejects_writes_delays_tasks_and_loses_none(
    database_url: str, directory: Path, break_it: Break, kind: str
) -> None:
    mounted = ExitStack()
    with redis_stack(database_url, directory, mounted) as (redis, stack):
        scheduler, worker = stack.scheduler(), stack.worker()
        held = project.held.enqueue(str(directory / "started"), str(directory / "go"))
        eventually(lambda: lines(directory / "started"), "it runs")
        repair = break_it(redis, stack, directory, mounted)
        began = time.monotonic()
        for number in range(20):
            project.logged.enqueue(str(directory / "log"), number)
        assert time.monotonic() - began < 50, "an enqueue does not wait for Redis"
        eventually(lambda: said(scheduler, "Redis cannot be used;") == 1, "the scheduler says so")
        eventually(lambda: said(worker, "Redis cannot be used;") >= 1, "the worker says so")
        assert kind in trouble(stack)
        (directory / "go").touch()  # the task ends while its report cannot be sent
        breakable.pass_time(OUTAGE)
        assert lines(directory / "log") == []
        repair()
        assert held.result(60) > 0
        each_ran_once(stack, directory / "log", 20)
        assert len(lines(directory / "started")) == 1, "its worker lived all the time"
        for process in (scheduler, worker):
            eventually(
                partial(lambda log: said(log, "Redis can be used again") >= 1, process), "it is over, and they say so"
            )
        assert is_calm(stack, 3)
        assert said(scheduler, "Redis cannot be used;") == 1
        assert not {"redis full", "redis refuses writes"} & trouble(stack).keys()


def test_redis_recovers_from_memory_full_of_task_messages(database_url: str, directory: Path) -> None:
    with redis_stack(database_url, directory, ExitStack()) as (_, stack):
        stack.scheduler()
        worker = stack.worker()
        stack.redis.config_set("maxmemory", stack.redis.info("memory")["used_memory"] + 3_000_000)
        large = "x" * 400_000
        handles = project.app.enqueue_many(
            project.who, [(large,)] * 15
        )  # in bulk, so that all tasks exist before the first is done
        eventually(lambda: said(worker, "Redis cannot be used;"), "it was full")
        assert all(handle.result(60)[0] == large for handle in handles)
        assert is_calm(stack, 5)


# -- Postgres


def test_exhausted_postgres_connections_delay_tasks_and_lose_none(redis_url: str, directory: Path) -> None:
    with (
        breakable.postgres(directory, max_connections=20) as (_, url),
        fresh_stack(url, redis_url, directory, **SETTINGS) as stack,
    ):
        scheduler, _ = stack.scheduler(), stack.worker()
        for number in range(20):
            project.logged.options(delay=0.5).enqueue(str(directory / "log"), number)
        project.app.close()
        taken_connections: list[psycopg2.extensions.connection] = []
        while _try_to_connect(url, taken_connections):
            pass
        with pytest.raises(Unavailable, match=r"too many clients already. Close some .* max_connections"):
            project.logged.enqueue(str(directory / "log"), 99)
        done = breakable.command(stack, "status")
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert "too many clients already" in done.stderr
        for connection in taken_connections[:2]:  # end the scheduler's connections; the test takes their slots at once
            _terminate_scheduler(connection)
        while _try_to_connect(url, taken_connections):
            pass
        eventually(lambda: said(scheduler, "Postgres cannot be used;") >= 1, "the scheduler says so")
        breakable.pass_time(SETTINGS["lease"])
        for connection in taken_connections[6:]:
            connection.close()
        each_ran_once(stack, directory / "log", 20)
        eventually(lambda: said(scheduler, "Postgres can be used again") >= 1, "it is over")
        assert is_calm(stack, 2), "between the two strokes, it may have been quicker than the greedy"
        while len([c for c in taken_connections if not c.closed]) < 20 and _try_to_connect(url, taken_connections):
            if stack.scalar("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'") >= 18:
                break
        assert "connections run out" in trouble(stack)
        for connection in taken_connections:
            connection.close()


def _try_to_connect(url: str, taken_connections: list[psycopg2.extensions.connection]) -> bool:
    try:
        taken_connections.append(psycopg2.connect(url))
    except psycopg2.OperationalError:
        return False
    taken_connections[-1].autocommit = True
    return True


def _terminate_scheduler(connection: psycopg2.extensions.connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'orchestrator scheduler'"
        )


def test_an_exhausted_connection_pool_raises_unavailable(database_url: str, redis_url: str, directory: Path) -> None:
    with fresh_stack(database_url, redis_url, directory) as stack:
        app = Orchestrator(stack.settings)
        engine = backend_of(app).connections._links().engine
        engine.pool._timeout = 0.2  # type: ignore[attr-defined]
        try:
            taken = [engine.connect() for _ in range(25)]
            task = project.noop._new((), {})
            with pytest.raises(Unavailable, match="QueuePool limit .* make fewer calls at the same time"):
                app._client.backend.tasks.enqueue(task)
            assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 0
            for connection in taken:
                connection.close()
            app._client.backend.tasks.enqueue(task)
            assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 1
        finally:
            app.close()


def test_a_connection_that_died_in_the_pool_is_replaced(database_url: str, redis_url: str, directory: Path) -> None:
    with fresh_stack(database_url, redis_url, directory) as stack:
        project.noop.enqueue()
        clients = "FROM pg_stat_activity WHERE application_name = 'orchestrator client'"
        assert stack.scalar(f"SELECT count(pg_terminate_backend(pid)) {clients}") == 1
        eventually(lambda: stack.scalar(f"SELECT count(*) = 0 {clients}"), "it is closed")
        project.noop.enqueue()
        assert stack.scalar("SELECT count(*) FROM orchestrator.tasks") == 2


def test_a_full_postgres_disk_delays_tasks_and_loses_none(redis_url: str, directory: Path) -> None:
    with ExitStack() as opened:
        server, url = opened.enter_context(breakable.postgres(directory))
        disk = opened.enter_context(breakable.small_disk(directory / "disk", 6))
        (disk / "space").mkdir()
        owner = server.data.stat()
        os.chown(disk / "space", owner.st_uid, owner.st_gid)
        engine = engine_for(url, autocommit=True)
        with engine.connect() as connection:
            connection.execute(text(f"CREATE TABLESPACE small LOCATION '{disk}/space'"))
            for table in ("tasks", "ended_tasks"):
                connection.execute(text(f"ALTER TABLE orchestrator.{table} SET TABLESPACE small"))
        engine.dispose()
        stack = opened.enter_context(fresh_stack(url, redis_url, directory, **SETTINGS))
        scheduler = stack.scheduler()
        stack.worker()
        held = project.held.enqueue(str(directory / "started"), str(directory / "go"))
        eventually(lambda: lines(directory / "started"), "it runs")
        filler = breakable.fill(disk)
        stored = 0
        with pytest.raises(Unavailable, match=r"No space left on device.* free some space"):
            for number in range(100_000):
                project.logged.enqueue(str(directory / "log"), number)
                stored = number + 1
        (directory / "go").touch()
        eventually(lambda: said(scheduler, "Postgres cannot be used;") == 1, "the scheduler says so")
        assert "No space left on device" in eventually(lambda: trouble(stack).get("scheduler stuck"), "status says so")
        breakable.pass_time(SETTINGS["lease"])
        filler.unlink()
        held.result(60)
        each_ran_once(stack, directory / "log", stored)
        assert len(lines(directory / "started")) == 1
        eventually(lambda: said(scheduler, "Postgres can be used again") == 1, "it is over")
        assert is_calm(stack, 1)


def test_a_long_external_transaction_is_reported_and_blocks_no_task(
    database_url: str, redis_url: str, directory: Path
) -> None:
    with fresh_stack(database_url, redis_url, directory, **SETTINGS) as stack:
        stack.scheduler()
        stack.worker()
        backup = psycopg2.connect(database_url, application_name="nightly backup")
        try:
            backup.set_session(isolation_level="REPEATABLE READ")
            with backup.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM orchestrator.tasks -- the nightly copy")
            took = []
            for _ in range(3):
                began = time.monotonic()
                assert project.app.start_many(project.noop, [()] * 5_000).wait_ended(90) == "success"
                took.append(time.monotonic() - began)
            print(f"5,000 tasks, three times behind one snapshot: {', '.join(f'{seconds:.1f}' for seconds in took)} s")
            message = trouble(stack)["long transaction"]
            assert f"process {backup.info.backend_pid} (nightly backup, postgres, idle in transaction)" in message
            assert "the nightly copy" in message
            assert f"pg_terminate_backend({backup.info.backend_pid})" in message
        finally:
            backup.close()
        eventually(lambda: "long transaction" not in trouble(stack), "it is over")
