"""A task gets the options of its decorator, however it is enqueued: the cells of the table in docs/limits.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from orchestrator import Retry, Task, Workflow, WorkflowContext
from orchestrator.domain.code.activation import Activation
from orchestrator.domain.dag.definition import Param
from orchestrator.domain.tasks.task import Enqueued
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.tasks.options import OPTION_NAMES
from orchestrator.store.insights.steps import list_steps
from orchestrator.transport.codec import decode
from tests.integration.stage import System, Worker

SAID: dict[str, Any] = {
    "queue": "post",
    "priority": 7,
    "delay": 30,
    "expires": 90,
    "retries": Retry(max=2, backoff="linear", on=(OSError,), give_up_on=(TimeoutError,)),
    "timeout": 40,
    "soft_timeout": 20,
    "isolation": "process",
    "store_result": False,
    "concurrency": 2,
    "concurrency_key": "acme",
    "total_concurrency": 5,
    "rate": "10/s",
    "total_rate": "20/s",
    "weight": 3,
    "headers": {"source": "import"},
    "on_loss": "fail",
    "max_starts": 4,
}
KEPT_OTHERWISE = {"queue": "queue", "priority": "priority", "delay": "delay", "expires": "expires", "retries": "retry"}
"""Where options of `SAID` are stored that have no field of the same name in the column `options`."""
NOT_SAID = {
    "eta": "instead of delay",
    "redact": "of the function, whose arguments it names",
    "executor": "no function",
    "executor_options": "no function",
    "unique_key": "refused in a run",
    "unique_for": "with a unique key",
    "on_duplicate": "with a unique key",
    "idempotency_key": "refused in a run",
    "on_success": "given below",
    "on_failure": "given below",
}
"""Options that `SAID` leaves out, with the reason."""


@pytest.fixture
def mail(system: System) -> Task[..., Any]:
    """A task with every option that a decorator accepts and that no origin rejects."""
    task: Task[..., Any] = system.app.task(name="mail", on_success=system.job, on_failure=[system.job], **SAID)(
        lambda **given: given
    )
    return task


def stored_options(system: System) -> dict[str, Any]:
    """Return the stored options of the only task `mail` in the database."""
    (row,) = system.sql(
        "SELECT queue, priority, lane, options, callbacks, round(extract(epoch FROM wake_at - created_at)) AS delay,"
        " round(extract(epoch FROM expires_at - created_at)) AS expires FROM orchestrator.tasks WHERE name = 'mail'"
    )
    return dict(row)


def run_job(system: System, worker: Worker) -> None:
    """Complete the pending job successfully."""
    system.pass_seconds(2)
    worker.succeed(*worker.take())
    system.tick(2)


def enqueued(system: System, mail: Task[..., Any], worker: Worker) -> None:
    del system, worker
    mail.enqueue()


def in_a_run(system: System, mail: Task[..., Any], worker: Worker) -> None:
    del worker
    system.app.start_many(mail, [{}])


def child(system: System, mail: Task[..., Any], worker: Worker) -> None:
    worker.report(Enqueued([mail._new((), {})]))
    system.pass_seconds()


def follower(system: System, mail: Task[..., Any], worker: Worker) -> None:
    system.job.options(on_success=mail).enqueue()
    run_job(system, worker)


def step(system: System, mail: Task[..., Any], worker: Worker) -> None:
    del worker
    flow = Workflow("flow")
    flow.task("send", mail)
    system.app.workflows.apply(flow)
    system.app.workflows["flow"].start()
    system.pass_seconds(2)


def hook(system: System, mail: Task[..., Any], worker: Worker) -> None:
    del mail
    flow = Workflow("flow", on_success=[{"task": "mail"}])
    flow.task("work", system.job)
    system.app.workflows.apply(flow)
    system.app.workflows["flow"].start()
    run_job(system, worker)


def schedule(system: System, mail: Task[..., Any], worker: Worker) -> None:
    del worker
    system.app.schedule(every="1h")(mail)
    system.app.schedules.apply()
    system.app.schedules["mail"].trigger()
    system.pass_seconds(2)


def code(system: System, mail: Task[..., Any], worker: Worker) -> None:
    @system.app.workflow(name="coded")
    async def coded(ctx: WorkflowContext) -> None:
        await mail.schedule()

    engine = Engine(system.app.code_workflows.find, 1_000_000)
    coded.start()
    system.pass_seconds()
    (turn,) = worker.take()
    worker.report(engine.activate(decode(Activation, turn.payload), turn.id, turn.attempt))
    engine.close()
    system.pass_seconds()


def nothing() -> None: ...


def test_workflow_code_schedules_tasks_with_absolute_times(system: System) -> None:
    worker = system.worker(knows=["coded"])
    now = datetime.now(UTC)
    moments: dict[str, Any] = {"eta": now + timedelta(minutes=10), "expires": now + timedelta(minutes=20)}
    code(system, system.app.task(name="mail", **moments)(nothing), worker)
    assert 590 < stored_options(system)["delay"] < 610
    assert 1190 < stored_options(system)["expires"] < 1210


def test_workflow_code_rejects_tasks_with_unique_keys(system: System) -> None:
    worker = system.worker(knows=["coded"])
    code(system, system.app.task(name="mail", unique_key="k")(nothing), worker)
    (run,) = system.sql("SELECT status FROM orchestrator.runs")
    (own,) = system.sql("SELECT error FROM orchestrator.ended_tasks")
    assert run["status"] == "failed"
    assert "has a unique key, and a run needs all its tasks" in own["error"]["message"]


def test_every_option_is_tested_and_stored(system: System, mail: Task[..., Any]) -> None:
    assert {*SAID, *NOT_SAID} == {*OPTION_NAMES}
    mail.enqueue()
    row = stored_options(system)
    kept = {"concurrency_key": row["lane"], **row, **row["options"]}
    assert {name for name in SAID if kept.get(KEPT_OTHERWISE.get(name, name)) in (None, "", {})} == set()


ORIGINS = [in_a_run, child, follower, step, hook, schedule, code]


@pytest.mark.parametrize("origin", ORIGINS, ids=[origin.__name__ for origin in ORIGINS])
def test_every_origin_applies_the_decorators_options(
    system: System, mail: Task[..., Any], origin: Callable[[System, Task[..., Any], Worker], None]
) -> None:
    worker = system.worker(knows=["job", "coded"])
    system.pass_seconds()
    enqueued(system, mail, worker)
    expected = stored_options(system)
    assert (expected["lane"], expected["delay"], expected["expires"]) == ("mail|acme", 30, 90)
    assert set(expected["options"]) >= {"retry", "timeout", "soft_timeout", "isolation", "rate", "weight"}
    system.sql("DELETE FROM orchestrator.tasks")
    origin(system, mail, worker)
    assert stored_options(system) == expected


def test_options_of_a_step_override_those_of_its_task(system: System, mail: Task[..., Any]) -> None:
    flow = Workflow("flow")
    flow.task("send", mail, queue="other", priority=0, retries=0, timeout=50, concurrency_key="globex")
    system.app.workflows.apply(flow)
    system.app.workflows["flow"].start()
    system.pass_seconds(2)
    row = stored_options(system)
    assert (row["queue"], row["priority"], row["lane"]) == ("other", 0, "mail|globex")
    assert (row["options"]["retry"], row["options"]["timeout"], row["options"]["soft_timeout"]) == ({}, 50, 20)


def test_a_step_waits_for_its_delay_and_expires(system: System) -> None:
    task = system.app.task(name="late", delay=1_000, expires=2_000, concurrency=1)(lambda: None)
    system.app.queue("default").pause()
    flow = Workflow("flow")
    flow.task("late", task)
    system.app.workflows.apply(flow)
    run = system.app.workflows["flow"].start()
    system.pass_seconds(2)
    assert system.sql("SELECT wake_at FROM orchestrator.tasks") != [{"wake_at": None}]
    system.lead(offset=1_500.0)
    system.pass_seconds(2)
    assert system.sql("SELECT wake_at FROM orchestrator.tasks") == [{"wake_at": None}]
    system.lead(offset=2_500.0)
    system.pass_seconds(2)
    assert run.progress().status == "failed"
    assert system.sql("SELECT reason FROM orchestrator.ended_tasks") == [{"reason": "expired"}]


@pytest.fixture
def by_key(system: System) -> Callable[[], Counter[str]]:
    """Register a task that runs once at a time for each customer; return a function that counts tasks in flight by
    lane."""

    def count_in_flight() -> Counter[str]:
        system.pass_seconds(3)
        rows = system.sql("SELECT lane FROM orchestrator.tasks WHERE status IN ('dispatched', 'running')")
        return Counter(row["lane"] for row in rows)

    system.app.task(name="send", concurrency=1, concurrency_key=lambda customer, **_: customer)(
        lambda customer: customer
    )
    return count_in_flight


def test_a_fan_out_respects_the_limit_of_each_concurrency_key(
    system: System, by_key: Callable[[], Counter[str]]
) -> None:
    worker = system.worker(knows=["send"])
    flow = Workflow("flow", params={"customers": list})
    flow.task("send", "send", foreach=flow.params.customers, input={"customer": flow.item}, concurrency_key=flow.item)
    system.app.workflows.apply(flow)
    run = system.app.workflows["flow"].start(customers=["acme", "acme", "acme", "globex", 7])
    assert by_key() == {"send|acme": 1, "send|globex": 1, "send|7": 1}
    outside = system.app.tasks["send"].enqueue("globex")
    assert by_key()["send|globex"] == 1, "who is enqueued stands in the same lane"
    rounds = 0
    while run.progress().status == "running" or outside.status() != "success":
        rounds += 1
        assert rounds < 20
        worker.succeed(*worker.take())
        assert all(count == 1 for count in by_key().values())
    assert run.progress().status == "success"


def test_an_invalid_concurrency_key_fails_the_step(system: System, by_key: Callable[[], Counter[str]]) -> None:
    flow = Workflow("flow", params={"customer": Param(type="any", default=None)})
    flow.task("send", "send", input={"customer": "x"}, concurrency_key=flow.params.customer)
    system.app.workflows.apply(flow)
    wrong, none = (system.app.workflows["flow"].start(customer=customer) for customer in (["a"], None))
    by_key()
    with system.engine.connect() as connection:
        (view,) = list_steps(connection, UUID(wrong.id))
    assert (wrong.progress().status, view.state) == ("failed", "failed")
    assert "concurrency_key: ${params.customer}: expected printable text of 1 to 200" in str(view.reason)
    assert [row["lane"] for row in system.sql("SELECT lane FROM orchestrator.tasks")] == ["send|"], "None is no key"
    assert none.progress().status == "running"


def test_a_changed_task_option_creates_a_new_workflow_version(system: System) -> None:
    flow = Workflow("flow")
    flow.task("work", "job")
    assert [system.app.workflows.apply(flow) for _ in range(2)] == [1, 1]
    system.job._call_options.__dict__["concurrency"] = 3
    assert [system.app.workflows.apply(flow) for _ in range(2)] == [2, 2]
