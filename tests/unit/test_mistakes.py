"""Mistakes in calls of the Python API are rejected where they are made, with an error that says what to write."""

# ruff: noqa: ARG005
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from orchestrator import (
    InvalidTask,
    InvalidWorkflow,
    Orchestrator,
    Rate,
    Retry,
    Settings,
    UnknownTask,
    WorkflowContext,
    as_completed,
    gather,
)
from orchestrator.testing import WorkflowTest
from orchestrator.time_limits import TimeLimit

SOMETHING = UUID(int=7)


@pytest.fixture
def app() -> Orchestrator:
    return Orchestrator(Settings())


# -- the application


def test_an_application_accepts_only_settings() -> None:
    for given in ("shop", {"namespace": "shop"}, Orchestrator()):
        with pytest.raises(TypeError, match=r"expected Settings\(…\), or .*Orchestrator\(namespace='shop'\), found "):
            Orchestrator(given)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"routes=…\): expected queues by names of tasks, .* found \['mail'\]"):
        Orchestrator(routes=["mail"])  # type: ignore[arg-type]


# -- functions


def numbers() -> Iterator[int]:
    yield 1


async def later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [numbers, later])
def test_a_generator_is_rejected_as_a_task(app: Orchestrator, function: Callable[[], Any]) -> None:
    for register in (app.task, app.task(retries=3)):
        with pytest.raises(InvalidTask, match=r"found a generator, which has `yield`: .* Return a list\."):
            register(function)
    assert dict(app.tasks) == {}


def test_a_generator_is_rejected_as_a_workflow_and_as_a_handler(app: Orchestrator) -> None:
    with pytest.raises(InvalidWorkflow, match="expected an `async def` function without `yield`"):
        generator: Any = later
        app.workflow(generator)

    @app.workflow
    async def answers(ctx: WorkflowContext, what: str) -> str:
        with pytest.raises(InvalidTask, match=f"{what} 'numbers': .* found a generator"):
            getattr(ctx, what.lower())(numbers)
        return "refused"

    async def main() -> list[str]:
        async with WorkflowTest() as test:
            return [await test.run(answers, what) for what in ("Query", "Update")]

    assert asyncio.run(main()) == ["refused"] * 2


# -- arguments


def test_errors_suggest_argument_names_and_the_place_of_options(app: Orchestrator) -> None:
    @app.task
    def resize(path: str, width: int = 100) -> None: ...

    @app.workflow
    async def order(ctx: WorkflowContext, number: int) -> None: ...

    with pytest.raises(InvalidTask, match=r"argument 'widht'\. Did you mean 'width'\? Expected "):
        resize.enqueue("a", widht=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidTask, match=r"argument 'delay'\. That is an option: give it with \.options\(delay=…\)\."):
        resize.enqueue("a", delay=60)  # type: ignore[call-arg]
    with pytest.raises(InvalidTask, match=r"argument 'timeout'\. That is an option: give it with \.options\(timeout=…"):
        order.start(1, timeout=60)  # type: ignore[call-arg]
    with pytest.raises(InvalidTask, match=r"argument 'xyzzy'\. Expected "):
        resize.enqueue("a", xyzzy=3)  # type: ignore[call-arg]


# -- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": "30s"}, "Option timeout: expected a number of seconds or a timedelta, .*found '30s'. Write 30."),
        ({"delay": "1h30m"}, "Option delay: .*Write 5400."),
        ({"soft_timeout": "5"}, "Option soft_timeout: .*Write 5."),
        ({"expires": "soon"}, "Option expires: .*found 'soon'.$"),
        ({"unique_for": "pendig"}, "Option unique_for: expected 'pending', .*Did you mean 'pending'"),
        ({"unique_for": "10m"}, "Option unique_for: .*Write 600."),
        ({"rate": Rate("10")}, "Option rate: expected a rate like"),  # type: ignore[arg-type]
        ({"unique_key": 1.5}, "Option unique_key: .*a whole number or a UUID, found 1.5"),
    ],
)
def test_the_error_of_an_invalid_option_says_what_to_write(
    app: Orchestrator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidTask, match=message):
        app.task(**options)


def test_the_error_of_an_invalid_workflow_option_says_what_to_write(app: Orchestrator) -> None:
    with pytest.raises(InvalidWorkflow, match="Option timeout: expected a number of seconds .* Write 30."):
        app.workflow(timeout="30s")  # type: ignore[call-overload]


@pytest.mark.parametrize("backoff", ["exponental", "computed", "listed", 5])
def test_an_unknown_backoff_is_rejected(backoff: Any) -> None:
    with pytest.raises(InvalidTask, match="Retry: expected 'exponential', 'linear', 'constant', a list"):
        Retry(backoff=backoff)
    with pytest.raises(InvalidTask, match="Did you mean 'exponential'"):
        Retry(backoff="exponental")  # type: ignore[arg-type]


def test_keys_may_be_strings_integers_and_uuids(app: Orchestrator) -> None:
    for given in ("7", 7, SOMETHING):
        task = app.task(name="t", unique_key=given, concurrency_key=lambda given: given)(lambda given: None)
        placed = task._call_options.placed("t", {"given": given}, 60.0)
        assert placed.unique is not None
        assert (placed.unique.key, placed.lane) == (f"unique:t:{given}", f"|{given}")


