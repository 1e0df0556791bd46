"""Options that a workflow copies from the tasks of its steps and hooks, and options that it rejects."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from orchestrator import InvalidTask, InvalidWorkflow, Orchestrator, TaskContext
from orchestrator.domain.dag.definition import Definition, Hook, Param, Registered, Step
from orchestrator.domain.problems import MAX_PROBLEMS
from orchestrator.sdk.dag import registered as registered_module
from orchestrator.sdk.dag.definitions import completed, loads
from orchestrator.sdk.dag.document import to_yaml
from orchestrator.sdk.dag.registered import copy_task_options


@pytest.fixture
def app() -> Orchestrator:
    return Orchestrator(routes={"routed": "far"})


def complete_definition(app: Orchestrator, *steps: Step, **parts: Any) -> Definition:
    return completed(Definition(name="flow", steps=steps, **parts), "flow", partial(copy_task_options, tasks=app.tasks))


def registered(app: Orchestrator, step: Step) -> Registered | None:
    return complete_definition(app, step).steps[0].registered


def test_a_task_without_options_leaves_the_definition_unchanged(app: Orchestrator) -> None:
    app.task(name="plain")(lambda: None)
    steps = Step(name="a", task="plain"), Step(name="b", task="file.py:function"), Step(name="c", workflow="plain")
    assert complete_definition(app, *steps) == Definition(name="flow", steps=steps)


def test_steps_redact_inputs_that_earlier_steps_redact(app: Orchestrator) -> None:
    app.task(name="login", redact=("token",))(lambda token: token)
    app.task(name="use")(lambda secret="", plain="", item="": (secret, plain, item))
    steps = complete_definition(
        app,
        Step(name="enter", task="login", input={"token": "${params.token}"}),
        Step(name="use", task="use", input={"secret": "Bearer ${enter.token}", "plain": "${enter.user}"}),
        Step(name="each", task="use", foreach="enter.tokens", input={"plain": "${item}"}),
        Step(name="all", task="use", foreach="enter.token", input={"plain": "${item}"}),
        params={"token": Param()},
    ).steps
    assert [step.registered and step.registered.options.get("inherited") for step in steps] == [
        None,
        ["token", "secret"],
        ["token"],
        ["token", "item", "plain"],
    ]


def test_task_options_are_copied_into_the_step(app: Orchestrator) -> None:
    app.task(name="routed", concurrency=2, concurrency_key=7, retries=2, priority=3)(lambda: None)
    found = registered(app, Step(name="a", task="routed"))
    assert found == Registered(options={"retry": {"max": 2}, "concurrency": 2}, queue="far", priority=3, key="7")
    again = complete_definition(app, Step(name="a", task="routed"))
    app.tasks.clear()
    assert copy_task_options(again, {}) == (again, []), "without tasks, all is left alone"
    app.task(name="another")(lambda: None)
    assert copy_task_options(again, app.tasks, ["routed"]) == (again, []), "and so is what another application has"


def test_inputs_without_a_parameter_are_not_passed_to_the_task(app: Orchestrator) -> None:
    app.task(name="some")(lambda wanted=None: wanted)
    app.task(name="all")(lambda **given: given)
    some = registered(app, Step(name="a", task="some", depends_on=("wanted", "other"), foreach="wanted.files"))
    assert some == Registered(ignored=("other", "item"))
    assert registered(app, Step(name="a", task="all", depends_on=("wanted", "other"), foreach="[1]")) is None
    assert registered(app, Step(name="a", task="some", depends_on=("wanted",))) is None


def test_a_key_is_computed_from_constant_arguments(app: Orchestrator) -> None:
    @app.task(name="send", concurrency=1, concurrency_key=lambda to, **_: f"c-{to}", weight=lambda to, **_: len(to))
    def send(to: str = "nobody", text: str = "") -> None: ...

    def found(**step: Any) -> tuple[str | None, float]:
        taken = registered(app, Step(name="a", task="send", **step))
        assert taken is not None
        return taken.key, taken.options["weight"]

    assert found(input={"to": "acme"}) == ("c-acme", 4)
    assert found() == ("c-nobody", 6), "a default is known as well"
    assert found(input={"to": "$${x}"}) == ("c-${x}", 4)
    assert found(input={"to": "acme"}, depends_on=("earlier",)) == ("c-acme", 4)
    assert found(input={"to": "acme"}, foreach="[1, 2]") == ("c-acme", 4)


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ({"input": {"to": "${params.customer}"}}, "to"),
        ({"input": {"to": "a", "text": "${run.id}"}}, "text"),
        ({"depends_on": ("text",), "input": {"to": "a"}}, "text"),
        ({"foreach": "params.all", "input": {"to": "a"}}, "item"),
    ],
)
def test_a_key_that_depends_on_values_of_a_run_is_rejected(app: Orchestrator, step: dict[str, Any], named: str) -> None:
    @app.task(name="send", concurrency=1, concurrency_key=lambda to, **_: to)
    def send(to: str = "", text: str = "", item: str = "") -> None: ...

    with pytest.raises(InvalidWorkflow, match=f"flow: tasks.a: Task 'send': option concurrency_key .*: {named}. Give"):
        complete_definition(app, Step(name="a", task="send", **step))
    taken = registered(app, Step(name="a", task="send", concurrency_key="${params.customer}", **step))
    assert taken == Registered(options={"retry": {}, "concurrency": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique_key": "k"}, "has the option unique_key, and a run needs all its tasks"),
        ({"idempotency_key": "k"}, "has the option idempotency_key, and a run needs all its tasks"),
        ({"eta": datetime(2030, 1, 1, tzinfo=UTC)}, "option eta is a fixed moment.* Give delay in seconds"),
        ({"expires": datetime(2030, 1, 1, tzinfo=UTC)}, "option expires is a fixed moment.* Give expires in seconds"),
        ({"on_success": True}, "option on_success=True is for calls inside a task only"),
        ({"concurrency_key": lambda: 1 / 0}, "cannot be computed from the arguments {}: ZeroDivisionError"),
        ({"concurrency_key": lambda: ""}, "Option concurrency_key: expected printable text"),
        ({"weight": lambda: 0}, "Option weight: expected a number from"),
        ({"soft_timeout": 30}, "Option soft_timeout: expected less than the timeout"),
    ],
)
def test_options_that_a_step_cannot_have_are_rejected(app: Orchestrator, options: dict[str, Any], message: str) -> None:
    app.task(name="t", **options)(lambda: None)
    with pytest.raises(InvalidWorkflow, match=message):
        complete_definition(app, Step(name="a", task="t", timeout=20.0))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("a: {task: shop.resise}", "f.yaml:3: tasks.a.task: the application has no task 'shop.resise'. Did you mean"),
        ("a: {task: resize}", "the application has no task 'resize'. Did you mean 'shop.resize'?"),
        (
            "a: {task: xyzzy}",
            "the application has no task 'xyzzy'. If another application has it, give it as elsewhere.",
        ),
        (
            "a: {task: shop.resize, input: {path: x, wdith: 5}}",
            "f.yaml:3: tasks.a.input.wdith: task 'shop.resize' has no such parameter. Did you mean 'width'?",
        ),
        (
            "a: {task: shop.resize, input: {path: x, width: wide}}",
            "f.yaml:3: tasks.a.input.width: Task 'shop.resize', argument 'width': expected int",
        ),
        (
            "a: {task: shop.resize}",
            "f.yaml:3: tasks.a: Task 'shop.resize': missing a required argument: 'path'. Expected shop.resize(",
        ),
    ],
)
def test_unknown_tasks_and_mismatched_inputs_are_rejected(app: Orchestrator, file: str, message: str) -> None:
    @app.task(name="shop.resize")
    def resize(path: str, width: int = 100) -> None: ...

    with pytest.raises(InvalidWorkflow, match=f"^{re.escape(message)}|: {re.escape(message)}"):
        loads(f"name: flow\ntasks:\n  {file}\n", "f.yaml", partial(copy_task_options, tasks=app.tasks))


@pytest.mark.parametrize(
    "file",
    [
        "{a: {task: shop.resize, input: {path: x, width: 5}}}",
        "{a: {task: shop.resize, input: {path: '${run.id}', width: '${len(run.id)}'}}}",
        "{path: {task: shop.find}, a: {task: shop.resize, depends_on: path}}",
        "{path: {task: shop.find}, a: {task: shop.resize, depends_on: path, foreach: path, input: {path: '${item}'}}}",
        "{a: {task: shop.each, foreach: [1, 2]}}",
        "{a: {task: shop.any, input: {whatever: 1}}}",
        "{a: {task: 'file.py:function'}, b: {task: orchestrator.webhook}, c: {workflow: any}}",
    ],
)
def test_known_tasks_and_matching_inputs_are_accepted(app: Orchestrator, file: str) -> None:
    @app.task(name="shop.resize")
    def resize(ctx: TaskContext, path: str, width: int = 100) -> None: ...

    app.task(name="shop.find")(lambda: None)
    app.task(name="shop.each")(lambda item: item)
    app.task(name="shop.any")(lambda **given: given)
    loads(f"name: flow\ntasks: {file}", "f.yaml", partial(copy_task_options, tasks=app.tasks))


def test_an_unknown_task_of_a_hook_is_rejected(app: Orchestrator) -> None:
    app.task(name="mail.send")(lambda: None)
    with pytest.raises(InvalidWorkflow, match="flow: on_failure.0..task: .* 'mail.sent'. Did you mean 'mail.send'"):
        complete_definition(app, Step(name="a", task="mail.send"), on_failure=(Hook(task="mail.sent"),))


def test_all_rejected_options_are_reported_at_once(app: Orchestrator) -> None:
    app.task(name="t", unique_key="k")(lambda: None)
    app.task(name="h", concurrency_key=lambda **_: "x")(lambda **_: None)
    with pytest.raises(InvalidWorkflow) as caught:
        complete_definition(app, Step(name="a", task="t"), Step(name="b", task="t"), on_failure=(Hook(task="h"),))
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["tasks.a", "tasks.b", "on_failure"]


def test_suggestions_are_sought_only_for_the_first_unknown_tasks(
    app: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.task(name="plain")(lambda: None)
    looked: list[str] = []

    def looking(name: str, _: object) -> str:
        looked.append(name)
        return ""

    monkeypatch.setattr(registered_module, "did_you_mean", looking)
    steps = tuple(Step(name=f"s{number}", task=f"t{number}") for number in range(5_000))
    with pytest.raises(InvalidWorkflow, match=r"the application has no task 't0'(?s:.*)… and \d+ more\."):
        complete_definition(app, *steps)
    assert len(looked) <= MAX_PROBLEMS


def test_hooks_keep_their_own_retries_unless_the_task_sets_them(app: Orchestrator) -> None:
    app.task(name="calm")(lambda: None)
    app.task(name="brisk", retries=0, timeout=5)(lambda: None)
    app.task(name="soft", soft_timeout=90)(lambda: None)
    hooks = tuple(Hook(task=name) for name in ("calm", "brisk", "soft", "orchestrator.webhook"))
    found = complete_definition(
        app, Step(name="a", task="calm"), on_success=(*hooks, Hook(webhook="http://x"))
    ).on_success
    options = [None if hook.registered is None else hook.registered.options for hook in found]
    assert options == [
        None,
        {"retry": {}, "timeout": 5.0},
        {"retry": {"max": 5}, "soft_timeout": 90.0},
        None,
        None,
    ]


def test_exported_yaml_omits_copied_options(app: Orchestrator) -> None:
    app.task(name="t", concurrency=2)(lambda: None)
    plain = Definition(name="flow", steps=(Step(name="a", task="t", concurrency_key="${run.id}"),))
    taken, _ = copy_task_options(plain, app.tasks)
    assert loads(to_yaml(taken)) == plain
    assert "registered:" in to_yaml(taken, registered=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique_key": "k"}, "its keys are unique or depend on its arguments"),
        ({"idempotency_key": "k"}, "its keys are unique or depend on its arguments"),
        ({"concurrency_key": lambda **_: "k"}, "its keys are unique or depend on its arguments"),
        ({"eta": datetime(2030, 1, 1, tzinfo=UTC)}, "its eta or expires is a fixed moment"),
        ({"expires": datetime(2030, 1, 1, tzinfo=UTC)}, "its eta or expires is a fixed moment"),
    ],
)
def test_options_that_a_callback_cannot_have_are_rejected(
    app: Orchestrator, options: dict[str, Any], message: str
) -> None:
    follower = app.task(name="follower", **options)(lambda given: given)
    leader = app.task(name="leader", on_success=follower)(lambda: None)
    with pytest.raises(InvalidTask, match=f"Task 'follower' cannot follow another: {message}"):
        leader._new((), {})
