"""Requests of a pull worker besides its result: progress, retry delay, returned work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.domain.executors.options import Broken, Finished
from orchestrator.settings import Settings, load_settings
from orchestrator.workers.executors.pull import PullExecutor
from tests.integration import test_executor_pull
from tests.integration.executing import Heard
from tests.integration.serving import serving
from tests.integration.test_executor_pull import SEALED, SIGNED, Client, execution, tell, watched

settings, address, redis = test_executor_pull.settings, test_executor_pull.address, test_executor_pull.redis


async def give_back(client: Client, work: Any) -> Any:
    return await client.post("/queue/return", json={"queue_id": work["queue_id"]})


@pytest.mark.parametrize("more", [{}, {**SIGNED, **SEALED}], ids=["plain", "sealed"])
def test_a_heartbeat_carries_progress(settings: Settings, more: dict[str, str]) -> None:
    settings = load_settings(
        environ={},
        database_url=settings.database_url,
        redis_url=settings.redis_url,
        **more,  # type: ignore[arg-type]
    )

    async def story(executor: PullExecutor, client: Client) -> None:
        heard = Heard()
        watching = asyncio.create_task(executor.watch(execution(), await executor.submit(execution()), heard))
        work = await client.poll()
        body = {"queue_id": work["queue_id"], "progress": {"fraction": 0.5, "text": "grüße"}}
        for _ in range(2):
            assert (await client.post("/queue/heartbeat", json=body)).status_code == 200
        assert (await client.beat(work)).status_code == 200
        completing = asyncio.create_task(client.complete(work, result=1))
        assert await watching == Finished(1)
        await executor.release(execution(), "e-1")
        assert (await completing).status_code == 200
        assert heard.marks == [(0.5, None, "grüße")]
        body["progress"] = {"fraction": 1.5}
        assert (await client.post("/queue/heartbeat", json=body)).status_code == 422

    with serving(settings) as address:
        tell(story, address, settings)


def test_a_worker_sets_the_retry_delay(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        for number, (given, expected) in enumerate([(2.5, 2.5), (-1, None), (True, None), ("soon", None)]):
            name = f"e-{number}"
            watching = await watched(executor, execution(name))
            error = {"kind": "Busy", "message": "later", "retry_after": given}
            completing = asyncio.create_task(client.complete(await client.poll(), error=error))
            assert await watching == Broken("Busy", "later", delay=expected)
            await executor.release(execution(name), name)
            assert (await completing).status_code == 200

    tell(story, address, settings)


def test_returned_work_goes_to_the_next_poll_without_losing_a_lease(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        watching = await watched(executor, execution(lease=60, max_leases=1))
        first = await client.poll()
        polling = asyncio.create_task(client.poll())
        assert (await give_back(client, first)).json() == {"ok": "1"}
        second = await polling
        assert (second["request_id"], second["attempt"]) == ("e-1", 1)
        for late in (await give_back(client, first), await client.beat(first), await client.complete(first, result=1)):
            assert (late.status_code, late.json()["data"]["attributes"]) == (409, {"state": "lost"})
        completing = asyncio.create_task(client.complete(second, result=2))
        assert await watching == Finished(2)
        await executor.release(execution(), "e-1")
        assert (await completing).status_code == 200
        assert (await give_back(client, second)).json()["data"]["attributes"] == {"state": "ended"}

    tell(story, address, settings)


def test_a_rejected_request_names_the_state(address: str, settings: Settings) -> None:
    async def story(executor: PullExecutor, client: Client) -> None:
        await watched(executor, execution())
        work = await client.poll()
        await executor.cancel(execution(), "e-1")
        for refused in (await client.beat(work), await client.complete(work, result=1), await give_back(client, work)):
            assert (refused.status_code, refused.json()["data"]["attributes"]) == (409, {"state": "cancelled"})

    tell(story, address, settings)