@pytest.mark.parametrize("option", ["unique_key", "concurrency_key"])
def test_a_key_that_is_an_argument_name_is_rejected(app: Orchestrator, option: str) -> None:
    one: Any = {option: "customer_id"}
    with pytest.raises(
        InvalidTask, match=rf"'mail', option {option}: .* Write {option}=lambda customer_id, \*\*_: cust"
    ):
        app.task(name="mail", **one)(lambda customer_id, subject: None)
    with pytest.raises(InvalidTask, match=rf"found 'customer_id', .* Write {option}=lambda customer_id: customer_id\."):
        app.task(name="mail", **one)(lambda customer_id: None)
    assert dict(app.tasks) == {}
    task: Any = app.task(name="mail", **one)(lambda customer: None)
    task.options(**{option: "customer"})  # may be data of the program


@pytest.mark.parametrize("option", ["unique_key", "concurrency_key", "weight"])
def test_functions_in_options_must_accept_the_arguments_of_the_task(app: Orchestrator, option: str) -> None:
    def declare(compute: Callable[..., Any], function: Callable[..., Any] = lambda customer, subject: None) -> Any:
        one: Any = {option: compute}
        app.tasks.pop("mail", None)
        return app.task(name="mail", **one)(function)

    for compute in (
        lambda customer: 1,
        lambda custmer, **_: 1,
        lambda customer, subject, /: 1,
        lambda customer, b, **_: 1,
    ):
        expected = rf"'mail', option {option}: .*by name \(customer, subject\), found one with the parameters \(cust?"
        with pytest.raises(InvalidTask, match=expected):
            declare(compute)
    with pytest.raises(
        InvalidTask, match=rf"got an unexpected .*'subject'\. Write {option}=lambda customer, \*\*_: cus"
    ):
        declare(lambda customer: 1)
    assert dict(app.tasks) == {}
    for fitting in (
        lambda customer, subject: 1,
        lambda **_: 1,
        lambda subject, **_: 1,
        lambda customer, subject, b=1: 1,
    ):
        declare(fitting)
    declare(lambda customer, area, **_: 1, lambda customer, **more: None)  # a call may contain an area
    with pytest.raises(InvalidTask, match=rf"option {option}: .* Write {option}=lambda customer, "):
        declare(lambda **_: 1).options(**{option: lambda customer: 1})


def test_methods_of_celery_raise_errors_with_the_replacement(app: Orchestrator) -> None:
    @app.task
    def resize(path: str) -> None: ...

    task: Any = resize
    with pytest.raises(AttributeError, match=r"resize\.options\(delay=60, .*\.enqueue\(…\): countdown=60 is delay=60"):
        task.apply_async(("a.png",), countdown=60)
    for name in ("signature", "apply", "retry"):
        with pytest.raises(AttributeError, match=f"has no {name}, which is Celery's"):
            getattr(task, name)
    with pytest.raises(AttributeError, match="'Task' object has no attribute 'enqeue'"):
        task.enqeue("a.png")
    assert not hasattr(task, "apply_async")


# -- waiting


@pytest.mark.parametrize("timeout", ["5", True, timedelta(seconds=5), float("nan")])
def test_wait_timeouts_must_be_numbers_of_seconds(app: Orchestrator, timeout: Any) -> None:
    task, run, workflow = app.handle(SOMETHING), app.run(SOMETHING), app.workflow_run(SOMETHING)
    calls: list[Callable[[], Any]] = [
        lambda: task.result(timeout),
        lambda: asyncio.run(task.aresult(timeout=timeout)),
        lambda: gather([task], timeout),
        lambda: as_completed([task], timeout),
        lambda: run.wait_ended(timeout),
        lambda: run.results(timeout),
        lambda: run.outputs(timeout),
        lambda: workflow.result(timeout),
        lambda: workflow.query("state", timeout=timeout),
        lambda: workflow.update("state", timeout=timeout),
        lambda: app.queue("mail").drain(timeout),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="timeout: expected a number of seconds, or None to wait forever, found "):
            call()


def test_an_infinite_timeout_is_no_limit() -> None:
    assert TimeLimit(float("inf")).give_up_at is None


# -- time zones


@pytest.mark.parametrize(
    ("zone", "message"),
    [
        ("PST", "the IANA database has no such zone.*Did you mean 'America/Los_Angeles'"),
        ("cest", "Did you mean 'Europe/Berlin'"),
        ("UTC+2", "Expected one such as Europe/Berlin, or UTC"),
        ("Berlin", "Did you mean 'Europe/Berlin'"),
    ],
)
def test_an_unknown_time_zone_gets_a_suggestion(app: Orchestrator, zone: str, message: str) -> None:
    with pytest.raises(InvalidWorkflow, match=f"unknown time zone '{zone.replace('+', '.')}'.*{message}"):
        app.schedule(cron="0 3 * * *", timezone=zone)(app.task(name="nightly")(lambda: None))


# -- mocks


def test_a_mock_must_replace_an_existing_task_or_workflow(app: Orchestrator) -> None:
    @app.task(name="ship")
    def ship() -> str:
        return ""

    @app.workflow(name="order")
    async def order(ctx: WorkflowContext) -> str:
        return await ship.schedule()

    async def run(mocks: Any) -> str:
        async with WorkflowTest() as test:
            return await test.run(order, mocks=mocks)

    assert asyncio.run(run({"ship": "shipped", "order": "never asked"})) == "shipped"
    with pytest.raises(UnknownTask, match=r"No task and no workflow is called 'shp'\. Did you mean 'ship'\?"):
        asyncio.run(run({"shp": "shipped"}))
    with pytest.raises(InvalidTask, match="mocks: expected tasks, workflows or their names, found <function"):
        asyncio.run(run({ship.function: "shipped"}))
