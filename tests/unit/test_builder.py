"""Workflows built in Python equal the same workflows written in a file."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

import pytest

from orchestrator import Orchestrator
from orchestrator.domain.dag.definition import Definition, Param, Step
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag.builder import Workflow
from orchestrator.sdk.dag.definitions import loads

app = Orchestrator()


@app.task(name="etl.discover")
def discover_files(day: date) -> dict[str, Any]:
    return {"files": [str(day)], "count": 1}


def plain_function() -> None: ...


def test_the_builder_equals_the_example_file() -> None:
    flow = Workflow(
        "nightly",
        version=3,
        params={"day": Param(type="date", default="today")},
        schedule={
            "cron": "0 3 * * *",
            "timezone": "Europe/Berlin",
            "overlap": "skip",
            "catch_up": "latest",
            "jitter": timedelta(seconds=30),
        },
        defaults={"retries": 2, "timeout": "10m"},
    )
    discover = flow.task("discover", discover_files, input={"day": flow.params.day})
    process = flow.task("process", "etl.process", depends_on=[discover], foreach=discover.files, concurrency=4)
    shards = flow.task("shards", "etl.shard", depends_on=discover, parallel=discover.count)
    report = flow.task("report", "reports.py:build", depends_on=(process, shards), on_failure="run")
    publish = flow.workflow("publish", "publish-site", depends_on=["report"], when=report.ok)
    flow.task("tell", "mail.send", depends_on=[publish], trigger="all_ended")
    assert flow.definition() == loads("""
name: nightly
version: 3
params: {day: {type: date, default: today}}
schedule: {cron: "0 3 * * *", timezone: Europe/Berlin, overlap: skip, catch_up: latest, jitter: 30s}
defaults: {retries: 2, timeout: 10m}
tasks:
  discover: {task: etl.discover, input: {day: "${params.day}"}}
  process:  {task: etl.process, depends_on: [discover], foreach: discover.files, concurrency: 4}
  shards:   {task: etl.shard, depends_on: [discover], parallel: discover.count}
  report:   {task: "reports.py:build", depends_on: [process, shards], on_failure: run}
  publish:  {workflow: publish-site, depends_on: [report], when: "${report.ok}"}
  tell:     {task: mail.send, depends_on: [publish], trigger: all_ended}
""")


def test_every_option_equals_its_key_in_a_file() -> None:
    child = Workflow("child")
    flow = Workflow(
        "everything",
        params={"s": str, "n": int, "f": float, "b": bool, "d": date, "t": datetime, "l": list, "o": dict, "a": Any},
        description="All of it.",
        timeout=timedelta(hours=1),
        concurrency={"limit": 2, "key": "${params.s}"},
        tags=["x"],
        on_failure={"task": "mail.send"},
        on_success=[{"webhook": "https://example.com"}],
        queue="billing",
        defaults={"queue": "slow", "priority": 5, "trigger": "none_failed"},
    )
    first = flow.task("first", "http", input={"since": date(2024, 1, 31), "run": flow.run.id}, timeout=1.5)
    items = flow.task(
        "items",
        plain_function,
        depends_on=[first],
        foreach=["a", 1, flow.params.s],
        input={
            "text": f"{flow.item} is {flow.index} of {flow.count}: {first['odd key'][0].name}",
            "nested": [{"x": (flow.item.name, 1)}],
        },
        retries=3,
    )
    flow.workflow("last", child, depends_on=[items], parallel=3, when=False, on_failure="skip")
    assert flow.definition() == loads(
        f"""
name: everything
params:
  s: {{type: string}}
  n: {{type: integer}}
  f: {{type: number}}
  b: {{type: boolean}}
  d: {{type: date}}
  t: {{type: datetime}}
  l: {{type: list}}
  o: {{type: object}}
  a: {{type: any}}
description: All of it.
timeout: 1h
concurrency: {{limit: 2, key: "${{params.s}}"}}
tags: x
on_failure: {{task: mail.send}}
on_success: {{webhook: "https://example.com"}}
queue: billing
defaults: {{queue: slow, priority: 5, trigger: none_failed}}
tasks:
  first: {{task: http, input: {{since: 2024-01-31, run: "${{run.id}}"}}, timeout: 1.5}}
  items:
    task: {__name__}:plain_function
    depends_on: first
    foreach: [a, 1, "${{params.s}}"]
    input:
      text: '${{item}} is ${{index}} of ${{count}}: ${{first["odd key"][0].name}}'
      nested: [{{x: ["${{item.name}}", 1]}}]
    retries: 3
  last: {{workflow: child, depends_on: [items], parallel: 3, when: false, on_failure: skip}}
