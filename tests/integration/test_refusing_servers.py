"""A Postgres that rejects statements and a Redis that rejects logins are outages, not failures of runs or tasks."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg2
import pytest
from click.testing import CliRunner, Result
from redis import Redis
from sqlalchemy import make_url

from orchestrator import Orchestrator, Settings, Unavailable
from orchestrator.cli import main
from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.scheduler.loop import Scheduler
from orchestrator.store import database, postgres_errors
from orchestrator.transport.connection import connect
from orchestrator.transport.inspection import check_health
from orchestrator.transport.leader.streams import LeaderStreams
from tests.integration.stage import KEYS, System
from tests.waiting import eventually

pytestmark = pytest.mark.own_connections

ONE_STEP = Definition(name="one-step", steps=(Step(name="one", task="job"),))
SHOP = "shop"
Run = Callable[..., Result]


def execute(url: str, *statements: str) -> None:
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        for statement in statements:
            connection.cursor().execute(statement)


@contextmanager
def read_only(url: str) -> Iterator[None]:
    """Make a database read-only; connections opened within the block stay read-only."""
    name = make_url(url).database
    admin = make_url(url).set(database="postgres").render_as_string(hide_password=False)
    terminate = f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{name}'"
    execute(admin, f"ALTER DATABASE {name} SET default_transaction_read_only = on", terminate)
    try:
        yield
    finally:
        execute(admin, f"ALTER DATABASE {name} RESET default_transaction_read_only")


@pytest.fixture
def run(in_empty_folder: Path) -> Run:
    return lambda *words: CliRunner().invoke(main, list(words))


@pytest.fixture
def role_url(database_url: str) -> Iterator[str]:
    """A role with all privileges on the tables, which owns none of them."""
    role = f"role_{uuid.uuid4().hex[:8]}"
    database.upgrade(database_url, namespace=SHOP)
    execute(database_url, f"CREATE ROLE {role} LOGIN")
    for schema in ("orchestrator", SHOP):
        execute(
            database_url,
            f"GRANT USAGE ON SCHEMA {schema} TO {role}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
        )
    yield make_url(database_url).set(username=role).render_as_string(hide_password=False)
    execute(database_url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def assert_refused(result: Result, *words: str) -> None:
    """Check that a command failed with one line that contains these words."""
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    for word in ("Error: Postgres cannot be used: ", *words):
        assert word in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_read_only_postgres_is_an_outage_to_clients(database_url: str, redis_url: str, run: Run) -> None:
    with closing(Orchestrator(database_url=database_url, redis_url=redis_url)) as app:
        task = app.task(name="job")(lambda: None)
        with read_only(database_url):
            for enqueue in (
                task.enqueue,
                task.options(unique_key="a").enqueue,
                lambda: app.enqueue_many(task, [()]),
                lambda: app.start_many(task, [()]),
            ):
                with pytest.raises(Unavailable, match="read-only transaction. Postgres is read-only"):
                    enqueue()
            assert_refused(run("enqueue", "job"), "Postgres is read-only")
            assert_refused(run("db", "upgrade"), "Postgres is read-only")
        task.enqueue()


@contextmanager
def running(database_url: str, redis_url: str, settings: Settings) -> Iterator[Scheduler]:
    """Run a scheduler in a thread."""
    engine = database.engine_for(database_url)
    redis = connect(redis_url)
    streams = LeaderStreams(redis, KEYS)
    scheduler = Scheduler(engine, streams, settings)
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()
        thread.join()
        streams.close()
        redis.close()
        engine.dispose()


def test_a_scheduler_waits_for_a_read_only_postgres(
    database_url: str, redis_url: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    settings = Settings(database_url=database_url, redis_url=redis_url, lease=30.0, worker_ttl=0.1)
    with running(database_url, redis_url, settings) as scheduler:
        eventually(scheduler.leading.is_set, "it leads")
        with read_only(database_url):
            expire = "UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'"
            execute(database_url, "SET default_transaction_read_only = off", expire)  # as happens after a while
            told = eventually(
                lambda: (
                    found if "no leader" in (found := run("status", "--json").stdout) and "read-only" in found else ""
                ),
                "status tells why none leads",
            )
            assert "the running schedulers cannot use Postgres" in told
            assert "scheduler stuck" in told
            assert "orchestrator scheduler" not in told
        eventually(scheduler.leading.is_set, "it leads again")
    assert ": a defect" not in caplog.text
    assert caplog.text.count("Postgres cannot be used; no task starts") == 1


def test_a_scheduler_waits_until_a_restore_has_created_the_indexes(
    database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A restore inserts rows before it creates indexes; until then, `ON CONFLICT` fails."""
    settings = Settings(database_url=database_url, redis_url=redis_url, lease=30.0)
    execute(database_url, "ALTER TABLE orchestrator.leases DROP CONSTRAINT leases_pkey")
    with running(database_url, redis_url, settings) as scheduler:
        eventually(lambda: "Postgres cannot be used; no task starts" in caplog.text, "it says so")
        assert "no unique or exclusion constraint" in caplog.text
        execute(database_url, "ALTER TABLE orchestrator.leases ADD PRIMARY KEY (shard)")
        eventually(scheduler.leading.is_set, "it leads")
    assert ": a defect" not in caplog.text


