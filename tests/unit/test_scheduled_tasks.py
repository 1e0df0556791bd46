"""`@app.schedule`: schedules declared in code, as workflows of one step."""

from __future__ import annotations

import re
import zoneinfo
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest

from orchestrator import InvalidTask, InvalidWorkflow, Orchestrator, Retry, UnknownOption, WorkflowContext
from orchestrator.domain.dag.definition import Definition, Registered
from orchestrator.domain.tasks.task import TaskOptions
from orchestrator.sdk.schedule_declarations import TaskDeclaration


def declare(app: Orchestrator, name: str | None = None, params: dict[str, Any] | None = None, **times: Any) -> Any:
    @app.schedule(name=name, params=params, **times)
    @app.task(name="clean", queue="night", priority=3)
    def clean(before: str = "") -> None: ...

    return clean


def definition_of(app: Orchestrator, name: str) -> Definition:
    """Return the workflow of a scheduled task."""
    declared = app.schedules._declared[name]
    assert isinstance(declared, TaskDeclaration)
    return declared.definition()


def test_a_scheduled_task_is_a_workflow_of_one_step() -> None:
    app = Orchestrator()
    task = declare(app, cron="0 3 * * *", timezone="Europe/Berlin", params={"before": "${run.fire_time}"})
    assert task is app.tasks["clean"]
    definition = definition_of(app, "clean")
    assert (definition.name, definition.queue) == ("clean", "night")
    params = {"before": "${run.fire_time}"}
    assert definition.schedule == {"cron": "0 3 * * *", "timezone": "Europe/Berlin", "params": params}
    (step,) = definition.steps
    assert (step.task, step.input) == ("clean", {"before": "${default(params.before, run.fire_time)}"})
    assert step.registered == Registered(queue="night", priority=3)


def test_a_scheduled_task_keeps_its_options() -> None:
    app = Orchestrator()

    @app.schedule(every=timedelta(hours=1), jitter="5m", at=None)  # type: ignore[arg-type]
    @app.task(name="clean", retries=Retry(max=3, backoff="constant"), timeout=9, isolation="process", concurrency=2)
    def clean() -> None: ...

    definition = definition_of(app, "clean")
    assert definition.schedule == {"every": 3600.0, "jitter": 300.0}
    registered = definition.steps[0].registered
    assert registered is not None
    options = msgspec.convert(registered.options, TaskOptions)
    assert options == app.tasks["clean"]._call_options.to_task_options(1.0)
    assert [options.retry.backoff, options.timeout, options.isolation, options.concurrency] == [
        "constant",
        9.0,
        "process",
        2,
    ]


def test_the_option_at_accepts_a_datetime() -> None:
    app = Orchestrator()
    declare(app, at=datetime(2030, 1, 1, 9))
    assert definition_of(app, "clean").schedule == {"at": "2030-01-01T09:00:00"}


def test_two_schedules_of_a_task_need_different_names() -> None:
    app = Orchestrator()
    declare(app, every="1h")
    declare(app, every="1h")  # as if the module were imported twice
    declare(app, "weekly", every="7d")
    assert list(app.schedules._declared) == ["clean", "weekly"]
    with pytest.raises(InvalidTask, match="Schedule name 'clean' is used twice"):
        declare(app, every="2h")


