"""Calls that wait report why nothing happens: no scheduler leads, no worker serves the queue, or none knows the
task."""

from __future__ import annotations

import asyncio
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from orchestrator import Orchestrator, ResultTimeout, WorkflowContext, gather
from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.domain.tasks.obstacles import NO_LEADER
from orchestrator.sdk.backend import code_requests, waiting
from orchestrator.sdk.backend.code_requests import CodeRequests
from orchestrator.store import fleet
from orchestrator.store.fleet import WorkerRow
from tests import forking
from tests.integration.stage import System
from tests.waiting import eventually


@pytest.fixture
def app(system: System) -> Orchestrator:
    @system.app.task(name="ship", queue="parcels")
    def ship() -> None: ...

    return system.app


def age_tasks(system: System) -> None:
    system.sql("UPDATE orchestrator.tasks SET created_at = now() - interval '1 minute'")


def keep_tasks_young(system: System) -> None:
    """Set creation times in the future: no task counts as waiting for long, however slow the test is."""
    system.sql("UPDATE orchestrator.tasks SET created_at = now() + interval '1 hour'")


def serve(system: System, queue: str) -> None:
    with system.engine.begin() as connection:
        fleet.mirror(connection, [WorkerRow("w", "here", 7, [queue], [], 10, 0, "live", 0.0)], datetime.now(UTC))
        connection.exec_driver_sql("UPDATE orchestrator.workers SET seen_at = now() + interval '1 hour'")


def test_a_timed_out_wait_for_a_task_reports_the_reason(system: System, app: Orchestrator) -> None:
    handle = app.enqueue("ship")
    keep_tasks_young(system)
    with pytest.raises(ResultTimeout, match="It is in progress; ask again"):
        handle.result(timeout=0)
    age_tasks(system)
    with pytest.raises(
        ResultTimeout,
        match="no live worker. Start one: .* --queues parcels; if one is running, its log says .*; ask again, or see",
    ):
        handle.result(timeout=0.01)
    with pytest.raises(ResultTimeout, match="no live worker. Start one:"):
        asyncio.run(handle.aresult(timeout=0.01))
    serve(system, "parcels")
    with pytest.raises(ResultTimeout, match="It is in progress; ask again"):
        handle.result(timeout=0.01)
    app.queue("parcels").pause()
    with pytest.raises(ResultTimeout, match="Queue 'parcels' is paused. Resume it: orchestrator queues resume parcels"):
        handle.result(timeout=0.01)
    app.queue("parcels").resume()
    system.sql("UPDATE orchestrator.tasks SET hold = 'unknown', wake_at = now() + interval '5 minutes'")
    with pytest.raises(ResultTimeout, match="No live worker of queue 'parcels' knows 'ship'. Start a worker"):
        handle.result(timeout=0.01)
    system.sql("UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'")
    with pytest.raises(ResultTimeout, match="No scheduler leads, so no task starts"):
        handle.result(timeout=0.01)


def test_a_timed_out_wait_for_a_run_reports_the_reason(system: System, app: Orchestrator) -> None:
    run = app.start_many(app.tasks["ship"], [(), ()])
    app.workflows.apply(Definition(name="flow", queue="reports", steps=(Step(name="a", task="file.py:function"),)))
    steps = app.workflows["flow"].start()
    system.tick(2)
    age_tasks(system)
    for handle, queue in ((run, "parcels"), (steps, "reports")):
        with pytest.raises(ResultTimeout, match=f"Queue '{queue}' has ready tasks and no live worker"):
            handle.wait_ended(timeout=0.01)


def test_a_wait_without_timeout_logs_the_reason_once(
    system: System, app: Orchestrator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_POLL_INTERVAL", 0.05)
    handles = [app.enqueue("ship") for _ in range(2)]
    system.sql("UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'")

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "No scheduler leads" in record.getMessage()]

    def wait() -> list[str]:
        with pytest.raises(ResultTimeout):
            handles[0].result(timeout=0.3)
        return said()

    eventually(wait, "it is told")
    with pytest.raises(ResultTimeout):
        gather(handles, timeout=0.3)
    assert said() == [f"client.waiting id={handles[0].id}: {NO_LEADER}"], "and once, while it stays so"


@pytest.mark.parametrize("words", [("enqueue", "far.away", "--wait"), ("runs", "start", "flow", "--watch")])
def test_waiting_commands_report_a_missing_leader_within_seconds(
    system: System, tmp_path: Path, words: tuple[str, ...]
) -> None:
    system.app.workflows.apply(Definition(name="flow", steps=(Step(name="a", task="file.py:function"),)))
    system.sql("UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'")
    environment = {
        "ORCHESTRATOR_DATABASE_URL": system.settings.database_url,
        "ORCHESTRATOR_REDIS_URL": system.settings.redis_url,
    }
    with forking.begin(*words, environment=environment, folder=tmp_path, stderr=subprocess.PIPE) as waiter:
        assert waiter.stderr is not None
        lines = iter(waiter.stderr.readline, "")
        if words[0] == "enqueue":
            assert len(next(lines)) == 37, "the id: stdout is for the result"
        assert next(lines).startswith("! No scheduler leads, so no task starts.")
        waiter.kill()


def test_a_query_reports_a_missing_leader_within_seconds(system: System) -> None:
    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> None:
        await ctx.signals("end").get()

    handle = basket.start()
    system.expire_lease()
    began = time.monotonic()
    with pytest.raises(ResultTimeout, match=r"No answer to query run .* yet\. No scheduler leads, so no task starts"):
        handle.query("look")
    assert time.monotonic() - began < 5.0, "it would wait for thirty seconds"


def test_an_unanswered_query_names_the_workers_that_could_answer(system: System) -> None:
    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> None:
        await ctx.signals("end").get()

    handle = basket.start()
    keep_tasks_young(system)
    worker = system.worker("w1", knows=("job", "basket"), queue="default")
    system.pass_seconds()
    said = (
        "No answer to query run .* within 0.01 s. This needs a worker of queue 'default' that has workflow 'basket': "
    )
    with pytest.raises(
        ResultTimeout,
        match=f"{said}none of the 1 live ones has answered: they are busy, or were lost a moment ago. Try again",
    ):
        handle.query("look", timeout=0.01)
    worker.leave()
    system.pass_seconds()
    with pytest.raises(ResultTimeout, match=f"{said}none is live. Start one: .* --queues default"):
        handle.query("look", timeout=0.01)


def test_a_query_waits_for_a_standby(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> None:
        await ctx.signals("end").get()

    handle = basket.start()
    system.expire_lease()
    looks: list[bool] = []

    def is_without_leader(code: CodeRequests, run: bytes) -> bool:
        looks.append(find(code, run))
        system.sql("UPDATE orchestrator.leases SET expires_at = now() + interval '1 hour'")
        return looks[-1]

    find = CodeRequests._is_without_leader
    monkeypatch.setattr(CodeRequests, "_is_without_leader", is_without_leader)
    monkeypatch.setattr(code_requests, "_FIRST_LEADER_CHECKS", (0.05, 0.05))
    with pytest.raises(ResultTimeout, match="within 0.3 s"):
        handle.query("look", timeout=0.3)
    assert looks == [True, False]