"""
    )


def test_references_print_their_expression() -> None:
    flow = Workflow("x")
    output = flow.task("a", "t")
    assert str(output) == "${a}"
    assert str(output.files[0]["k"].name) == '${a.files[0]["k"].name}'
    assert repr(output.x) == "<Reference ${a.x}>"
    with pytest.raises(TypeError, match=r"\$\{a.files\} is not known yet, and cannot be iterated over. Use foreach="):
        list(output.files)
    with pytest.raises(TypeError, match=r"\$\{a.ok\} is not known yet, and is neither true nor false. Use when="):
        bool(output.ok)
    assert not hasattr(output, "__len__")


def error_lines(flow: Workflow) -> list[str]:
    with pytest.raises(InvalidWorkflow) as caught:
        flow.definition()
    return str(caught.value).splitlines()


def test_mistakes_are_all_named() -> None:
    flow = Workflow("x", params={"day": date}, defaults={"timeout": "soon"}, schedule={"cron": "0 25 * * *"})
    flow.task("process", "t", input={"day": flow.params.dya})
    flow.task("report", "t", depends_on=["proces"], retires=2)  # type: ignore[call-arg]
    assert error_lines(flow) == [
        "workflow 'x': schedule.cron: hour '25' of '0 25 * * *': expected 0 to 23; also *, lists, ranges and steps.",
        "workflow 'x': defaults.timeout: expected a duration such as 250ms, 30s, 10m, 1h30m or 2d, or a number of "
        "seconds, found the string 'soon'.",
        "workflow 'x': tasks.report.retires: unknown key. Did you mean 'retries'?",
        "workflow 'x': tasks.process.input.day: unknown parameter 'dya'. Did you mean 'day'?",
        "workflow 'x': tasks.report.depends_on: unknown task 'proces'. Did you mean 'process'?",
    ]


def test_only_plain_data_is_accepted() -> None:
    flow = Workflow("x")
    flow.task("a", "t", input={"x": object()})
    assert error_lines(flow) == ["workflow 'x': only plain data can be kept: builtins.object is not plain data."]
    flow = Workflow("x")
    flow.task("a", "t", input={"x": float("inf")})
    assert error_lines(flow) == ["workflow 'x': a number in it is not a finite number of at most 64 bits."]


def test_parameters_may_be_written_as_in_files() -> None:
    flow = Workflow("x", params={"day": {"type": "date", "default": "today"}, "n": int})
    flow.task("a", "t")
    assert flow.definition().params == {"day": Param(type="date", default="today"), "n": Param(type="integer")}
    wrong = Workflow("x", params={"day": {"typ": "date"}})
    wrong.task("a", "t")
    with pytest.raises(InvalidWorkflow, match="typ"):
        wrong.definition()
    with pytest.raises(InvalidWorkflow, match=r"params.p: expected one of the types .* a mapping .* found \['a'\]"):
        Workflow("x", params={"p": ["a"]})  # type: ignore[dict-item]


def test_names_and_types_are_checked_at_once() -> None:
    flow = Workflow("x")
    flow.task("a", "t")
    with pytest.raises(InvalidWorkflow, match="workflow 'x': two tasks are called 'a'"):
        flow.task("a", "t")
    with pytest.raises(InvalidWorkflow, match="found <function .*lambda"):
        flow.task("b", lambda: None)
    with pytest.raises(InvalidWorkflow, match=r"workflow 'x': params.p: expected one of the types str, int"):
        Workflow("x", params={"p": set})


def test_a_step_rejects_a_task_with_other_options() -> None:
    task = Orchestrator().task(name="t")(lambda: None)
    Workflow("x").task("a", task)
    with pytest.raises(
        InvalidWorkflow, match=r"A step runs task 't' as it is registered. Pass the options to the step"
    ):
        Workflow("x").task("a", task.options(concurrency=3))


def test_a_step_with_a_dot_in_its_name_can_be_referenced() -> None:
    flow = Workflow("dots")
    load = flow.task("load.orders", "t")
    flow.task("each", "t", depends_on=[load], foreach=load.rows, input={"all": load})
    step = flow.definition().steps[1]
    assert (step.depends_on, step.foreach) == (("load.orders",), "`load.orders`.rows")
    assert step.input == {"all": "${`load.orders`}"}


def test_a_definition_built_by_hand_is_checked_before_it_is_stored() -> None:
    made = Definition(name="by-hand", steps=(Step(name="x" * 6_000, task="t"),))
    with pytest.raises(InvalidWorkflow, match=r"workflow 'by-hand': tasks\.'x{128}…': a name has 1 to 128 characters"):
        Orchestrator().workflows.apply(made)