def test_invalid_schedules_are_rejected_at_once() -> None:
    app = Orchestrator()
    with pytest.raises(InvalidTask, match="unexpected keyword argument 'after'"):
        declare(app, every="1h", params={"after": 1})
    with pytest.raises(InvalidTask, match="goes above @app.task"):
        app.schedule(every="1h")(lambda: None)  # type: ignore[type-var]
    with pytest.raises(InvalidTask, match="has the option unique_key, and a run needs all its tasks"):
        app.schedule(every="1h")(app.task(name="only", unique_key="k")(lambda: None))
    with pytest.raises(InvalidTask, match="option eta is a fixed moment"):
        app.schedule(every="1h")(app.task(name="late", eta=datetime(2030, 1, 1, tzinfo=UTC))(lambda: None))
    with pytest.raises(UnknownOption):
        wrong: Any = {"cron": "* * * * *"}
        app.task(name="x", **wrong)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"cron": "0 25 * * *"}, "schedule of task 'clean': schedule.cron: hour '25'"),
        ({}, "expected exactly one of cron, every and at, found none"),
        ({"every": "1h", "overlp": "skip"}, "schedule.overlp: unknown key. Did you mean 'overlap'?"),
        ({"every": "1h", "timezone": "Mars"}, "unknown time zone 'Mars'"),
        ({"cron": "0 3 * * *", "every": "1h"}, "expected exactly one of cron, every and at, found cron and every"),
        ({"cron": "0 3 * * *", "timezone": "Europe/Berln"}, "'Europe/Berln'. Did you mean 'Europe/Berlin'?"),
        ({"every": "1h", "params": {"before": "${params.x}"}}, "tasks.task.input.before: unknown parameter 'x'"),
    ],
)
def test_invalid_times_of_a_task_are_rejected_by_the_decorator(times: dict[str, Any], message: str) -> None:
    app = Orchestrator()
    with pytest.raises(InvalidWorkflow, match=re.escape(message)):
        declare(app, **times)
    assert not app.schedules._declared


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"cron": "0 25 * * *"}, "schedule of workflow 'order': schedule.cron: hour '25'"),
        ({"cron": "0 3 * * *", "at": "2030-01-01"}, "found cron and at"),
        ({"every": "1h", "timezone": "Mars"}, "unknown time zone 'Mars'"),
    ],
)
def test_invalid_times_of_a_code_workflow_are_rejected_by_the_decorator(times: dict[str, Any], message: str) -> None:
    app = Orchestrator()
    with pytest.raises(InvalidWorkflow, match=re.escape(message)):

        @app.schedule(**times)
        @app.workflow(name="order")
        async def order(ctx: WorkflowContext) -> None: ...

    assert not app.schedules._declared


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"number": 5, "numbr": 5}, "got an unexpected keyword argument 'numbr'"),
        ({"number": "five"}, "Workflow 'order', argument 'number': expected int"),
        ({"number": 5, "due": "${run.id}"}, "Workflow 'order', argument 'due': expected datetime"),
        ({"number": 5, "due": "${run.fire_tme}"}, "schedule of workflow 'order': Expression 'run.fire_tme'"),
        ({"number": 5, "due": "${params.day}"}, "there is no 'params' here. Known names: run."),
    ],
)
def test_invalid_parameters_of_a_code_workflow_are_rejected(params: dict[str, Any], message: str) -> None:
    app = Orchestrator()

    @app.workflow(name="order")
    async def order(ctx: WorkflowContext, number: int, due: datetime | None = None) -> None: ...

    app.schedule(every="1h", params={"number": 5, "due": "${run.fire_time}"})(order)
    with pytest.raises((InvalidTask, InvalidWorkflow), match=re.escape(message)):
        app.schedule(every="1h", name="other", params=params)(order)


def test_missing_time_zone_data_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoneinfo, "available_timezones", set)
    with pytest.raises(InvalidWorkflow, match="There is no time zone data here: pip install tzdata"):
        declare(Orchestrator(), every="1h", timezone="Atlantis/Capital")


def test_keys_are_computed_from_constant_parameters() -> None:
    app = Orchestrator()

    @app.task(name="clean", concurrency_key=lambda area, **_: area, weight=lambda area, **_: len(area))
    def clean(area: str, due: str = "") -> None: ...

    app.schedule(every="1h", name="attic", params={"area": "attic"})(clean)
    app.schedule(every="1h", name="varied", params={"area": "attic"})(clean.options(concurrency_key="all"))
    attic, varied = (definition_of(app, name).steps[0].registered for name in ("attic", "varied"))
    assert attic is not None
    assert (attic.key, attic.options["weight"]) == ("attic", 5)
    assert varied is not None
    assert varied.key == "all"
    with pytest.raises(InvalidWorkflow, match="schedule of task 'clean': tasks.task: .*: due. Give .* constant params"):
        app.schedule(every="1h", name="due", params={"area": "attic", "due": "${run.fire_time}"})(clean)


def test_a_schedule_may_have_a_start_and_an_end() -> None:
    app = Orchestrator()

    @app.schedule(every="1h", start=date(2090, 1, 1), end=datetime(2090, 1, 1, 3))
    @app.task(name="bounded")
    def bounded() -> None: ...

    schedule = definition_of(app, "bounded").schedule
    assert schedule is not None
    assert (schedule["start"], schedule["end"]) == ("2090-01-01", "2090-01-01T03:00:00")
