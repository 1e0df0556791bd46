"""Tasks enqueued in transactions of psycopg2, psycopg 3, asyncpg and Django."""

from __future__ import annotations

import asyncio
import json
import select
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Engine

from orchestrator import Duplicate, InvalidTask, NotFound, Orchestrator, Task
from orchestrator.store import database
from tests.integration.test_enqueueing import OPTIONS, _row

Enqueue = Callable[..., Any]


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Orchestrator]:
    with Orchestrator(database_url=database_url, redis_url=redis_url) as app:
        yield app


class Drivers:
    """One transaction with each driver, which is committed or rolled back."""

    def __init__(self, url: str) -> None:
        self._url = url

    def psycopg2(self, task: Task[..., Any], values: list[Any], *, keep: bool = True) -> list[str]:
        connection = psycopg2.connect(self._url, cursor_factory=psycopg2.extras.RealDictCursor)
        try:
            ids = [task.enqueue_in(connection, value).id for value in values]
            connection.commit() if keep else connection.rollback()
        finally:
            connection.close()
        return ids

    def psycopg(self, task: Task[..., Any], values: list[Any], *, keep: bool = True) -> list[str]:
        with (
            psycopg.connect(self._url, autocommit=True, row_factory=dict_row) as connection,
            connection.transaction(force_rollback=not keep),
        ):
            return [task.enqueue_in(connection, value).id for value in values]

    def async_psycopg(self, task: Task[..., Any], values: list[Any], *, keep: bool = True) -> list[str]:
        async def main() -> list[str]:
            async with await psycopg.AsyncConnection.connect(self._url, row_factory=dict_row) as connection:
                ids = [(await task.aenqueue_in(connection, value)).id for value in values]
                await (connection.commit() if keep else connection.rollback())
                return ids

        return asyncio.run(main())

    def asyncpg(self, task: Task[..., Any], values: list[Any], *, keep: bool = True) -> list[str]:
        async def main() -> list[str]:
            async with asyncpg.create_pool(self._url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
                await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
                transaction = connection.transaction()
                await transaction.start()
                ids = [(await task.aenqueue_in(connection, value)).id for value in values]
                await (transaction.commit() if keep else transaction.rollback())
                return ids

        return asyncio.run(main())


DRIVERS = ["psycopg2", "psycopg", "async_psycopg", "asyncpg"]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, database_url: str) -> Enqueue:
    found: Enqueue = getattr(Drivers(database_url), request.param)
    return found


def test_each_driver_writes_the_same_row(app: Orchestrator, engine: Engine, driver: Enqueue) -> None:
    follower = app.task(name="follower")(lambda value: value)
    task = app.task(name="job")(lambda value: value)
    for number, options in enumerate(OPTIONS):
        for chosen in (options, options | {"on_success": follower}):
            one = task.options(**chosen)
            (written,) = driver(one, [b"\0\\x\t"])
            assert _row(engine, written) == _row(engine, one.enqueue(b"\0\\x\t").id), (number, chosen)


def test_a_rolled_back_transaction_enqueues_nothing(app: Orchestrator, driver: Enqueue) -> None:
    task = app.task(name="job")(lambda value: value)
    (undone,) = driver(task, [1], keep=False)
    with pytest.raises(NotFound):
        app.handle(undone).status()


def test_a_unique_key_admits_one_task(app: Orchestrator, driver: Enqueue, request: pytest.FixtureRequest) -> None:
    task = app.task(name="job")(lambda value: value)
    key = request.node.name
    first, second = driver(task.options(unique_key=key), [1, 1])
    assert first == second
    assert task.options(unique_key=key).enqueue(1).id == first
    with pytest.raises(Duplicate):
        driver(task.options(unique_key=key, on_duplicate="raise"), [1])
    with pytest.raises(Duplicate, match="other arguments"):
        driver(task.options(idempotency_key=key), [1]) and driver(task.options(idempotency_key=key), [2])


def test_the_commit_wakes_the_leader(app: Orchestrator, driver: Enqueue, database_url: str) -> None:
    task = app.task(name="job")(lambda value: value)
    leader = psycopg2.connect(database_url)
    leader.autocommit = True
    leader.cursor().execute('LISTEN "orchestrator"')
    driver(task, [1], keep=False)
    driver(task, [1])
    assert select.select([leader], [], [], 30)[0]
    leader.poll()
    assert [notification.channel for notification in leader.notifies] == ["orchestrator"]
    leader.close()


def test_each_driver_enqueues_into_another_namespace(driver: Enqueue, database_url: str, redis_url: str) -> None:
    database.upgrade(database_url, namespace="elsewhere")
    with Orchestrator(database_url=database_url, redis_url=redis_url, namespace="elsewhere") as app:
        (found,) = driver(
            app.task(name="job", unique_key=driver.__name__, concurrency_key="c")(lambda value: value), [1]
        )
        assert app.handle(found).status() == "pending"
        (again,) = driver(app.tasks["job"], [1])
        assert again == found
        app.handle(found).cancel()


def test_unsupported_connections_are_rejected(app: Orchestrator, database_url: str) -> None:
    task = app.task(name="job")(lambda value: value)

    async def enqueue_on_async_connection() -> None:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            task.enqueue_in(connection, 1)

    with pytest.raises(InvalidTask, match=r"is asynchronous, and nothing was enqueued. Call `await task.aenqueue_in"):
        asyncio.run(enqueue_on_async_connection())
    with (
        psycopg.connect(database_url) as connection,
        pytest.raises(InvalidTask, match="asynchronous connection of psycopg or asyncpg, found .*Connection"),
    ):
        asyncio.run(task.aenqueue_in(connection, 1))
    with (
        sqlite3.connect(":memory:") as lite,
        pytest.raises(InvalidTask, match="or a connection of psycopg2, psycopg"),
    ):
        task.enqueue_in(lite, 1)
    lite.close()


# -- Django


@pytest.fixture(scope="module")
def django(database_url: str) -> Iterator[Any]:
    import django
    from django.conf import settings
    from django.db import connection

    with closing(psycopg2.connect(database_url)) as found:
        if found.server_version < 14_00_00:
            pytest.skip("Django needs Postgres 14")
    known = psycopg2.extensions.parse_dsn(database_url)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    given = {names[key]: value for key, value in known.items()}
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **given}})
    django.setup()
    yield connection
    connection.close()


def test_tasks_follow_the_savepoints_of_django(app: Orchestrator, django: Any) -> None:
    from django.db import transaction

    task = app.task(name="job")(lambda value: value)
    with transaction.atomic():
        kept = task.enqueue_in(django, 1)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            undone = task.options(unique_key="django").enqueue_in(django, 2)
            1 / 0  # noqa: B018
        with transaction.atomic():
            also = task.options(unique_key="django").enqueue_in(django, 3)
        with pytest.raises(NotFound):
            kept.status()
    assert (kept.status(), also.status()) == ("pending", "pending")
    with pytest.raises(NotFound):
        undone.status()
    assert task.enqueue_in(django, 4).status() == "pending", "without a transaction, it exists at once"
