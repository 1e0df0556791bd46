"""Request slots of a server: how many requests may wait, and how keys are isolated from each other."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine, event, text

from orchestrator.api import app as application
from orchestrator.api import slots
from orchestrator.api.routes import ROUTES
from orchestrator.domain.access import Scope
from orchestrator.settings import load_settings
from tests.integration.api_client import make_key
from tests.integration.serving import serving
from tests.waiting import eventually


def test_excess_concurrent_enqueues_are_rejected_with_retry_after(
    database_url: str, redis_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_MAX_WAITING", 3)
    app = application.create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:

            async def enqueue() -> httpx.Response:
                return await client.post("/api/v1/tasks", json={"name": "job"})

            assert (await enqueue()).status_code == 201
            with engine.connect() as connection:
                connection.execute(text("BEGIN; LOCK TABLE orchestrator.tasks IN SHARE MODE"))
                requests = [asyncio.create_task(enqueue()) for _ in range(5)]
                while sum(request.done() for request in requests) < 2:
                    await asyncio.sleep(0.01)
                connection.execute(text("COMMIT"))
            return [await request for request in requests]

    answers = asyncio.run(asyncio.wait_for(main(), 60))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 201, 429, 429]
    assert all("Retry-After" in answer.headers for answer in answers if answer.status_code == 429)


def test_a_small_bulk_does_not_wait_for_expensive_requests() -> None:
    """Two keys that validated large definitions kept three tasks of a third key waiting for ten seconds."""
    (bulk,) = [route for route in ROUTES if route.path == "/api/v1/tasks/bulk"]
    assert not bulk.is_expensive, "a large body makes it so"


def _key(engine: Engine, name: str, queues: str | None = None) -> dict[str, str]:
    return {"Authorization": f"Bearer {make_key(engine, Scope.ADMIN, name, queues=queues)}"}


def test_a_key_with_full_slots_blocks_neither_probes_nor_other_keys(
    database_url: str, redis_url: str, engine: Engine
) -> None:
    app = application.create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))
    ada, bob = _key(engine, "ada"), _key(engine, "bob")

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            assert (await client.get("/api/v1/workflows", headers=ada)).status_code == 200
            with engine.connect() as connection:
                connection.execute(text("BEGIN; LOCK TABLE orchestrator.tasks IN ACCESS EXCLUSIVE MODE"))
                paths = ["/api/v1/tasks"] * 30 + ["/api/v1/search?text=a"] * 10
                held = [asyncio.create_task(client.get(path, headers=ada)) for path in paths]
                async with asyncio.timeout(30):
                    asked = [("/healthz", {}), ("/readyz", {}), ("/api/v1/workflows", bob), ("/healthz", {})]
                    statuses = [(await client.get(path, headers=key)).status_code for path, key in asked]
                assert not any(request.done() for request in held)
                connection.execute(text("COMMIT"))
            return [*statuses, *(answer.status_code for answer in await asyncio.gather(*held))]

    assert asyncio.run(main()) == [200] * 44


def test_a_statement_is_cancelled_when_its_client_disconnects(
    database_url: str, redis_url: str, engine: Engine
) -> None:
    settings = load_settings(environ={}, database_url=database_url, redis_url=redis_url)
    path, key = "/api/v1/search?text=a", _key(engine, "ada")["Authorization"]
    waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%insights.%'")
    with serving(settings) as address, engine.connect() as looking, engine.connect() as locking:
        looking = looking.execution_options(isolation_level="AUTOCOMMIT")
        locking.execute(text("LOCK TABLE orchestrator.tasks IN ACCESS EXCLUSIVE MODE"))
        place = address.rpartition("/")[2].partition(":")
        with socket.create_connection((place[0], int(place[2])), timeout=30) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\n\r\n".encode())
            eventually(lambda: looking.execute(waits).scalar_one(), "it reads the table")
        eventually(lambda: not looking.execute(waits).scalar_one(), "it is cancelled", 5.0)
        locking.rollback()
        assert httpx.get(address + path, headers={"Authorization": key}, timeout=30).status_code == 200


def test_a_wait_for_thousands_of_ids_is_checked_by_one_statement(
    database_url: str, redis_url: str, engine: Engine
) -> None:
    app = application.create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))
    bound = _key(engine, "mail", queues="mail.")
    seen: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        seen.append(statement)

    async def main() -> list[tuple[int, int]]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=bound, timeout=60
        ) as client:
            new = [{"name": "t.a", "queue": "mail.out"}] * 1_000
            made = (await client.post("/api/v1/tasks/bulk", json={"tasks": new})).json()["ids"]
            ids = [b64encode(UUID(id).bytes).decode() for id in made] * 5
            event.listen(Engine, "before_cursor_execute", note)
            statuses = []
            for tasks in (ids, [*ids[:-1], b64encode(uuid4().bytes).decode()]):
                answer = await client.post("/api/v1/waits", json={"tasks": tasks, "timeout": 0})
                statuses.append((answer.status_code, len([one for one in seen if "insights.owners" in one])))
            return statuses

    try:
        assert asyncio.run(main()) == [(200, 1), (404, 2)]
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_large_bodies_read_at_once_are_limited_per_key(database_url: str, redis_url: str, engine: Engine) -> None:
    app = application.create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))
    ada, bob = _key(engine, "ada"), _key(engine, "bob")
    may_end, begun = asyncio.Event(), []

    async def slow(number: int) -> AsyncIterator[bytes]:
        yield b'{"name": "t.a", "args": ["' + b"a" * 70_000
        begun.append(number)
        await may_end.wait()
        yield b'"]}'

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:

            async def send(number: int, key: dict[str, str]) -> int:
                return (await client.post("/api/v1/tasks", content=slow(number), headers=key)).status_code

            sent = [asyncio.create_task(send(number, ada)) for number in range(10)]
            async with asyncio.timeout(30):
                while len(begun) < 8:
                    await asyncio.sleep(0.01)
                assert (await client.post("/api/v1/tasks", json={"name": "t.a"}, headers=ada)).status_code == 201
                sent.append(asyncio.create_task(send(10, bob)))
                while 10 not in begun:
                    await asyncio.sleep(0.01)
            assert len(begun) == 9
            may_end.set()
            return await asyncio.gather(*sent)

    assert asyncio.run(main()) == [201] * 11


def test_the_payload_of_a_rejected_request_is_freed(database_url: str, redis_url: str, engine: Engine) -> None:
    app = application.create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))
    key, many = _key(engine, "ada"), 123_456

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            body = {"name": "t.a", "args": [1.5] * many}  # nine bytes each, together above the payload limit
            assert (await client.post("/api/v1/tasks", json=body, headers=key)).status_code == 422

    gc.disable()
    try:
        asyncio.run(main())
        # The worker thread releases its call just after its result was taken; a leak would stay.
        eventually(lambda: not [found for found in gc.get_objects() if type(found) is list and len(found) == many])
    finally:
        gc.enable()


def test_a_stopping_server_answers_waiting_requests_with_503(database_url: str, redis_url: str, engine: Engine) -> None:
    """This was a server error with a traceback: a thread still ran the step that was to be closed."""
    app = application.create_app(load_settings(environ={}, database_url=database_url, redis_url=redis_url))
    key = _key(engine, "waits")["Authorization"].encode()
    body = json.dumps({"tasks": [b64encode(uuid4().bytes).decode()], "timeout": 60}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/waits",
        "raw_path": b"/api/v1/waits",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", str(len(body)).encode()), (b"authorization", key)],
        "client": ("127.0.0.1", 1),
        "scheme": "http",
        "http_version": "1.1",
    }

    async def main() -> list[Any]:
        sent: list[Any] = []
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return bodies.pop() if bodies else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        with engine.connect() as connection:
            connection.execute(text("BEGIN; LOCK TABLE orchestrator.tasks, orchestrator.ended_tasks"))
            asked = asyncio.create_task(app(scope, receive, send))
            waiting = text(
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database"
                " WHERE datname = current_database())"
            )
            while not connection.execute(waiting).scalar_one():
                await asyncio.sleep(0.01)
            asked.cancel()
            await asked
            connection.execute(text("COMMIT"))
        return sent

    start, answer = asyncio.run(asyncio.wait_for(main(), 60))
    assert (start["status"], json.loads(answer["body"])["detail"][:22]) == (503, "The server is stopping"), answer
