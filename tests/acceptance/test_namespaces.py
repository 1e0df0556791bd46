"""Two applications with the same tasks and queues on the same servers, each in a namespace of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import project
import psycopg2
import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, make_url, text

from orchestrator import NotFound, Orchestrator, Settings
from orchestrator.cli import main
from orchestrator.embedded import EmbeddedServices
from orchestrator.errors import SchemaError
from orchestrator.store import database, leases
from tests.acceptance.stack import Stack, using
from tests.waiting import eventually

OTHER = "user"
"""An SQL keyword, because a namespace may be one."""


@pytest.fixture(scope="module")
def two(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory, services: EmbeddedServices
) -> Iterator[tuple[Stack, Stack]]:
    """A stack in the default namespace, and one in another."""
    database.upgrade(database_url, namespace=OTHER)
    first = Stack(database_url, redis_url, tmp_path_factory.mktemp("first"))
    second = Stack(database_url, redis_url, tmp_path_factory.mktemp("second"), namespace=OTHER)
    try:
        for stack in (first, second):
            stack.scheduler()
            stack.worker("--database")
        yield first, second
    finally:
        first.close()
        second.close()


def ended(stack: Stack, schema: str) -> int:
    return int(str(stack.scalar(f'SELECT count(*) FROM "{schema}".ended_tasks')))


def test_each_namespace_runs_and_sees_only_its_own_tasks(two: tuple[Stack, Stack], tmp_path: Path) -> None:
    first, second = two
    before = ended(first, "orchestrator"), ended(first, OTHER)
    with using(project.app, first):
        mine = [project.logged.enqueue(str(tmp_path / "first"), number) for number in range(3)]
        assert [handle.result(60) for handle in mine] == [0, 1, 2]
    with using(project.app, second):
        with pytest.raises(NotFound):
            project.app.handle(mine[0].id).status()
        others = [project.logged.enqueue(str(tmp_path / "second"), number) for number in range(5)]
        assert [handle.result(60) for handle in others] == [0, 1, 2, 3, 4]
        bulk = project.app.enqueue_many(project.add, [(number, number) for number in range(7)])
        assert [handle.result(60) for handle in bulk] == [2 * number for number in range(7)]
    assert sorted((tmp_path / "first").read_text().split()) == ["0", "1", "2"]
    assert sorted((tmp_path / "second").read_text().split()) == ["0", "1", "2", "3", "4"]
    assert (ended(first, "orchestrator"), ended(first, OTHER)) == (before[0] + 3, before[1] + 12)


def test_runs_and_idempotency_keys_are_separate_in_each_namespace(two: tuple[Stack, Stack]) -> None:
    for stack in two:
        with using(project.app, stack):
            run = project.app.start_many(project.add, [(1, 1), (2, 2)], name="same")
            assert run.results(60) == [2, 4]
            task = project.add.options(idempotency_key="order 1")
            assert task.enqueue(1, 2).result(60) == 3
            assert task.enqueue(1, 2).result(60) == 3  # the same task, in each namespace
            assert stack.redis.exists(f"{{{stack.settings.namespace}:0}}:generation")


@pytest.mark.parametrize("key", [None, "a key"])
def test_a_task_is_enqueued_in_a_transaction_of_the_user(two: tuple[Stack, Stack], key: str | None) -> None:
    """The user's own statements on this connection are sent unchanged."""
    _, second = two
    url = second.settings.database_url.replace("postgresql:", "postgresql+psycopg2:")
    engine = create_engine(url)
    with using(project.app, second):
        task = project.add.options(unique_key=key)
        with engine.connect() as connection:
            with connection.begin() as transaction:
                gone = task.enqueue_in(connection, 1, 1)
                assert connection.execute(text("SELECT 'orchestrator.'")).scalar_one() == "orchestrator."
                transaction.rollback()
            with connection.begin():
                handle = task.enqueue_in(connection, 2, 3)
        assert handle.result(60) == 5
        with pytest.raises(NotFound):
            gone.status()
    engine.dispose()


def test_a_task_completes_in_a_transaction_of_its_namespace(two: tuple[Stack, Stack]) -> None:
    """The task's own statements are sent as written: only the orchestrator's statements get the namespace."""
    _, second = two
    with using(project.app, second):
        found, child = project.in_one_transaction.enqueue(2, 3).result(60).split()
        assert found == "orchestrator.tasks"
        assert project.app.handle(child).result(60) == 5