def test_a_leader_on_a_full_disk_takes_few_terms_and_recovers(database_url: str, redis_url: str) -> None:
    """It used to take several terms a second, and `status` blamed the disk for seconds after it had room again."""
    settings = Settings(database_url=database_url, redis_url=redis_url, lease=30.0, worker_ttl=60.0, safety_scan=0.01)
    engine = database.engine_for(database_url)
    redis = connect(redis_url)
    redis.flushall()
    system = System(engine, redis, settings)
    full = "RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'"
    execute(
        database_url,
        f"CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {full}; END $$",
        "CREATE TRIGGER full_disk BEFORE UPDATE ON orchestrator.tasks EXECUTE FUNCTION full_disk()",
        "UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'",
    )
    system.worker()
    task = system.job.enqueue()
    streams = LeaderStreams(connect(redis_url), KEYS)
    scheduler = Scheduler(engine, streams, settings)
    thread = threading.Thread(target=scheduler.run)
    thread.start()

    def term() -> int:
        return int(system.sql("SELECT term FROM orchestrator.leases")[0]["term"])

    try:
        eventually(lambda: "No space left" in (check_health(redis, KEYS).complaint or ""), "status says so")
        before, began = term(), time.monotonic()
        eventually(lambda: time.monotonic() > began + 3.0, "three seconds pass")
        assert term() - before <= 5
        execute(database_url, "DROP TRIGGER full_disk ON orchestrator.tasks")
        eventually(lambda: system.row(task)["status"] == "dispatched", "it goes on")
        eventually(lambda: check_health(redis, KEYS).complaint is None, "status says nothing more", timeout=2.0)
    finally:
        execute(database_url, "DROP FUNCTION IF EXISTS full_disk CASCADE")
        scheduler.stop()
        thread.join()
        streams.close()
        system.close()
        redis.close()
        engine.dispose()


