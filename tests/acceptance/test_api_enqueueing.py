"""Many clients enqueue over HTTP at the same time: they share commits, and hold no threads of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack

CALL = {"name": "project.add", "args": [1, 2], "queue": "nobody"}


@pytest.fixture(scope="module")
def served(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        yield stack, stack.api()


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        await client.post("/api/v1/tasks", json=CALL)
        yield client


async def enqueue(client: httpx.AsyncClient, key: str | None = None, **given: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await client.post("/api/v1/tasks", json=CALL | given, headers=headers)


@asynccontextmanager
async def blocked_inserts(stack: Stack) -> AsyncIterator[None]:
    """Block all inserts of tasks within the block."""
    with stack.engine.connect() as connection:
        connection.execute(text("BEGIN; LOCK TABLE orchestrator.tasks IN SHARE MODE"))
        yield
        connection.execute(text("COMMIT"))


def test_waiting_enqueues_hold_no_thread_and_share_commits(served: tuple[Stack, str]) -> None:
    stack, url = served

    async def main() -> list[httpx.Response]:
        async with clients(url) as client:
            async with blocked_inserts(stack):
                waiting = [asyncio.create_task(enqueue(client)) for _ in range(100)]
                while stack.scalar(_WAITING) == 0:
                    await asyncio.sleep(0.01)
                for _ in range(20):  # more requests than threads
                    (await asyncio.wait_for(client.get("/api/v1/queues"), 30)).raise_for_status()
                assert not any(one.done() for one in waiting)
            return [await one for one in waiting]

    answers = asyncio.run(main())
    assert {answer.status_code for answer in answers} == {201}
    ids = [answer.json()["id"] for answer in answers]
    found = stack.sql(
        "SELECT id::text, xmin::text FROM orchestrator.tasks WHERE id = ANY(CAST(:ids AS uuid[]))", ids=ids
    )
    assert {id for id, _ in found} == set(ids)
    assert len(found) == 100
    assert len({transaction for _, transaction in found}) < 50


_WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%/* enqueue.%' AND wait_event_type = 'Lock'
"""


def test_a_rejected_request_does_not_affect_concurrent_requests(served: tuple[Stack, str]) -> None:
    stack, url = served

    async def main() -> tuple[str, list[httpx.Response]]:
        async with clients(url) as client:
            first = await enqueue(client, "a key")
            async with blocked_inserts(stack):
                waiting = [
                    asyncio.create_task(
                        enqueue(client, "a key", args=[number, 2])
                        if number in (3, 1)
                        else enqueue(client, priority=1_000 if number == 7 else 0)
                    )
                    for number in range(12)
                ]
                while stack.scalar(_WAITING) == 0:
                    await asyncio.sleep(0.01)
            return first.json()["id"], [await one for one in waiting]

    first, answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [201, 201, 201, 409, 201, 201, 201, 422, 201, 201, 201, 201]
    assert answers[1].json()["id"] == first == answers[3].json()["task_id"]


def test_concurrent_enqueues_with_one_key_create_one_task(served: tuple[Stack, str]) -> None:
    stack, url = served

    async def main() -> list[httpx.Response]:
        async with clients(url) as client:
            return await asyncio.gather(*(enqueue(client, "at once", queue="once") for _ in range(40)))

    answers = asyncio.run(main())
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert stack.scalar("SELECT count(*) FROM orchestrator.tasks WHERE queue = 'once'") == 1
