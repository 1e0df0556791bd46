"""Two sets of API data: one within the bounds of an API key (`mail`), one outside of them (`bank`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx
from sqlalchemy import Connection, Engine

from orchestrator.domain.access import Scope, Secret
from orchestrator.sdk.backend import Backend
from orchestrator.sdk.dag import definitions
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.settings import Settings, load_settings
from orchestrator.store.database import engine_for
from tests.integration.api_client import ApiClient, make_key

OWN, OTHERS = "mail.out", "bank.out"


@dataclass
class House:
    """A database with two sets of data, and an API key bound to the first."""

    settings: Settings
    engine: Engine
    key: Secret
    tasks: dict[str, UUID] = field(default_factory=dict)
    failed: dict[str, UUID] = field(default_factory=dict)
    runs: dict[str, UUID] = field(default_factory=dict)
    run_tasks: dict[str, UUID] = field(default_factory=dict)
    backfills: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._client = ApiClient(self.settings)
        self.app = self._client.app

    def send(self, method: str, path: str, key: Secret | None = None, **options: Any) -> httpx.Response:
        answer: httpx.Response = self._client.send(method, path, key=key or self.key, **options)
        return answer

    def get(self, path: str, key: Secret | None = None) -> Any:
        answer = self.send("GET", path, key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def make_key(
        self, queues: str | None, workflows: str | None, scope: Scope = Scope.ADMIN, tasks: str | None = None
    ) -> Secret:
        return make_key(self.engine, scope, "bound", queues=queues, workflows=workflows, tasks=tasks)


def definition(workflow: str, queue: str, **more: Any) -> dict[str, Any]:
    schedule = {"cron": "0 6 * * *"}
    return {"name": workflow, "queue": queue, "schedule": schedule, "tasks": {"a": {"task": "t.a"}}} | more


def fill(house: House, backend: Backend, connection: Connection, name: str) -> None:
    queue, workflow = f"{name}.out", f"{name}-flow"
    task = call_by_name(house.settings, "t.a", [], {}, options={"queue": queue}, queue="default")
    house.tasks[name] = UUID(bytes=backend.tasks.enqueue(task))
    house.failed[name] = UUID(bytes=new_id())
    connection.exec_driver_sql(
        "INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, error, attempt, failures, losses,"
        " priority, seq, created_at, ended_at) VALUES (%s, 't.a', %s, '', 'failed', %s, 1, 1, 0, 0, 1, now(), now())",
        (house.failed[name].hex, queue, f'{{"kind": "E", "message": "secret of {name}"}}'),
    )
    backend.workflows.apply(definitions.from_data(definition(workflow, queue)))
    house.runs[name] = UUID(bytes=backend.workflows.start(workflow, {}, new_id(), key=None, tags=()))
    house.run_tasks[name] = UUID(bytes=new_id())
    connection.exec_driver_sql(
        "INSERT INTO orchestrator.tasks (id, name, queue, payload, run_id, step)"
        " VALUES (%s, 't.a', 'shared', '', %s, 'a')",
        (house.run_tasks[name].hex, house.runs[name].hex),
    )
    backend.queues.limit(queue, 5, None)
    house.backfills[name] = backend.schedules.backfill(f"{workflow}/default", "2026-01-01", "2026-01-03", None, False)


@contextmanager
def furnished(database_url: str, redis_url: str) -> Iterator[House]:
    """Fill an empty database with both sets of data."""
    settings = load_settings(environ={}, database_url=database_url, redis_url=redis_url)
    engine = engine_for(database_url, autocommit=True)
    house = House(settings, engine, Secret("", ""))
    house.key = house.make_key("mail.", "mail-")
    backend = Backend(settings)
    with engine.connect() as connection:
        for name in ("mail", "bank"):
            fill(house, backend, connection, name)
        connection.exec_driver_sql("DELETE FROM orchestrator.inbox")
    yield house
    backend.close()
    engine.dispose()


def changes(house: House) -> list[Any]:
    """Return a checksum of every table that a rejected request must not change."""
    tables = (
        "inbox",
        "queues",
        "schedules",
        "workflows",
        "backfills",
        "runs",
        "tasks",
        "api_keys",
        "services",
        "flows",
        "drains",
    )
    with house.engine.connect() as connection:
        return [
            connection.exec_driver_sql(f"SELECT count(*), sum(hashtext(t::text)) FROM orchestrator.{table} t").one()
            for table in tables
        ]