def test_a_scheduler_waits_while_a_dump_is_restored(
    database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tables are gone for a while; the log had a traceback for each attempt."""
    settings = Settings(database_url=database_url, redis_url=redis_url, lease=30.0, worker_ttl=60.0, safety_scan=0.01)
    engine = database.engine_for(database_url)
    redis = connect(redis_url)
    redis.flushall()
    streams = LeaderStreams(redis, KEYS)
    scheduler = Scheduler(engine, streams, settings)
    execute(database_url, "UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'")
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        eventually(scheduler.leading.is_set, "it leads")
        execute(database_url, "ALTER SCHEMA orchestrator RENAME TO away")
        eventually(lambda: scheduler.postgres.is_down, "it says so")
        execute(database_url, "ALTER SCHEMA away RENAME TO orchestrator")
        eventually(scheduler.leading.is_set, "it leads again")
    finally:
        scheduler.stop()
        thread.join()
        streams.close()
        redis.close()
        engine.dispose()
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_a_missing_privilege_does_not_mark_runs_as_stuck(role_url: str, database_url: str, redis_url: str) -> None:
    role = make_url(role_url).username
    engine = database.engine_for(role_url)
    redis = connect(redis_url)
    settings = Settings(database_url=database_url, redis_url=redis_url, lease=60.0, safety_scan=0.01)
    system = System(engine, redis, settings)
    try:
        system.lead()
        worker = system.worker()
        system.app.workflows.apply(ONE_STEP)
        execute(database_url, f"REVOKE INSERT ON orchestrator.tasks FROM {role}")
        run = system.app.workflows["one-step"].start()
        for _ in range(3):
            with suppress(*postgres_errors.UNAVAILABLE):
                system.pass_seconds()
        assert system.sql("SELECT stuck FROM orchestrator.runs") == [{"stuck": None}]
        with pytest.raises(postgres_errors.UNAVAILABLE) as caught:
            system.pass_seconds()
        assert postgres_errors.is_outage(caught.value)
        execute(database_url, f"GRANT INSERT ON orchestrator.tasks TO {role}")
        system.lead()

        def is_over() -> bool:
            worker.succeed(*worker.take())
            return run.progress().status == "success"

        system.tick_until(is_over)
    finally:
        system.close()
        redis.close()
        engine.dispose()


def test_a_missing_privilege_is_reported_in_one_line(
    role_url: str, database_url: str, redis_url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database_url, f"REVOKE INSERT ON {SHOP}.tasks FROM {make_url(role_url).username}")
    with (
        closing(Orchestrator(database_url=role_url, redis_url=redis_url, namespace=SHOP)) as app,
        pytest.raises(Unavailable, match="permission denied for table tasks. Grant that .* the schema 'shop'"),
    ):
        app.task(name="job")(lambda: None).enqueue()
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", role_url)
    monkeypatch.setenv("ORCHESTRATOR_NAMESPACE", SHOP)
    assert_refused(run("enqueue", "job"), "permission denied for table tasks. Grant that", "schema 'shop'")
    monkeypatch.setenv("ORCHESTRATOR_NAMESPACE", "elsewhere")
    assert_refused(run("db", "upgrade"), "permission denied for database", "schema 'elsewhere'")


@pytest.mark.parametrize(("password", "rights"), [("wrong", "+@all"), ("right", "+ping")])
def test_status_does_not_advise_to_start_a_redis_that_rejects_logins(
    redis_url: str, run: Run, monkeypatch: pytest.MonkeyPatch, password: str, rights: str
) -> None:
    with closing(Redis.from_url(redis_url)) as redis:
        user = ("guest", "reset", "on", ">right", "~*", rights)
        redis.execute_command("ACL", "SETUSER", *user)  # type: ignore[no-untyped-call]
        monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", redis_url.replace("unix://", f"unix://guest:{password}@"))
        said = run("status").output
        redis.execute_command("ACL", "DELUSER", "guest")  # type: ignore[no-untyped-call]
    assert "! Redis rejects the user or password in the setting redis_url" in said
    assert "start it" not in said


def test_an_upgrade_warns_of_a_role_that_is_named_like_the_namespace(
    database_url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role's search_path begins with the schema of the same name, so its own tables would be created among ours."""
    name = f"keeper_{uuid.uuid4().hex[:8]}"
    database_name = make_url(database_url).database
    execute(database_url, f"CREATE ROLE {name} LOGIN", f"GRANT CREATE ON DATABASE {database_name} TO {name}")
    url = make_url(database_url).set(username=name).render_as_string(hide_password=False)
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", url)
    monkeypatch.setenv("ORCHESTRATOR_NAMESPACE", name)
    try:
        for _ in range(2):
            warned = run("db", "upgrade")
            assert warned.exit_code == 0, warned.output
            assert f"Warning: the role {name} has {name} first in its search_path" in warned.stderr
            assert f'ALTER ROLE "{name}" SET search_path = public' in warned.stderr
        execute(database_url, f'ALTER ROLE "{name}" SET search_path = public')
        assert run("db", "upgrade").stderr == ""
    finally:
        execute(database_url, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")
