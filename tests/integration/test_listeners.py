"""Many workflows that wait for one event, or for the end of one run, with expensive filters.

These are evaluated over several ticks, and delay neither the event nor other runs.
"""

from __future__ import annotations

import logging
import select
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from orchestrator.domain.dag.definition import Concurrency, Definition, EventTrigger, Param, Step
from orchestrator.domain.dag.steps import StepProgram
from orchestrator.scheduler.leadership import TermOver
from orchestrator.scheduler.runs.triggers import Triggers
from tests.integration.stage import System

EXPENSIVE = 8
"""Number of listeners with an expensive filter."""
ONE = (Step(name="a", task="job"),)
FAILS = "${event.params.absent > 1}"


def expensive(path: str) -> str:
    """Return a filter that accepts everything; two such filters exceed a tick's budget (see `scarce`)."""
    return "${" + " + ".join([f"len({path} + {path})"] * 10) + " > 0}"


@pytest.fixture(autouse=True)
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ticks a small budget, in the cost of expressions, which does not depend on the machine."""
    monkeypatch.setattr("orchestrator.scheduler.runs.triggers._MAX_WORK", 600)
    monkeypatch.setattr("orchestrator.domain.dag.steps.WORK_PER_TICK", 600)
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 600)


def listen(system: System, name: str, **trigger: Any) -> None:
    system.app.workflows.apply(Definition(name=name, on=(EventTrigger(**trigger),), steps=ONE))


def started(system: System) -> list[str]:
    found = system.sql("SELECT workflow FROM orchestrator.runs ORDER BY workflow")
    return [row["workflow"] for row in found if row["workflow"] != "up"]


def test_expensive_event_filters_are_evaluated_over_several_ticks(system: System) -> None:
    """Formerly one tick evaluated all: sixty took longer than the lease, and the event was lost for all."""
    for number in range(EXPENSIVE):
        listen(system, f"expensive{number:02}", event="large", filter=expensive("event.list"))
    listen(system, "refusing", event="large", filter="${event.absent > 1}")
    listen(system, "plain", event="large")
    system.app.post_event("large", {"list": [1] * 300})
    listen(system, "other", event="small")
    system.app.post_event("small")
    system.tick()
    numbers = [len(started(system))]
    assert "plain" in started(system), "who has no filter waits for none"
    assert 1 < numbers[0] < EXPENSIVE // 2
    system.lead()  # a new leader, without memory
    for _ in range(EXPENSIVE):
        system.tick()
        numbers.append(len(started(system)))
    assert max(after - before for before, after in pairwise(numbers)) <= 3, "two, and at last one of another event"
    assert started(system) == sorted([*(f"expensive{number:02}" for number in range(EXPENSIVE)), "plain", "other"])
    assert system.count("inbox") == 0


def test_other_requests_are_handled_beside_an_expensive_event(system: System) -> None:
    for number in range(EXPENSIVE):
        listen(system, f"expensive{number:02}", event="large", filter=expensive("event.list"))
    system.app.post_event("large", {"list": [1] * 300})
    task = system.job.enqueue(1)
    task.cancel()
    system.tick()
    assert task.status() == "cancelled"
    assert system.count("inbox") == 1


@pytest.fixture
def upstream(system: System) -> None:
    system.app.workflows.apply(Definition(name="up", params={"list": Param(type="list")}, steps=ONE))


def end_upstream(system: System, size: int) -> Any:
    worker = system.worker()
    run = system.app.workflows["up"].start(list=[1] * size)
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    return run


@pytest.mark.usefixtures("upstream")
def test_a_run_ends_before_its_listeners_filters_are_evaluated(system: System) -> None:
    """Formerly they were evaluated in the transaction that ended the run, and prevented its end."""
    for number in range(EXPENSIVE):
        listen(system, f"expensive{number:02}", workflow="up", filter=expensive("event.params.list"))
    listen(system, "refusing", workflow="up", filter=FAILS)
    listen(system, "plain", workflow="up", params={})
    run = end_upstream(system, 300)
    assert run.progress().status == "success"
    assert "plain" in started(system)
    assert len(started(system)) < EXPENSIVE // 2
    system.lead()
    system.tick(EXPENSIVE)
    assert started(system) == sorted([*(f"expensive{number:02}" for number in range(EXPENSIVE)), "plain"])
    assert system.count("inbox") == 0


@pytest.mark.usefixtures("upstream")
def test_a_listener_that_makes_the_scheduler_fail_is_skipped(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Triggers._start

    def start(self: Triggers, tx: Any, listener: Any, event: Any) -> Any:
        if listener.workflow == "broken":
            raise AssertionError("nobody has thought of it")
        return original(self, tx, listener, event)

    monkeypatch.setattr(Triggers, "_start", start)
    for name in ("after", "broken", "while"):
        listen(system, name, workflow="up")
    worker = system.worker()
    run = system.app.workflows["up"].start(list=[])
    system.pass_seconds()
    worker.succeed(*worker.take())
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            system.tick()
    assert run.progress().status == "success"
    assert started(system) == ["after", "while"]
    assert "workflow.trigger_failed workflow=broken" in caplog.text
    assert system.count("inbox") == 0


def test_a_listener_that_takes_too_long_is_skipped(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tick that ran out of time is charged to the listener under evaluation, not to the event."""
    original = Triggers._start

    def start(self: Triggers, tx: Any, listener: Any, event: Any) -> Any:
        if listener.workflow == "slow":
            system.clock.now += system.settings.lease
            raise TermOver
        return original(self, tx, listener, event)

    monkeypatch.setattr(Triggers, "_start", start)
    for name in ("before", "slow", "zest"):
        listen(system, name, event="heard")
    system.app.post_event("heard")
    for _ in range(12):
        with suppress(TermOver):
            system.tick()
    assert started(system) == ["before", "zest"]
    assert "evaluating it takes too long; other work would have to wait" in caplog.text
    assert system.count("inbox") == 0


