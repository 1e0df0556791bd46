"""A client prepares its enqueue statement if its connection is a Postgres session of its own, not a pooler's."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import Orchestrator
from orchestrator.sdk.backend.connections import Connections
from orchestrator.store import database, driver
from tests.integration.stage import System


def prepared(app: Orchestrator) -> list[str]:
    """Return the statements that the application's kept connection has prepared."""
    cursor = kept_connection(app).connection.cursor()
    cursor.execute("SELECT statement FROM pg_prepared_statements")
    return [statement for (statement,) in cursor.fetchall()]


def kept_connection(app: Orchestrator) -> Any:
    backend: Any = app._client.backend
    connections: Connections = backend.tasks._connections
    engine: Any = connections._links().engine
    return engine.pool.kept[0]


def enqueue(app: Orchestrator, number: int) -> None:
    if "job" not in app.tasks:
        app.task(name="job")(lambda: None)
    for _ in range(number):
        app.tasks["job"].enqueue()


def test_an_enqueue_is_prepared_after_several_uses(system: System) -> None:
    enqueue(system.app, 5)
    assert prepared(system.app) == []
    enqueue(system.app, 5)
    (statement,) = prepared(system.app)
    assert "/* enqueue.insert */" in statement
    assert system.count("tasks") == 10


def test_a_client_behind_a_pooler_prepares_no_statement(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver._PooledConnection, "_is_session", lambda _: False)
    enqueue(system.app, 10)
    assert prepared(system.app) == []
    assert system.count("tasks") == 10


def test_a_session_replaced_by_a_pooler_loses_no_task(system: System) -> None:
    enqueue(system.app, 10)
    cursor = kept_connection(system.app).connection.cursor()
    cursor.execute("DEALLOCATE ALL")
    enqueue(system.app, 10)
    assert system.count("tasks") == 20
    assert prepared(system.app) == [], "it is not tried again"


def test_each_namespace_has_statements_of_its_own(system: System) -> None:
    url, redis_url = system.settings.require_database(), system.settings.require_redis()
    database.upgrade(url, namespace="elsewhere")
    with Orchestrator(database_url=url, redis_url=redis_url, namespace="elsewhere") as other:
        enqueue(system.app, 10)
        enqueue(other, 10)
        (statement,) = prepared(other)
        assert '"elsewhere".tasks' in statement
        assert kept_connection(other)._uses.values() != kept_connection(system.app)._uses.values()
    assert system.count("tasks") == 10
    assert system.sql('SELECT count(*) FROM "elsewhere".tasks')[0]["count"] == 10
    system.sql('DROP SCHEMA "elsewhere" CASCADE')
