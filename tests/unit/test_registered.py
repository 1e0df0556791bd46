"""What a workflow takes over from the tasks that its steps and hooks name, and what it refuses."""

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


def take(app: Orchestrator, *steps: Step, **parts: Any) -> Definition:
    return completed(Definition(name="flow", steps=steps, **parts), "flow", partial(copy_task_options, tasks=app.tasks))


def registered(app: Orchestrator, step: Step) -> Registered | None:
    return take(app, step).steps[0].registered


def test_a_task_that_says_nothing_leaves_the_definition_as_it_is(app: Orchestrator) -> None:
    app.task(name="plain")(lambda: None)
    steps = Step(name="a", task="plain"), Step(name="b", task="file.py:function"), Step(name="c", workflow="plain")
    assert take(app, *steps) == Definition(name="flow", steps=steps)


def test_steps_inherit_what_others_hide_and_hide_it_under_other_names(app: Orchestrator) -> None:
    app.task(name="login", redact=("token",))(lambda token: token)
    app.task(name="use")(lambda secret="", plain="", item="": (secret, plain, item))
    steps = take(
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


def test_what_is_taken_over(app: Orchestrator) -> None:
    app.task(name="routed", concurrency=2, concurrency_key=7, retries=2, priority=3)(lambda: None)
    found = registered(app, Step(name="a", task="routed"))
    assert found == Registered(options={"retry": {"max": 2}, "concurrency": 2}, queue="far", priority=3, key="7")
    again = take(app, Step(name="a", task="routed"))
    app.tasks.clear()
    assert copy_task_options(again, {}) == (again, []), "without tasks, all is left alone"
    app.task(name="another")(lambda: None)
    assert copy_task_options(again, app.tasks, ["routed"]) == (again, []), "and so is what another application has"


def test_what_a_task_has_no_parameter_for_is_not_sent_to_it(app: Orchestrator) -> None:
    app.task(name="some")(lambda wanted=None: wanted)
    app.task(name="all")(lambda **given: given)
    some = registered(app, Step(name="a", task="some", depends_on=("wanted", "other"), foreach="wanted.files"))
    assert some == Registered(ignored=("other", "item"))
    assert registered(app, Step(name="a", task="all", depends_on=("wanted", "other"), foreach="[1]")) is None
    assert registered(app, Step(name="a", task="some", depends_on=("wanted",))) is None


def test_a_key_of_arguments_that_stand_in_the_definition(app: Orchestrator) -> None:
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
def test_a_key_of_arguments_that_only_a_run_knows(app: Orchestrator, step: dict[str, Any], named: str) -> None:
    @app.task(name="send", concurrency=1, concurrency_key=lambda to, **_: to)
    def send(to: str = "", text: str = "", item: str = "") -> None: ...

    with pytest.raises(InvalidWorkflow, match=f"flow: tasks.a: Task 'send': option concurrency_key .*: {named}. Give"):
        take(app, Step(name="a", task="send", **step))
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
def test_what_no_step_can_keep_is_refused(app: Orchestrator, options: dict[str, Any], message: str) -> None:
    app.task(name="t", **options)(lambda: None)
    with pytest.raises(InvalidWorkflow, match=message):
        take(app, Step(name="a", task="t", timeout=20.0))


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
def test_tasks_and_inputs_that_do_not_fit_the_application(app: Orchestrator, file: str, message: str) -> None:
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
def test_tasks_and_inputs_that_fit(app: Orchestrator, file: str) -> None:
    @app.task(name="shop.resize")
    def resize(ctx: TaskContext, path: str, width: int = 100) -> None: ...

    app.task(name="shop.find")(lambda: None)
    app.task(name="shop.each")(lambda item: item)
    app.task(name="shop.any")(lambda **given: given)
    loads(f"name: flow\ntasks: {file}", "f.yaml", partial(copy_task_options, tasks=app.tasks))


def test_an_unknown_task_of_a_hook(app: Orchestrator) -> None:
    app.task(name="mail.send")(lambda: None)
    with pytest.raises(InvalidWorkflow, match="flow: on_failure.0..task: .* 'mail.sent'. Did you mean 'mail.send'"):
        take(app, Step(name="a", task="mail.send"), on_failure=(Hook(task="mail.sent"),))


def test_everything_that_cannot_be_kept_is_told_at_once(app: Orchestrator) -> None:
    app.task(name="t", unique_key="k")(lambda: None)
    app.task(name="h", concurrency_key=lambda **_: "x")(lambda **_: None)
    with pytest.raises(InvalidWorkflow) as caught:
        take(app, Step(name="a", task="t"), Step(name="b", task="t"), on_failure=(Hook(task="h"),))
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["tasks.a", "tasks.b", "on_failure"]


def test_of_thousands_of_unknown_tasks_the_first_are_looked_for(
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
        take(app, *steps)
    assert len(looked) <= MAX_PROBLEMS


def test_a_hook_is_patient_unless_its_task_says_otherwise(app: Orchestrator) -> None:
    app.task(name="calm")(lambda: None)
    app.task(name="brisk", retries=0, timeout=5)(lambda: None)
    app.task(name="soft", soft_timeout=90)(lambda: None)
    hooks = tuple(Hook(task=name) for name in ("calm", "brisk", "soft", "orchestrator.webhook"))
    found = take(app, Step(name="a", task="calm"), on_success=(*hooks, Hook(webhook="http://x"))).on_success
    options = [None if hook.registered is None else hook.registered.options for hook in found]
    assert options == [
        None,
        {"retry": {}, "timeout": 5.0},
        {"retry": {"max": 5}, "soft_timeout": 90.0},
        None,
        None,
    ]


def test_a_file_says_nothing_of_it(app: Orchestrator) -> None:
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
def test_what_no_follower_can_keep_is_refused(app: Orchestrator, options: dict[str, Any], message: str) -> None:
    follower = app.task(name="follower", **options)(lambda given: given)
    leader = app.task(name="leader", on_success=follower)(lambda: None)
    with pytest.raises(InvalidTask, match=f"Task 'follower' cannot follow another: {message}"):
        leader._new((), {})
