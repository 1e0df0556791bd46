"""Pulled work after Redis was emptied or came back with an older state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest
from redis import Redis

from orchestrator.domain.executors.options import Finished
from orchestrator.domain.executors.record import Record, encode_record
from orchestrator.settings import Settings
from orchestrator.store.database import engine_for
from orchestrator.workers.executors.pull import PullExecutor
from tests.integration import test_executor_pull
from tests.integration.executing import Heard
from tests.integration.test_executor_pull import KEYS, Client, begin, execution, fall_silent, offered, tell, watched

settings, address, redis = test_executor_pull.settings, test_executor_pull.address, test_executor_pull.redis

NAME = f"task-{UUID(int=7)}-1"


@pytest.fixture
def open_task(settings: Settings) -> Iterator[None]:
    """Insert the running execution NAME into Postgres."""
    engine = engine_for(settings.database_url, autocommit=True)
    record = encode_record(Record(name=NAME, attempt=1, failures=0, since=0.0, external_id=NAME))
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.tasks (id, name, queue, payload, options, status, attempt, failures, losses,"
            " priority, created_at, details)"
            " VALUES (%s, 'shop.sum', 'q', '', '{}', 'running', 1, 0, 0, 0, now(), %s)",
            (UUID(int=7).hex, record),
        )
        try:
            yield
        finally:
            connection.exec_driver_sql("DELETE FROM orchestrator.tasks WHERE id = %s", (UUID(int=7).hex,))
    engine.dispose()


def is_emptied(redis: Redis) -> None:
    redis.flushdb()
    begin(redis, "1-2-b")


def is_back_with_what_it_had(redis: Redis) -> None:
    """Make Redis forget the last second, in which the work was leased."""
    redis.hset(KEYS.pull(NAME), mapping={"s": "waiting", "n": 0})
    redis.hdel(KEYS.pull(NAME), "q", "w")
    redis.zadd(KEYS.pull_waiting("sum"), {NAME: 1})
    redis.set(KEYS.server, "another-life")  # not noticed by a leader yet


@pytest.mark.parametrize("happens", [is_emptied, is_back_with_what_it_had])
@pytest.mark.usefixtures("open_task")
def test_work_that_redis_lost_stays_with_its_worker(
    address: str, settings: Settings, redis: Redis, happens: Callable[[Redis], None]
) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        await offered(executor, execution(NAME))
        work = await client.poll(wait=0)
        happens(redis)
        assert await client.poll(wait=0) is None, "nobody else gets it"
        unknown = await client.beat(work)
        assert (unknown.status_code, "retry the request" in unknown.json()["detail"]) == (503, True), unknown.text
        assert unknown.headers["Retry-After"]
        completing = asyncio.create_task(client.complete(work, result=1))  # waits until the work is known again
        begin(redis, "1-2-b")
        heard = Heard()
        assert await executor.watch(execution(NAME), NAME, heard) == Finished(1)
        await executor.release(execution(NAME), NAME)
        assert (await completing).status_code == 200
        assert await client.poll(wait=0) is None

    tell(story, address, settings)


def test_work_without_a_heartbeat_after_a_wipe_waits_one_lease(address: str, settings: Settings, redis: Redis) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        work = execution(lease=1)
        watching = await watched(executor, work)
        old = await client.poll()
        is_emptied(redis)
        began = time.monotonic()
        new = await client.poll()
        assert (time.monotonic() - began > 0.9, new["attempt"]) == (True, 1)
        assert (await client.beat(old)).status_code == 409, "it was silent for one lease"
        watching.cancel()

    tell(story, address, settings)


def test_a_heartbeat_restores_its_lease_after_redis_was_emptied(address: str, settings: Settings, redis: Redis) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution(max_leases=1))
        work = await client.poll()
        is_emptied(redis)
        async with asyncio.timeout(60):
            while (await client.beat(work)).status_code != 200:
                await asyncio.sleep(0.05)
        late = await client.beat({"queue_id": "e-1~0000000000000000"})
        assert (late.status_code, "another worker" in late.json()["detail"]) == (409, True)
        await fall_silent(executor, redis)
        assert (await watching).kind == "LeaseLost", "it counts like any other"

    tell(story, address, settings)


def test_reoffered_work_is_not_released_by_an_earlier_watcher(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        await offered(executor, execution())
        await executor.release(execution(), "e-1")  # by a watcher whose report came too late to count
        work = await client.poll(wait=0)
        await executor.release(execution(), "e-1")
        assert (await client.beat(work)).status_code == 200

    tell(story, address, settings)


@pytest.mark.usefixtures("open_task")
def test_work_unknown_to_redis_is_rejected_by_its_state_in_postgres(
    address: str, settings: Settings, redis: Redis
) -> None:
    async def story(_: PullExecutor, client: Client) -> None:
        token = "0" * 16
        for name, status, said in (
            (NAME, 503, "offered again"),
            (f"{NAME}2", 409, "this attempt of its task failed"),
            (f"task-{UUID(int=8)}-1", 404, "There is no work item"),
            ("e-1", 404, "There is no work item"),
        ):
            answer = await client.beat({"queue_id": f"{name}~{token}"})
            assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text

    tell(story, address, settings)
