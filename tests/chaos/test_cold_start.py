"""Processes that start before Postgres and Redis wait for the servers; invalid settings end a process at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from orchestrator.embedded import EmbeddedPostgres, EmbeddedRedis
from orchestrator.embedded.server import find_redis
from tests.acceptance.conftest import fresh_stack, project
from tests.acceptance.stack import Process, Stack
from tests.chaos import breakable
from tests.chaos.breakable import SETTINGS, said
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(find_redis() is None, reason="no Redis to stop")

HBA = """
local all alice scram-sha-256
local all all trust
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with breakable.folder() as path:
        yield path


@pytest.fixture
def servers(directory: Path) -> Iterator[tuple[EmbeddedPostgres, EmbeddedRedis, str]]:
    """A Postgres that requires a password from the user alice only, and a Redis."""
    rules = directory / "pg_hba.conf"
    rules.write_text(HBA)
    redis = EmbeddedRedis(directory)
    redis.start()
    with breakable.postgres(directory, hba_file=str(rules)) as (server, url):
        yield server, redis, url
        redis.start()  # the test may have stopped it
    redis.stop()


@pytest.fixture
def stack(servers: tuple[EmbeddedPostgres, EmbeddedRedis, str], directory: Path) -> Iterator[Stack]:
    server, redis, url = servers
    with fresh_stack(url, redis.url, directory, **SETTINGS) as stack:
        yield stack
        server.start()
        redis.start()


def is_waiting_for(server: str, process: Process) -> bool:
    """Return whether a process has logged exactly once that it waits for a server."""
    return said(process, f"{server} cannot be used; waiting for it:") == 1


def test_starting_processes_wait_for_postgres_and_redis(
    stack: Stack, servers: tuple[EmbeddedPostgres, EmbeddedRedis, str]
) -> None:
    server, redis, _ = servers
    server.stop()
    redis.stop()
    scheduler, worker, api = stack.scheduler(wait=False), stack.worker(wait=False), stack.begin_api()
    stopped_early = [stack.scheduler(wait=False), stack.worker(wait=False)]
    for process in (scheduler, worker, *stopped_early):
        eventually(partial(is_waiting_for, "Redis", process), "it waits")
    for process in (scheduler, api):
        eventually(partial(is_waiting_for, "Postgres", process), "for Postgres too")
    stopped_early.append(stack.begin_api())
    eventually(lambda: said(stopped_early[-1], "waiting for it:") == 1, "so does another")
    for process in stopped_early:
        process.signal(signal.SIGTERM)
        assert process.wait(60) == 0, "who waits can be stopped"
    redis.start()
    eventually(lambda: worker.logged("process.ready"), "a worker needs no more than Redis")
    eventually(lambda: scheduler.logged("Redis can be used again"), "the scheduler has seen it")
    assert not scheduler.logged("scheduler.ready")
    server.start()
    eventually(lambda: scheduler.logged("scheduler.ready"), "the scheduler has all that it needs")
    eventually(lambda: api.logged("api.ready"), "so has the API")
    assert project.add.enqueue(2, 3).result(60) == 5
    for process in (scheduler, worker):
        assert said(process, "Redis cannot be used;") == 1
        assert said(process, "Traceback") == 0
    assert said(worker, "Postgres") == 0
    assert scheduler.stop() == worker.stop() == api.stop() == 0


def test_wrong_connection_settings_end_a_process_at_once(
    stack: Stack, servers: tuple[EmbeddedPostgres, EmbeddedRedis, str]
) -> None:
    server, redis, url = servers
    with stack.engine.connect() as connection:
        connection.execute(text("CREATE ROLE alice LOGIN SUPERUSER PASSWORD 'right'"))
    parsed = make_url(url)

    def startup_error(*arguments: str, **environment: str) -> str:
        result = breakable.command(stack, *arguments, **environment)
        assert (result.returncode, "Traceback" in result.stderr, "waiting for it" in result.stderr) == (1, False, False)
        return result.stderr

    def database(**parts: str) -> str:
        return parsed.set(**parts).render_as_string(hide_password=False)  # type: ignore[arg-type]

    wrong = database(username="alice", password="wrong")
    message = startup_error("scheduler", ORCHESTRATOR_DATABASE_URL=wrong)
    assert 'password authentication failed for user "alice"' in message
    assert "Check the user and the password in the setting database_url." in message
    assert 'database "nowhere" does not exist' in startup_error(
        "scheduler", ORCHESTRATOR_DATABASE_URL=database(database="nowhere")
    )
    server.create_database("empty")
    assert "Run `orchestrator db upgrade`" in startup_error(
        "scheduler", ORCHESTRATOR_DATABASE_URL=database(database="empty")
    )
    assert "Setting database_url" in startup_error("scheduler", ORCHESTRATOR_DATABASE_URL="mysql:/db")
    guarded = redis.url.replace("unix://", "unix://:wrong@")
    for arguments in (("scheduler",), ("worker", "--app", "project:app")):
        assert "Redis cannot be used: " in startup_error(*arguments, ORCHESTRATOR_REDIS_URL=guarded)
        assert "Setting redis_url" in startup_error(*arguments, ORCHESTRATOR_REDIS_URL="http://redis")
