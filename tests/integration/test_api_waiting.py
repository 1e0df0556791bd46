"""A request that waits for a task is answered when the task ends, and holds no thread or connection meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.integration.api_client import ApiClient, bare_api, bare_settings, empty_engine  # noqa: F401

END = """
WITH ended AS (DELETE FROM orchestrator.tasks RETURNING *)
INSERT INTO orchestrator.ended_tasks (id, name, queue, payload, status, result, attempt, failures, losses, priority,
                                      seq, created_at, ended_at)
SELECT id, name, queue, payload, 'success', '\\xc3', 1, 0, 0, 0, seq, created_at, now() FROM ended
"""
MANY = 100


def test_a_request_waits_for_the_end_or_its_timeout(api: ApiClient, engine: Engine) -> None:
    async def ask() -> tuple[Any, ...]:
        async with api.opened() as asking:
            path = f"/api/v1/tasks/{(await asking.post('/api/v1/tasks', json={'name': 't.a'})).json()['id']}"
            began = time.monotonic()
            early = await asking.get(f"{path}?wait=0.3")
            waited = time.monotonic() - began
            waiting = [asyncio.create_task(asking.get(f"{path}?wait=50")) for _ in range(MANY)]
            other = await asking.get(path)  # served, although more requests wait than there are threads or connections
            with engine.connect() as connection:
                await asyncio.to_thread(connection.exec_driver_sql, END)
            return early, waited, other, await asyncio.gather(*waiting), await asking.get(f"{path}?wait=50")

    early, waited, other, late, again = asyncio.run(ask())
    assert waited >= 0.3
    for answer in (early, other):
        assert answer.json()["task"]["status"] == "pending"
    assert [(one.status_code, one.json()["task"]["status"], one.json()["result"]) for one in (*late, again)] == [
        (200, "success", True)
    ] * (MANY + 1)


@pytest.mark.parametrize(("wait", "status"), [("61", 422), ("-1", 422), ("nan", 422), ("x", 422), ("1", 404)])
@pytest.mark.parametrize("kind", ["tasks", "runs"])
def test_invalid_waits_are_rejected_at_once(api: ApiClient, kind: str, wait: str, status: int) -> None:
    assert api.get(f"/api/v1/{kind}/0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17?wait={wait}").status_code == status
