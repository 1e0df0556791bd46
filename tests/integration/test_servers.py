"""Postgres and Redis in unusual setups: several hosts, two-phase commits, a cluster."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from redis import Redis
from redis.exceptions import ConnectionError
from sqlalchemy import text
from sqlalchemy.orm import Session

from orchestrator import Orchestrator
from orchestrator.embedded.postgres import EmbeddedPostgres
from orchestrator.embedded.server import find_redis
from orchestrator.errors import ConfigurationError
from orchestrator.store import database, dialing
from orchestrator.transport.connection import connect, prerequisite
from tests.waiting import eventually


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A Postgres with prepared transactions enabled."""
    folder = tmp_path_factory.mktemp("postgres")
    folder.chmod(0o755)
    server = EmbeddedPostgres(folder, {"max_prepared_transactions": 5})
    server.start()
    database.upgrade(server.url)
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("postgresql://a:1,b:2/db", "a,b", "1,2"),
        ("postgresql://user:p%40ss@a,b:2/db?target_session_attrs=read-write", "a,b", ",2"),
        ("postgresql+psycopg2://[::1]:1,b.example:2", "::1,b.example", "1,2"),
        ("postgres://%2Frun%2Fa,%2Frun%2Fb/db", "/run/a,/run/b", ","),
    ],
)
def test_several_hosts_are_given_to_the_driver(url: str, host: str, port: str) -> None:
    given, hosts = dialing.several_hosts(url)
    assert hosts == {"host": host, "port": port}
    assert "," not in given
    database.engine_for(url).dispose()


def test_invalid_hosts_are_rejected(redis_url: str) -> None:
    with pytest.raises(ConfigurationError, match="Setting database_url: expected .* are not hosts with ports"):
        database.engine_for("postgresql://a:1,b:x/db")


def test_the_first_usable_host_is_chosen(postgres: EmbeddedPostgres, redis_url: str, tmp_path: Path) -> None:
    nobody, place = (quote(str(path), safe="") for path in (tmp_path, postgres.url.partition("?host=")[2]))
    url = f"postgresql://postgres@{nobody}:5432,{place}:5432/postgres?target_session_attrs=read-write"
    app = Orchestrator(database_url=url, redis_url=redis_url)
    assert app.task(name="job")(lambda: None).enqueue().status() == "pending"
    app.close()


def test_tasks_are_enqueued_in_two_phase_transactions(postgres: EmbeddedPostgres, redis_url: str) -> None:
    app = Orchestrator(database_url=postgres.url, redis_url=redis_url)
    task = app.task(name="job")(lambda: None)
    engine = database.engine_for(postgres.url)
    with Session(engine, twophase=True) as session:
        first = task.enqueue_in(session.connection())
        session.prepare()
        session.commit()
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        second = task.options(unique_key="a").enqueue_in(connection)
        transaction.prepare()
        transaction.commit()
    assert [first.status(), second.status()] == ["pending", "pending"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM pg_prepared_xacts")).scalar() == 0
    engine.dispose()
    app.close()


def _answers(redis: Redis) -> bool:
    try:
        return bool(redis.ping())
    except ConnectionError:
        return False


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path for a socket: at most 107 characters are allowed, and pytest's folders come near."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_redis_cluster_node_is_rejected(short_folder: Path) -> None:
    found = find_redis()
    if found is None:
        pytest.skip("only a real Redis has a cluster mode")
    socket = short_folder / "redis.sock"
    settings = f'port 0\nunixsocket {socket}\ncluster-enabled yes\ndir {short_folder}\nsave ""\n'
    (short_folder / "redis.conf").write_text(settings)
    process = subprocess.Popen([found.path, str(short_folder / "redis.conf")], stdout=subprocess.DEVNULL)
    redis = connect(f"unix://{socket}")
    try:
        eventually(lambda: _answers(redis), "the server answers")  # the socket exists before the server listens
        needed = prerequisite(redis)  # the check that schedulers and workers make at their start
        with pytest.raises(ConfigurationError, match="redis_url: this is a node of a Redis Cluster") as caught:
            needed.check()
        assert needed.outage(caught.value) is None, "waiting does not mend it"
    finally:
        redis.close()
        process.kill()
        process.wait()
