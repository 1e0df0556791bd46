"""How many requests may wait: those that enqueue wait without a thread, and are counted all the same."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from sqlalchemy import Engine, text

from orchestrator.api import app as application
from orchestrator.api import turns
from orchestrator.settings import load_settings


def test_too_many_who_enqueue_at_once_are_told_to_come_again(
    database_url: str, redis_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_MOST_WAITING", 3)
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