def test_children_with_expensive_keys_are_created_over_several_ticks(system: System) -> None:
    """Formerly the cost of a step's key counted, and that of a child workflow's key did not."""
    costs = " + ".join(["len(params.list + params.list)"] * 20)
    limit = Concurrency(limit=1, key=f"${{{costs} + params.place}}")
    params = {"list": Param(type="list")}
    child = Definition(name="child", params=params | {"place": Param(type="integer")}, concurrency=limit, steps=ONE)
    system.app.workflows.apply(child)
    given = {"list": "${params.list}", "place": "${index}"}
    each = Step(name="each", workflow="child", parallel=12, input=given)
    system.app.workflows.apply(Definition(name="parent", params=params, steps=(each,)))
    system.app.workflows["parent"].start(list=[1] * 300)
    numbers = [0]
    while numbers[-1] < 12:
        system.tick()
        numbers.append(len(started(system)) - 1)
        assert len(numbers) < 30
        assert numbers[-1] - numbers[-2] <= 4


def test_a_run_that_takes_too_long_names_its_step(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(_: Any, __: Any) -> Any:
        system.clock.now += system.settings.lease
        raise TermOver

    monkeypatch.setattr(StepProgram, "decide", decide)
    slow = Step(name="slow", task="job", when="${params.list == []}")
    system.app.workflows.apply(Definition(name="up", params={"list": Param(type="list")}, steps=(slow,)))
    system.app.workflows["up"].start(list=[])
    for _ in range(12):
        with suppress(TermOver):
            system.tick()
    (row,) = system.sql("SELECT stuck FROM orchestrator.runs")
    assert row["stuck"]["kind"] == "TooSlow"
    assert row["stuck"]["message"].endswith("It was at the decision of step 'slow'.")


def test_an_idle_transaction_timeout_is_not_reported_as_an_outage(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    system.settings = replace(system.settings, lease=0.3)
    scheduler = system.lead()
    with pytest.raises(OperationalError) as ended, scheduler._leadership.reading() as connection:
        driver: Any = connection.connection.driver_connection
        select.select([driver], [], [], 10.0)  # until Postgres closes the connection
        connection.execute(text("SELECT 1"))
    scheduler._report_outage(ended.value)
    assert "Postgres ended its transaction" in caplog.text
    assert "cannot be used" not in caplog.text


def test_a_standby_reports_no_transaction_time(system: System) -> None:
    leadership = system.scheduler._leadership
    system.sql("UPDATE orchestrator.leases SET term = term + 1")
    with pytest.raises(TermOver), leadership.writing(0.0):
        pass
    assert leadership.took > 0
    leadership.lease_view()
    assert leadership.took == 0


def test_a_tick_that_takes_too_long_is_not_reported_as_an_outage(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = system.scheduler
    with system.engine.connect() as connection, pytest.raises(OperationalError) as ended:
        connection.execute(text("SET LOCAL statement_timeout = 1"))
        connection.execute(text("SELECT pg_sleep(60)"))
    scheduler.term._began_at = system.clock()
    system.clock.now += system.settings.lease
    scheduler._report_outage(ended.value)
    assert "more work in one tick than fits into its lease: a tick took" in caplog.text
    assert "cannot be used" not in caplog.text
    assert not scheduler.postgres.is_ongoing
    scheduler.term._began_at = system.clock()
    scheduler._report_outage(ended.value)
    assert "Postgres cannot be used" in caplog.text, "which a short tick has no part in"
