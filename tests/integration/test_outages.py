"""Errors of failing servers, as the code sees them that must survive an outage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from redis import Redis

from orchestrator import Orchestrator
from orchestrator.embedded import EmbeddedPostgres, EmbeddedRedis
from orchestrator.store import database, postgres_errors
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader.streams import LeaderStreams
from tests.chaos.real import hosts
from tests.chaos.real.proxy import Proxies


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server of this module, which the tests stop."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"))
    server.start()
    yield server
    server.stop("immediate")


def test_a_crash_of_postgres_between_two_statements_is_an_outage(postgres: EmbeddedPostgres) -> None:
    engine = database.engine_for(postgres.url)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
        postgres.stop("immediate")
        postgres.start()
        with pytest.raises(postgres_errors.UNAVAILABLE) as caught:
            connection.exec_driver_sql("SELECT 2")
        assert postgres_errors.is_outage(caught.value)
        assert connection.invalidated
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 3").scalar() == 3
    engine.dispose()


def test_a_client_fails_at_most_once_after_a_crash_of_postgres(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    database.upgrade(postgres.url)
    app = Orchestrator(database_url=postgres.url, redis_url=f"unix://{tmp_path}/nobody.sock")
    task = app.task(name="noop")(lambda: None)
    for enqueue in (task.enqueue, lambda: app.enqueue_many(task, [()]), lambda: app.start_many(task, [()])):
        enqueue()
        postgres.stop("immediate")
        postgres.start()
        with suppress(*postgres_errors.UNAVAILABLE):
            enqueue()
        enqueue()
    app.close()


_WAITS_FOR_POSTGRES = """
import sys
from orchestrator.store import database, postgres_errors

with database.engine_for(sys.argv[1]).connect() as connection:
    connection.exec_driver_sql("SELECT 1")
    print("connected", flush=True)
    try:
        connection.exec_driver_sql("SELECT pg_sleep(600)")
    except postgres_errors.UNAVAILABLE:
        print("outage")
"""


@pytest.mark.skipif(not hosts.are_permitted(), reason="this system does not let us make network namespaces")
def test_a_postgres_that_vanishes_silently_is_an_outage(postgres: EmbeddedPostgres) -> None:
    with Proxies() as proxies, closing(hosts.Host(5)) as host:
        proxy = proxies.to(Path(postgres.url.partition("?host=")[2]) / postgres.socket_name, host.address)
        url = f"postgresql://postgres@{proxy.address}:{proxy.port}/postgres"
        command = [*host.prefix, sys.executable, "-c", _WAITS_FOR_POSTGRES, url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "connected\n"
                host.pull_cable()
                assert process.communicate(timeout=120) == ("outage\n", None)
            finally:
                process.kill()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this module, which the tests fill."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """A Redis whose memory limit is reset afterwards."""
    redis = connect(redis_url)
    yield redis
    redis.config_set("maxmemory", 0)
    redis.close()


def test_a_full_redis_is_an_outage_for_scripts(redis: Redis) -> None:
    streams = LeaderStreams(redis, Keys())
    streams.terms.claim(1, "")
    redis.config_set("maxmemory", 1)
    with pytest.raises(UNAVAILABLE):
        streams.terms.claim(2, "")
    with pytest.raises(UNAVAILABLE):
        streams.terms.begin(1, "1-1", "server")
    with pytest.raises(UNAVAILABLE):
        streams.publish("1-1", 1, {"default": [b"message"]})
    streams.close()


def test_a_full_redis_within_a_transaction_is_an_outage(redis: Redis, redis_url: str) -> None:
    worker = connect(redis_url)
    worker.execute_command("MULTI")  # type: ignore[no-untyped-call]
    worker.execute_command("SET", "key", "value")  # type: ignore[no-untyped-call]
    redis.config_set("maxmemory", 1)
    with pytest.raises(UNAVAILABLE):
        worker.execute_command("EXEC")  # type: ignore[no-untyped-call]
    worker.close()
