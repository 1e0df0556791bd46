"""Traces without a receiver of spans: none is configured, or it is unreachable."""

from __future__ import annotations

import httpx

from tests.acceptance.conftest import project
from tests.acceptance.stack import Stack
from tests.waiting import eventually

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_tasks_succeed_while_the_span_receiver_is_unreachable(stack: Stack) -> None:
    stack.environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "10"}
    scheduler = stack.scheduler()
    worker = stack.worker()
    handles = [project.add.enqueue(number, 1) for number in range(50)]
    assert [handle.result(timeout=60) for handle in handles] == [number + 1 for number in range(50)]
    said = "The receiver of spans cannot be used"
    eventually(lambda: worker.logged(said), "it is said")
    assert (worker.stop(), scheduler.stop()) == (0, 0)
    assert worker.log.read_text().count(said) == 1
    assert "Traceback" not in worker.log.read_text() + scheduler.log.read_text()


def test_traces_are_propagated_without_loading_an_exporter(stack: Stack) -> None:
    stack.scheduler()
    stack.worker("--app", "traced:app")
    address = stack.api()
    sent = httpx.post(f"{address}/api/v1/tasks", json={"name": "traced.passes_on"}, headers={"traceparent": PARENT})
    assert sent.status_code == 201, sent.text
    eventually(lambda: stack.scalar("SELECT count(*) FROM orchestrator.ended_tasks") == 2, "both have ended")
    answer = httpx.get(f"{address}/api/v1/tasks/{sent.json()['id']}").json()
    assert answer["result"] == [PARENT]
    assert stack.sql("SELECT name, trace FROM orchestrator.ended_tasks ORDER BY created_at") == [
        ("traced.passes_on", PARENT),
        ("traced.tells", PARENT),
    ]