def test_only_standbys_of_the_namespace_hear_of_a_released_lease(two: tuple[Stack, Stack]) -> None:
    url = two[1].settings.database_url
    listener = psycopg2.connect(url)
    listener.autocommit = True
    listener.cursor().execute(f'LISTEN "{OTHER}"; LISTEN orchestrator')
    engine = database.engine_for(url, namespace=OTHER)
    with engine.begin() as connection:
        term = leases.acquire(connection, 7, str(uuid4()), 60.0, "a shard that nobody else leads")
        assert term is not None
        leases.release(connection, 7, term)

    def heard() -> list[str]:
        listener.poll()
        return [notification.channel for notification in listener.notifies if notification.payload == leases.RELEASED]

    assert eventually(heard, "the lease was released") == [OTHER]
    listener.close()
    engine.dispose()


def test_commands_use_the_configured_namespace(two: tuple[Stack, Stack], monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = two
    with using(project.app, second):
        handle = project.add.options(queue="nobody").enqueue(1, 1)
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", second.settings.database_url)
    monkeypatch.setenv("ORCHESTRATOR_REDIS_URL", second.settings.redis_url)
    assert handle.id not in CliRunner().invoke(main, ["tasks", "list", "--json"]).output
    monkeypatch.setenv("ORCHESTRATOR_NAMESPACE", OTHER)
    assert handle.id in CliRunner().invoke(main, ["tasks", "list", "--json"]).output
    status = CliRunner().invoke(main, ["status"])
    assert status.exit_code == 0, status.output
    assert "Queue 'nobody' has ready tasks" in status.output
    assert CliRunner().invoke(main, ["tasks", "cancel", handle.id]).exit_code == 0
    with using(project.app, second):
        eventually(lambda: handle.status() == "cancelled", "cancelled")


def test_an_error_about_missing_tables_names_the_upgrade_command(
    two: tuple[Stack, Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, redis_url = two[0].settings.database_url, two[0].settings.redis_url
    app = Orchestrator(Settings(database_url=url, redis_url=redis_url, namespace="shop"))
    task = app.task(name="project.add")(lambda a, b: a + b)
    with pytest.raises(SchemaError, match="in the namespace 'shop' yet.*`ORCHESTRATOR_NAMESPACE=shop orchestrator db"):
        task.enqueue(1, 1)
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", url)
    monkeypatch.setenv("ORCHESTRATOR_NAMESPACE", "shop")
    assert "in the namespace 'shop' yet" in CliRunner().invoke(main, ["db", "check"]).output
    for _ in range(2):
        assert CliRunner().invoke(main, ["db", "upgrade"]).exit_code == 0
    assert CliRunner().invoke(main, ["db", "check"]).exit_code == 0
    assert task.enqueue(1, 1).status() == "pending"
    app.close()


def test_a_role_that_may_create_a_schema_is_enough(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """As on managed services: the role is no superuser, and owns only its own schema."""
    role, namespace = f"tenant_{uuid4().hex[:8]}", f"of_{uuid4().hex[:8]}"
    url = make_url(database_url)
    admin = create_engine(url.set(drivername="postgresql+psycopg2"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION"))
        connection.execute(text(f"GRANT CREATE ON DATABASE {url.database} TO {role}"))
    own = url.set(username=role).render_as_string(hide_password=False)
    stack = Stack(own, redis_url, tmp_path, namespace=namespace)
    try:
        assert "is at revision" in stack.output_of("db", "upgrade")
        scheduler = stack.scheduler()
        stack.worker("--database")
        with using(project.app, stack):
            assert project.add.enqueue(1, 2).result(60) == 3
            assert project.both.start(1, 2).result(60) == [2, 3]
            child = project.in_one_transaction.enqueue(2, 3).result(60).split()[1]
            assert project.app.handle(child).result(60) == 5
        assert json.loads(stack.output_of("status", "--json"))["trouble"] == []
        assert "is at revision" in stack.output_of("db", "check")
        assert not scheduler.logged("permission denied")
    finally:
        stack.close()
        with admin.connect() as connection:
            connection.execute(text(f"DROP OWNED BY {role} CASCADE"))
            connection.execute(text(f"DROP ROLE {role}"))
        admin.dispose()
